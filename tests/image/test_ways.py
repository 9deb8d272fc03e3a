"""The ways to mount an image: each shows the same tree, is taken where better ones do not work, and says so.

As root, better ways are said not to work (`Facts`); a plain user finds that out for real."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bootseer.analysis.inputs import sources
from bootseer.analysis.scan import scan
from bootseer.bring.places import unpacked_folder
from bootseer.bring.unpacked import name_of, release_unpacked
from bootseer.errors import UsageError
from bootseer.image.conversion.convert import convert
from bootseer.image.mounting import ways
from bootseer.image.mounting.metadata import read_document
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source, this_platform
from bootseer.mounts import kernel
from bootseer.mounts.ladder import Facts, Way
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from busybox import CONFIG
from conftest_launch import BOOTSEER
from image_node import base_layers, unmount_below
from oci_images import (
    directory,
    fifo,
    file,
    hard_link,
    layer,
    opaque,
    symlink,
    whiteout,
    write_layout,
)
from plain_user import UID, as_plain_user, home_of, run_as_plain_user

pytestmark = [pytest.mark.root, pytest.mark.fuse]

NO_EROFS = {"erofs_file": "said to be missing", "loop": "said to be missing"}
WAYS = {
    Way.EROFS_FILE: Facts(),
    Way.EROFS_LOOP: Facts(erofs_file="said to be missing"),
    Way.FUSE_TREE: Facts(**NO_EROFS),
    Way.UNPACK: Facts(**NO_EROFS, fuse="said to be missing"),
}
UPPER = [
    layer(
        directory("d", mode=0o750, uid=3, gid=4),
        directory("d/sub"),
        file("d/below", b"of the lower layer"),
        file("d/changed", b"old"),
        file("d/gone", b"old"),
        directory("hidden"),
        file("hidden/old", b"old"),
        directory("becomes"),
        file("becomes/inner", b"old"),
        file("owned", b"content", uid=77, gid=78, mode=0o4755, mtime=1_600_000_000, xattrs={"user.a": b"1"}),
        file("secret", b"for the owner alone", uid=77, mode=0o600),
        hard_link("hard", "owned"),
        symlink("link", "/outside/the/root"),
        fifo("pipe"),
        file("large", bytes(range(256)) * 8192),
        *(file(f"d/sub/{number:04d}", str(number).encode()) for number in range(300)),
    ),
    layer(
        directory("d", mode=0o755),
        file("d/changed", b"new"),
        whiteout("d/gone"),
        opaque("hidden"),
        file("hidden/new", b"new"),
        whiteout("becomes"),
        file("becomes", b"a file now"),
        file("d/sub/0001", b"new"),
        whiteout("d/sub/0002"),
    ),
]


class Image:
    """One image, converted into a store that everybody may read."""

    def __init__(self, folder: Path, *more: bytes) -> None:
        self.folder = folder
        layers = [base_layers(folder / "tree")[0], *UPPER, *more]
        write_layout(folder / "layout", layers, tag="1", architecture=this_platform().architecture, **CONFIG)
        self.reference = f"oci:{folder}/layout:1"
        self.store = str(folder / "store")
        with closing(open_source(parse_reference(self.reference))) as source, closing(open_store(self.store)) as store:
            self.digest = convert(source, store).digest
        subprocess.run(["chmod", "-R", "a+rX", folder / "store", folder / "layout"], check=True)

    def request(self, **changes: object) -> Request:
        reference = parse_reference(self.reference)
        plain = Request(reference, self.store, self.folder / "cache", self.folder / "runtime", loading="lazy")
        return replace(plain, **changes)  # type: ignore[arg-type]

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.folder / "runtime")


@pytest.fixture
def image() -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    # Not below pytest's own folder, which every session of pytest closes for other users.
    folder = Path(tempfile.mkdtemp(prefix="bootseer-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield Image(folder)
    finally:
        unmount_below(folder)
        shutil.rmtree(folder)


def tree_of(root: Path) -> dict[str, object]:
    """Everything that can be seen of all files, but the sizes of folders."""
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


@pytest.mark.parametrize("way", [Way.EROFS_LOOP, Way.FUSE_TREE, Way.UNPACK])
@pytest.mark.parametrize("writable", [False, True])
def test_each_way_shows_the_same_tree(image: Image, way: Way, writable: bool) -> None:
    if way is Way.EROFS_LOOP and not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices")
    best = mount_image(image.request(), image.folder / "best", facts=WAYS[Way.EROFS_FILE])
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
        facts=WAYS[way],
    )
    assert mounted.facts["way"] == way.value
    assert str(mounted.facts["refused_ways"]).startswith("EROFS from files: said to be missing")
    assert len(said) == 1
    assert f"by {way.value}" in said[0]
    assert "said to be missing" in said[0]
    found = tree_of(mounted.root)
    if writable:  # the root is new: its time is
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
    assert list(image.runtime.all()) == []
    again = mount_image(image.request(cache=image.folder / "cache2"), image.folder / "again", facts=WAYS[way])
    assert tree_of(again.root) == expected
    again.close()


def test_what_fails_in_spite_of_its_promise_is_left_for_the_next_way(image: Image) -> None:
    """A cache on tmpfs, from whose files EROFS is not mounted."""
    said: list[str] = []
    cache = image.folder / "cache"
    cache.mkdir()
    kernel.move(kernel.create("tmpfs", [("source", "test")]), cache)
    mounted = mount_image(image.request(loading="pull"), image.folder / "mnt", say=said.append)
    way, refused = mounted.facts["way"], str(mounted.facts["refused_ways"])
    assert way in (Way.EROFS_LOOP.value, Way.FUSE_TREE.value)
    assert "mount erofs: " in refused
    assert any(f"by {way}" in line for line in said)
    assert (mounted.root / "d" / "changed").read_text() == "new"
    mounted.close()


def tree_name(image: Image) -> str:
    """What the written out tree of the image is called: after its block files."""
    request = image.request()
    document = read_document(open_store(str(request.store)), image.digest)
    return name_of(list(dict.fromkeys(layer.file.identity for layer in document.layers)))


def test_written_out_trees_go_when_nobody_used_them_for_long(image: Image) -> None:
    mounted = mount_image(image.request(), image.folder / "mnt", facts=WAYS[Way.UNPACK])
    cache = image.request().cache
    assert release_unpacked(cache, image.runtime, idle_s=0) == []
    mounted.close()
    assert release_unpacked(cache, image.runtime, idle_s=1000) == []
    assert release_unpacked(cache, image.runtime, idle_s=0) == [tree_name(image)]
    assert list(unpacked_folder(cache).iterdir()) == []


def test_a_written_out_tree_is_left_alone_while_somebody_is_mounting(image: Image) -> None:
    mount_image(image.request(), image.folder / "mnt", facts=WAYS[Way.UNPACK]).close()
    folder = image.runtime.new_folder()
    assert release_unpacked(image.request().cache, image.runtime, idle_s=0) == []
    image.runtime.clear(folder)
    assert release_unpacked(image.request().cache, image.runtime, idle_s=0) != []


def test_a_tree_that_was_not_finished_is_written_anew(image: Image) -> None:
    cache = image.request().cache
    leaving = unpacked_folder(cache) / f"{tree_name(image)}.new"
    (leaving / "closed").mkdir(parents=True)
    (leaving / "closed" / "file").touch()
    (leaving / "closed").chmod(0)
    mounted = mount_image(image.request(), image.folder / "mnt", facts=WAYS[Way.UNPACK])
    assert not (mounted.root / "closed").exists()
    mounted.close()
    assert not leaving.exists()


@pytest.mark.parametrize(
    ("facts", "private", "writable", "hint"),
    [
        (Facts(mount=ways.NO_ROOT, fuse="no device", user_overlay="no", namespace="forbidden"), True, True, "doctor"),
        (Facts(mount=ways.NO_ROOT, fuse="no fusermount3"), False, False, "fuse3"),
        (Facts(mount=ways.NO_ROOT), False, True, "image run"),
    ],
)
def test_where_there_is_no_way_the_error_names_one(facts: Facts, private: bool, writable: bool, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ways.pick(facts, private=private, writable=writable)
    assert hint in caught.value.hint


# What follows is done by a user without rights.

LIST = (
    "cd /; busybox find . -xdev ! -path './etc/*' ! -path ./etc ! -path './dev*' ! -path './proc*' ! -path './sys*' "
    "! -path './run*' ! -path . ! -type d -exec busybox stat -c '%n %a %F %s %h %Y %t %T' {} + | busybox sort;"
    "busybox find ./d -type d -exec busybox stat -c '%n %a %Y' {} + | busybox sort;"
    "busybox find d hidden hard owned secret becomes large -type f -exec sha256sum {} + | busybox sort;"
    "busybox readlink link"
)
Plain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def plain(image: Image) -> Iterator[Plain]:
    """`plain(words, fuse=...)`: the program as a user without rights. Nothing of it may stay."""
    home = home_of(image.folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER_")}
    env.update(BOOTSEER_RUNTIME=str(home / "runtime"), BOOTSEER_CACHE=str(home / "cache"), BOOTSEER_STORE=image.store)

    def call(*words: str, fuse: bool, **options: object) -> subprocess.CompletedProcess[str]:
        return run_as_plain_user(image.folder, *words, fuse=fuse, env=env, **options)

    yield call
    assert list((home / "runtime" / "mounts").glob("*")) == []
    assert list((home / "cache" / "containers").glob("*")) == []


def run_of(image: Image, *words: str, **options: str) -> list[str]:
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["image", "run", image.reference, "--loading", "lazy", *given, "--", *words]


@pytest.mark.parametrize(("fuse", "way"), [(True, Way.FUSE_TREE), (False, Way.UNPACK)])
def test_a_container_of_a_plain_user_sees_what_root_s_sees(image: Image, plain: Plain, fuse: bool, way: Way) -> None:
    words = run_of(image, "sh", "-c", LIST)
    env = {"BOOTSEER_RUNTIME": str(image.folder / "runtime"), "BOOTSEER_CACHE": str(image.folder / "cache")}
    of_root = subprocess.run(
        [*BOOTSEER, *words],
        env={**os.environ, **env, "BOOTSEER_STORE": image.store},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert of_root.stderr == ""
    assert of_root.stdout.count("\n") > 600
    ran = plain(*words, fuse=fuse)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == of_root.stdout.splitlines()
    assert f"by {way.value}; not by EROFS from files or EROFS from loop devices: it needs root" in ran.stderr
    assert ran.stderr.count("is shown") == 1


@pytest.mark.parametrize("fuse", [True, False])
def test_changes_of_one_container_are_not_in_the_next(image: Image, plain: Plain, fuse: bool) -> None:
    script = "cat d/changed; echo mine > d/changed; rm -r hidden; echo x > new; cat d/changed; ls"
    shell = ("sh", "-c", f"alias rm='busybox rm'; cd /; {script}")
    first = plain(*run_of(image, *shell), fuse=fuse)
    again = plain(*run_of(image, *shell), fuse=fuse)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("newmine\n")
    assert again.stdout == first.stdout


def test_a_written_out_tree_whose_root_is_closed_is_deleted(image: Image, plain: Plain) -> None:
    trees = unpacked_folder(image.folder / "home" / "cache")
    assert plain(*run_of(image, "true"), fuse=False).returncode == 0
    (tree,) = [path for path in trees.iterdir() if path.suffix != ".lock"]
    tree.chmod(0o555)  # as the root directory of many images is
    pruned = plain("cache", "prune", fuse=False)
    assert pruned.returncode == 0, pruned.stderr
    assert list(trees.iterdir()) == []


def test_the_files_are_written_out_once(image: Image, plain: Plain) -> None:
    trees = unpacked_folder(image.folder / "home" / "cache")
    made = []
    for _ in range(2):
        assert plain(*run_of(image, "true"), fuse=False).returncode == 0
        (tree,) = [path for path in trees.iterdir() if path.suffix != ".lock"]
        made.append((tree.name, tree.stat().st_ino, (tree / "d" / "changed").stat().st_ctime_ns))
    assert made[0] == made[1]


@pytest.mark.parametrize("runtime", ["direct", "runc"])
def test_streams_exit_code_and_root_of_a_plain_user_s_container(image: Image, plain: Plain, runtime: str) -> None:
    ran = plain(
        *run_of(image, "sh", "-c", "cat; id -u; echo $GREETING; pwd; exit 7", runtime=runtime), fuse=True, input="in\n"
    )
    assert (ran.returncode, ran.stdout) == (7, "in\n0\nhello\n/work\n"), ran.stderr


@pytest.mark.parametrize(("user", "ids"), [("worker", "1000 1001"), ("5:44", "5 44"), ("0:44", "0 44")])
def test_another_user_of_the_image_is_the_caller_by_another_name(
    image: Image, plain: Plain, user: str, ids: str
) -> None:
    script = "echo $(id -u) $(id -g); cat /secret; echo; echo x > file && stat -c '%u %g' file"
    home = image.folder / "home"
    script += "; echo y > /out/file"
    ran = plain(*run_of(image, "sh", "-c", script, user=user, mount=f"{home}:/out"), fuse=True)
    assert ran.stdout == f"{ids}\nfor the owner alone\n{ids}\n", ran.stderr
    assert (home / "file").stat().st_uid == UID


def test_a_plain_user_s_devices_and_system_files_are_the_host_s_and_protected(image: Image, plain: Plain) -> None:
    script = (
        "dd if=/dev/zero bs=4 count=1 2>/dev/null | wc -c; ls -d /proc/1 /sys/class; echo x > /proc/sys/kernel/hostname"
    )
    ran = plain(*run_of(image, "sh", "-c", script, device="/dev/full"), fuse=True)
    assert ran.stdout == "4\n/proc/1\n/sys/class\n"
    assert "Read-only file system" in ran.stderr


def test_the_way_and_why_stand_in_the_events(image: Image, plain: Plain) -> None:
    spool = image.folder / "home" / "spool"
    words = run_of(image, "true", spool=str(spool))
    assert plain("run", "-q", "--image", words[2], *words[3:], fuse=False).returncode == 0
    events = scan(sources([str(spool)])).events
    (ended,) = [event.attrs for event in events if event.stage == "image_loading" and event.phase == "end"]
    assert (ended["way"], ended["mode"]) == ("unpacked files", "fallback")
    assert "file trees through FUSE: open /dev/fuse: Permission denied" in ended["refused_ways"]


def test_a_plain_user_mounts_through_fusermount(image: Image, plain: Plain) -> None:
    point = image.folder / "home" / "mnt"
    bootseer = shlex.join(BOOTSEER)
    script = (
        f"{bootseer} image mount {image.reference} {point} --loading lazy >&2 && "
        f"cat {point}/d/changed {point}/secret && "
        f"{bootseer} image list --json && {bootseer} image umount {point} && ls -A {point}"
    )
    ran = in_shell(image, script)
    assert ran.returncode == 0, ran.stderr
    content, _, rest = ran.stdout.partition("alone")
    assert content == "newfor the owner "
    (mount,) = json.loads(rest)["mounts"]
    assert (mount["target"], mount["state"]) == (str(point), "mounted")


def in_shell(image: Image, script: str) -> subprocess.CompletedProcess[str]:
    """Several commands as a plain user with FUSE, in one mount namespace."""
    home = home_of(image.folder)
    env = {**os.environ, "BOOTSEER_RUNTIME": str(home / "runtime"), "BOOTSEER_CACHE": str(home / "cache")}
    return subprocess.run(
        ["sh", "-c", script],
        preexec_fn=as_plain_user(image.folder, fuse=True),
        env={**env, "BOOTSEER_STORE": image.store, "HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_without_fuse_a_plain_user_s_mount_is_an_error_with_the_way_out(image: Image, plain: Plain) -> None:
    ran = plain("image", "mount", image.reference, str(image.folder / "home" / "mnt"), fuse=False)
    assert ran.returncode == 2
    assert "without root: /dev/fuse cannot be opened" in ran.stderr
    assert "image run" in ran.stderr


@pytest.mark.parametrize(("fuse", "status", "found"), [(True, "limited", "FUSE"), (False, "limited", "unpacked")])
def test_the_doctor_tells_the_way_and_why(plain: Plain, fuse: bool, status: str, found: str) -> None:
    checks = json.loads(plain("doctor", "--json", fuse=fuse).stdout)["checks"]
    (row,) = [check for check in checks if check["name"] == ways.CHECK]
    assert row["status"] == status
    assert found in row["found"]
    assert "it needs root" in row["why"]


@pytest.mark.parametrize("fuse", [True, False])
def test_killed_a_plain_user_s_run_leaves_neither_command_nor_files(image: Image, plain: Plain, fuse: bool) -> None:
    home = home_of(image.folder)
    env = {**os.environ, "BOOTSEER_RUNTIME": str(home / "runtime"), "BOOTSEER_CACHE": str(home / "cache")}
    with subprocess.Popen(
        [*BOOTSEER, *run_of(image, "sh", "-c", "echo $$; exec sleep 600")],
        preexec_fn=as_plain_user(image.folder, fuse=fuse),  # noqa: PLW1509 - no other thread runs
        env={**env, "BOOTSEER_STORE": image.store, "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: list((home / "runtime" / "mounts").iterdir()) == [])
    until(lambda: list((home / "cache" / "containers").iterdir()) == [])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "did not come true in 120 s"
        time.sleep(0.02)
