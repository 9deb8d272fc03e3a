"""Real setups in real captures: which of the files they read are observed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bootseer.env.capturing.reads import not_watched
from bootseer.errors import AccessError
from bootseer.launch.environment.watch import Watch
from env.capturing.captured import Machine
from env.capturing.watched import look_at
from plain_user import as_plain_user

pytestmark = pytest.mark.root


def test_files_that_are_opened_are_seen_and_those_that_are_only_looked_at_are_not(machine: Machine) -> None:
    for name in ("read", "linked", "listed", "asked", "theirs"):
        (machine.work / name).write_text(name)
    (machine.work / "link").symlink_to("linked")
    said = look_at(
        machine,
        "cat /srv/read >&2; (. /srv/link) 2>/dev/null || true; ls /srv >&2; test -f /srv/asked",
        beside="cat /srv/theirs > /dev/null",
    )
    assert (said["complete"], said["why"]) == (True, "")
    assert [path for path in said["reads"] if path.startswith("/srv")] == ["/srv/linked", "/srv/read"]
    assert not said["watching"]


def test_programs_and_their_libraries_are_reads(machine: Machine) -> None:
    said = look_at(machine, "cp /bin/true /srv/mine", way="overlay")
    assert "/usr/bin/true" in said["reads"]
    (machine.work / "theirs").write_bytes(Path("/bin/true").read_bytes())
    (machine.work / "theirs").chmod(0o755)
    said = look_at(machine, "/srv/theirs")
    assert said["unaccounted"] == ["/srv/theirs"]


def test_what_a_setup_made_or_changed_itself_is_accounted_for(machine: Machine) -> None:
    (machine.work / "old").write_text("old\n")
    script = """
        cd /srv
        mkdir build; echo a > build/made; cat build/made >&2; mv build built; cat built/made >&2
        mkdir gone; echo b > gone/made; cat gone/made >&2; rm -r gone
        cat old >&2; echo more >> old; cat old >&2
    """
    assert look_at(machine, script)["unaccounted"] == []


def test_a_file_of_another_program_is_not_accounted_for_unless_it_is_declared(machine: Machine) -> None:
    (machine.work / "data").mkdir()
    (machine.work / "data" / "choice").write_text("2.0")
    script = "cat /srv/data/choice >&2"
    assert look_at(machine, script)["unaccounted"] == ["/srv/data/choice"]
    assert look_at(machine, script, accounted=["/srv/data"])["unaccounted"] == []
    assert look_at(machine, script, accounted=["/srv/data/choice"])["unaccounted"] == []


def test_files_written_past_the_capture_that_stay_are_reported(machine: Machine) -> None:
    script = (
        "mkdir /var/tmp/data; echo x > /var/tmp/data/stays; echo y > /var/tmp/goes; rm /var/tmp/goes; echo z > /srv/z"
    )
    said = look_at(machine, script)
    assert said["writes"] == ["/var/tmp/data/stays"]


def test_what_is_written_to_our_own_folders_is_not_reported(machine: Machine) -> None:
    script = "mkdir /var/tmp/spool; echo x > /var/tmp/spool/events; echo y > /var/tmp/spooled"
    assert look_at(machine, script, own=["/var/tmp/spool"])["writes"] == ["/var/tmp/spooled"]


@pytest.mark.parametrize("env", [{"UV_CACHE_DIR": "/srv/.cache/uv"}, {"HOME": "/srv"}])
def test_a_cache_that_a_link_leads_to_is_the_machine_s_own(machine: Machine, env: dict[str, str]) -> None:
    folder = machine.work / "cache" / "uv"
    folder.mkdir(parents=True)
    (folder / "old").write_text("old")
    (machine.work / ".cache").symlink_to("/srv/cache")
    said = look_at(machine, "cat /srv/.cache/uv/old >&2; echo new > /srv/.cache/uv/new", env=env)
    assert (said["code"], said["unaccounted"], said["writes"], said["unsafe"]) == (0, [], [], [])
    assert (folder / "new").exists()


def test_a_scratch_folder_that_is_a_link_keeps_its_name_and_its_rules(machine: Machine) -> None:
    (machine.work / "scratch" / "project").mkdir(parents=True)
    (machine.work / "scratch" / "project" / "pins").write_text("1")
    script = """
        cd /var/tmp; echo x > uv-1f.lock; cat uv-1f.lock >&2; mkdir venv; echo x > venv/pyvenv.cfg
        cd project; cat pins >&2; echo x > made
    """
    prepare = "mount -t tmpfs none /var; ln -s /srv/scratch /var/tmp"
    said = look_at(machine, script, prepare=prepare, env={"VIRTUAL_ENV": "/var/tmp/project"})
    assert said["writes"] == ["/var/tmp/uv-1f.lock", "/var/tmp/venv/pyvenv.cfg"]
    assert said["unsafe"] == ["it installed into /var/tmp/venv, which is not kept: use another folder"]
    assert [path for path in said["unaccounted"] if "scratch" in path] == ["/srv/scratch/project/pins"]
    assert not (machine.work / "scratch" / "project" / "made").exists()


def test_what_is_written_on_a_mount_that_cannot_be_captured_is_reported_and_no_input(machine: Machine) -> None:
    said = look_at(machine, "echo x > /mnt/x; cat /mnt/x >&2", prepare="mount -t ramfs none /mnt")
    assert (said["writes"], said["unaccounted"]) == (["/mnt/x"], [])
    assert said["unsafe"] == ["it wrote /mnt/x, which is not captured"]


def test_thousands_of_files_are_all_seen(machine: Machine) -> None:
    (machine.work / "many").mkdir()
    for number in range(5_000):
        (machine.work / "many" / str(number)).touch()
    said = look_at(machine, "for round in 1 2; do find /srv/many -type f -exec cat {} +; done >&2")
    assert said["complete"]
    assert len([path for path in said["reads"] if path.startswith("/srv/many/")]) == 5_000


def test_a_setup_without_mounts_of_its_own_is_unobserved(tmp_path: Path) -> None:
    watch = Watch.begin(["/"], enter=lambda: None, log=tmp_path / "log")
    assert watch.end() == watch.end() == not_watched("the setup has no mounts of its own")


def test_reads_of_a_user_without_rights_are_unobserved(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    code = (
        "from pathlib import Path; from bootseer.launch.environment.watch import Watch\n"
        "from bootseer.mounts import user_namespace\n"
        "print(Watch.begin(['/'], enter=user_namespace.enter, log=Path('/dev/null')).end())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=as_plain_user(tmp_path, fuse=False),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.stdout == f"{not_watched('watch files: Operation not permitted')}\n", ended.stderr


def test_a_watch_that_dies_makes_the_answer_incomplete_and_nothing_else(machine: Machine) -> None:
    said = look_at(machine, "cat /etc/passwd >&2", kill_the_watch=True)
    assert (said["code"], said["complete"], said["reads"]) == (0, False, [])
    assert "has died" in said["why"]


def test_a_watch_that_cannot_enter_says_so(tmp_path: Path) -> None:
    def enter() -> None:
        raise AccessError("no way in")

    watch = Watch.begin(["/"], enter=enter, log=tmp_path / "log")
    assert watch.background.wait(0.0)
    assert watch.end() == not_watched("no way in")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel: a package with a script and a data file."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/__init__.py", "def main(): print('tiny')\n")
        wheel.writestr("tiny/data.txt", "data")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/entry_points.txt", "[console_scripts]\ntiny = tiny:main\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return folder


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_ordinary_installation_leaves_nothing_unaccounted_and_nothing_behind(
    machine: Machine, wheels: Path, installer: str
) -> None:
    (machine.work / "requirements.txt").write_text("tiny==1.0\n")
    (machine.work / "wheels").symlink_to(wheels)
    options = f"--no-index --find-links {wheels} -r requirements.txt"
    if installer == "uv":
        if shutil.which("uv") is None:
            pytest.skip("uv is not on PATH")
        script = f"uv venv -q -p {sys.executable} /opt/env; uv pip install -q -p /opt/env/bin/python {options}"
    else:
        pip = f"{sys.executable} -m pip --python /opt/env/bin/python"
        script = f"{sys.executable} -m venv --without-pip /opt/env; {pip} install -q {options}"
    said = look_at(machine, f"cd /srv; {script}; /opt/env/bin/tiny >&2", accounted=["/srv/requirements.txt"])
    assert said["code"] == 0, said["error"]
    assert (said["complete"], said["unaccounted"], said["unsafe"]) == (True, [], [])
