"""With `bootseer run --restarts --warm`, a restarted launcher is a copy of the warm parent of the dead one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.artifact.workload import workload_key
from bootseer.hook import programs
from bootseer.launch.process_snapshot import FETCHED
from bootseer.trace.spool_tail import SpoolTail
from conftest_launch import BOOTSEER
from hook.test_warm import FACTS
from waiting import processes

LIMIT_S = 300
LAUNCH = (
    "import os, subprocess, sys\nimported = 'colorsys' in sys.modules\n"
    + FACTS
    + """
env = {**os.environ, "LAUNCHER_IS": str(os.getpid()), "OMP_NUM_THREADS": "3"}
child = subprocess.run([sys.executable, "child.py"], env=env, capture_output=True, text=True, check=True).stdout.split()
print(json.dumps([int(os.environ["BOOTSEER_RESTART"]), imported, *child]), flush=True)
if sys.argv[1] == "wait" and os.environ["BOOTSEER_RESTART"] == "1":
    signal.pause()
if sys.argv[1] == "orphan":  # the warm parent is killed before this process is
    os.kill(int(child[2]), signal.SIGKILL)
if os.environ["BOOTSEER_RESTART"] != "2":
    os.kill(os.getpid(), signal.SIGKILL)
"""
)
CHILD = """
import os, sys
imported = "colorsys" in sys.modules
children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
others = [pid for pid in children if int(pid) != os.getpid()]
print(imported, os.environ["LAUNCHER_IS"] == str(os.getppid()), *others or [0])
"""


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "child.py").write_text(CHILD)
        self.launcher = folder / "launch.py"
        self.launcher.write_text(LAUNCH)
        main = str(folder / "child.py")
        told = programs.import_lines(os.path.realpath(main), str(folder))[0]
        known = {"program": "child.py", "main": main, "telling": told, "flags": [], "modules": ["colorsys"]}
        known |= {"native": {"OMP_NUM_THREADS": "3"}, "changed": [], "launcher": "launch.py"}
        self.record = json.dumps({"schema": programs.SCHEMA, "launchers": {"launch.py": known}})
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "PYTHON"))}
        self.env = {**clean, "BOOTSEER_CACHE": str(folder / "cache"), "LAUNCHER": "0", "GROUP": "0"}

    @contextlib.contextmanager
    def start(self, mode: str, way: str) -> Iterator[subprocess.Popen[str]]:
        """The run, which is killed when the test leaves it, so that a failure in between does not wait for its end."""
        command = [sys.executable, str(self.launcher), way]
        path = self.folder / "cache" / "warm" / f"{workload_key(command, setup=chr(0))}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.parent.chmod(0o700)
        path.write_text(self.record)
        words = ["--restarts", "2", "--warm", mode, "--spool", str(self.folder / mode), "--job", "x"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*BOOTSEER, "run", *words, "--", *command], env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=pipe, stderr=pipe, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def run(self, mode: str, way: str = "again") -> list[Any]:
        """The lines printed by the starts: for each, its facts, then its restart number, imports and child's output."""
        with self.start(mode, way) as process:
            out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def told(self) -> list[tuple[int, str]]:
        """Of each `warm_start` event its restart, and the reason if it was not warm."""
        (folder,) = (self.folder / "on").glob("x/*")
        found = [event for event in SpoolTail(str(folder)).poll(last=True) if event.stage == "warm_start"]
        found.sort(key=lambda event: event.mono_ns)
        return [(event.restart, str(event.attrs.get("why_not", ""))) for event in found]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def left(folder: Path) -> list[str]:
    """Running warm parents of this job."""
    texts = [words.decode(errors="replace") for _, words in processes()]
    return [text for text in texts if "warm_parent.py" in text and str(folder) in text]


