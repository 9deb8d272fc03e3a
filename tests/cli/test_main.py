"""The end of the program: with its exit code and all output, even while calls of libraries are pending."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bootseer
from bootseer.cli.verb_parts import stop_event
from plain_user import alone, home_of

_LEFT_BEHIND = """
import atexit, sys, threading
from bootseer.cli import main

# Calls of hdfs-native that return after this abort the process.
atexit.register(sys.stderr.write, "torn down")
if "left" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.argv[1:] = ["ckpt", "list", "."] if "well" in sys.argv else ["ckpt", "list", "nowhere"]
main.main()
"""


def ended(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", _LEFT_BEHIND, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_calls_that_were_left_behind_do_not_see_the_interpreter_end(tmp_path: Path) -> None:
    assert ended(tmp_path, "well")[2] == "torn down"
    code, said, errors = ended(tmp_path, "left", "well")
    assert (code, errors) == (0, "")
    assert said.startswith("0 checkpoints")
    code, said, errors = ended(tmp_path, "left")
    assert (code, said) == (1, "")
    assert errors.startswith("bootseer: ")
    assert "torn down" not in errors


def test_a_second_ctrl_c_ends_it_without_a_traceback() -> None:
    code = (
        "import signal; from bootseer.cli import main; again = lambda *_: signal.raise_signal(signal.SIGINT);"
        "main._any_verb = main._say = again; main.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, b"")


def test_nor_if_a_verb_ends_early_with_an_exit_code(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-c", _LEFT_BEHIND, "left", "well"],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")


def test_options_of_a_verb_with_a_command_are_completed_before_the_command_is_there() -> None:
    typed = {"COMP_WORDS": "bootseer run --cap", "COMP_CWORD": "2", "_BOOTSEER_COMPLETE": "bash_complete"}
    ran = subprocess.run(
        [Path(sys.executable).parent / "bootseer"],
        env={**os.environ, **typed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["plain,--cap-add", "plain,--cap-drop"], ran.stderr


@pytest.mark.parametrize(
    ("typed", "verb"),
    [("bootseer ckp", "ckpt"), ("bootseer env ca", "capture"), ("bootseer image hotset ex", "export")],
)
def test_completing_a_verb_imports_none(typed: str, verb: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_BOOTSEER_COMPLETE": "bash_complete"}
    command = [sys.executable, "-P", "-X", "importtime", "-m", "bootseer"]
    ran = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [f"plain,{verb}"], ran.stderr
    imported = set(re.findall(r"bootseer\.cli\.(\w+)", ran.stderr))
    assert imported <= {"main", "verbs", "verb_parts", "options", "output"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    "typed", ["bootseer report tr", "bootseer run -r tr", "bootseer run -- python tr", "bootseer run -- python --co"]
)
def test_files_are_completed_for_values_and_in_the_command_of_the_user(typed: str, shell: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_BOOTSEER_COMPLETE": f"{shell}_complete"}
    command = [sys.executable, "-P", "-m", "bootseer"]
    ran = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert re.split(r"[,\s]", ran.stdout)[:2] == ["file", typed.rsplit(maxsplit=1)[-1]], ran.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("bootseer ckp", "ckpt\tCopy, mount and check checkpoints that are striped over storage nodes."),
        ("bootseer report ~/tr", "~/train, 1.log"),
    ],
)
def test_fish_shows_whole_descriptions_and_files_at_home(tmp_path: Path, typed: str, found: str) -> None:
    (tmp_path / "train, 1.log").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = f'_BOOTSEER_COMPLETE=fish_source bootseer | source; complete -C "{typed}"'
    env = {**os.environ, "HOME": str(tmp_path), "PATH": path}
    ran = subprocess.run(["fish", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout == f"{found}\n", ran.stderr


def test_a_signal_stops_a_service_whose_main_thread_holds_the_lock_of_the_event() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = stop_event()
        with stop._cond:  # like inside `wait`
            signal.raise_signal(signal.SIGTERM)
        assert stop.wait(60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_suggestion_imports_only_groups() -> None:
    command = [sys.executable, "-P", "-X", "importtime", "-m", "bootseer", "capture"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no verb 'capture': did you mean `bootseer env capture`?" in ran.stderr
    assert "bootseer.cli.env" not in ran.stderr


def test_a_list_of_mounts_does_not_import_what_mounts(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-X", "importtime", "-m", "bootseer", "image", "list"]
    env = {**os.environ, "BOOTSEER_RUNTIME": str(tmp_path)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.stdout == "nothing is mounted\n"
    assert "bootseer.image" not in ran.stderr


def test_packages_for_the_job_do_not_take_the_place_of_ours(tmp_path: Path) -> None:
    """A PYTHONPATH for the job may have packages for another Python version, or old ones."""
    (tmp_path / "click.py").write_text("raise ImportError('of another Python')\n")
    command = [Path(sys.executable).parent / "bootseer", "--version"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    # A folder with BootSeer itself also has its dependencies.
    (tmp_path / "bootseer").symlink_to(Path(bootseer.__file__).parent)
    command = [sys.executable, "-P", "-m", "bootseer", "--version"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False)
    assert (ran.returncode, b"of another Python" in ran.stderr) == (1, True)


def test_a_path_that_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    far = tmp_path / ("x" * 300)
    ran = subprocess.run(
        [Path(sys.executable).parent / "bootseer", "image", "convert", f"dir:{far}", str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, f"bootseer: {far}: File name too long\n")


def test_a_locale_without_some_characters_breaks_neither_help_nor_json(tmp_path: Path) -> None:
    folder = tmp_path / "na\u00efve \u65e5"
    folder.mkdir()
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for words in (["mount", "--help"], ["list", str(folder)], ["list", "--json", str(folder)]):
        command = [Path(sys.executable).parent / "bootseer", "ckpt", *words]
        ran = subprocess.run(command, env=env, capture_output=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout.decode())["job"] == f"file://{folder}"


def test_errors_of_the_system_are_one_line(tmp_path: Path) -> None:
    program, where = Path(sys.executable).parent / "bootseer", "(where: BOOTSEER_LOG=debug)"
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([program, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, f"bootseer: No space left on device {where}\n")
    lost = "bootseer: the working folder was removed, change to another one: No such file or directory\n"
    gone = f"mkdir gone && cd gone && rmdir ../gone && {program} ckpt list ."
    ran = subprocess.run(["sh", "-c", gone], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, lost)
    ran = subprocess.run(["sh", "-c", f"{gone} >&-"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, lost)


@pytest.mark.root
def test_a_refused_thread_or_process_is_one_line_with_the_limits(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o711)
    home = home_of(tmp_path)
    for words in (["list", str(home)], ["mount", str(home / "job"), str(home / "there")]):
        ran = subprocess.run(
            [Path(sys.executable).parent / "bootseer", "ckpt", *words],
            env={**os.environ, "HOME": str(home)},
            preexec_fn=alone(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
        assert ran.stderr.endswith("; see the limits of processes and memory (ulimit -u, pids.max)\n")


def test_a_message_that_cannot_be_written_does_not_change_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([Path(sys.executable).parent / "bootseer", "run"], stderr=full, check=False)
    assert ran.returncode == 2
