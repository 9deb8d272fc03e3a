"""`bootseer run --restarts`: what is restarted, its events, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.image.sources.source import this_platform
from bootseer.io import proc
from bootseer.launch import restart_request, supervise
from bootseer.launch.restart import is_elastic
from bootseer.launch.restart_request import Run as Asked
from bootseer.mounts import kernel
from bootseer.trace.event import Event
from busybox import running
from conftest_launch import BOOTSEER
from environment_place import Place, made_place
from image_node import Node, busybox_layer, convert_box, have_converted, push, tar
from oci_images import write_layout

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
Events = Callable[[], list[Event]]
LIMIT_S = 300
START = 'echo "$BOOTSEER_RESTART $BOOTSEER_KIND"; '


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come true in {LIMIT_S} s"
        time.sleep(0.02)


@contextlib.contextmanager
def started(env: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [*BOOTSEER, "run", *words]
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def test_a_killed_command_starts_again_and_its_events_say_which_start_it_is(run: Run, events: Events) -> None:
    ran = run("run", "--restarts", "3", "--", "sh", "-c", START + "[ $BOOTSEER_RESTART = 2 ] || kill -9 $$")
    assert (ran.returncode, ran.stdout) == (0, "0 full\n1 restart\n2 restart\n")
    lines = ran.stderr.splitlines()
    assert lines[0] == "bootseer: the command was ended by SIGKILL; starting it again (restart 1 of 3)"
    assert lines[1].endswith("(restart 2 of 3)")
    commands = [event for event in events() if event.stage == "command" and event.phase == "end"]
    assert [(one.restart, one.kind, one.attrs["exit_code"]) for one in commands] == [
        (0, "full", 137), (1, "restart", 137), (2, "restart", 0),
    ]  # fmt: skip
    (end,) = (event for event in events() if event.stage == "run" and event.phase == "end")
    assert (end.restart, end.attrs["exit_code"]) == (0, 0)


@pytest.mark.parametrize(
    ("script", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 1", 1, 3),
        ("kill -SEGV $$", 139, 3),
        ("exit 2", 2, 1),  # wrong arguments
        ("exit 126", 126, 1),
        ("nonesuch-program", 127, 1),
    ],
)
def test_only_an_end_that_may_be_transient_is_followed_by_a_start(
    run: Run, script: str, code: int, starts: int
) -> None:
    ran = run("run", "--restarts", "2", "--", "sh", "-c", f"echo start; {script}")
    assert (ran.returncode, ran.stdout.count("start\n")) == (code, starts), ran.stderr
    assert ("not started again" in ran.stderr) == (starts == 3)


@pytest.mark.parametrize("words", [["--", "nonesuch-program"], ["--setup", "false.sh", "--", "true"]])
def test_what_cannot_begin_is_not_tried_again(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "false.sh").write_text("echo setup; exit 3\n")
    ran = run("run", "--env", "bypass", "--restarts", "2", *words)
    assert ran.returncode == (3 if "true" in words else 127)
    assert "starting it again" not in ran.stderr
    assert (ran.stdout + ran.stderr).count("setup\n") == ("true" in words)


def test_a_delay_without_restarts_is_a_usage_error(run: Run) -> None:
    ran = run("run", "--restart-delay", "3", "--", "true")
    assert (ran.returncode, "give --restarts N too" in ran.stderr) == (2, True)


def test_what_the_command_left_is_ended_before_its_next_start(run: Run) -> None:
    """It would hold devices and ports. Includes processes that ignore SIGTERM or have their own session."""
    count = "pgrep -fc '^sleep 600.7[7]'"
    leave = f"(trap '' TERM; exec setsid sleep 600.77) & until {count}; do sleep 0.05; done; exit 1"
    script = f"{count}; [ $BOOTSEER_RESTART = 1 ] || {{ {leave}; }}"
    ran = run("run", "-q", "--restarts", "1", "--", "sh", "-c", script)
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout.splitlines()[0], ran.stdout.splitlines()[-1]) == ("0", "0")
    assert running("sleep 600.77") == []


def test_other_runs_of_the_same_job_are_left_alone(env: dict[str, str], run: Run) -> None:
    """`srun` starts one for each rank, all with the same trace."""
    with started(env, "-q", "--job", "one", "--restarts", "1", "--", "sh", "-c", "echo up; read _") as beside:
        assert beside.stdout is not None
        assert beside.stdout.readline() == "up\n"
        ran = run("run", "-q", "--job", "one", "--attempt", "0", "--restarts", "1", "--", "false")
        out, err = beside.communicate("\n", timeout=LIMIT_S)
    assert ran.returncode == 1
    assert (beside.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_nothing_is_restarted_after_a_signal_that_ends_the_run(env: dict[str, str], number: signal.Signals) -> None:
    with started(env, "--restarts", "5", "--", "sh", "-c", "echo up; exec sleep 600.78") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, "starting it again" in err) == (128 + number, "", False)


def test_a_signal_ends_the_delay(env: dict[str, str]) -> None:
    with started(env, "--restarts", "5", "--restart-delay", "3600", "--", "sh", "-c", "echo up; exit 1") as process:
        assert process.stderr is not None
        assert "starting it again in 3600 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, "up\n")
    assert "interrupted by SIGINT before the command was started again" in err


def test_a_run_killed_in_a_later_start_leaves_nothing(env: dict[str, str]) -> None:
    script = "[ $BOOTSEER_RESTART = 1 ] || kill -9 $$; echo up; exec sleep 600.79"
    with started(env, "--restarts", "5", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.communicate(timeout=LIMIT_S)
    until(lambda: running("sleep 600.79") == [])


def test_a_launcher_that_restarts_its_processes_is_left_alone_unless_it_was_killed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho start\n[ $5 = killed ] && kill -9 $$\nexit 1\n")
    (tmp_path / "torchrun").chmod(0o755)
    words = ["run", "--restarts", "1", "--", "./torchrun", "--max-restarts", "3", "train.py", "--"]
    gave_up, killed = run(*words, "gave-up"), run(*words, "killed")
    assert (gave_up.returncode, gave_up.stdout) == (1, "start\n")
    assert "its launcher restarts it itself" in gave_up.stderr
    assert (killed.returncode, killed.stdout) == (137, "start\nstart\n")


def test_on_request_the_command_starts_again_whatever_it_ended_with(
    env: dict[str, str], run: Run, events: Events
) -> None:
    """Not limited by `--restarts`, which is 0 here."""
    script = f"trap 'exit 0' TERM; {START} while :; do sleep 0.05; done"
    job = f"moe-{os.getpid()}"  # other tests on this machine start runs, too
    with started(env, "-q", "--job", job, "--restarts", "0", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        for number, kind in enumerate(("full", "hot_update", "hot_update")):
            assert process.stdout.readline() == f"{number} {kind}\n"
            if number < 2:
                (found,) = json.loads(run("restart", "--json", job).stdout)["runs"]
                assert (found["pid"], found["job"], found["restart"]) == (process.pid, job, number + 1)
        process.terminate()
        assert process.wait(LIMIT_S) == 0, "what the command ended with after a signal of its own"
    restarts = [event for event in events() if event.stage == "restart" and event.phase == "begin"]
    assert [(one.restart, one.kind, one.attrs["requested"]) for one in restarts] == [
        (1, "hot_update", True), (2, "hot_update", True),
    ]  # fmt: skip
    report = json.loads(run("report", "--json", job).stdout)
    assert [one["by"] for one in report["restarts"]] == ["request"] * 2
    assert "restart 2 on request: " in run("report", job).stdout


def test_a_command_that_ignores_sigterm_is_killed_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RESTART_GRACE_S", 0.2)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {supervise.RESTART_REQUEST})
    try:
        supervise.block_signals()
        ready, write = os.pipe()
        script = "trap '' TERM; echo up; while :; do sleep 0.05; done"
        pid = supervise.spawn(["sh", "-c", script], os.environ, {1: write}, own_group=True)
        assert os.read(ready, 3) == b"up\n"
        requested: list[bool] = []
        signal.pthread_kill(threading.get_ident(), supervise.RESTART_REQUEST)  # any other thread ignores it
        code = supervise.wait(pid, own_group=True, on_restart_request=lambda: requested.append(True))
        for end in (ready, write):
            os.close(end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert (code, requested) == (137, [True])


def test_roots_own_run_is_restarted_not_that_of_a_user_with_a_job_of_this_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or of a process that claims to be one, for which the request would time out."""
    own, other = Asked(11, 12, "moe", 0), Asked(21, 22, "moe", 0)
    again, signalled = Asked(11, 13, "moe", 1), list[int]()
    looks = iter([[other, own], [other, again]])
    monkeypatch.setattr(restart_request, "find_runs", lambda job: next(looks))
    monkeypatch.setattr(proc, "status", lambda pid: {"Uid": f"{os.getuid() + (pid != 11)}\t0\t0\t0"})
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    assert (restart_request.restart("moe", 5), signalled) == ([again], [11])


