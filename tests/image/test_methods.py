"""The ways to mount an image: each shows the same tree, is used when better ones do not work, and is reported.

As root, better ways are declared missing; for an ordinary user they really fail."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bootseer.artifact import materialize
from bootseer.artifact.places import blocks_folder, metadata_folder, unpacked_folder
from bootseer.artifact.unpacked import delete_idle_trees, tree_name
from bootseer.cache import disk
from bootseer.cache.cache import Cache
from bootseer.errors import UsageError
from bootseer.fuse import syscalls
from bootseer.fuse.syscalls import failure
from bootseer.image.catalog import images_in, prune, read_document
from bootseer.image.conversion.convert import convert
from bootseer.image.conversion.layer import ConvertOptions
from bootseer.image.mounting import methods, trial
from bootseer.image.mounting.mount import mount_image
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.machine.kernel import Trial
from bootseer.mounts import kernel, shared_layers, user_namespace
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.kernel import mount_table
from bootseer.mounts.layers import MountMethod
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.store.open import open_store
from bootseer.store.store import Store
from oci_images import (
    device,
    directory,
    file,
    layer,
)
from plain_user import UID
from waiting import until
from ways_image import Image, made_image

pytestmark = [pytest.mark.root, pytest.mark.fuse]

METHODS = list(MountMethod)
WAYS = {way: dict.fromkeys(METHODS[:place], "said to be missing") for place, way in enumerate(METHODS)}


def tree_of(root: Path) -> dict[str, object]:
    """All visible attributes of all files, except the sizes of folders."""
    found: dict[str, object] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        facts: list[object] = [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns]
        names = os.listxattr(path, follow_symlinks=False)
        facts.append({name: os.getxattr(path, name, follow_symlinks=False) for name in names})
        if stat.S_ISLNK(status.st_mode):
            facts.append(path.readlink())
        elif not stat.S_ISDIR(status.st_mode):
            facts += [status.st_nlink, status.st_rdev, status.st_size]
            if stat.S_ISREG(status.st_mode):
                facts.append(hashlib.sha256(path.read_bytes()).hexdigest())
        found[str(path.relative_to(root))] = facts
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_set_uid_programs_and_devices_of_a_mounted_image_have_no_effect(
    way: MountMethod, writable: bool, num_layers: int
) -> None:
    """For every user of the host. In a container the programs are effective, the devices are not."""
    if way is MountMethod.EROFS_LOOP and not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices")
    layers = [
        layer(
            directory("bin"), directory("dev"), file("bin/id", Path("/usr/bin/id").read_bytes(), uid=77, mode=0o4755),
            device("dev/zero", 1, 5, mode=0o666), device("dev/disk", 7, 0, block=True, mode=0o666),
        ),
        layer(file("other")),
    ]  # fmt: skip
    with made_image(layers[:num_layers]) as image:
        for suid, expected in ((False, UID), (True, 77)):
            changes = image.folder / "changes" if writable else None
            mounted = mount_image(image.request(), image.folder / "at", writable=changes, suid=suid, refused=WAYS[way])
            assert mounted.facts["way"] == way.value
            root = mounted.root
            script = f"{root}/bin/id -u; cat < {root}/dev/zero | head -c 1; cat < {root}/dev/disk"
            ran = subprocess.run(
                ["sh", "-c", script], user=UID, group=UID, extra_groups=[], capture_output=True, text=True, check=False
            )
            assert ran.stdout == f"{expected}\n"
            assert ran.stderr.count("Permission denied") == 2
            flags = {row.path: row.options for row in mount_table() if row.path.startswith(f"{image.folder}/")}
            assert all({"nodev", "nosuid"} <= set(flags[path]) for path in flags if path != str(root)), flags
            mounted.close()


def test_layers_above_are_looked_for_before_this_process_uses_the_store(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    layer_above = image.folder / "above"
    layer_above.mkdir()

    def above(_: str) -> list[Path]:
        used.append("above")
        return [layer_above]

    def opened(uri: str, **options: bool) -> Store:
        used.append("store")
        return open_store(uri, **options)

    monkeypatch.setattr(materialize, "open_store", opened)
    mount_image(image.request(loading="pull"), image.folder / "at", above=above).close()
    assert used == ["above", "store"]


@pytest.mark.parametrize("way", [MountMethod.EROFS_LOOP, MountMethod.FUSE_TREE, MountMethod.UNPACK])
@pytest.mark.parametrize("writable", [False, True])
def test_each_way_shows_the_same_tree(image: Image, way: MountMethod, writable: bool) -> None:
    if way is MountMethod.EROFS_LOOP and not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices")
    best = mount_image(image.request(), image.folder / "best", refused=WAYS[MountMethod.EROFS_FILE])
    expected = tree_of(best.root)
    best.close()
    assert "hidden/new" in expected
    assert "d/gone" not in expected
    said: list[str] = []
    changes = image.folder / "changes" if writable else None
    mounted = mount_image(
        image.request(cache=image.folder / "cache2"),
        image.folder / "other",
        writable=changes,
        say=said.append,
        refused=WAYS[way],
    )
    assert mounted.facts["way"] == way.value
    assert str(mounted.facts["refused_ways"]).startswith("EROFS from files: said to be missing")
    assert len(said) == 1
    assert f"by {way.value}" in said[0]
    assert "said to be missing" in said[0]
    found = tree_of(mounted.root)
    if writable:  # the root is new, and so is its time
        del found["."]
        assert found == {name: facts for name, facts in expected.items() if name != "."}
    else:
        assert found == expected
    if writable:
        (mounted.root / "d" / "changed").write_text("by the container")
        (mounted.root / "hidden" / "new").unlink()
        assert not (mounted.root / "hidden" / "new").exists()
    else:
        with pytest.raises(OSError, match="Read-only"):
            (mounted.root / "new").write_text("x")
    mounted.close()
    # Its daemon ends later if another test's mount namespace has copies; a later mount deletes the rest.
    assert not kernel.is_mount(mounted.root)
    again = mount_image(image.request(cache=image.folder / "cache2"), image.folder / "again", refused=WAYS[way])
    assert tree_of(again.root) == expected
    again.close()


@pytest.mark.parametrize("way", [MountMethod.EROFS_FILE, MountMethod.FUSE_TREE, MountMethod.UNPACK])
def test_an_attribute_of_a_user_namespaces_overlay_hides_nothing(way: MountMethod) -> None:
    layers = [
        layer(directory("d"), file("d/below")),
        layer(directory("d", xattrs={"user.overlay.opaque": b"y"}), file("d/above")),
    ]
    with made_image(layers) as image:
        mounted = mount_image(image.request(), image.folder / "at", refused=WAYS[way])
        assert sorted(path.name for path in (mounted.root / "d").iterdir()) == ["above", "below"]
        mounted.close()


@pytest.mark.parametrize("removed", [False, True])
def test_a_node_that_knows_an_image_notices_that_its_blocks_were_deleted(removed: bool) -> None:
    content = os.urandom(8 << 20)
    with made_image([layer(file("noise", content))]) as image:
        mount_image(image.request(), image.folder / "first").close()
        with closing(open_store(image.store)) as store:
            catalog = images_in(store)
            if removed:
                catalog.remove(image.digest, time.time())
            else:
                with closing(open_source(parse_reference(image.reference))) as source:
                    convert(source, store, options=ConvertOptions(block_size=1 << 20))
            assert prune(catalog, time.time() + 10, grace_s=1).deleted
        for known in metadata_folder(image.request().cache).rglob("*"):
            os.utime(known, (0, 0))  # like after an earlier start
        said: list[str] = []
        mounted = mount_image(image.request(), image.folder / "second", say=said.append)
        assert (mounted.root / "noise").read_bytes() == content
        assert any("is pulled and converted on this node" in line for line in said) is removed
        mounted.close()


def test_an_image_of_more_layers_than_the_kernel_takes_is_served_at_once() -> None:
    said: list[str] = []
    with made_image([layer(file(f"f{number}", os.urandom(3000))) for number in range(230)]) as image:
        mounted = mount_image(image.request(loading="lazy"), image.folder / "at", say=said.append)
        assert mounted.facts["way"] == MountMethod.FUSE_TREE.value
        assert len(list(mounted.root.iterdir())) == 230
        mounted.close()
    assert len(said) == 1, "nothing is fetched for the attempt"
    assert "longer than a page" in said[0]


def test_a_daemon_serves_although_many_files_were_open_when_it_was_started() -> None:
    """For example those of an image with hundreds of layers."""
    with made_image([layer(file("noise", os.urandom(1 << 20)))]) as image, ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(Path(os.devnull).open())
        mounted = mount_image(image.request(), image.folder / "at", refused=WAYS[MountMethod.EROFS_FILE])
        assert mounted.facts["mode"] == "lazy"
        (state,) = image.runtime.all()
        assert state.daemon is not None
        assert Daemon(image.runtime.folder(state), state.daemon).status()["restarts"] == 0
        mounted.close()


def test_a_restarted_daemon_shows_the_same_folders_that_several_layers_have() -> None:
    names = ("a", "b", "c", "d")
    layers = [
        layer(*(entry for name in names for entry in (directory(name), file(f"{name}/{kind}-{name}"))))
        for kind in ("low", "up")
    ]
    with made_image(layers) as image:
        mounted = mount_image(image.request(), image.folder / "at", refused=WAYS[MountMethod.FUSE_TREE])
        (state,) = image.runtime.all()
        assert state.daemon is not None
        daemon = Daemon(image.runtime.folder(state), state.daemon)
        for name in ("c", "b", "a"):
            list((mounted.root / name).iterdir())
        os.kill(int(str(daemon.status()["pid"])), signal.SIGKILL)
        for name in ("d", "a", "b", "c"):
            found = sorted(path.name for path in (mounted.root / name).iterdir() if path.is_file())
            assert found == [f"low-{name}", f"up-{name}"]
        assert daemon.status()["restarts"] == 1
        mounted.close()


@pytest.mark.parametrize("way", [MountMethod.EROFS_FILE, MountMethod.UNPACK])
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_copy_of_a_mount_in_another_namespace_survives_eviction(
    way: MountMethod, writable: bool, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example when a container of another engine binds the mount point. Not every file system shows such users."""
    if not is_seen:
        monkeypatch.setattr(disk, "has_other_users", lambda fd: False)
    content = os.urandom(4 << 20)
    with made_image([layer(file("noise", content))]) as image:
        request = image.request(loading="pull")
        changes = image.folder / "changes" if writable else None
        mounted = mount_image(request, image.folder / "at", writable=changes, refused=WAYS[way])
        script = f"echo ready; read line; cat {mounted.root}/noise"
        with subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            mounted.close()
            cache = Cache(blocks_folder(request.cache))
            unmount_idle(image.runtime, idle_s=0)
            delete_idle_trees(request.cache, image.runtime, idle_s=0)
            freed = cache.prune(0).freed_bytes
            assert (freed == 0) == (is_seen and way is MountMethod.EROFS_FILE)
            # Reads come from the disk from now on: nothing of this mount is in the page cache yet.
            assert other.communicate(b"\n")[0] == content


