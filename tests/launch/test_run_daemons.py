"""`bootseer run --setup`: daemons that the setup leaves running are started again where its snapshot is used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.env.document import Daemon
from bootseer.env.processes import listening, pid_in, processes, sockets_of
from bootseer.launch.environment.relaunch import start_daemons
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.environment.view import EnvironmentUnavailable
from bootseer.trace.event import BEGIN, END
from environment_place import Place, end, made_place
from plain_user import UID
from registry import free_port

pytestmark = pytest.mark.root

SERVER = """
import os, socket, sys, time
kind = sys.argv[1]
index = os.path.expanduser("~/index-" + kind)
if not os.path.exists(index):  # only in the first start
    time.sleep(float(os.environ.get("BUILDS_S", "0")))
    open(index, "w").write("built")
if kind == "daemon" and os.fork():
    os._exit(0)
if kind == "unix":
    server = socket.socket(socket.AF_UNIX)
    server.bind(AT)
else:
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
if kind == "daemon":
    os.setsid()
    open(PID_FILE, "w").write(str(os.getpid()) + "\\n")
server.listen()
print("listens", flush=True)
while True:
    server.accept()[0].sendall(os.environ.get("SAYS", "nothing").encode())
"""
ASK = """
import socket
for address in (AT, ("127.0.0.1", PORT), ("127.0.0.1", SLOW)):
    one = socket.socket(socket.AF_UNIX if address == AT else socket.AF_INET)
    one.connect(address)
    print(one.makefile().read())
"""


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


class Daemons:
    """A setup with three daemons: one sends a variable exported by the setup, one has a pid file, one builds an index
    first."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.port, self.slow = free_port(), free_port()
        self.at = place.outside / "agent" / "socket"
        self.pid_file = place.outside / "agent" / "server.pid"
        # Not in the setup's text: existing paths in it count as inputs.
        places = {"AT": str(self.at), "PID_FILE": str(self.pid_file), "PORT": self.port, "SLOW": self.slow}
        text = "".join(f"{name} = {value!r}\n" for name, value in places.items())
        place.write("server.py", text + SERVER)
        place.write("ask.py", text + ASK)
        place.outside.mkdir(parents=True)
        self.script = place.counting_script(
            f"mkdir -p {self.at.parent}; mkdir ~/made || exit\n"
            "SAYS=hello python server.py unix </dev/null >/dev/null 2>&1 &\n"
            f"python server.py daemon {self.port} </dev/null >~/agent.out 2>&1\n"
            f"BUILDS_S=1 python server.py slow {self.slow} </dev/null >/dev/null 2>&1 &\n"
            "until python ask.py; do sleep 0.05; done 2>/dev/null >&2"
        )
        self.words = ("--setup", self.script, "--")
        self.ask = (*self.words, "python", "ask.py")

    @property
    def addresses(self) -> set[str]:
        return {f"unix {self.at}", f"tcp 127.0.0.1:{self.port}", f"tcp 127.0.0.1:{self.slow}"}

    def end(self) -> None:
        """End the daemons of a start that does not record them."""
        waiting = {number for number, address in listening().items() if address in self.addresses}
        for pid in processes():
            if waiting & sockets_of((pid,)):
                os.kill(pid, signal.SIGKILL)
        awaited(lambda: self.addresses.isdisjoint({*listening().values()}))
        self.at.unlink()
        self.pid_file.unlink()

    def gone(self) -> bool:
        """Whether nothing listens any more, and no socket or pid file is left to block the next start."""
        taken = self.addresses & {*listening().values()}
        return not taken and not self.at.exists() and not self.pid_file.exists()