def test_a_request_needs_one_job_that_can_be_restarted(env: dict[str, str], run: Run) -> None:
    plain, *jobs = (f"{name}-{os.getpid()}" for name in ("plain", "one", "two"))
    # A process may have arbitrary variables.
    forged = {**env, "BOOTSEER_RUN_ID": "-", "BOOTSEER_RESTART": "9" * 5000}
    with started(forged, "-q", "--job", plain, "--", "sh", "-c", "echo up; read _") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        ran = run("restart", plain)
        assert (ran.returncode, f"no run of job {plain} on this node can be restarted" in ran.stderr) == (2, True)
        assert "bootseer run --restarts N" in ran.stderr
        process.communicate("\n", timeout=LIMIT_S)
    with (
        started(env, "-q", "--job", jobs[0], "--restarts", "0", "--", "sh", "-c", "echo up; read _") as one,
        started(env, "-q", "--job", jobs[1], "--restarts", "0", "--", "sh", "-c", "echo up; read _") as two,
    ):
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        ran = run("restart")
        assert (ran.returncode, "several jobs can be restarted: " in ran.stderr) == (2, True), ran.stderr
        assert all(job in ran.stderr for job in jobs)
        assert all(job in run("restart", jobs[0].partition("-")[0]).stderr for job in jobs)  # Slurm's end with a number
        for process in (one, two):
            process.communicate("\n", timeout=LIMIT_S)
            assert process.returncode == 0


