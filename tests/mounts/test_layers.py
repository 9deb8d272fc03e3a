"""EROFS images and overlays of few and many layers, with real mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, NotFoundError, PermanentError, UsageError
from bootseer.mounts import kernel
from bootseer.mounts.layers import mount_erofs, mount_overlay
from mounts.images import write_image
from waiting import until

pytestmark = pytest.mark.root


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("loop", [None, True])
def test_an_image_is_mounted_from_its_file_or_through_a_loop_device(place: Path, loop: bool | None) -> None:
    if loop and not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices")
    image = write_image(place / "image", {b"a": b"alpha" * 5000, b"d": {b"x": b"y"}, b"l": "d/x"})
    target = made(place / "at")
    mount_erofs(image, target, loop=loop)
    assert kernel.is_mount(target)
    assert (target / "a").read_bytes() == b"alpha" * 5000
    assert (target / "l").read_bytes() == b"y"
    assert (target / "a").stat().st_mtime_ns == 1_700_000_000_123_456_789
    kernel.unmount(target)
    assert not kernel.is_mount(target)
    kernel.unmount(target)  # no mount: does nothing


def test_a_mount_directly_below_the_root_is_seen() -> None:
    assert {"/proc", "/sys"} <= set(kernel.mount_points())
    assert kernel.is_mount(Path("/proc"))
    assert kernel.is_mount(Path("/"))
    assert not kernel.is_mount(Path("/nothing-of-this-name"))


def test_an_invalid_image_is_named_in_the_error(place: Path) -> None:
    (place / "text").write_bytes(b"x" * 8192)
    with pytest.raises(BootseerError, match=r"text: mount erofs"):
        mount_erofs(place / "text", made(place / "at"))
    with pytest.raises(NotFoundError, match=r"none: mount erofs"):
        mount_erofs(place / "none", place / "at")


@pytest.mark.parametrize("count", [1, 2, 130, 200, 500])
def test_overlays_of_one_to_many_layers(place: Path, count: int) -> None:
    lowers = []
    for number in range(count):
        lower = made(place / f"a rather long name, with commas:and colons {number}")
        (lower / "same").write_text(str(number))
        (lower / f"own {number}").touch()
        lowers.append(lower)
    target = made(place / "at")
    if count > 200:
        with pytest.raises(PermanentError, match="longer than a page"):
            mount_overlay(lowers, target)
        return
    mount_overlay(lowers, target)
    assert (target / "same").read_text() == str(count - 1), "the last layer is the highest"
    assert len(list(target.iterdir())) == count + 1
    kernel.unmount(target)


@pytest.mark.parametrize("name", ["upper \\ with, odd:name", "my folder"])
def test_a_writable_overlay_leaves_its_layers_alone(place: Path, name: str) -> None:
    image = write_image(place / "image", {b"a": b"alpha", b"b": b"beta"})
    mount_erofs(image, made(place / "layer"))
    upper, work = made(place / name / "upper"), made(place / name / "work")
    target = made(place / "at")
    mount_overlay([place / "layer"], target, upper=upper, work=work)
    (target / "a").write_text("changed")
    (target / "b").unlink()
    assert sorted(path.name for path in target.iterdir()) == ["a"]
    assert (upper / "a").read_text() == "changed"
    assert (place / "layer" / "a").read_text() == "alpha"


@pytest.mark.parametrize("name", ["my files", "odd \\, with:all"])
def test_an_upper_layer_in_use_is_found_by_its_name_and_holds_whole_files(place: Path, name: str) -> None:
    """With many layers, and any defaults of the kernel: later runs check whether they may delete the folder."""
    lowers = [made(place / "a rather long name for a layer" / str(number)) for number in range(150)]
    unique = os.urandom(4).hex()  # mounts of other tests are seen, too
    upper, work = made(place / name / unique / "upper"), made(place / name / unique / "work")
    target = made(place / "at")
    for several in (lowers[:1], lowers):
        mount_overlay(several, target, upper=upper, work=work)
        assert kernel.is_mounted_anywhere(f"/{unique}/")
        assert "redirect_dir=nofollow" in Path("/proc/self/mountinfo").read_text(errors="replace")
        kernel.unmount(target)
        until(lambda: not kernel.is_mounted_anywhere(f"/{unique}/"))  # a namespace of another test may have a copy


def test_deletions_and_opaque_folders_of_images_count(place: Path) -> None:
    below = write_image(place / "below", {b"a": b"1", b"gone": b"2", b"d": {b"old": b"3"}})
    above = write_image(place / "above", {b"gone": None, b"d": {b"new": b"4"}}, opaque=frozenset({b"d"}))
    layers = [made(place / "l0"), made(place / "l1")]
    for image, layer in zip((below, above), layers, strict=True):
        mount_erofs(image, layer)
    target = made(place / "at")
    mount_overlay(layers, target)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == ["a", "d", "d/new"]
    with pytest.raises(OSError, match="Read-only"):
        (target / "a").write_text("x")


def test_layers_may_have_names_longer_than_an_option(place: Path) -> None:
    deep = [made(place / str(number) / ("x" * 200) / ("y" * 200)) for number in range(3)]
    (deep[0] / "f").write_text("found")
    mount_overlay(deep, made(place / "at"))
    assert (place / "at" / "f").read_text() == "found"


def test_wrong_folders_are_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="upper and work"):
        mount_overlay([place], place, upper=place)
    with pytest.raises(NotFoundError):
        mount_overlay([place / "none", place / "neither"], place)


PRIVATE = """
import sys, os, signal
from pathlib import Path
from bootseer.mounts import kernel, layers
kernel.unshare_mounts()
layers.mount_erofs(Path(sys.argv[1]), Path(sys.argv[2]))
assert kernel.is_mount(Path(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_with_mounts_of_its_own_leaves_none(place: Path) -> None:
    image, target = write_image(place / "image", {b"a": b"alpha"}), made(place / "at")
    ended = subprocess.run([sys.executable, "-c", PRIVATE, str(image), str(target)], check=False)
    assert ended.returncode == -9
    assert not kernel.is_mount(target)
    assert os.listdir(target) == []  # noqa: PTH208 - names
