"""Mounting real images: lazily, from the cache, after a pull, and by each fallback; with hot sets between starts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.artifact import materialize, mounting
from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.hotsets import HotSets
from bootseer.artifact.loading import LAZY, Prediction
from bootseer.artifact.places import blocks_folder, metadata_folder
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.mounted import MountedImage, find_mount, unmount_recorded
from bootseer.image.mounting.request import Request
from bootseer.image.mounting.resolve import resolve_image
from bootseer.image.reference import parse_reference
from bootseer.mounts import kernel, shared_layers
from bootseer.mounts.layers import MountMethod, mount_erofs
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from image_node import LARGE_BYTES, Node, convert_box, have_converted
from registry import PASSWORD, USER, Registry
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse]
Mount = Callable[..., MountedImage]


@pytest.fixture
def converted(node: Node) -> Node:
    have_converted(node)
    return node


def store_of(node: Node) -> str:
    return f"oci://{node.reference.rpartition(':')[0]}"


def request(node: Node, **changes: object) -> Request:
    plain = Request(
        parse_reference(node.reference), store_of(node), cache=node.cache, runtime=node.runtime, loading="lazy"
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture
def mount(node: Node) -> Mount:
    """`mount(...)`: mount the image on a new folder, with a changed request; messages go to `node.folder/said`."""
    numbers = iter(range(100))

    def call(writable: bool = False, **changes: object) -> MountedImage:
        number = next(numbers)

        def say(line: str) -> None:
            with (node.folder / "said").open("a") as file:
                file.write(line + "\n")

        changed = node.folder / f"changed{number}" if writable else None
        return mount_image(request(node, **changes), node.folder / f"mnt{number}", writable=changed, say=say)

    return call


def said(node: Node) -> str:
    path = node.folder / "said"
    return path.read_text() if path.exists() else ""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_lazy_mount_shows_every_file_and_fetches_what_is_read(converted: Node, mount: Mount) -> None:
    mounted = mount()
    assert mounted.facts["mode"] == "lazy"
    tree = converted.folder / "tree"
    assert sorted(path.name for path in mounted.root.iterdir()) == sorted(path.name for path in tree.iterdir())
    assert digest(mounted.root / "hot") == digest(tree / "hot")
    numbers = mounted.end_startup()
    assert LARGE_BYTES <= numbers["demand_bytes"] < 2 * LARGE_BYTES  # type: ignore[operator]
    runtime = Runtime(converted.runtime)
    (state,) = runtime.all()
    mounted.close()
    assert not kernel.is_mount(mounted.root)
    # `close` waits for two seconds for the daemon; if it ends later, the next mount removes its record.
    until(lambda: state.daemon is None or not state.daemon.alive, "the daemon has ended")
    runtime.remove_stale()
    assert list(runtime.all()) == []


def test_a_start_logs_in_to_its_registry_once(converted: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(converted.folder / "registry", converted.folder / "private" / "registry")
    with Registry(converted.folder / "private", basic=True) as private:
        login = converted.folder / "login"
        login.mkdir()
        (login / "config.json").write_text(
            json.dumps({"auths": {private.host: {"username": USER, "password": PASSWORD}}})
        )
        monkeypatch.setenv("DOCKER_CONFIG", str(login))
        reference = f"{private.host}/team/box:1"
        asked = request(converted, reference=parse_reference(reference), store=f"oci://{private.host}/team/box")
        image = resolve_image(asked, say=print)
        image.store.close()
        assert image.fallback == ""
        assert [logged.status for logged in private.requests() if "/team/box/" in logged.path].count(401) == 1


def test_what_takes_long_is_shown_as_it_goes(node: Node) -> None:
    shown: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def show(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        told = shown.setdefault(f"{what} {unit}", [])
        yield lambda done, total: told.append((done, total))

    # It is not converted yet: this start does that, and then all of it is on this node.
    mount_image(request(node, store=None), node.folder / "converted", show=show).close()
    convert_box(node.reference)
    pulled = request(node, loading="pull", cache=node.folder / "other-cache")
    mount_image(pulled, node.folder / "pulled", show=show).close()
    for told in (shown[f"converting {node.reference} bytes"], shown[f"fetching {node.reference} blocks"]):
        assert told[-1][0] == told[-1][1] > 0, "to the end"
    assert f"waiting for {store_of(node)} " in shown


def test_what_one_start_needed_the_next_node_fetches_first(converted: Node, mount: Mount) -> None:
    first = mount(workload="w")
    digest(first.root / "hot")
    first.end_startup()
    first.wait_for_record()
    first.close()
    other = converted.folder / "other-cache"
    second = mount(workload="w", cache=other)
    assert second.facts["mode"] == "hot"
    digest(second.root / "hot")
    numbers = second.end_startup()
    second.close()
    assert numbers["coverage"] > 0.9  # type: ignore[operator]  # the kernel may read ahead a little further
    assert numbers["hot_bytes"] + numbers["demand_bytes"] < 1.5 * LARGE_BYTES  # type: ignore[operator]
    assert said(converted) == ""


@pytest.mark.parametrize("why", ["", "not here"])
def test_a_layer_above_an_image_adds_replaces_and_deletes(converted: Node, why: str) -> None:
    above = converted.folder / "above"
    for folder in ("bin", "etc", "new"):
        (above / folder).mkdir(parents=True)
    (above / "new" / "file").write_text("new")
    (above / "etc" / "passwd").write_text("replaced")
    os.mknod(above / "hot", stat.S_IFCHR, 0)
    for kind in ("trusted", "user"):
        os.setxattr(above / "bin", f"{kind}.overlay.opaque", b"y")
    mounted = mount_image(
        request(converted),
        converted.folder / "mnt",
        writable=converted.folder / "changed",
        above=lambda digest: [above],
        # When every other way is ruled out, the files are written out.
        refused=dict.fromkeys(list(MountMethod)[:3], why) if why else {},
    )
    root = mounted.root
    assert mounted.facts["way"] == ("unpacked files" if why else "EROFS from files")
    assert (root / "new" / "file").read_text() == "new"
    assert (root / "etc" / "passwd").read_text() == "replaced"
    assert (root / "etc" / "group").exists()
    assert list((root / "bin").iterdir()) == []
    assert not (root / "hot").exists()
    (root / "new" / "file").write_text("changed")
    mounted.close()
    assert (above / "new" / "file").read_text() == "new"


def test_a_node_that_has_everything_makes_no_request_for_a_digest(converted: Node, mount: Mount) -> None:
    by_digest = parse_reference(f"{converted.reference}@{converted.digest}")
    mount(reference=by_digest, loading="pull").close()
    before = len(converted.requests())
    mounted = mount(reference=by_digest)
    assert mounted.facts["mode"] == "local"
    assert digest(mounted.root / "cold") == digest(converted.folder / "tree" / "cold")
    mounted.close()
    assert len(converted.requests()) == before


def test_a_tag_is_what_it_was_when_its_registry_is_away_and_that_is_said(converted: Node, mount: Mount) -> None:
    mount(loading="pull").close()
    converted.registry.__exit__(None, None, None)
    mounted = mount()
    assert mounted.facts["mode"] == "local"
    assert converted.digest in said(converted)
    mounted.close()


def test_copies_of_metadata_that_a_crash_of_the_machine_damaged_are_not_used(converted: Node, mount: Mount) -> None:
    mount(loading="pull").close()
    copies = [path for path in metadata_folder(converted.cache).rglob("*") if path.is_file()]

    def damage() -> None:
        for path in copies:
            path.write_bytes(bytes(path.stat().st_size))

    damage()
    mounted = mount()
    assert mounted.facts["mode"] == "local"
    mounted.close()
    damage()
    converted.registry.__exit__(None, None, None)
    with pytest.raises(TransientError):
        mount()


def test_a_pull_fetches_everything_and_leaves_no_daemon(converted: Node, mount: Mount) -> None:
    mounted = mount(loading="pull")
    (state,) = Runtime(converted.runtime).all()
    assert (mounted.facts["mode"], state.daemon) == ("pull", None)
    assert all(entry.trusted for entry in Cache(blocks_folder(converted.cache)).entries())
    mounted.close()


def test_a_small_image_is_pulled_without_being_asked(converted: Node, mount: Mount) -> None:
    mounted = mount(loading="auto")
    assert mounted.facts["mode"] == "pull"
    assert "pull is over at once" in str(mounted.facts["reason"])
    mounted.close()


def test_an_image_that_is_not_converted_is_converted_here_and_that_is_said(node: Node, mount: Mount) -> None:
    mounted = mount()
    assert mounted.facts["mode"] == "fallback"
    assert "is not converted" in str(mounted.facts["reason"])
    assert "is not converted" in said(node)
    assert digest(mounted.root / "hot") == digest(node.folder / "tree" / "hot")
    mounted.close()
    again = mount()
    assert again.facts["mode"] != "fallback"
    again.close()


def test_what_one_store_has_is_not_expected_of_another(converted: Node, mount: Mount) -> None:
    """For example of an image that was copied to another repository, with the same digest: reads would fail there."""
    mount().close()
    assert mount(store=str(converted.folder / "store")).facts["mode"] == "fallback"


def test_without_a_fallback_an_image_that_is_not_converted_is_an_error_with_the_way_out(
    node: Node, mount: Mount
) -> None:
    with pytest.raises(UsageError) as caught:
        mount(fallback="none")
    assert "bootseer image convert" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        mount(reference=parse_reference(str(node.folder / "tree")), fallback="none")
    assert "by the digest that this prints" in caught.value.hint
    assert list(Runtime(node.runtime).mounts.iterdir()) == []


def test_a_folder_of_files_is_an_image_too(node: Node, mount: Mount) -> None:
    mounted = mount(reference=parse_reference(str(node.folder / "tree")), store=None)
    assert digest(mounted.root / "cold") == digest(node.folder / "tree" / "cold")
    mounted.close()


def test_without_fuse_everything_is_fetched_first_and_that_is_said(converted: Node, mount: Mount) -> None:
    def without_fuse() -> None:
        kernel.unshare_mounts()
        (converted.folder / "no-fuse").touch()
        kernel.attach(kernel.clone_mount(converted.folder / "no-fuse"), Path("/dev/fuse"))
        mounted = mount()
        assert mounted.facts["mode"] == "fallback"
        assert "cannot be served lazily" in said(converted)
        assert digest(mounted.root / "hot") == digest(converted.folder / "tree" / "hot")
        mounted.close()

    in_child(without_fuse)


def in_child(work: Callable[[], None]) -> None:
    """Run something in a child process, because it would change this one; fails if the child fails."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_changes_go_with_the_mount_and_the_root_looks_as_the_image_s(converted: Node, mount: Mount) -> None:
    mounted = mount(writable=True)
    (mounted.root / "new").write_text("x")
    (mounted.root / "etc" / "passwd").unlink()
    assert (mounted.root.stat().st_mode & 0o777) == 0o755
    mounted.close()
    again = mount()
    assert (again.root / "etc" / "passwd").exists()
    assert not (again.root / "new").exists()
    again.close()


