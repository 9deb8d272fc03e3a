"""Records of mounts compared with the mount table; and layers that stay mounted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from bootseer.errors import AccessError, PermanentError
from bootseer.mounts import kernel
from bootseer.mounts.layers import mount_erofs, mount_overlay
from bootseer.mounts.namespace import Namespace
from bootseer.mounts.process import ProcessId
from bootseer.mounts.shared_layers import mount_shared, mounted_layers, unmount_idle
from bootseer.mounts.state import MountState, Runtime
from mounts.images import write_image
from mounts.starting import DEADLINE_S, Start
from small_disks import small_disk
from waiting import until

pytestmark = pytest.mark.root

IDENTITY = "ab" * 32


class Layer:
    """A file outside of a cache, with the interface of `CachedFile`."""

    index = SimpleNamespace(identity=IDENTITY)

    def __init__(self, path: Path) -> None:
        self.path = path


def mounted_state(runtime: Runtime, place: Path) -> MountState:
    """A mount like those of the commands: one EROFS layer in its folder, and an overlay of it at the user's target."""
    folder = runtime.new_folder()
    (folder / "layer").mkdir()
    mount_erofs(write_image(place / "image", {b"a": b"alpha"}), folder / "layer")
    target = place / "user's place"
    target.mkdir(exist_ok=True)
    mount_overlay([folder / "layer"], target)
    state = MountState(
        folder.name, str(target), "registry/image:tag", runtime.boot, (IDENTITY,), made_s=12.5, details={"way": "EROFS"}
    )
    runtime.write(state)
    return state


def test_a_mount_is_found_listed_and_removed(place: Path) -> None:
    runtime = Runtime(place / "run")
    state = mounted_state(runtime, place)
    assert list(Runtime(place / "run").all()) == [state]
    assert runtime.find(Path(state.target)) == state
    assert runtime.find(place / "elsewhere") is None
    assert runtime.health(state) == "mounted"
    runtime.remove_stale()
    assert list(runtime.all()) == [state]
    kernel.unmount(Path(state.target))
    assert runtime.health(state) == "gone"
    runtime.remove_stale()
    assert list(runtime.mounts.iterdir()) == []


def test_what_several_remove_at_once_is_gone_for_all(place: Path) -> None:
    runtime = Runtime(place / "run")
    for _ in range(20):
        folder = runtime.new_folder()
        state = MountState(folder.name, str(place / "target"), "what", runtime.boot)
        runtime.write(state)
        for number in range(30):
            (folder / f"f{number}").touch()
            (folder / f"d{number}").mkdir()
        with ThreadPoolExecutor(4) as threads:
            for _ in threads.map(lambda _, state=state: runtime.remove(state), range(4)):
                pass
        assert not folder.exists()


def test_leftovers_of_an_earlier_boot_are_gone(place: Path) -> None:
    runtime = Runtime(place / "run")
    state = replace(mounted_state(runtime, place), boot="another")
    runtime.write(state)
    assert runtime.health(state) == "gone"


def test_a_mount_in_a_process_of_its_own_is_gone_with_it(place: Path) -> None:
    runtime = Runtime(place / "run")
    child = subprocess.Popen(["sleep", "60"])
    folder = runtime.new_folder()
    state = MountState(folder.name, str(place / "x"), "i", runtime.boot, owner=ProcessId.of(child.pid))
    runtime.write(state)
    assert runtime.health(state) == "mounted"
    child.kill()
    child.wait(DEADLINE_S)
    runtime.remove_stale()
    assert list(runtime.all()) == []