def test_what_a_command_leaves_running_is_reaped_where_restarts_are_warm(run: Run) -> None:
    script = "(true &); sleep 0.5; echo $$; cat /proc/$PPID/task/$PPID/children"
    own, children = run("run", "-q", "--warm", "auto", "--restarts", "0", "--", "sh", "-c", script).stdout.splitlines()
    assert children.split() == [own]


def test_options_and_variables_with_which_a_launcher_restarts() -> None:
    assert is_elastic(["torchrun", "--max-restarts=3", "x"], {})
    assert is_elastic(["torchrun", "x"], {"PET_MAX_RESTARTS": "1"})
    assert not is_elastic(["torchrun", "--max_restarts", "0", "x"], {"PET_MAX_RESTARTS": "1"})
    assert not is_elastic(["python", "--max-restarts"], {})


@pytest.mark.root
@pytest.mark.fuse
def test_the_image_stays_mounted(run: Run, events: Events, env: dict[str, str], node: Node) -> None:
    env.update(node.env)
    have_converted(node)
    script = "echo $BOOTSEER_RESTART >> /numbers; cat /numbers; [ $BOOTSEER_RESTART = 2 ] || kill -9 $$"
    # With the host's PID namespace, only the restart ends the command's remaining processes.
    left = "(busybox setsid sleep 600.76 &); "
    for words, before in (((), ""), (("--pid", "host"), left)):
        ran = run("run", "--restarts", "2", "--image", node.reference, *words, "--", "sh", "-c", before + script)
        assert (ran.returncode, ran.stdout) == (0, "0\n0\n1\n0\n1\n2\n"), ran.stderr
        until(lambda: len(running("sleep 600.76")) <= 1)  # that of the last start, as without restarts
        for pid in running("sleep 600.76"):
            os.kill(pid, signal.SIGKILL)
    assert [event.restart for event in events() if event.stage == "image_loading.mount" and event.phase == "end"] == [
        0
    ] * 2
    points = [point for point in kernel.mount_points() if point.startswith(f"{node.folder}/")]
    assert all(point.startswith(f"{node.runtime}/layers/") for point in points), points
    assert list((node.cache / "containers").iterdir()) == []


