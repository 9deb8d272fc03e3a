"""`bootseer run --process-snapshot` with the real CRIU: what is restored is the same as after exec, or exec is used."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard

from bootseer.trace.spool_tail import SpoolTail
from conftest_launch import BOOTSEER
from hook.test_warm import FACTS
from waiting import processes, until

pytestmark = pytest.mark.slow

LIMIT_S = 300
ZONE = Path("/usr/share/zoneinfo/Asia/Tokyo")
LAUNCH = (
    "import os, subprocess, sys\nwas_warm = 'colorsys' in sys.modules\n"
    + FACTS
    + """
print(json.dumps([was_warm, os.getpid(), os.getppid()]), flush=True)
child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
subprocess.run([sys.executable, child, *sys.argv[1:]], check=True, stdin=subprocess.DEVNULL)
todo, once = sys.argv[1].split("="), os.environ.get("BOOTSEER_RESTART") == "0"
if todo[0] == "exit" or todo[0] == "die" and once:
    sys.exit(int(todo[1]))
if todo[0] == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"told\\n"))
    print("waits", flush=True)
    while True:
        signal.pause()
"""
)
CHILD = (
    "import sys\nwas_warm = 'colorsys' in sys.modules\nimport safetensors, colorsys, tell\n"
    + FACTS
    + "print(json.dumps([was_warm, os.getpid(), os.getppid(), tell.told]), flush=True)\n"
)
TELL = "told = None\n"


class Ran(NamedTuple):
    code: int
    lines: list[Any]
    """Launcher's facts and state, then the rank's."""
    err: str
    refusals: list[str]
    """Of the warm starts, "" for each that was not refused."""

    @property
    def warm(self) -> list[bool]:
        """Whether launcher and rank were forked from a process with the imports."""
        return [line[0] for line in self.lines if isinstance(line, list)]


class Job:
    def __init__(self, folder: Path, criu: str) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self._runs = 0
        (folder / "lib").mkdir()
        for name, text in (("launch", LAUNCH), ("child", CHILD), ("lib/safetensors", ""), ("lib/tell", TELL)):
            self.write(f"{name}.py", text)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "PYTHON"))}
        self.env = {**clean, "BOOTSEER_CACHE": str(self.cache), "BOOTSEER_CRIU": criu, "LAUNCHER": "0", "GROUP": "0"}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder / "lib")]))
        self.command = [sys.executable, str(folder / "launch.py")]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(
        self, *args: str, options: Sequence[str] = ("--process-snapshot",), before: Sequence[str] = (), **more: Any
    ) -> subprocess.Popen[str]:
        """Start a run; `before`: words before it."""
        self._runs += 1
        words = [*before, *BOOTSEER, "run", "-q", *options, "--spool", str(self.folder / f"spool-{self._runs}")]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            [*words, "--job", "x", "--", *self.command, *(args or ("exit=0",))],
            text=True, **{"env": self.env, "cwd": self.folder, **pipes, **more},
        )  # fmt: skip

    def run(self, *args: str, told: str = "", **more: Any) -> Ran:
        with self.start(*args, **more) as process:
            out, err = process.communicate(told, timeout=LIMIT_S)
        return Ran(process.returncode, self.parsed(out), err, self.refusals())

    @staticmethod
    def parsed(out: str) -> list[Any]:
        return [json.loads(line) if line[0] in "[{" else line for line in out.splitlines()]

    def refusals(self) -> list[str]:
        found = []
        for folder in self.folder.glob(f"spool-{self._runs}/x/*"):
            found += [event for event in SpoolTail(str(folder)).poll(last=True) if event.stage == "warm_start"]
        found.sort(key=lambda event: event.mono_ns)
        return [str(event.attrs.get("why_not", "")) for event in found]

    @property
    def snapshots(self) -> list[Path]:
        return sorted((self.cache / "processes").glob("*"))

    def image(self) -> bytes:
        """The snapshot's content."""
        (path,) = self.snapshots
        data = path.read_bytes()
        return zstandard.ZstdDecompressor().decompressobj().decompress(data[data.index(b"\n") + 1 :])

    def pid(self) -> int:
        """The process id in the snapshot."""
        (path,) = self.snapshots
        line = json.loads(path.read_bytes().partition(b"\n")[0])
        (name,) = (name for name, _ in line["files"] if name.startswith("core-"))
        return int(name[5:-4])

    def left(self) -> list[str]:
        """Running processes, and folders, of runs that have ended."""
        found = [words.decode(errors="replace") for _, words in processes()]
        return [words for words in found if str(self.folder) in words] + [
            str(path) for path in (self.cache / "containers").glob("*")
        ]