@pytest.mark.fuse
def test_a_dead_daemon_is_noticed_and_its_mount_can_be_removed(place: Path, start: Start) -> None:
    runtime = Runtime(place / "run")
    daemon, _ = start(write_image(place / "image", {b"a": b"alpha" * 500_000}))
    folder = runtime.new_folder()
    target = place / "at"
    target.mkdir()
    kernel.attach(kernel.clone_mount(daemon.folder / "files"), target)
    state = MountState(folder.name, str(target), "i", runtime.boot, daemon=daemon.process)
    runtime.write(state)
    assert runtime.health(state) == "mounted"
    daemon.process.signal(signal.SIGKILL)
    until(lambda: runtime.health(state) == "daemon dead", "its end is detected")
    runtime.remove_stale()
    assert list(runtime.all()) == [state], "it is still mounted, and its readers get errors"
    kernel.unmount(target, lazy=True)
    runtime.remove_stale()
    assert list(runtime.all()) == []


def test_other_files_than_records_are_not_mounts(place: Path) -> None:
    runtime = Runtime(place / "run")
    for number, text in enumerate(["", "[]", '{"schema": "bootseer.mount/2"}', "null", "{" * 100, '{"schema": 1}']):
        folder = runtime.mounts / f"{number:012x}"
        folder.mkdir()
        (folder / "mount.json").write_text(text)
    (runtime.mounts / "../../x").mkdir(exist_ok=True)
    assert list(runtime.all()) == []


@pytest.mark.fuse
def test_what_was_begun_and_abandoned_is_cleaned_after_a_while(place: Path, start: Start) -> None:
    runtime = Runtime(place / "run")
    daemon, _ = start(write_image(place / "image", {b"a": b"x" * 2_000_000}))
    daemon.folder.rename(runtime.mounts / "0123456789ab")  # as if it had been started there
    folder = runtime.mounts / "0123456789ab"
    runtime.remove_stale()
    assert folder.exists()
    assert daemon.process.alive, "a mount may be in progress"
    os.utime(folder, (0, 0))
    runtime.remove_stale()
    assert not folder.exists()
    until(lambda: not daemon.process.alive, "the daemon ended")


def test_a_kept_layer_is_left_alone_during_mounts(place: Path) -> None:
    runtime = Runtime(place / "run")
    image = write_image(place / "image", {b"a": b"alpha"})
    layer = mount_shared(runtime, Layer(image))
    folder = runtime.new_folder()  # of an image on this layer that is being mounted and has no record yet
    assert unmount_idle(runtime, idle_s=0) == []
    assert (layer / "a").read_bytes() == b"alpha"
    os.utime(folder, (0, 0))
    runtime.remove_stale()
    assert runtime.is_mounting(), "a large image may take longer"
    (folder / "maker").write_text("1 0")  # an ended process
    assert not runtime.is_mounting()
    assert unmount_idle(runtime, idle_s=0) == [IDENTITY]


def test_deleting_a_folder_never_reaches_into_a_mount(place: Path) -> None:
    runtime = Runtime(place / "run")
    precious = place / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep me")
    folder = runtime.new_folder()
    (folder / "bound").mkdir()
    (folder / "link").symlink_to(precious)
    kernel.attach(kernel.clone_mount(precious), folder / "bound")
    # Root in a user namespace sees the mount but cannot unmount it.
    with pytest.raises(PermanentError, match="bound is still mounted"):
        Namespace.create(lambda: runtime.remove_folder(folder), user=True)
    assert (precious / "data").read_text() == "keep me"
    runtime.remove_folder(folder)
    assert (precious / "data").read_text() == "keep me"
    assert not folder.exists()


def test_a_runtime_folder_of_another_user_is_not_used(place: Path) -> None:
    (place / "run").mkdir()
    os.chown(place / "run", 12345, 12345)
    with pytest.raises(AccessError, match="belongs to user 12345"):
        Runtime(place / "run")


@pytest.mark.parametrize("name", ["", "mounts", "layers"])
def test_a_folder_of_the_runtime_that_others_can_change_is_not_used(place: Path, name: str) -> None:
    folder = place / "run" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(AccessError, match=f"{folder} can be changed by other users .* set BOOTSEER_RUNTIME"):
        Runtime(place / "run")


