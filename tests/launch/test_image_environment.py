"""When the layer of a snapshot cannot be mounted with an image, the image is mounted without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.env import Mode
from bootseer.env.life.decide import Action, Decision
from bootseer.errors import PermanentError, UsageError
from bootseer.image.containers.container import Options
from bootseer.image.mounting.mount import LayersAbove
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.environment.view import PreparedEnvironment
from bootseer.launch.image.environment import ImageEnvironment
from bootseer.mounts.state import MountState, Runtime
from image_node import mounted_image

LAYER = Path("/layer")


def layers(digest: str) -> list[Path]:
    return [LAYER]


@pytest.fixture
def image(tmp_path: Path) -> MountedImage:
    """An image that is not mounted yet."""
    runtime = Runtime(tmp_path / "runtime")
    state = MountState("m", str(tmp_path / "root"), "image", runtime.boot, (), None, None, 0.0, {})
    return mounted_image(runtime, state, tmp_path / "cache")


@pytest.fixture
def restored(tmp_path: Path) -> Callable[[Mode], ImageEnvironment]:
    """A start with the layer of its snapshot prepared."""

    def make(mode: Mode) -> ImageEnvironment:
        wanted = EnvironmentOptions(tmp_path / "cache", tmp_path / "runtime", mode=mode)
        start = EnvironmentStart(Task("setup.sh", [], wanted, {}), ["true"])
        start.prepared = PreparedEnvironment("restored", Decision(Action.RESTORE, "hit", "", mode=mode), {})
        start.prepared.undo.callback((tmp_path / "undone").touch)
        return ImageEnvironment(start, Options())

    return make


def test_a_layer_that_cannot_be_mounted_is_given_up(
    restored: Callable[[Mode], ImageEnvironment], image: MountedImage, tmp_path: Path
) -> None:
    asked = []

    def mount(writable: Path, layers: LayersAbove, setup: bool) -> MountedImage:
        above = tuple(layers("sha256:0"))
        asked.append((above, setup))
        if above:
            raise PermanentError("no overlay takes it")
        return image

    environment = restored("auto")
    assert environment.mount(mount, tmp_path, layers) is image
    assert asked == [((LAYER,), False), ((), True)]
    assert environment.start.prepared is None  # so that the setup runs
    assert (tmp_path / "undone").exists()


def test_a_layer_that_can_be_mounted_is_used(
    restored: Callable[[Mode], ImageEnvironment], image: MountedImage, tmp_path: Path
) -> None:
    def mount(writable: Path, layers: LayersAbove, setup: bool) -> MountedImage:
        assert list(layers("sha256:0")) == [LAYER]
        return image

    environment = restored("auto")
    assert environment.mount(mount, tmp_path, layers) is image
    assert environment.start.prepared is not None
    assert not (tmp_path / "undone").exists()


def test_where_a_snapshot_is_required_nothing_is_mounted_without_it(
    restored: Callable[[Mode], ImageEnvironment], tmp_path: Path
) -> None:
    def mount(writable: Path, layers: LayersAbove, setup: bool) -> MountedImage:
        assert layers("sha256:0")
        raise OSError("no overlay takes it")

    with pytest.raises(UsageError, match="cannot-mount"):
        restored("require").mount(mount, tmp_path, layers)


def test_where_snapshots_are_bypassed_there_is_no_lookup(tmp_path: Path) -> None:
    wanted = EnvironmentOptions(tmp_path / "cache", tmp_path / "runtime", mode="bypass", store=str(tmp_path / "store"))
    start = EnvironmentStart(Task("setup.sh", [], wanted, {}), ["true"])
    key, decision = start.restore("sha256:0")
    assert key is None
    assert (decision.action, decision.code, decision.mode) == (Action.INSTALL, "bypass", "bypass")
    assert not (start.task.folder.path / "lookup.log").exists()