@pytest.fixture
def job(tmp_path: Path, criu: str) -> Iterator[Job]:
    job = Job(tmp_path, criu)
    yield job
    until(lambda: not job.left(), "the end of all processes")


@pytest.fixture
def made(job: Job) -> Job:
    """A job with a process snapshot."""
    ran = job.run()
    assert (ran.code, ran.err, ran.warm, len(job.snapshots)) == (0, "", [False, False], 1), ran
    return job


def become_other() -> None:
    """Before the run: settings that are other ones than at the dump."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))
    os.nice(2)
    os.sched_setaffinity(0, [*os.sched_getaffinity(0)])
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@pytest.mark.root
def test_launcher_and_ranks_find_what_they_find_after_exec(job: Job) -> None:
    (job.folder / "other").mkdir()
    job.write("lib/tell.py", "import sys\nprint('imports')\nprint('wrongs', file=sys.stderr)\n" + TELL)
    job.env["REMOVED"] = "1"
    first = job.run()
    assert (first.code, first.warm, len(job.snapshots)) == (0, [False, False], 1), first
    del job.env["REMOVED"]
    job.env["ADDED"] = "é"
    other: Any = {"umask": 0o27, "preexec_fn": become_other, "cwd": job.folder / "other", "told": "told\n"}
    by_exec = job.run("exit=7", "--lr", "é", options=(), **other)
    restored = job.run("exit=7", "--lr", "é", **other)
    assert by_exec.refusals == []
    assert restored.refusals == ["", ""]
    assert (by_exec.warm, restored.warm) == ([False, False], [True, True])
    assert (by_exec.code, restored.code, restored.err) == (7, 7, by_exec.err)
    own = ("BOOTSEER_", "TRACEPARENT")
    for ran in (by_exec, restored):
        launcher, rank = (line for line in ran.lines if isinstance(line, list))
        assert rank[2] == launcher[1]
        for facts in (line for line in ran.lines if isinstance(line, dict)):
            facts["env"] = {name: value for name, value in facts["env"].items() if not name.startswith(own)}
            facts["environ"] = [word for word in facts["environ"] if word.partition("=")[0] in facts["env"]]
            facts["fds"] = [number for number, handed_on in facts["fds"].items() if handed_on]
    found, expected = ([line for line in ran.lines if not isinstance(line, list)] for ran in (restored, by_exec))
    assert found == expected


def test_signals_reach_a_restored_launcher_and_its_end_is_the_runs(made: Job) -> None:
    before = made.snapshots[0].stat().st_mtime_ns
    with made.start("wait=1", stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGUSR1)
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=LIMIT_S)
    assert (lines[-2:], rest, err, process.returncode) == (["waits\n", "told\n"], "", "", 128 + signal.SIGTERM)
    assert made.refusals() == ["", ""]
    assert made.snapshots[0].stat().st_mtime_ns >= before


@pytest.mark.root
def test_a_run_whose_session_is_outside_of_its_pid_namespace(job: Job) -> None:
    before = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    ran = [job.run(before=before) for _ in range(2)]
    assert [(one.code, one.err, one.warm) for one in ran] == [(0, "", [False] * 2), (0, "", [True] * 2)], ran
    assert ran[1].refusals == ["", ""]
    by_exec, restored = ([line["leads"] for line in one.lines if isinstance(line, dict)] for one in ran)
    assert restored == by_exec


WITH_PID = """import os, subprocess, sys
from bootseer.hook.warm_child import Cloner
if os.fork() == 0:
    if Cloner().clone(int(sys.argv[1])) == 0:
        os.execvp(sys.argv[2], sys.argv[2:])
    os._exit(0)
