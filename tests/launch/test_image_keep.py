"""The files that a setup wrote in an image become a layer; the command sees them even when that fails."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Action, Decision
from bootseer.errors import PermanentError
from bootseer.image.containers.container import Container, Options
from bootseer.image.mounting.mount import LayersAbove
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch.environment.setup import SetupResult
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.image.setup import UPPER, ImageSetupHost, UpperLayer
from bootseer.launch.image.setup_paths import setup_paths
from bootseer.mounts import kernel
from bootseer.mounts.state import MountState, Runtime
from image_node import mounted_image

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")]
KEY = RequestKey("0" * 64, {}, {}, {}, (), (), {})


class Mounts:
    """A stand-in for mounting an image, which records the requested layers."""

    def __init__(self, folder: Path, *, refuses_layers: bool = False, refuses_all: bool = False) -> None:
        self.root = folder / "root"
        self.asked: list[tuple[Path, ...]] = []
        self._refuses_layers = refuses_layers
        self._refuses_all = refuses_all
        self._runtime = Runtime(folder.parent / "runtime")

    def __call__(self, writable: Path, layers: LayersAbove, setup: bool = False) -> MountedImage:
        above = tuple(layers("sha256:0"))
        self.asked.append(above)
        if self.asked[1:] and (self._refuses_all or (above and self._refuses_layers)):
            raise PermanentError("no overlay takes it")
        (writable / UPPER).mkdir(parents=True, exist_ok=True)
        self.root.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.root], check=True)
        name = self._runtime.new_folder().name
        state = MountState(name, str(self.root), "image", self._runtime.boot, details={"changes": str(writable)})
        self._runtime.write(state)
        return mounted_image(self._runtime, state, writable.parent)


@pytest.fixture
def writable(tmp_path: Path) -> Iterator[Path]:
    """An image's folder for changes."""
    folder = tmp_path / "writable"
    folder.mkdir()
    yield folder
    while kernel.is_mount(folder / "root"):
        kernel.unmount(folder / "root", lazy=True)


def keeping(writable: Path, mount: Mounts, options: Options | None = None) -> tuple[UpperLayer, EnvironmentStart]:
    wanted = EnvironmentOptions(writable.parent / "cache", writable.parent / "runtime")
    task = Task("setup.sh", [], wanted, {})
    start = EnvironmentStart(task, ["true"])
    mounted = mount(writable, lambda digest: ())
    (writable / UPPER / "tool").write_text("what the setup wrote")
    setup = ImageSetupHost(task, mounted, options or Options(), setup_paths("/work", [], []), task.folder.path, {})
    return UpperLayer(start, setup, mount, Decision(Action.BUILD, "no-snapshot", "")), start


def test_what_the_setup_wrote_becomes_a_layer(writable: Path) -> None:
    mount = Mounts(writable)
    keep, start = keeping(writable, mount)
    keep.publish(SetupResult(), KEY)
    layer = start.task.folder.path / "layer"
    assert mount.asked == [(), (layer,)]
    assert (layer / "tool").read_text() == "what the setup wrote"
    assert list((writable / UPPER).iterdir()) == []
    assert start.publishing is not None
    start.publishing.stop()


def test_a_layer_that_cannot_be_mounted_becomes_the_upper_one_again(writable: Path) -> None:
    mount = Mounts(writable, refuses_layers=True)
    keep, start = keeping(writable, mount)
    keep.publish(SetupResult(), KEY)
    assert mount.asked == [(), (start.task.folder.path / "layer",), ()]
    assert (writable / UPPER / "tool").read_text() == "what the setup wrote"
    assert (start.publishing, start.task.outcome["why_not"]) == (None, "no overlay takes it")


def test_what_devices_mount_is_not_part_of_the_layer(writable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime creates an empty file as mount point for a driver's library. In the layer, other nodes would get an
    empty library."""
    edits = {"mounts": [{"hostPath": "/etc/hostname", "containerPath": "/usr/lib/libdriver.so.1"}]}
    cdi = writable.parent / "cdi"
    cdi.mkdir()
    (cdi / "tool.json").write_text(
        json.dumps({"kind": "acme.com/tool", "devices": [{"name": "0", "containerEdits": edits}]})
    )
    monkeypatch.setattr(Container.__init__, "__kwdefaults__", {"cdi_folders": [cdi]})
    keep, _ = keeping(writable, Mounts(writable), Options(devices=("acme.com/tool=0",)))
    with keep._host._container(["true"], {}, []):
        pass
    (writable / UPPER / "usr" / "lib").mkdir(parents=True)
    for name in ("libdriver.so.1", "libother.so.1"):
        (writable / UPPER / "usr" / "lib" / name).write_text("")
    paths = [change.path for change in keep._changes(writable / UPPER)]
    assert "/usr/lib/libother.so.1" in paths
    assert "/usr/lib/libdriver.so.1" not in paths


def test_an_image_in_use_stays_as_it_is(writable: Path) -> None:
    mount = Mounts(writable)
    keep, start = keeping(writable, mount)
    with (mount.root / "in use").open("w"):
        keep.publish(SetupResult(), KEY)
    assert mount.asked == [()]
    assert (writable / UPPER / "tool").exists()
    assert start.publishing is None


def test_without_a_snapshot_the_image_is_mounted_again_on_what_the_setup_wrote(writable: Path) -> None:
    mount = Mounts(writable)
    keep, _ = keeping(writable, mount)
    keep.remount()
    assert mount.asked == [(), ()]
    assert (writable / UPPER / "tool").exists()


def test_an_image_that_cannot_be_mounted_any_more_is_an_error(writable: Path) -> None:
    keep, _ = keeping(writable, Mounts(writable, refuses_all=True))
    with pytest.raises(PermanentError, match="cannot be mounted again"):
        keep.publish(SetupResult(), KEY)