def test_a_way_that_fails_although_it_seemed_usable_is_followed_by_the_next(image: Image) -> None:
    """A cache on tmpfs: EROFS cannot be mounted from its files."""
    said: list[str] = []
    cache = image.folder / "cache"
    cache.mkdir()
    kernel.attach(kernel.create_mount("tmpfs", [("source", "test")]), cache)
    mounted = mount_image(image.request(loading="pull"), image.folder / "mnt", say=said.append)
    way, refused = mounted.facts["way"], str(mounted.facts["refused_ways"])
    assert way in (MountMethod.EROFS_LOOP.value, MountMethod.FUSE_TREE.value)
    assert "mount erofs: " in refused
    assert any(f"by {way}" in line for line in said)
    assert (mounted.root / "d" / "changed").read_text() == "new"
    mounted.close()


def unpacked_name(image: Image) -> str:
    """The name of the image's unpacked tree, made from its block files."""
    request = image.request()
    document, _ = read_document(open_store(str(request.store)), image.digest)
    return tree_name(list(dict.fromkeys(layer.file.identity for layer in document.layers)))


def test_written_out_trees_are_deleted_when_unused_for_long(image: Image) -> None:
    mounted = mount_image(image.request(), image.folder / "mnt", refused=WAYS[MountMethod.UNPACK])
    cache = image.request().cache
    assert delete_idle_trees(cache, image.runtime, idle_s=0) == []
    mounted.close()
    assert delete_idle_trees(cache, image.runtime, idle_s=1000) == []
    until = time.monotonic() + 120  # a mount namespace of another test may have a copy
    while not (deleted := delete_idle_trees(cache, image.runtime, idle_s=0)) and time.monotonic() < until:
        time.sleep(0.1)
    assert deleted == [unpacked_name(image)]
    assert list(unpacked_folder(cache).iterdir()) == []