def awaited(fact: Callable[[], object]) -> None:
    until = time.monotonic() + 300
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_setup_leaves_running_is_started_again_on_another_node(place: Place) -> None:
    daemons = Daemons(place)
    assert place.run(*daemons.ask).stdout == "hello\nnothing\nnothing\n"
    assert place.published()["published"] is True, place.published()
    assert daemons.gone()
    (document,) = place.documents()
    assert {address for one in document["daemons"] for address in one["sockets"]} == daemons.addresses
    assert [path for one in document["daemons"] for path in one["pid_files"]] == [str(daemons.pid_file)]
    daemons.at.parent.rmdir()  # on a real node /run is empty after a boot
    place.cache = "other"
    ran = place.run(*daemons.ask)
    assert (ran.stdout, place.start()["mode"], place.num_setups) == ("hello\nnothing\nnothing\n", "restored", 1)
    assert daemons.gone()
    for cache in ("cache", "other"):  # in the capturing start, too
        marks = [one for one in place.events() if one.stage == "environment_setup.daemon.python" and one.node == cache]
        begun, ready = ({one.span: one.mono_ns for one in marks if one.phase == phase} for phase in (BEGIN, END))
        assert len(begun) == 3
        if cache == "cache":
            assert max(ready[span] - begun[span] for span in begun) >= 1e9, "the index is built in this time"
    # The run is killed: its daemons end with it.
    running = place.begin(*daemons.words, "sleep", "600")
    awaited(lambda: pid_in(str(daemons.pid_file)) and daemons.addresses <= {*listening().values()})
    end(running)
    awaited(daemons.gone)


def test_what_cannot_be_started_again_makes_the_setup_run(place: Place) -> None:
    daemons = Daemons(place)
    place.run(*daemons.ask)
    stale = f"{daemons.pid_file}, the pid file of python, already exists and is stale"
    for number, (why, *more) in enumerate(((stale,), ("this start refuses them", "--env-daemons", "refuse")), 2):
        daemons.pid_file.write_text("4194304\n")  # no process has this number
        (place.root / "home/made").rmdir()
        ran = place.run(*more, *daemons.words, "true")
        assert why in ran.stderr
        assert (place.start()["mode"], place.start()["code"]) == ("installed", "daemons")
        assert place.num_setups == number
        daemons.end()


DAEMON = Daemon(
    "agent", "/bin/sh", ("sh", "-c", "sleep 600"), (), "/", "", os.getuid(), os.getgid(), nice=0, sockets=()
)  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    task = Task(None, (), EnvironmentOptions(tmp_path / "cache", tmp_path / "runtime"), dict(os.environ))
    yield task
    task.folder.remove()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"argv": ("sh", "-c", "kill -9 $$"), "sockets": ("tcp 127.0.0.1:1",)},
            "agent was killed by SIGKILL at its start",
        ),
        ({"argv": ("sh", "-c", "exit 3"), "sockets": ("tcp 127.0.0.1:1",)}, "agent ended with exit code 3"),
        (
            {"program": "/nowhere/agent"},
            "agent cannot be started: sh: [Errno 2] No such file or directory: '/nowhere/agent'",
        ),
        ({"uid": os.getuid() + 12345, "user": "bin"}, "agent ran as user bin"),
        ({"cwd": "/nowhere"}, "agent cannot be started: sh: [Errno 2] No such file or directory: '/nowhere'"),
    ],
)
def test_one_that_does_not_start_is_reported_in_a_line(task: Task, changed: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvironmentUnavailable) as raised:
        start_daemons(task, (replace(DAEMON, **changed),), None)
    assert why in str(raised.value)
    assert raised.value.code == "daemons"


def test_a_taken_port_is_named_with_its_owner(task: Task) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp 127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EnvironmentUnavailable, match=rf"{address}, which is taken by .*\({os.getpid()}\)"):
            start_daemons(task, (replace(DAEMON, sockets=(address,)),), None)


def test_folders_in_run_are_made_for_another_user(task: Task) -> None:
    folder = Path("/run", f"bootseer-test-{os.getpid()}", "agent")
    words = f"echo $$ > {folder}/agent.pid; exec sleep 600"
    other = replace(DAEMON, argv=("sh", "-c", words), uid=UID, gid=UID, pid_files=(f"/var{folder}/agent.pid",))
    try:
        start_daemons(task, (replace(other, umask=0o077),), None).stop(60.0)
        for path in (folder.parent, folder):
            assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (UID, 0o755)
        assert not list(folder.iterdir())
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def test_one_that_needs_another_is_started_once_more(task: Task, tmp_path: Path) -> None:
    first = replace(DAEMON, argv=("sh", "-c", f"[ -e {tmp_path}/up ] || exit 1; sleep 600"))
    server = f"import socket, time; s = socket.socket(1); s.bind('{tmp_path}/up'); s.listen(); time.sleep(600)"
    other = replace(DAEMON, program=sys.executable, argv=("python", "-c", server), sockets=(f"unix {tmp_path}/up",))
    start_daemons(task, (first, other), None).stop(60.0)
    assert not (tmp_path / "up").exists()