@pytest.mark.parametrize(
    "where", ["precious", "cache/containers/../precious", "cache/containers", "cache/containers/a"]
)
def test_a_record_has_nothing_deleted_but_changes_in_the_cache(converted: Node, mount: Mount, where: str) -> None:
    mounted = mount(writable=True)
    runtime = Runtime(converted.runtime)
    state = runtime.find(mounted.root)
    assert state is not None
    precious = converted.folder / where
    precious.mkdir(parents=True, exist_ok=True)
    (precious / "data").touch()
    runtime.write(replace(state, details={**state.details, "changes": str(precious)}))
    state = find_mount(runtime, mounted.root)
    unmount_recorded(runtime, state, converted.cache)
    assert (precious / "data").exists() == (where != "cache/containers/a")


def test_a_read_only_mount_takes_no_changes(converted: Node, mount: Mount) -> None:
    mounted = mount()
    with pytest.raises(OSError, match="Read-only"):
        (mounted.root / "new").write_text("x")
    mounted.close()


def test_a_failed_mount_leaves_nothing_mounted(converted: Node, mount: Mount) -> None:
    (converted.folder / "file").touch()
    with pytest.raises((BootseerError, OSError)):
        mount_image(request(converted), converted.folder / "file" / "below")
    mounted = {point for point in kernel.mount_points() if point.startswith(f"{converted.folder}/")}
    assert mounted <= {str(path) for path in Runtime(converted.runtime).layers.iterdir()}
    assert list(Runtime(converted.runtime).all()) == []