def test_a_written_out_tree_is_left_alone_while_it_is_being_mounted(image: Image) -> None:
    mount_image(image.request(), image.folder / "mnt", refused=WAYS[MountMethod.UNPACK]).close()
    folder = image.runtime.new_folder()
    assert delete_idle_trees(image.request().cache, image.runtime, idle_s=0) == []
    image.runtime.remove_folder(folder)
    # A mount namespace of another test may have a copy.
    until(lambda: delete_idle_trees(image.request().cache, image.runtime, idle_s=0) != [])


def test_a_tree_that_was_not_finished_is_written_anew(image: Image) -> None:
    cache = image.request().cache
    leaving = unpacked_folder(cache) / f"{unpacked_name(image)}.new"
    (leaving / "closed").mkdir(parents=True)
    (leaving / "closed" / "file").touch()
    (leaving / "closed").chmod(0)
    mounted = mount_image(image.request(), image.folder / "mnt", refused=WAYS[MountMethod.UNPACK])
    assert not (mounted.root / "closed").exists()
    mounted.close()
    assert not leaving.exists()


@pytest.mark.parametrize(
    ("trial", "private", "writable", "hint"),
    [
        (Trial(False, "unshare user namespace", errno.EPERM), True, True, "doctor"),
        (Trial(True), False, False, "fuse3"),
        (Trial(True), False, True, "image run"),
    ],
)
def test_where_there_is_no_way_the_error_names_one(
    trial: Trial, private: bool, writable: bool, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_namespace, "may_mount", lambda: False)
    monkeypatch.setattr(methods.kernel, "attempt", lambda name: trial)
    monkeypatch.setattr(methods.shutil, "which", lambda name: None)
    with pytest.raises(UsageError) as caught:
        methods.choose_method(methods.refused_untried(private=private, writable=writable), private=private)
    assert hint in caught.value.hint