def test_a_kept_layer_is_mounted_once_and_released_when_idle(place: Path) -> None:
    runtime = Runtime(place / "run")
    image = write_image(place / "layer", {b"a": b"alpha"})
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: mount_shared(runtime, Layer(image)), range(16)))
    (layer,) = found
    assert (layer / "a").read_bytes() == b"alpha"
    assert [point for point in kernel.mount_points() if point == str(layer)] == [str(layer)]
    assert unmount_idle(runtime, idle_s=3600) == []
    assert unmount_idle(runtime, idle_s=0) == [IDENTITY]
    assert mounted_layers(runtime) == []


def test_a_kept_layer_whose_file_was_replaced_or_written_to_is_mounted_anew(place: Path) -> None:
    runtime = Runtime(place / "run")
    image = write_image(place / "layer", {b"a": b"alpha"})
    layer = mount_shared(runtime, Layer(image))
    first = layer.stat().st_dev
    assert mount_shared(runtime, Layer(image)).stat().st_dev == first
    write_image(place / "other", {b"a": b"omega"}).replace(image)
    mount_shared(runtime, Layer(image))
    assert (layer / "a").read_bytes() == b"omega"
    # Written in place: the mount has cached pages of the old content.
    with image.open("r+b") as file:
        file.write(write_image(place / "third", {b"a": b"delta"}).read_bytes())
    mount_shared(runtime, Layer(image))
    assert (layer / "a").read_bytes() == b"delta"
    assert list(kernel.mount_points()).count(str(layer)) == 1


def test_a_layer_of_a_mounted_image_is_not_released(place: Path) -> None:
    runtime = Runtime(place / "run")
    state = mounted_state(runtime, place)
    mount_shared(runtime, Layer(place / "image"))
    assert unmount_idle(runtime, idle_s=0) == []
    kernel.unmount(Path(state.target))
    assert unmount_idle(runtime, idle_s=0) == [IDENTITY]


KEEPER = """
import os, signal, sys
from pathlib import Path
from bootseer.mounts.shared_layers import mount_shared
from bootseer.mounts.state import Runtime
class Layer:
    index = type("Index", (), {"identity": sys.argv[3]})
    path = Path(sys.argv[2])
mount_shared(Runtime(Path(sys.argv[1])), Layer())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_mounted_is_used(place: Path) -> None:
    runtime = Runtime(place / "run")
    image = write_image(place / "layer", {b"a": b"alpha"})
    ended = subprocess.run(
        [sys.executable, "-c", KEEPER, str(runtime.root), str(image), IDENTITY], capture_output=True, check=False
    )
    assert ended.returncode == -9
    layer = mount_shared(runtime, Layer(image))
    assert (layer / "a").read_bytes() == b"alpha"


def test_an_overlay_outlives_the_release_of_its_layer(place: Path) -> None:
    runtime = Runtime(place / "run")
    image = write_image(place / "layer", {b"a": b"alpha" * 1000})
    layer = mount_shared(runtime, Layer(image))
    (place / "empty").mkdir()
    (place / "at").mkdir()
    mount_overlay([place / "empty", layer], place / "at")
    assert unmount_idle(runtime, idle_s=0) == [IDENTITY]
    assert (place / "at" / "a").read_bytes() == b"alpha" * 1000


def test_a_mount_point_may_have_a_name_that_is_not_utf_8(place: Path) -> None:
    runtime = Runtime(place / "run")
    folder = runtime.new_folder()
    state = MountState(folder.name, os.fsdecode(b"/mnt/caf\xe9"), "registry/image:tag", runtime.boot)
    runtime.write(state)
    assert [*runtime.all()] == [runtime.find(Path(state.target))] == [state]


def test_a_full_runtime_folder_is_one_clear_error(tmp_path: Path) -> None:
    # The folder itself and its three subfolders use up all inodes of this file system.
    with small_disk(tmp_path / "small", "nr_inodes=4") as small:
        runtime = Runtime(small / "bootseer")
        with pytest.raises(PermanentError, match="No space left on device; make room there"):
            runtime.new_folder()
