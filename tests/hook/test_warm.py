"""Programs that a launcher starts from a warm parent are the same as after exec; in doubt, exec is used.

The launcher and its programs are real processes; their imports are small here, and torch in `test_warm_torch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import bootseer
from bootseer.hook import programs
from bootseer.trace.spool_tail import SpoolTail

pytestmark = pytest.mark.slow

HOOK = Path(bootseer.__file__).parent / "hook"
FACTS = """
import atexit, ctypes, decimal, json, os, random, resource, signal, sys, threading, uuid
def proc(name):
    with open(f"/proc/self/{name}") as file:
        return file.read()
def stream(one):
    raw = getattr(one.buffer, "raw", one.buffer)
    return [type(one.buffer).__name__, one.encoding, one.errors, one.line_buffering, one.write_through, one.name,
            one.mode, raw.name, raw.mode, one.fileno()]
fds = os.listdir("/proc/self/fd")
fds = {name: os.get_inheritable(int(name)) for name in fds if os.path.lexists(f"/proc/self/fd/{name}")}
status = dict(line.split(":", 1) for line in proc("status").splitlines())
main = sys.modules["__main__"]
facts = dict(
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, file=__file__, main=sorted(vars(main))[:9], name=__name__,
    package=__package__, cached=__cached__, loader=type(__loader__).__name__, env=dict(os.environ), cwd=os.getcwd(),
    environ=sorted(proc("environ").split("\\0")), cmdline=proc("cmdline"), comm=proc("comm"), fds=fds,
    limits=proc("limits"), nice=os.nice(0), affinity=sorted(os.sched_getaffinity(0)), oom=proc("oom_score_adj"),
    umask=status["Umask"], blocked=status["SigBlk"], ignored=status["SigIgn"], caught=status["SigCgt"],
    handlers=[str(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n != signal.SIGINT],
    interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    ours=os.getppid() == int(os.environ["LAUNCHER"]), leads=[os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    group=os.getpgid(0) == int(os.environ["GROUP"]), threads=[one.name for one in threading.enumerate()],
    native=threading.main_thread().native_id == os.getpid(), flags=str(sys.flags),
    streams=[stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
    coredump=[proc("coredump_filter"), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)], slack=proc("timerslack_ns"),
    stdin=sys.stdin.read(), tid=int(status["Pid"]) == threading.get_native_id(), executable=sys.executable,
)
print(json.dumps(facts))
"""
LAUNCH = """
import json, os, signal, subprocess, sys
os.environ.update(LAUNCHER=str(os.getpid()), GROUP=str(os.getpgid(0)))
BEFORE
for words, options in json.loads(sys.argv[1]):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **options)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""


class Launcher:
    """Runs `launch.py`, which starts programs, with a record of modules for its warm parent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.known: dict[str, Any] = {"flags": [], "modules": ["decimal", "json", "uuid"], "native": {}, "changed": []}
        self.program = "child.py"
        self.before = ""
        self.env: dict[str, str] = {}
        self.options: dict[str, Any] = {}

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def remember(self, main: str) -> None:
        """Write the record of an earlier start."""
        folder = str(self.folder) if self.program.startswith("-m") else str(Path(main).parent)
        told = programs.import_lines(os.path.realpath(main), folder)[0]
        known = {"program": self.program, "telling": told, "main": main, **self.known}
        record = {"schema": programs.SCHEMA, "launchers": {"launch.py": known}}
        (self.spool / programs.KNOWN).write_text(json.dumps(record))

    def start(self, *runs: tuple[Sequence[str], dict[str, Any]], warm: bool = True) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER_")}
        env = {**clean, "PYTHONPATH": f"{HOOK}/path", "BOOTSEER_TRACE": f"spool:{self.spool}", "BOOTSEER_JOB": "x"}
        env |= {"BOOTSEER_WARM": str(self.spool if warm else self.folder), **self.env}
        words = [sys.executable, self.write("launch.py", LAUNCH.replace("BEFORE", self.before)), json.dumps(runs)]
        return subprocess.Popen(
            words,
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **self.options,
        )

    def run(self, *runs: tuple[Sequence[str], dict[str, Any]], warm: bool = True) -> list[tuple[int, str, str]]:
        """Exit code and output of each program."""
        with self.start(*runs, warm=warm) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return [tuple(json.loads(line)) for line in out.splitlines()]

    def told(self) -> list[dict[str, Any]]:
        events = sorted(SpoolTail(str(self.spool)).poll(last=True), key=lambda event: event.wall_ns)  # of all pids
        return [dict(event.attrs) for event in events if event.stage == "warm_start"]

    def reasons(self) -> list[str]:
        return [str(attrs.get("why_not", "")) for attrs in self.told()]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


_WAYS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "plain": ([], ["child.py", "--lr", "0.1", "é"], {"input": "told\n"}),
    "unbuffered, own session": (["-u"], ["child.py"], {"input": "", "start_new_session": True, "umask": 0o27}),
    "folder, environment, group": ([], ["../child.py"], {"input": "", "cwd": "sub", "process_group": 0}),
    "module, more files": ([], ["-m", "pack.child", "x"], {"input": "", "pass_fds": [0, 2]}),
}


@pytest.mark.parametrize("way", _WAYS)
def test_a_program_finds_what_it_finds_after_exec(launcher: Launcher, way: str):
    flags, words, options = _WAYS[way]
    launcher.write("child.py", FACTS)
    for folder in ("sub", "pack"):
        (launcher.folder / folder).mkdir()
    launcher.write("pack/child.py", FACTS)
    launcher.write("pack/__init__.py", "")
    module = words[0] == "-m"
    launcher.program = "-m pack.child" if module else "child.py"
    launcher.known["flags"] = flags
    launcher.remember(str(launcher.folder / ("pack/child.py" if module else "child.py")))
    launcher.before = """
import resource
os.nice(1); os.umask(0o77)
resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.environ["LR"] = "é"; os.environ.pop("HOME", None)
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
"""
    by_exec = launcher.run(([*flags, *words], options), warm=False)
    assert launcher.told() == []
    warm = launcher.run(([*flags, *words], options))
    assert launcher.reasons() == [""]
    assert [code for code, _, _ in (*by_exec, *warm)] == [0, 0], (by_exec, warm)
    expected, found = (json.loads(lines[0][1]) for lines in (by_exec, warm))
    for facts in (expected, found):
        facts["env"].pop("LAUNCHER"), facts["env"].pop("BOOTSEER_WARM"), facts["env"].pop("GROUP")
        facts["environ"] = [word for word in facts["environ"] if word.partition("=")[0] in facts["env"]]
    assert found == expected
    assert found["ours"]


def test_a_program_that_python_would_start_by_posix_spawn_is_warm_too(launcher: Launcher):
    """With Python 3.13 and a recent C library these are nearly all programs."""
    launcher.remember(launcher.write("child.py", "import sys\nprint('decimal' in sys.modules)"))
    assert launcher.run((["child.py"], {"close_fds": False})) == [(0, "True\n", "")]
    assert launcher.reasons() == [""]


_ENDS = {
    "exit code": "sys.exit(7)",
    "exit text": "sys.exit('no data')",
    "exception": "def f():\n    raise ValueError('bad')\nf()",
    "in a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "syntax": "exec('a b')",
    "interrupted": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "fault": "faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)",
    "atexit": "atexit.register(print, 'first'); atexit.register(print, 'second'); print('x', end='')",
    "own hook": "sys.excepthook = lambda *error: print('hook', error[0].__name__); 1 / 0",
    "thread": "t = threading.Thread(target=lambda: print(threading.current_thread().name)); t.start()",
    "fork": "pid = os.fork()\nif pid == 0:\n    os._exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "spawn": (
        "if __name__ == '__main__':\n    import multiprocessing\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(abs, [-3]))"
    ),
    "handlers": (
        "signal.signal(signal.SIGALRM, lambda *_: print('alarm')); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "signal.pause(); signal.signal(signal.SIGCHLD, lambda *_: print('child'))\n"
        "if os.fork() == 0:\n    os._exit(0)\nos.wait(); os.kill(os.getpid(), signal.SIGINT)"
    ),
    "core": "os.abort()",
    "where": "faulthandler.register(signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1)",
    "later": "faulthandler.dump_traceback_later(0.01, exit=True); time.sleep(60)",
    "at exit of a fork": "atexit.register(print, 'end')\nif os.fork() == 0:\n    sys.exit()\nos.wait()",
    "executors": (
        "if __name__ == '__main__':\n    import multiprocessing\n"
        "    from concurrent.futures import ProcessPoolExecutor\n"
        "    for way in ('fork', 'forkserver'):\n"
        "        with ProcessPoolExecutor(1, multiprocessing.get_context(way)) as pool:\n"
        "            print(list(pool.map(abs, [-3])))"
    ),
    "debugger": "x = 41\nbreakpoint()\nprint(x)",
}


def test_a_program_ends_as_after_exec(launcher: Launcher):
    head = "import atexit, decimal, faulthandler, os, signal, sys, threading, time\n"
    cases = "\n".join(f"if sys.argv[1] == {name!r}:\n{textwrap.indent(text, '    ')}" for name, text in _ENDS.items())
    launcher.remember(launcher.write("child.py", head + cases))
    runs = [(["child.py", name], {"input": "p x + 1\nc\n"}) for name in _ENDS]
    by_exec, warm = launcher.run(*runs, warm=False), launcher.run(*runs)
    assert launcher.reasons() == [""] * len(_ENDS)
    for name, expected, found in zip(_ENDS, by_exec, warm, strict=True):
        # What `faulthandler` prints has our frames below the program's, and the thread's address.
        ours, theirs = (re.sub(r"0x\w+", "0x", err).splitlines() for _, _, err in (found, expected))
        ours = [line for line in ours if f'"{HOOK}/' not in line]
        assert (*found[:2], ours) == (*expected[:2], theirs), name
    assert dict(zip(_ENDS, warm, strict=True))["interrupted"][0] == -signal.SIGINT


_MODES = {
    "fault handler": ("PYTHONFAULTHANDLER", "os.kill(os.getpid(), signal.SIGSEGV)"),
    "hash seed": ("PYTHONHASHSEED", "print(hash('seed'))"),
    "safe path": ("PYTHONSAFEPATH", "print(sys.path)"),
}


@pytest.mark.parametrize("mode", _MODES)
def test_modes_of_python_that_variables_set_are_as_after_exec(launcher: Launcher, mode: str):
    name, text = _MODES[mode]
    (launcher.folder / "lib").mkdir()
    launcher.env.update({name: "1", "PYTHONPATH": f"{HOOK}/path:{launcher.folder}/lib"})
    launcher.remember(launcher.write("child.py", f"import os, signal, sys\n{text}\n"))
    (by_exec,), (warm,) = launcher.run((["child.py"], {}), warm=False), launcher.run((["child.py"], {}))
    assert launcher.reasons() == [""]
    assert warm[:2] == by_exec[:2]
    assert warm[2].partition("\n")[0] == by_exec[2].partition("\n")[0]  # followed by frames, two of which are ours


def test_py_spy_finds_the_frames_of_a_program(launcher: Launcher):
    py_spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if py_spy is None or os.geteuid() != 0:
        pytest.skip("needs py-spy and root")
    text = f"""
        import os, subprocess
        def train():
            subprocess.run([{py_spy!r}, "dump", "--pid", str(os.getpid())])
        train()
    """
    launcher.remember(launcher.write("child.py", text))
    (by_exec,), (warm,) = launcher.run((["child.py"], {}), warm=False), launcher.run((["child.py"], {}))
    assert launcher.reasons() == [""]
    told, expected = (re.findall(r"\S+ \(child.py:\d+\)", out) for _, out, _ in (warm, by_exec))
    assert told == expected == ["train (child.py:4)", "<module> (child.py:5)"]


def test_what_is_random_differs_between_programs_of_one_parent(launcher: Launcher):
    launcher.write("generators.py", "import random\nown = random.Random()\nseeded = random.Random(3)\n")
    (launcher.folder / "transformers/utils").mkdir(parents=True)
    launcher.write("transformers/utils/hub.py", "from uuid import uuid4\nSESSION_ID = uuid4().hex\n")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = [
        "random",
        "uuid",
        "ssl",
        "secrets",
        "tempfile",
        "generators",
        "multiprocessing.process",
        "transformers.utils.hub",
    ]
    text = """
        import generators, multiprocessing.process, random, secrets, ssl, tempfile, transformers.utils.hub, uuid
        key = bytes(multiprocessing.process.current_process().authkey).hex()
        print(random.random(), uuid.uuid4(), ssl.RAND_bytes(8).hex(), secrets.token_hex(), generators.own.random(), key,
              transformers.utils.hub.SESSION_ID, generators.seeded.random())
    """
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", text))
    first, second = launcher.run((["job/child.py"], {}), (["job/child.py"], {}))
    assert launcher.reasons() == ["", ""]
    pairs = list(zip(first[1].split(), second[1].split(), strict=True))
    assert all(a != b for a, b in pairs[:-1]), pairs
    assert pairs[-1][0] == pairs[-1][1]


def test_a_module_that_has_changed_is_not_handed_on(launcher: Launcher):
    library = launcher.write("library.py", "version = 1")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["library"]
    (launcher.folder / "job").mkdir()
    child = launcher.write("job/child.py", "import library\nprint(library.version)\n")
    launcher.remember(child)
    # After the first program, the warm parent is ready; then the file changes.
    launcher.before = (
        f"subprocess.run([sys.executable, {child!r}], stdout=2)\nopen({library!r}, 'w').write('version = 22')"
    )
    assert launcher.run((["job/child.py"], {})) == [(0, "22\n", "")]
    assert [bool(reason) for reason in launcher.reasons()] == [False, True]
    assert "library.py has changed" in launcher.reasons()[1]


def test_a_module_that_changes_while_others_are_imported_is_not_handed_on(launcher: Launcher):
    launcher.write("library.py", "import pathlib\nversion = 1\npathlib.Path(__file__).write_text('version = 22')\n")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["library"]
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "import library\nprint(library.version)\n"))
    assert launcher.run((["job/child.py"], {})) == [(0, "22\n", "")]
    assert "library.py has changed" in launcher.reasons()[0]


def test_a_package_that_was_installed_since_the_imports_is_not_missed(launcher: Launcher):
    packages = launcher.folder / "site-packages"
    packages.mkdir()
    launcher.write("site-packages/library.py", "import importlib.util\nfound = importlib.util.find_spec('optional')\n")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{packages}"
    launcher.known["modules"] = ["library"]
    (launcher.folder / "job").mkdir()
    child = launcher.write("job/child.py", "import library\nprint(library.found is not None)\n")
    launcher.remember(child)
    launcher.before = (
        f"subprocess.run([sys.executable, {child!r}], stdout=2)\nopen({str(packages / 'optional.py')!r}, 'w').close()"
    )
    assert launcher.run((["job/child.py"], {})) == [(0, "True\n", "")]
    assert [bool(reason) for reason in launcher.reasons()] == [False, True]
    assert "site-packages has changed" in launcher.reasons()[1]


_AWAIT_GO = """
import time
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def _parent_of(process: subprocess.Popen[str]) -> int:
    """The warm parent of a launcher."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if programs.PARENT in Path(f"/proc/{word}/cmdline").read_text():
                return int(word)
        time.sleep(0.01)
    raise AssertionError("there is no warm parent")


def test_a_parent_that_is_killed_in_a_request_costs_only_its_time(launcher: Launcher):
    launcher.remember(launcher.write("child.py", "import os\nopen('ran', 'a').write('x')"))
    launcher.before = _AWAIT_GO
    with launcher.start((["child.py"], {}), (["child.py"], {})) as process:
        parent = _parent_of(process)
        os.kill(parent, signal.SIGSTOP)
        (launcher.folder / "go").touch()
        time.sleep(0.5)  # the request has been made by now, most likely; all that follows holds if not
        os.kill(parent, signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 2
    assert (launcher.folder / "ran").read_text() == "xx"
    (reason,) = launcher.reasons()
    assert reason in ("the warm parent ended before it answered", "the warm parent has ended")


@pytest.mark.parametrize("handler", ["handle", "functools.partial(handle, 1)", "Handler()"])
def test_an_exception_of_the_launchers_signal_handler_is_raised_in_the_launcher(launcher: Launcher, handler: str):
    """torchrun's `SignalException` ends torchrun, which must not start the program by exec then."""
    launcher.remember(launcher.write("child.py", "open('ran', 'w')"))
    launcher.before = (
        f"""
import functools
class SignalException(Exception): pass
def handle(*_):
    open("handled", "w").close()
    raise SignalException("SIGTERM")
class Handler:
    def __call__(self, *_): handle()
signal.signal(signal.SIGTERM, {handler})
"""
        + _AWAIT_GO
    )
    with launcher.start((["child.py"], {})) as process:
        parent = _parent_of(process)
        os.kill(parent, signal.SIGSTOP)
        (launcher.folder / "go").touch()
        time.sleep(0.5)  # the request has been made by now, most likely; all that follows holds if not
        process.terminate()
        while not (launcher.folder / "handled").exists():
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):  # it ends with the launcher
            os.kill(parent, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "SignalException: SIGTERM" in err
    assert not (launcher.folder / "ran").exists()


@pytest.mark.parametrize("end", ["exit", "kill", "wait"])
def test_the_parent_goes_with_its_launcher_or_before_it_waits_for_any_child(launcher: Launcher, end: str):
    launcher.remember(launcher.write("child.py", "print('ran')"))
    waits = "try:\n    os.wait()\nexcept ChildProcessError:\n    print(json.dumps([0, 'none', '']))"
    launcher.before = {"wait": waits, "kill": _AWAIT_GO, "exit": ""}[end]
    with launcher.start((["child.py"], {})) as process:
        if end == "kill":
            parent = _parent_of(process)
            process.kill()
        out, _ = process.communicate(timeout=300)
    if end == "kill":
        until = time.monotonic() + 300
        while Path(f"/proc/{parent}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(f"/proc/{parent}").exists()
    else:
        assert json.loads(out.splitlines()[-1]) == [0, "ran\n", ""]
    if end == "wait":
        assert json.loads(out.splitlines()[0])[1] == "none"
        assert launcher.reasons() == ["the launcher waits for any child"]


def test_a_rank_starts_no_warm_parent_although_its_program_is_a_launchers(launcher: Launcher):
    """Ranks of Lightning run the launcher's program again; other ranks start a program for an evaluation."""
    launcher.remember(launcher.write("child.py", "print('ran')"))
    launcher.env["LOCAL_RANK"] = "1"
    assert launcher.run((["child.py"], {})) == [(0, "ran\n", "")]
    assert launcher.told() == []


@pytest.mark.root
def test_a_socket_of_another_user_is_refused(tmp_path: Path):
    program = f"""
import os, socket, subprocess, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
if os.fork() == 0:
    os.setuid(65534)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(theirs, [b"x"], [one.fileno() for one in pair])
    os._exit(0)
_, fds, _, _ = socket.recv_fds(ours, 1, 2)
words = [sys.executable, {str(HOOK / programs.PARENT)!r}, str(fds[1]), {str(tmp_path)!r}, "x"]
print(subprocess.run(words, pass_fds=[fds[1]], timeout=300).returncode)
"""
    env = {**os.environ, "PYTHONPATH": f"{HOOK}/path", "BOOTSEER_TRACE": f"spool:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
