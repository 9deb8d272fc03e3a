"""A warm parent gives way: to programs where processes or memory are short, and when nothing has asked it for long."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bootseer.mounts import kernel
from hook.test_warm import HOOK, Launcher
from plain_user import open_way_to

UNTIL_IT_ENDED = """
import time
parent, = open(f"/proc/self/task/{os.getpid()}/children").read().split()
while open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.mark.parametrize(
    ("setting", "why"),
    [("_IDLE_S=0.036", "no program was started for 1e-05 h"), ("_SHARE=0.0", "memory was short")],
)
def test_a_parent_that_is_not_worth_its_memory_ends_and_the_next_start_says_why(
    launcher: Launcher, setting: str, why: str
) -> None:
    launcher.write("library.py", f"import sys\nvars(sys.modules['__main__']).update(_LOOK_S=0.05, {setting})\n")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["library"]
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "print('ran')"))
    launcher.before = UNTIL_IT_ENDED
    assert launcher.run((["job/child.py"], {})) == [(0, "ran\n", "")]
    assert launcher.reasons() == [f"the warm parent has ended: {why}"]


RESTARTED = """
import os, socket
from bootseer.hook import warm_parent
from bootseer.launch.warm_restart import WarmRestart

class Tracer:
    def emit(self, *_, attrs, **more):
        print(attrs["why_not"])

os.environ["BOOTSEER_RUN_ID"] = "run"
restart = WarmRestart(Tracer(), "run")
if os.fork() == 0:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        warm_parent._LOOK_S, warm_parent._IDLE_RESTARTS_S = 0.05, 3600.0
        warm_parent.time.monotonic = lambda times=iter(range(0, 1 << 20, 1800)): next(times)
        warm_parent.serve(theirs.fileno(), "nowhere", "launch.py")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert os.wait()[1] == 0
print(restart.spawn(dict(os.environ), {}, True))
"""


def test_with_restarts_it_ends_later_and_the_restart_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", RESTARTED], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "the warm parent has ended: no program was started for 1 h\nNone\n", done.stderr


@pytest.mark.slow
def test_the_kernel_takes_it_before_the_job_where_memory_is_short(launcher: Launcher) -> None:
    text = """
        import os
        pids = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
        print(sorted(int(open(f"/proc/{pid}/oom_score_adj").read()) for pid in pids))
    """
    launcher.remember(launcher.write("child.py", text))
    ((_, out, err),) = launcher.run((["child.py"], {}))
    assert launcher.reasons() == [""], err
    assert out == f"{[int(Path('/proc/self/oom_score_adj').read_text()), 1000]}\n"


@pytest.mark.root
def test_it_gives_its_place_to_the_program_where_the_user_may_have_no_more_processes(tmp_path: Path) -> None:
    uid = 100_000 + os.getpid()  # of no other process

    def become() -> None:
        kernel.unshare_mounts()
        open_way_to(Path(sys.base_prefix))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        launcher = Launcher(Path(folder))
        os.chown(launcher.spool, uid, uid)
        launcher.remember(launcher.write("child.py", "print('ran')"))
        launcher.options = {"preexec_fn": become}
        assert launcher.run((["child.py"], {})) == [(0, "ran\n", "")]
        assert launcher.reasons() == [
            "the warm parent has ended: it cannot be copied: Resource temporarily unavailable"
        ]


_LEFT = """
import os, sys
from pathlib import Path
from bootseer.io.memory import available_bytes
print(available_bytes())
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
print(available_bytes())
with open(sys.argv[2], "wb") as file:
    file.write(bytes(32 << 20))
    os.fsync(file.fileno())
print(available_bytes())
"""


@pytest.mark.root
def test_memory_is_what_the_machine_and_the_cgroups_have_left_with_page_cache(tmp_path: Path) -> None:
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    groups = {kinds: path for _, kinds, path in lines}
    kind, limit = ("/memory", "memory.limit_in_bytes") if "memory" in groups else ("", "memory.max")
    group = Path(f"/sys/fs/cgroup{kind}{groups.get(kind[1:], '')}", f"bootseer-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / limit).write_text(f"{128 << 20}")
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        words = [sys.executable, "-c", _LEFT, str(group), str(tmp_path / "file")]
        out = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    finally:
        group.rmdir()
    before, inside, with_cache = map(int, out.split())
    (total,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 128 << 20 < before < int(total.split()[1]) << 10
    assert 112 << 20 < with_cache <= inside <= 128 << 20