def image_with_python(node: Node, python: str) -> str:
    """Busybox and an empty file with this name, on which the test mounts this machine's Python."""
    tree = node.folder / "python"
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "usr" / "bin" / python).touch(0o755)
    (tree / "usr" / "local" / "bin").mkdir(parents=True)
    (tree / "usr" / "local" / "bin" / "python3").symlink_to(f"../../bin/{python}")
    layers = [busybox_layer(), tar(tree, ["usr"])]
    config = {"Env": ["PATH=/usr/local/bin:/bin"]}
    layout = node.folder / "python-layout"
    write_layout(layout, layers, tag="1", architecture=this_platform().architecture, **config)
    push(layout, node.registry.host, "team/python", "1")
    reference = f"{node.registry.host}/team/python:1"
    convert_box(reference)
    return reference


PYTHON = Path("/usr/bin/python3").resolve().name


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.skipif(
    PYTHON not in [f"python3.{minor}" for minor in range(11, 30)], reason="needs the system's Python 3.11 or later"
)
def test_in_a_container_with_python_a_restart_stays_in_it_and_is_warm(
    run: Run, events: Events, env: dict[str, str], node: Node, tmp_path: Path
) -> None:
    """After a failure and on request; the program in between passes on signals and exit codes."""
    env.update(node.env)
    job = tmp_path / "job"
    (job / "library").mkdir(parents=True)
    (job / "library" / "safetensors.py").touch()
    (job / "child.py").write_text("import colorsys, safetensors")
    (job / "launch.py").write_text("""import os, signal, subprocess, sys
warm, number = "colorsys" in sys.modules, os.environ.get("BOOTSEER_RESTART", "0")
subprocess.run([sys.executable, "/job/child.py"], check=True)
kept = os.listdir("/dev/shm")
open(f"/dev/shm/{number}", "w")
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(number, os.environ["BOOTSEER_KIND"], warm, sorted(kept), flush=True)
if os.environ["MODE"] == "record":
    sys.exit()
if number == "0":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
""")
    tmp_path.chmod(0o755)
    mounts = [word for name in ("/usr/bin", "/usr/lib", "/lib", "/lib64") if Path(name).exists()
              for word in ("--mount", f"{name}:{name}:ro")]  # fmt: skip
    mounts += ["--mount", f"{job}:/job:ro", "--container-env", "PYTHONPATH=/job/library"]
    job_name = f"boxed-{os.getpid()}"
    words = ["--job", job_name, "--image", image_with_python(node, PYTHON), "--warm", "on", *mounts, "--container-env"]
    command = ["--", "/usr/bin/python3", "/job/launch.py"]
    recorded = run("run", *words, "MODE=record", *command)
    assert recorded.stdout == "0 full False []\n", recorded.stderr
    with started(env, "--restarts", "1", *words, "MODE=run", *command) as process:
        assert process.stdout is not None
        out = [process.stdout.readline() for _ in range(2)]
        asked = run("restart", job_name)
        out.append(process.stdout.readline())
        process.send_signal(signal.SIGUSR1)
        rest, err = process.communicate(timeout=LIMIT_S)
    assert asked.returncode == 0, asked.stderr
    assert out == ["0 full False []\n", "1 restart True ['0']\n", "2 hot_update True ['0', '1']\n"], err
    assert (process.returncode, rest) == (7, ""), err
    assert [
        (one.phase, one.restart, one.attrs.get("exit_code"))
        for one in events()
        if one.stage == "command" and one.restart
    ] == [("begin", 1, None), ("end", 1, 143), ("begin", 2, None), ("end", 2, 7)]
    assert list((node.cache / "containers").iterdir()) == []
    missing = run("run", "--restarts", "1", *words, "MODE=run", "--", "/job/missing")
    assert (missing.returncode, "/job/missing: command not found" in missing.stderr) == (127, True), missing.stderr


