"""Loading snapshots to this machine: lazily, from the cache, with the store unavailable, and by each fallback."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.artifact.process_snapshots import ProcessSnapshot
from bootseer.artifact.unpacked import delete_idle_trees
from bootseer.env.document import EnvironmentDocument
from bootseer.env.restoring.layer import Layer, LayerOptions, mount_layer
from bootseer.errors import BootseerError
from bootseer.mounts import kernel
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.mounts.state import Runtime
from bootseer.store.file import FileStore
from restoring import Setup
from store_doubles import MemoryStore
from waiting import until

pytestmark = pytest.mark.root
SIZE = 6 << 20
BringIt = Callable[..., Layer]


@pytest.fixture
def document(setup: Setup) -> EnvironmentDocument:
    rng = random.Random(3)
    for name in ("hot", "cold"):
        setup.write(f"/opt/env/{name}", "")
        setup.at(f"/opt/env/{name}").write_bytes(rng.randbytes(SIZE))
    setup.at("/opt/env/link").symlink_to("hot")
    os.link(setup.at("/opt/env/hot"), setup.at("/opt/env/again"))
    changes = setup.changes(Path("/opt/env"), deleted=[Path("/opt/gone")], opaque=[Path("/opt/env")])
    return setup.document(changes, [Path("/opt/env")])


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def bring(
    as_root: None, setup: Setup, document: EnvironmentDocument, tmp_path: Path, said: list[str]
) -> Iterator[BringIt]:
    """`bring(...)`: the layer, with other options; closed at the end."""
    with ExitStack() as opened:

        def call(store: FileStore | None = None, **changes: object) -> Layer:
            plain = LayerOptions(cache=tmp_path / "cache", runtime=tmp_path / "runtime", loading="lazy")
            layer = mount_layer(
                document,
                store or setup.store,  # type: ignore[arg-type]
                replace(plain, **changes),  # type: ignore[arg-type]
                say=said.append,
            )
            opened.callback(layer.close)
            return layer

        yield call


def check_tree(layer: Layer, setup: Setup) -> None:
    for name in ("hot", "cold"):
        assert layer.at(f"/opt/env/{name}").read_bytes() == setup.at(f"/opt/env/{name}").read_bytes()
    assert layer.at("/opt/env/again").samefile(layer.at("/opt/env/hot"))
    assert str(layer.at("/opt/env/link").readlink()) == "hot"
    status = layer.at("/opt/gone").stat()
    assert (stat.S_IFMT(status.st_mode), status.st_rdev) == (stat.S_IFCHR, 0)
    assert os.getxattr(layer.at("/opt/env"), "trusted.overlay.opaque") == b"y"


@pytest.mark.fuse
def test_what_is_read_is_fetched_and_the_next_start_knows_it(bring: BringIt, setup: Setup, tmp_path: Path) -> None:
    first = bring(workload="w")
    assert first.facts["mode"] == "lazy"
    first.at("/opt/env/hot").read_bytes()
    numbers = first.end_startup()
    assert SIZE <= numbers["demand_bytes"] < 1.7 * SIZE  # type: ignore[operator]
    first.wait_for_record()
    first.close()
    second = bring(workload="w", cache=tmp_path / "another")
    assert second.facts["mode"] == "hot"
    check_tree(second, setup)


@pytest.mark.fuse
def test_what_a_daemon_that_died_has_fetched_is_unknown(bring: BringIt, tmp_path: Path) -> None:
    """It was reported as nothing."""
    layer = bring()
    (state,) = Runtime(tmp_path / "runtime").all()
    assert state.daemon is not None
    os.killpg(os.getpgid(state.daemon.pid), signal.SIGKILL)
    until(lambda: not state.daemon.alive, "the daemon has ended")
    assert layer.end_startup() == {"stored_bytes": None}


def test_one_mount_serves_all_starts_and_survives_them(
    bring: BringIt, setup: Setup, document: EnvironmentDocument, tmp_path: Path
) -> None:
    first, second = bring(loading="pull"), bring()
    assert second.facts["mode"] == "local"
    numbers = [layer.end_startup() for layer in (first, second)]
    assert [one["cold_bytes"] for one in numbers] == [first.facts["stored_bytes"], 0]
    assert [bool(one["requests"]) for one in numbers] == [True, False]
    assert first.path == second.path
    check_tree(second, setup)
    runtime = Runtime(tmp_path / "runtime")
    first.close()
    assert unmount_idle(runtime, idle_s=0) == []
    second.close()
    assert kernel.is_mount(first.path)
    assert unmount_idle(runtime, idle_s=0) == [document.file.identity]


def test_a_process_snapshot_is_shared_also_by_a_node_that_has_everything(bring: BringIt, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "core.img").write_bytes(b"core")
    said: list[str] = []
    for name, loading, found in (("first", "pull", False), ("second", "lazy", True)):
        into = tmp_path / name
        snapshot = ProcessSnapshot(tmp_path / f"{name}-processes" / "w", into, said.append)
        assert bring(loading=loading, workload="w", process=snapshot).facts["mode"] == ("local" if found else "pull")
        assert snapshot.unpack() == found
        snapshot.keep(images)
    assert (into / "core.img").read_bytes() == b"core"
    assert said == []


@contextmanager
def disk_of(size: str, cache: Path) -> Iterator[None]:
    cache.mkdir(mode=0o700)
    kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("size", size), ("mode", "700")]), cache)
    try:
        yield
    finally:
        kernel.unmount(cache, lazy=True)  # the kernel may still be closing the layer's file


def test_on_a_full_disk_a_start_keeps_the_mount_that_it_needs(bring: BringIt, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with disk_of("14m", cache):
        layer = bring(loading="pull")
        layer.close()
        try:
            (cache / "ballast").write_bytes(bytes(shutil.disk_usage(cache).free - (1 << 20)))
            mounted = (tmp_path / "runtime" / "layers").stat().st_mtime_ns  # changes with each new or removed mount
            bring().close()
            assert (tmp_path / "runtime" / "layers").stat().st_mtime_ns == mounted
        finally:
            kernel.unmount(layer.path)


@pytest.mark.fuse
def test_a_pull_that_does_not_fit_is_reported_as_the_lazy_start_that_it_is(
    bring: BringIt, setup: Setup, tmp_path: Path
) -> None:
    with disk_of("8m", tmp_path / "cache"):
        layer = bring(loading="pull")
        assert layer.facts["mode"] == "lazy"
        assert "not all of it fits on this node" in str(layer.facts["reason"])
        check_tree(layer, setup)
        layer.close()


def test_the_shared_copy_cannot_be_written(bring: BringIt) -> None:
    layer = bring(loading="pull")
    with pytest.raises(OSError, match="Read-only"):
        layer.at("/opt/env/hot").write_bytes(b"poison")


def test_a_node_that_has_everything_needs_no_store(bring: BringIt, setup: Setup) -> None:
    bring(loading="pull").close()
    shutil.rmtree(str(setup.store.uri).removeprefix("file://"))
    check_tree(bring(), setup)


def test_a_store_without_the_snapshot_is_an_error_and_leaves_nothing(bring: BringIt, tmp_path: Path) -> None:
    with pytest.raises(BootseerError):
        bring(store=MemoryStore(tmp_path.name))
    assert list((tmp_path / "runtime" / "mounts").iterdir()) == []


def test_where_nothing_is_mounted_the_files_are_written_out_and_that_is_said(
    bring: BringIt, setup: Setup, tmp_path: Path, said: list[str]
) -> None:
    layer = bring(unpack=True)
    assert (layer.facts["mode"], layer.facts["way"]) == ("fallback", "unpacked files")
    assert "written out" in said[0]
    check_tree(layer, setup)
    assert layer.at("/opt/env/hot").stat().st_mtime_ns == bring(loading="pull").at("/opt/env/hot").stat().st_mtime_ns
    runtime = Runtime(tmp_path / "runtime")
    assert delete_idle_trees(tmp_path / "cache", runtime, idle_s=0) == []
    layer.close()
    assert delete_idle_trees(tmp_path / "cache", runtime, idle_s=0) == [layer.path.name]


@pytest.mark.fuse
def test_what_a_killed_start_had_mounted_is_taken_away_by_the_next(
    bring: BringIt, setup: Setup, document: EnvironmentDocument, tmp_path: Path
) -> None:
    pid = os.fork()
    if pid == 0:
        mount_layer(
            document, setup.store, LayerOptions(cache=tmp_path / "cache", runtime=tmp_path / "runtime", loading="lazy")
        )
        os._exit(0)  # as after a kill: nothing is closed
    assert os.waitpid(pid, 0)[1] == 0
    runtime = Runtime(tmp_path / "runtime")
    (left,) = runtime.all()
    assert kernel.is_mount(Path(left.target))
    daemon = left.daemon
    assert daemon is not None
    until(lambda: not daemon.alive)  # it ends with the process that it served
    check_tree(bring(), setup)
    assert not kernel.is_mount(Path(left.target))
    assert left.id not in {state.id for state in runtime.all()}