@contextmanager
def copies_of_all_mounts() -> Iterator[Path]:
    """The root of another mount namespace, to which unmounts here do not propagate, like when `/` is private."""
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield Path(f"/proc/{process.pid}/root")
        finally:
            process.kill()


@pytest.mark.parametrize("of_command", [True, False])
def test_copies_of_a_mount_in_other_namespaces_do_not_hold_up_its_end(converted: Node, of_command: bool) -> None:
    runtime = Runtime(converted.runtime)
    mounted = mount_image(
        request(converted), converted.folder / "mnt", writable=converted.folder / "changed", lifeline=of_command
    )
    (state,) = runtime.all()
    daemon = state.daemon
    assert daemon is not None
    with copies_of_all_mounts() as elsewhere:
        mounted.close()
        assert not kernel.is_mount(mounted.root)
        assert daemon.alive is not of_command
        copy = elsewhere / str(mounted.root / "hot").lstrip("/")
        if of_command:
            with pytest.raises(OSError, match=r"Input/output|not connected"):
                copy.read_bytes()
        else:
            assert digest(copy) == digest(converted.folder / "tree" / "hot")
    until(lambda: not daemon.alive)
    runtime.remove_stale()
    assert list(runtime.all()) == []


@pytest.mark.parametrize("loop", [False, True])
def test_complete_layers_stay_mounted_until_they_are_released(
    converted: Node, mount: Mount, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    if loop and not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices")
    monkeypatch.setattr(shared_layers, "mount_erofs", lambda data, target, **_: mount_erofs(data, target, loop=loop))
    mounted = mount(loading="pull")
    runtime, cache = Runtime(converted.runtime), Cache(blocks_folder(converted.cache))
    assert unmount_idle(runtime, idle_s=0) == []
    mounted.close()
    assert len(unmount_idle(runtime, idle_s=0)) == 2
    # The kernel releases a loop device, and with it the file, some time after the last unmount.
    until(lambda: not any(entry.in_use for entry in cache.entries()), "the release of the files")


def test_a_hot_set_that_cannot_be_published_is_kept_here(converted: Node, mount: Mount) -> None:
    mounted = mount(workload="w", publish=False)
    digest(mounted.root / "hot")
    mounted.end_startup()
    mounted.wait_for_record()
    mounted.close()
    assert HotSets(converted.cache, converted.digest, None, print).load("w") is not None
    with closing(open_store(store_of(converted))) as store:
        assert [stored.name for stored in store.list("hotsets/")] == []


def test_without_root_there_is_a_clear_error(converted: Node) -> None:
    def as_nobody() -> None:
        os.setuid(65534)
        with pytest.raises(UsageError, match="without root"):
            mount_image(request(converted), converted.folder / "x")

    in_child(as_nobody)


def test_where_the_kernel_cannot_mount_it_the_files_are_written_out(converted: Node, mount: Mount) -> None:
    """EROFS cannot be mounted directly from a file on tmpfs, and there are neither loop devices nor FUSE."""

    def on_tmpfs() -> None:
        kernel.unshare_mounts()
        converted.cache.mkdir()
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test")]), converted.cache)
        (converted.folder / "no-loop").touch()
        for device in ("/dev/loop-control", "/dev/fuse"):
            kernel.attach(kernel.clone_mount(converted.folder / "no-loop"), Path(device))
        mounted = mount(writable=True, loading="pull")
        assert (mounted.facts["mode"], mounted.facts["way"]) == ("fallback", "unpacked files")
        for way in ("EROFS from files: ", "EROFS from loop devices: ", "file trees through FUSE: "):
            assert way in str(mounted.facts["refused_ways"])
        assert "by unpacked files; not by EROFS from files: " in said(converted)
        for name in ("hot", "etc/passwd", "bin/busybox"):
            assert digest(mounted.root / name) == digest(converted.folder / "tree" / name)
        (mounted.root / "new").write_text("x")
        mounted.close()
        assert not (converted.folder / "changed0").exists()

    in_child(on_tmpfs)


def test_an_image_that_a_bucket_lacks_is_converted_by_the_start_itself(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process would be killed after minutes, and the report would not name the fallback."""
    stages: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[dict[str, object]]:
        stages.append(name)
        yield {}

    monkeypatch.setattr(mounting, "breaks_forks", lambda uri: True)
    wanted = request(node, store=str(node.folder / "store"))
    mounted = mount_image(wanted, node.folder / "mnt", stage=stage, say=lambda line: None)
    assert (mounted.facts["mode"], mounted.facts["reason"]) == ("fallback", f"{node.reference} is not converted")
    mounted.close()
    assert stages[:3] == ["store", "resolve", "fallback"]


@pytest.mark.parametrize("where", ["on a full disk", "by FUSE alone"])
def test_this_process_does_not_pull_from_a_bucket_before_it_starts_a_daemon(
    where: str, converted: Node, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounting, "breaks_forks", lambda uri: True)
    monkeypatch.setattr(materialize, "breaks_forks", lambda uri: True)
    refused = None
    if where == "on a full disk":
        monkeypatch.setattr(CacheSpace, "is_short", lambda space, num_bytes=0: True)
    else:
        refused = dict.fromkeys(list(MountMethod)[:2], "said to be missing")
    mounted = mount_image(request(converted, loading="auto"), converted.folder / "mnt", refused=refused)
    assert mounted.facts["mode"] == "lazy"
    mounted.close()
    monkeypatch.setattr(materialize, "choose_loading", lambda *asked: Prediction(LAZY, "without a hot set"))
    mounted = mount_image(request(converted, loading="auto"), converted.folder / "mnt", refused=refused)
    assert mounted.facts["reason"] == "without a hot set"  # no pull was chosen, so none was prevented
    mounted.close()


@pytest.mark.parametrize(("free", "expected"), [(10 << 20, False), (60 << 20, True), (900 << 20, True)])
def test_the_rest_of_an_image_does_not_fill_the_disk(
    free: int, expected: bool, converted: Node, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    real = materialize.start_daemon
    monkeypatch.setattr(materialize, "start_daemon", lambda spec, **to: started.append(spec.open) or real(spec, **to))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 30, used=0, free=free))
    mount().close()
    assert [spec.rest for spec in started] == [expected]
