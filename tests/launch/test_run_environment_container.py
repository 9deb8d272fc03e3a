"""Environments for root without the right to mount, as in most containers: files are compared and written out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bootseer
from bootseer.mounts import kernel
from conftest_launch import BOOTSEER
from environment_place import DEADLINE_S, Place, Ran, made_place
from once import copy

pytestmark = pytest.mark.root

_SHOWN = ("/usr", "/etc", "/proc", "/sys", "/dev")
_LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_READ_ONLY = 1


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may make a container")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    with made_place() as place:
        yield place


def in_container(place: Place) -> Callable[[], None]:
    """For `preexec_fn`: a separate root on a separate disk, so that nothing else changes the compared files."""
    new = place.root / "container"
    new.mkdir(exist_ok=True)
    source = Path(bootseer.__file__).parents[2]
    shown = {*_SHOWN, sys.base_prefix, sys.prefix, str(source), str(Path(__file__).parent)}
    outside = place.outside
    outside.mkdir(exist_ok=True)

    def become() -> None:
        kernel.unshare_mounts()
        held = kernel.clone_mount(place.root)
        again = kernel.clone_mount(outside)
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("mode", "755")]), new)
        for link in map(Path, _LINKS):
            if link.is_symlink():
                (new / link.name).symlink_to(link.readlink())
        for path in sorted(shown):
            target = new / path.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            kernel.attach(kernel.clone_mount(Path(path), recursive=True), target)
            if path not in _SHOWN[2:]:
                kernel.restrict(target, _READ_ONLY)
        for mount, where in ((held, place.root), (again, outside)):
            target = new / str(where).lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            kernel.attach(mount, target)
        (new / "tmp").mkdir(mode=0o1777, exist_ok=True)  # the checkout may be there
        kernel.change_root(new)
        os.chdir(place.project)

    return become


def run(place: Place, *words: str) -> Ran:
    place.keep_rules()
    drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    ran = subprocess.run(
        [*drop, *BOOTSEER, "run", "-q", *words],
        preexec_fn=in_container(place),
        env={**place.env, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=place.project,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "an error of BootSeer" not in ran.stderr, ran.stderr
    return ran


def test_a_replaced_container_gets_the_files_and_keeps_its_rights(place: Place) -> None:
    copy(place.venv, place.root / "cache" / "image")
    script = place.counting_script("python -m pip install -q beta==2.0\nmkdir data; echo words > data/vocab\n")
    check = "import alpha, beta; print(beta.VERSION, alpha.__file__)"
    words = ("--setup", script, "--", "sh", "-c", f"python -c '{check}'; cat data/vocab; grep CapEff /proc/self/status")
    first = run(place, *words)
    assert first.stdout.splitlines()[:2] == [f"2.0 {place.site}/alpha.py", "words"]
    assert (place.start()["mode"], place.start()["way"]) == ("captured", "scan")
    assert "by scanning the disks" in first.stderr
    assert place.published()["published"] is True
    shutil.rmtree(place.venv)
    shutil.rmtree(place.project / "data")
    copy(place.root / "cache" / "image", place.venv)
    place.cache = "other"
    second = run(place, *words)
    assert second.stdout == first.stdout
    assert "nothing can be mounted here" in second.stderr
    assert (place.start()["mode"], place.start()["way"]) == ("restored", "unpacked files")
    assert place.num_setups == 1
    assert int(second.stdout.split()[-1], 16) & 1 << 14  # CAP_IPC_LOCK


def test_a_user_s_own_file_in_the_way_is_not_written_over(place: Place) -> None:
    copy(place.venv, place.root / "cache" / "image")
    script = place.counting_script("mkdir -p data; echo words > data/vocab\n")
    words = ("--setup", script, "--", "cat", "data/vocab")
    run(place, *words)
    (place.project / "data" / "vocab").write_text("my own work\n")
    ran = run(place, *words)
    assert "data/vocab" in ran.stderr
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "conflict")
    assert place.num_setups == 2