@pytest.mark.root
@pytest.mark.fuse
def test_on_request_a_container_without_python_is_made_anew(run: Run, env: dict[str, str], node: Node) -> None:
    env.update(node.env)
    have_converted(node)
    job = f"bare-{os.getpid()}"
    for pids in ("own", "host"):
        words = ("--job", job, "--restarts", "0", "--image", node.reference, "--pid", pids)
        with started(env, "-q", *words, "--", "sh", "-c", START + "read _") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "0 full\n"
            (found,) = json.loads(run("restart", "--json", job).stdout)["runs"]
            assert (found["pid"], found["restart"]) == (process.pid, 1)
            assert process.stdout.readline() == "1 hot_update\n"
            process.communicate("\n", timeout=LIMIT_S)
        assert process.returncode == 0


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


@pytest.mark.root
def test_the_environment_stays_mounted(place: Place) -> None:
    """In the start that makes the snapshot, and in the one that mounts it."""
    script = place.counting_script()
    place.write("requirements.txt", "alpha==1.0\n")
    again = "import alpha, os; print(alpha.VERSION, flush=True); os.environ['BOOTSEER_RESTART'] == '1' or os.abort()"
    for mode in ("captured", "restored"):
        ran = place.run("--restarts", "1", "--setup", script, "-r", "requirements.txt", "--", "python", "-c", again)
        assert ran.stdout == "1.0\n1.0\n", ran.stderr
        assert place.start()["mode"] == mode
        assert not place.mounts()
    assert place.num_setups == 1


def test_the_report_tells_how_often_and_what_that_saved(run: Run, tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("sleep 0.3\n")
    script = "sleep 0.1; [ $BOOTSEER_RESTART = 0 ] || echo step; [ $BOOTSEER_RESTART = 2 ]"
    words = ["--restarts", "2", "--restart-delay", "1", "--began-pattern", "step", "--setup", "setup.sh"]
    assert run("run", "--job", "x", "--env", "bypass", *words, "--", "sh", "-c", script).returncode == 0
    report = json.loads(run("report", "--json", "x").stdout)
    assert (report["startup"]["restart"], report["startup"]["kind"]) == (2, "restart")
    assert "environment_setup" not in report["unobserved"]
    first, second = report["restarts"]
    assert (first["restart"], first["by"], first["exit_code"]) == (1, "bootseer", 1)
    assert second["startup_s"] > 1.1, "the delay is part of it"
    assert 0.3 < second["saved_s"] == second["not_repeated"]["environment_setup"]
    assert json.loads(run("report", "--json", "--restart", "0", "x").stdout)["restarts"] == []
    assert "2 restarts in place: " in run("report", "x").stdout
    run("report", "x", "--html", "page.html")
    assert "2 restarts in place: " in (tmp_path / "page.html").read_text()


def test_events_of_a_launcher_s_own_restarts_have_other_numbers(run: Run, events: Events) -> None:
    stage = [sys.executable, "-m", "bootseer", "stage", "work", "--", "true"]
    elastic = "import os, subprocess, sys\nfor count in '01': subprocess.run(sys.argv[1:], check=True,"
    elastic += " env={**os.environ, 'TORCHELASTIC_RESTART_COUNT': count})\nsys.exit(1)"
    run("run", "--restarts", "1", "--", sys.executable, "-c", elastic, *stage)
    begun = [event.restart for event in events() if event.stage == "work" and event.phase == "begin"]
    assert begun == [0, 1, 2, 3]