def until_none_is_left(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while found := left(folder):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.slow
def test_a_restarted_launcher_finds_what_it_finds_after_exec_and_its_programs_stay_its_children(job: Job) -> None:
    by_exec, warm = job.run("off"), job.run("on")
    assert [line[:4] for line in by_exec[1::2]] == [
        [0, False, "False", "True"],
        [1, False, "False", "True"],
        [2, False, "False", "True"],
    ]
    assert [line[:4] for line in warm[1::2]] == [
        [0, False, "True", "True"],
        [1, True, "True", "True"],
        [2, True, "True", "True"],
    ]
    assert job.told() == [(0, ""), (1, ""), (1, ""), (2, ""), (2, "")]
    for expected, found in zip(by_exec[::2], warm[::2], strict=True):
        for facts in (expected, found):
            for name in ("BOOTSEER_WARM", "BOOTSEER_TRACE", "BOOTSEER_RUN_ID", "TRACEPARENT"):
                facts["env"].pop(name, None)
            facts["fds"] = [number for number, handed_on in facts["fds"].items() if handed_on]  # without the parent's
            facts["environ"] = [word for word in facts["environ"] if word.partition("=")[0] in facts["env"]]
        assert found == expected
    until_none_is_left(job.folder)


@pytest.mark.slow
def test_without_a_warm_parent_that_lives_the_launcher_starts_by_exec(job: Job) -> None:
    lines = job.run("on", "orphan")
    assert [line[:3] for line in lines[1::2]] == [[number, False, "True"] for number in range(3)]
    until_none_is_left(job.folder)


@pytest.mark.slow
def test_a_launcher_that_is_an_archive_is_restarted_by_exec(job: Job) -> None:
    job.launcher = job.folder / "launch.pyz"
    job.record = job.record.replace("launch.py", "launch.pyz")
    with zipfile.ZipFile(job.launcher, "w") as archive:
        archive.writestr("__main__.py", LAUNCH)
    lines = job.run("on")
    assert [line[:3] for line in lines[1::2]] == [[number, False, "True"] for number in range(3)]
    refusals = [(restart, why) for restart, why in job.told() if why]
    assert refusals == [(n, "OSError: launch.pyz: no Python source, but an archive or compiled") for n in (1, 2)]


def test_a_run_killed_in_a_warm_restart_leaves_nothing(job: Job) -> None:
    with job.start("on", "wait") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert json.loads(lines[3])[:2] == [1, True]
        assert left(job.folder)
        process.kill()
        process.communicate(timeout=LIMIT_S)
    until_none_is_left(job.folder)


def test_a_signal_reaches_a_launcher_that_was_started_warm(job: Job) -> None:
    with job.start("on", "wait") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert json.loads(lines[3])[:2] == [1, True]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.count("starting it again") == 1
    until_none_is_left(job.folder)


DAMAGED = """
import marshal, os, signal, socket, time
from bootseer.hook import programs
from bootseer.launch.warm_restart import WarmRestart

class Tracer:
    def emit(self, *_, attrs, **more):
        print(attrs["why_not"])

restart = WarmRestart(Tracer(), "run")
if os.fork() == 0:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(programs.restart_address("run", os.getppid()))
    _, (answer, *_), *_ = socket.recv_fds(end, 64, 253)
    os.write(answer, marshal.dumps(3))
    signal.pause()
while not restart.pids():
    time.sleep(0.01)
print(restart.spawn(dict(os.environ), {}, True))
"""


LAUNCHERS = """
import os
from bootseer.hook import warm_parent
from bootseer.launch.warm_restart import WarmRestart

def connects(depth):
    pid = os.fork()
    if pid == 0:
        found = connects(depth - 1) if depth else warm_parent._run(os.getppid()) is not None
        os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

os.environ["BOOTSEER_RUN_ID"] = "run"
restart = WarmRestart(None, "run")
print(connects(1), len(restart.pids()))
print(connects(2), len(restart.pids()))
"""


def test_only_warm_parents_of_the_commands_own_launcher_connect() -> None:
    """Otherwise, the 66th of a script that starts many launchers would wait for ever, and a restart could be cold."""
    words = [sys.executable, "-c", LAUNCHERS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "1 1\n0 1\n"


def test_runs_with_the_same_process_id_do_not_disturb_each_other() -> None:
    """Pods in the host's network share its abstract sockets; in each of them `bootseer run` is process 1."""
    script = (
        "from bootseer.launch.warm_restart import WarmRestart\n"
        "runs = [WarmRestart(None, name) for name in 'ab']\n"
        "print(*(run._socket is not None for run in runs))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "True True\n"


def test_a_run_makes_no_process_snapshot_if_one_came_too_late_for_its_start(tmp_path: Path) -> None:
    """Without a record none could be made anyway: the run says so if it tries."""
    script = (
        "import sys\n"
        "from bootseer.launch.warm_restart import WarmRestart\n"
        "WarmRestart(None, 'run').record(sys.argv[1], ['python'], {}, None)"
    )
    said = []
    for name in ("made", FETCHED):
        (tmp_path / name / name).mkdir(parents=True)
        words = [sys.executable, "-c", script, str(tmp_path / name)]
        said.append(subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True).stderr)
    assert ["no process snapshot was made: " in text for text in said] == [True, False]


def test_a_warm_parent_that_answers_with_nonsense_does_not_end_the_run() -> None:
    words = [sys.executable, "-c", DAMAGED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.startswith("TypeError: ")
    assert done.stdout.endswith("\nNone\n")