os.wait()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(int(sys.argv[1]), 0)[1]))
"""


@pytest.mark.root
def test_a_run_with_the_process_id_of_the_one_that_made_the_snapshot(job: Job) -> None:
    """As in pods: it is process 1, and the number of a namespace is used again."""
    with subprocess.Popen(["true"]) as free:
        before = (sys.executable, "-c", WITH_PID, str(free.pid))
    ran = [job.run(before=before) for _ in range(2)]
    assert [(one.code, one.err, one.warm) for one in ran] == [(0, "", [False] * 2), (0, "", [True] * 2)], ran


def become_batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_STACK, (32 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def test_with_another_scheduling_policy_or_stack_size_the_snapshot_is_made_anew(made: Job) -> None:
    (ran, again) = (made.run(preexec_fn=become_batch) for _ in range(2))
    assert ran.warm[0] is False
    assert ran.refusals[0].endswith("other rights or limits than this start: scheduling policy, stack size")
    assert (again.warm, again.err) == ([True, True], "")


def test_the_restart_of_a_restored_launcher_is_warm_too(made: Job) -> None:
    ran = made.run("die=3", options=("--process-snapshot", "--restarts", "1"))
    assert (ran.code, ran.warm, ran.refusals) == (0, [True] * 4, [""] * 4)
    assert ran.err.count("starting it again") == 1
    numbers = [line["env"]["BOOTSEER_RESTART"] for line in ran.lines if isinstance(line, dict)]
    assert numbers == ["0", "0", "1", "1"]


def test_a_script_runs_also_when_it_starts_the_same_launcher(job: Job) -> None:
    """What it does first would not happen if its launcher were restored."""
    script = job.write("job.sh", f'#!/bin/sh\necho "[]"\nexec {" ".join(job.command)} "$@" 2>"$0.log"\n')
    script.chmod(0o755)
    job.command = [str(script)]
    for _ in range(2):
        ran = job.run()
        assert (ran.code, ran.lines[0], job.snapshots) == (0, [], []), ran
        assert "no process snapshot was made: the command is no Python program" in ran.err


def test_an_executable_python_file_is_restored_by_its_name_on_the_path(job: Job) -> None:
    launcher = job.write("torchrunner", f"#!{sys.executable}\n{LAUNCH}")
    launcher.chmod(0o755)
    job.command = ["torchrunner"]
    job.env["PATH"] = f"{job.folder}:{job.env['PATH']}"
    first, restored = job.run(), job.run("exit=0", "more")
    assert (first.warm, restored.warm, restored.refusals) == ([False] * 2, [True] * 2, ["", ""]), first
    assert restored.lines[0]["argv"] == [str(launcher), "exit=0", "more"]
    assert restored.lines[0]["comm"] == "torchrunner\n"
    launcher.write_text(f"#!{sys.executable}\n\n{LAUNCH}")
    assert job.run().refusals[:1] == ["no process snapshot: torchrunner is another program, or has changed"]
    assert job.run().warm == [True] * 2


_LEFT_TO_RANKS = (
    *("socket.gethostname()", "platform.node()", "os.uname().nodename"),
    *("random.random()", "os.urandom(8).hex()", "uuid.uuid4().hex"),
)


def test_a_snapshot_that_too_many_modules_prevent_is_not_tried_at_the_end_of_each_run(job: Job) -> None:
    modules = [f"tell{number}" for number in range(9)]
    for name in modules:
        job.write(f"lib/{name}.py", "import socket\nsocket.gethostname()\n")
    job.write("child.py", f"import safetensors, {', '.join(modules)}\n")
    errors = [job.run().err for _ in range(2)]
    assert errors == ["bootseer: no process snapshot was made: tell7, which tell7 imports, reads the node's name\n", ""]


@pytest.mark.root
def test_modules_that_read_the_nodes_name_or_draw_random_numbers_are_left_to_the_ranks(job: Job) -> None:
    """Restored in another UTS namespace, with another name."""
    for number, text in enumerate(_LEFT_TO_RANKS):
        job.write(f"lib/tell{number}.py", f"import os, platform, random, socket, sys, uuid\ntold = {text}\n")
    job.write("lib/tell.py", "import os, sys\nmachine = os.uname().machine, sys.platform\n")
    child = "".join(f"import tell{number}\nprint(tell{number}.told)\n" for number in range(len(_LEFT_TO_RANKS)))
    job.write("launch.py", "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)\n")
    loaded = "print('tell' in sys.modules, any(f'tell{n}' in sys.modules for n in range(9)))\n"
    job.write("child.py", f"import sys\n{loaded}import safetensors, tell\n{child}")
    first = job.run()
    assert (first.err, len(job.snapshots), first.lines[0]) == ("", 1, "False False"), first
    script = 'echo other-node >/proc/sys/kernel/hostname; exec "$@"'
    restored = job.run(before=("unshare", "--uts", "sh", "-c", script, "sh"))
    assert restored.refusals == ["", ""]
    assert restored.lines[:4] == ["True False", *["other-node"] * 3]
    assert not set(restored.lines[4:]) & set(first.lines[4:])


def test_secrets_are_not_in_a_snapshot(job: Job) -> None:
    secrets = {"THEIR_API_KEY": "s3cret-one", "DB": "postgres://me:s3cret-two@db/x", "MYSQL_PWD": "s3cret-three"}
    job.env |= {**secrets, "TOKENIZERS_PARALLELISM": "false"}
    job.write("lib/tell.py", "import os\ntold = os.environ['TOKENIZERS_PARALLELISM']\n")
    first = job.run()
    assert (first.err, len(job.snapshots)) == ("", 1), first
    assert b"s3cret-" not in job.image()
    for name, value in secrets.items():
        job.write("lib/tell.py", f"import os\ntold = os.environ['{name}']\n")
        reason = f"no process snapshot was made: imports read {name}, which a memory image must not contain"
        assert reason in (ran := job.run()).err, ran
        assert ran.lines[-1][3] == value
        assert job.run().err == ""  # it is not tried at the end of each run
        (refused,) = (job.cache / "warm").glob("*.refused")
        os.utime(refused, (1, 1))
    job.write("lib/secret", "s3cret-one")
    job.write("lib/tell.py", "told = open(__file__.replace('tell.py', 'secret')).read()\n")
    assert "the process snapshot was not kept: it contains the value of THEIR_API_KEY" in job.run().err
    assert job.run().err == ""
    assert b"s3cret-" not in job.image()


def test_what_has_changed_since_the_dump_is_not_restored_and_the_snapshot_made_anew(made: Job) -> None:
    def refused(reason: str, **more: Any) -> None:
        ran = made.run(**more)
        assert (ran.code, ran.warm[0]) == (0, False), ran
        assert reason in ran.refusals[0], ran.refusals
        again = made.run(**more)
        assert (again.code, again.warm, again.refusals) == (0, [True, True], ["", ""]), again

    tell = made.write("lib/tell.py", "import os\ntold = os.environ.get('SIZE')\n")
    refused(f"{tell} has changed since the imports")
    os.utime(tell, (1, 1))
    assert made.run().refusals == ["", ""]  # what has just been written is compared by content
    tell.write_text(tell.read_text() + "\n")
    os.utime(tell, (1, 1))
    refused(f"{tell} has changed since the imports")
    os.utime(tell, (2, 2))
    refused(f"{tell} has changed since the imports")
    made.env["SIZE"] = "2"
    refused("the variable SIZE has changed since the imports (tell reads it)")
    tell.write_text("import os\ntold = str(os.environb.get(b'BYTES'))\nwhere = os.path.abspath('x')\n")
    refused(f"{tell} has changed since the imports")
    made.env["BYTES"] = "2"
    refused("the variable BYTES has changed since the imports (tell reads it)")
    (made.folder / "other").mkdir()
    refused("tell reads the working folder, which is another one than during the imports", cwd=made.folder / "other")
    made.env["OMP_NUM_THREADS"] = "3"
    refused("the variable OMP_NUM_THREADS has changed since the imports")
    made.env["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
    refused("the variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE has changed since the imports")
    made.env["PYTHONHASHSEED"] = "3"
    refused("the variable PYTHONHASHSEED has changed since the imports")
    made.env["PYTHONPATH"] += ":"
    refused("the variable PYTHONPATH has changed since the imports")
    tell.write_text("told = None\n")
    refused(f"{tell} has changed since the imports")
    refused("PYTHONPATH has a relative folder", cwd=made.folder / "other")


def test_after_a_change_of_the_ranks_imports_the_snapshot_is_made_anew(made: Job) -> None:
    child = made.folder / "child.py"
    child.write_text(f"import wave\n{CHILD}")
    changed = made.run()
    assert changed.warm == [True, False]
    assert changed.refusals[1].startswith("child.py imports other modules")
    again = made.run()
    assert (again.warm, again.refusals) == ([True, True], ["", ""])
    before = made.snapshots[0].read_bytes()
    assert made.run().warm == [True, True]
    assert made.snapshots[0].read_bytes() == before


def test_a_launcher_with_a_module_of_the_same_name_as_an_imported_one_is_not_restored(made: Job) -> None:
    mine = made.write("colorsys.py", "")
    ran = made.run()
    assert (ran.code, ran.warm) == (0, [False, False])
    assert ran.refusals[0] == f"{mine.parent} has a module colorsys of its own, which the imports found elsewhere"


@pytest.mark.root
@pytest.mark.skipif(not ZONE.exists(), reason="needs the time zone database")
def test_a_restored_process_has_the_nodes_time_zone(job: Job) -> None:
    job.write("child.py", CHILD + "import time\nprint(time.tzname[0], time.localtime(0).tm_hour)\n")
    job.env.pop("TZ", None)
    assert job.run().code == 0
    script = f'mount --bind {ZONE} /etc/localtime && exec "$@"'
    ran = job.run(before=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert (ran.lines[-1], ran.refusals) == ("JST 9", ["", ""]), ran
