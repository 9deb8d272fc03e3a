"""When no snapshot can be used, the setup runs, with private changes where possible, and neither the job nor this
machine is worse off than without BootSeer."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from environment_place import DEADLINE_S, Place, made_place
from plain_user import protect_disks

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


@pytest.fixture
def disk(place: Place) -> Iterator[Path]:
    """A folder for small disks: `mount_on`."""
    path = place.root / "small"
    path.mkdir()
    yield path
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def mount_on(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bootseer-test", str(disk)], check=True)


ALPHA = ("python", "-c", "import alpha; print(alpha.VERSION)")


def test_a_cache_that_cannot_be_used_costs_the_snapshot_alone(place: Place) -> None:
    script = place.counting_script("python -m pip install -q alpha==1.0\nexport GREETING=hello\n")
    more = {"BOOTSEER_CACHE": "/proc/nowhere"}
    words = ("--setup", script, "--", "sh", "-c", "alpha; echo $GREETING")
    ran = place.run(*words, more=more)
    assert ran.stdout == "alpha 1.0\nhello\n"
    assert "BOOTSEER_CACHE" in ran.stderr
    assert (place.start()["mode"], place.start()["code"], place.num_setups) == ("installed", "failed", 1)
    ran = place.run("--env", "require", *words, more=more, code=1)
    assert "no environment snapshot" in ran.stderr
    assert place.num_setups == 1


def test_a_cache_without_room_for_files_costs_the_snapshot_alone(place: Place, disk: Path) -> None:
    job = "python -c 'import alpha; print(alpha.VERSION)'; echo $GREETING; exit 7"
    words = ("--setup", place.alpha_script("export GREETING=hello\n"), "--", "sh", "-c", job)
    for num_inodes in (3, 5, 7, 9, 12, 16):
        mount_on(disk, f"size=64m,nr_inodes={num_inodes}")
        env = {**place.env, "BOOTSEER_CACHE": str(disk)}
        ran = warm.bootseer(("run", "-q", *words), env=env, cwd=place.project, become=protect_disks)
        assert (ran.returncode, ran.stdout.splitlines()[0]) == (7, "1.0"), (num_inodes, ran.stderr)
        assert "Traceback" not in ran.stderr
        assert ran.stdout.splitlines()[1] == "hello" or " do not reach the command" in ran.stderr
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_exit_code_is_the_command_s_whatever_fails_after_it(place: Place) -> None:
    setup = ("--setup", place.alpha_script())
    print_it = "python -c 'import alpha; print(alpha.VERSION)'"
    delete = f"{print_it}; rm -rf {place.root}/cache/environments/runs {place.root}/cache/environments/changes; exit 7"
    for mode in ("captured", "restored"):
        ran = place.run(*setup, "--", "sh", "-c", delete, code=7)
        assert "Traceback" not in ran.stderr
        assert ran.stdout == "1.0\n"
        assert place.start()["mode"] == mode
        if mode == "captured":
            place.run(*setup, "--", "true")


def test_a_setting_that_no_reader_survives_costs_the_snapshot_alone(place: Place) -> None:
    (place.project / "uv.toml").write_text(f"x = {'[' * 20_000}")
    script = place.counting_script("echo words > words\n")
    ran = place.run("--setup", script, "--", "cat", "words")
    assert ran.stdout == "words\n"
    assert place.num_setups == 1


def test_a_setup_without_a_snapshot_leaves_the_machine_s_python_as_it_is(place: Place) -> None:
    unknown = place.root / "elsewhere.txt"
    unknown.write_text("1\n")
    place.write("read.py", f"print(open('{unknown}').read())")
    script = place.counting_script(
        "python -c \"exec(compile(open('read.py').read(), 'x', 'exec'))\" > seen\n"
        "python -m pip install -q alpha==1.0\nexport GREETING=hello\n"
    )
    words = ("--setup", script, "--", "sh", "-c", "alpha; echo $GREETING; cat seen")
    for number in (1, 2, 3):
        assert place.run(*words).stdout == "alpha 1.0\nhello\n1\n\n"
        assert not (place.site / "alpha.py").exists()
        assert place.num_setups == number
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "unsafe")
    assert (place.project / "seen").exists()
    assert not place.leftovers()
    assert not place.mounts()
    words = ("--env-input", str(unknown), "--env-input", "read.py", *words)
    place.run(*words)
    place.run(*words)
    assert (place.start()["mode"], place.num_setups) == ("restored", 4)


def test_a_conflict_costs_one_start_and_no_later_one(place: Place) -> None:
    script = place.counting_script("mkdir -p data; echo words > data/vocab; python -m pip install -q alpha==1.0\n")
    words = ("--setup", script, "--", "sh", "-c", "alpha; cat data/vocab")
    place.run(*words)
    (place.project / "data" / "vocab").write_text("my own work\n")
    assert place.run(*words).stdout == "alpha 1.0\nwords\n"
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "conflict")
    assert not (place.site / "alpha.py").exists()
    assert place.run(*words).stdout == "alpha 1.0\nwords\n"
    assert (place.start()["mode"], place.num_setups) == ("restored", 2)


@pytest.mark.parametrize("mode", ["auto", "refresh"])
def test_where_the_environment_cannot_be_shown_no_file_is_in_the_way_of_the_setup(place: Place, mode: str) -> None:
    words = ("--setup", place.alpha_script("mkdir made && echo x > made/file\n"), "--", *ALPHA)
    place.run(*words)
    shutil.rmtree(place.project / "made")
    place.cache = "other"
    changes = place.root / "other/environments/changes"
    changes.parent.mkdir(parents=True, mode=0o700)
    changes.touch()  # not a folder: the job's changes cannot be stored
    assert place.run("--env", mode, *words).stdout == "1.0\n"
    assert place.start()["mode"] == "installed"
    assert (place.project / "made/file").read_text() == "x\n"


def test_without_the_store_the_machine_s_python_stays_as_it_is(place: Place) -> None:
    place.write("requirements.txt", "alpha==1.0\n")
    ran = place.run("-r", "requirements.txt", "--", *ALPHA, more={"BOOTSEER_STORE": "oci://127.0.0.1:9/team/none"})
    assert ran.stdout == "1.0\n"
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "store-down")
    assert not (place.site / "alpha.py").exists()


def test_a_setup_that_was_killed_on_a_full_disk_does_not_run_again(place: Place, disk: Path) -> None:
    mount_on(disk, "size=32m")
    script = place.counting_script("dd if=/dev/zero of=big bs=1M count=64 2>/dev/null\nkill -9 $$\n")
    place.run("--setup", script, "--", "true", code=137, more={"BOOTSEER_CACHE": str(disk)})
    assert place.num_setups == 1


def test_what_outlives_the_command_keeps_its_files_until_it_ends(place: Place) -> None:
    setup = ("--setup", place.alpha_script())
    stop, seen = place.outside / "stop", place.outside / "seen"
    survivor = f"while [ ! -e {stop} ]; do sleep 0.05; done; python -c 'import alpha' && touch {seen}"
    ran = place.run(*setup, "--", "sh", "-c", f"setsid sh -c {survivor!r} >/dev/null 2>&1 </dev/null &")
    assert place.start()["mode"] == "captured", ran.stderr
    assert place.leftovers()
    stop.touch()
    until = time.monotonic() + DEADLINE_S
    while not seen.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    while place.leftovers():
        place.run(*setup, "--", *ALPHA)
        assert time.monotonic() < until