@pytest.mark.root
def test_the_doctor_says_that_the_disk_of_the_cache_is_nearly_full(tmp_path: Path) -> None:
    """It told root to be root where the trial failed, or that all was well."""
    syscalls.mount("tmpfs", "tmpfs", tmp_path, options="size=1m")
    try:
        found = trial.check(tmp_path / "cache")
    finally:
        kernel.unmount(tmp_path)
    assert (found.status, found.why) == ("limited", f"the disk of {tmp_path} is nearly full: blocks are not kept")
    assert "BOOTSEER_CACHE" in found.install


def test_each_better_method_is_refused_with_a_reason() -> None:
    refused = {MountMethod.FUSE_TREE: "no device"}
    assert methods.choose_method(refused, private=True) is MountMethod.EROFS_FILE
    assert methods.describe_fallback(refused, MountMethod.EROFS_FILE) == ""
    methods.refuse(refused, MountMethod.EROFS_FILE, failure("/run/a: mount erofs", errno.ENODEV))
    assert methods.choose_method(refused, private=True) is MountMethod.UNPACK
    assert methods.describe_fallback(refused, MountMethod.UNPACK) == (
        "by unpacked files; not by EROFS from files or EROFS from loop devices: the kernel has no EROFS; "
        "file trees through FUSE: no device"
    )


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EINVAL])
def test_without_erofs_in_the_kernel_the_image_is_still_lazy(
    number: int, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL stands for any other error; fetching everything may help then."""

    def fail(path: Path, target: Path, *, loop: bool | None = None) -> None:
        raise failure(f"{path}: mount erofs", number)

    monkeypatch.setattr(shared_layers, "mount_erofs", fail)
    said: list[str] = []
    mounted = mount_image(image.request(), image.folder / "mnt", say=said.append)
    assert mounted.facts["way"] == MountMethod.FUSE_TREE.value
    assert (mounted.root / "d" / "changed").read_text() == "new"
    lazy = number == errno.ENODEV
    assert (mounted.facts["mode"] == "lazy") is lazy
    assert any("fetching all of it first" in line for line in said) is not lazy
    mounted.close()
