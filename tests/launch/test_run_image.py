"""`bootseer run --image` and `bootseer image run`: the command behaves in its container as it would without one, and
the loading of the image is measured."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.artifact.workload import workload_key
from bootseer.mounts import kernel
from bootseer.mounts.state import Runtime
from bootseer.trace.event import Event
from busybox import running
from conftest_launch import BOOTSEER
from image_node import Node, have_converted

pytestmark = [pytest.mark.root, pytest.mark.fuse]

Run = Callable[..., subprocess.CompletedProcess[str]]
Events = Callable[[], list[Event]]


@pytest.fixture
def env(env: dict[str, str], node: Node) -> dict[str, str]:
    return {**env, **node.env}


@pytest.fixture
def image(node: Node) -> str:
    """The reference of a converted image."""
    have_converted(node)
    return node.reference


def nothing_is_left(node: Node) -> None:
    points = [point for point in kernel.mount_points() if point.startswith(f"{node.folder}/")]
    assert all(point.startswith(f"{node.runtime}/layers/") for point in points), points
    assert list((node.cache / "containers").iterdir()) == []
    assert list((node.runtime / "mounts").iterdir()) == []


def test_arguments_streams_and_exit_code_pass(run: Run, image: str, node: Node) -> None:
    ran = run(
        "run", "-q", "--image", image, "--loading", "lazy", "--",
        "sh", "-c", 'cat; echo "$0|$1|$GREETING"; pwd; echo err >&2; exit 7', "a b", "c'd",
        input="in\n",
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "in\na b|c'd|hello\n/work\n", "err\n")
    nothing_is_left(node)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command_and_its_end_is_reported(
    image: str, env: dict[str, str], node: Node, number: int
) -> None:
    script = (  # a signal that the command catches does not end its worker
        "sleep 600 & worker=$!; trap 'sleep 0.1; read -r _ _ state _ < /proc/$worker/stat; echo got USR1 $state' USR1;"
        "echo ready; while :; do sleep 0.05; done"
    )
    words = ["run", "-q", "--image", image, "--", "sh", "-c", script]
    with subprocess.Popen([*BOOTSEER, *words], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        answer = "got USR1 S\n"
        if number == signal.SIGUSR1:
            answer = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert (answer, process.wait(300)) == ("got USR1 S\n", 128 + signal.SIGTERM)
    nothing_is_left(node)


@pytest.mark.parametrize("handler", ["trap - TERM", "trap 'exit 1' TERM"])
def test_a_signal_while_the_runtime_starts_the_container_is_in_the_exit_code(
    image: str, env: dict[str, str], node: Node, tmp_path: Path, handler: str
) -> None:
    """Depending on the moment, the signal ends the runtime, or a child of the runtime, which then fails."""
    runtime = tmp_path / "programs/runc"
    runtime.parent.mkdir()
    runtime.write_text(f"#!/bin/sh\n{handler}\necho starting\nsleep 60 >/dev/null & wait\n")
    runtime.chmod(0o755)
    words = ["run", "-q", "--image", image, "--runtime", "runc", "--", "true"]
    env = {**env, "PATH": f"{runtime.parent}:{env['PATH']}"}
    with subprocess.Popen([*BOOTSEER, *words], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.terminate()
        assert process.wait(300) == 128 + signal.SIGTERM
    nothing_is_left(node)


def test_a_terminal_stays_one(image: str, env: dict[str, str], node: Node) -> None:
    master, slave = pty.openpty()
    words = [
        "run",
        "-q",
        "--image",
        image,
        "--",
        "sh",
        "-c",
        "test -t 0 && test -t 1 && echo yes",
    ]
    with subprocess.Popen([*BOOTSEER, *words], env=env, stdin=slave, stdout=slave, stderr=subprocess.PIPE) as process:
        os.close(slave)
        assert process.wait(300) == 0, process.stderr and process.stderr.read()
        assert os.read(master, 100) == b"yes\r\n"
    os.close(master)


def test_a_killed_run_leaves_neither_command_nor_mounts(image: str, env: dict[str, str], node: Node) -> None:
    """Nor processes that the command started, whatever their parents and sessions."""
    words = ["run", "-q", "--image", image, "--loading", "lazy", "--"]
    script = ["sh", "-c", "(busybox setsid sleep 600.99 &) ; (sleep 600.99 &) ; echo up; exec sleep 600.99"]
    with subprocess.Popen([*BOOTSEER, *words, *script], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        until(lambda: len(running("sleep 600.99")) == 3)
        process.kill()
    until(lambda: running("sleep 600.99") == [])
    until(lambda: not any("/containers/" in point and str(node.folder) in point for point in kernel.mount_points()))
    until(lambda: list((node.cache / "containers").iterdir()) == [])


def test_a_run_that_was_killed_with_its_guard_is_cleaned_up_after_by_the_next(
    run: Run, image: str, env: dict[str, str], node: Node
) -> None:
    """Schedulers kill all processes of a job at once."""
    words = [*BOOTSEER, "run", "-q", "--image", image, "--", "sh", "-c", "echo up; exec sleep 600.98"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (guard,) = (pid for pid in children if b"trap ''" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(guard), signal.SIGKILL)
        process.kill()
    until(lambda: running("sleep 600.98") == [])
    assert [point for point in kernel.mount_points() if f"{node.cache}/containers/start-" in point]

    def cleans_up() -> bool:
        assert run("run", "-q", "--image", image, "--", "true").returncode == 0
        return list((node.cache / "containers").iterdir()) == []

    until(cleans_up)  # its daemon needs a moment to end, and holds the folder's lock meanwhile
    nothing_is_left(node)


def test_what_a_run_left_that_was_killed_with_its_guard_is_deleted_by_the_next(
    run: Run, image: str, node: Node
) -> None:
    left = node.cache / "containers" / "start-dead" / "upper" / "large"
    left.parent.mkdir(parents=True)
    left.write_text("what its container had written")
    for folder in (left.parent, left.parent.parent, left.parent.parent.parent):
        folder.chmod(0o700)
    assert run("run", "-q", "--image", image, "--", "true").returncode == 0
    nothing_is_left(node)


def test_open_files_of_the_caller_are_closed_in_the_container(image: str, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    words = ["image", "run", "--entrypoint", "none", image, "--", "sh", "-c", "cat /proc/*/fd/9/../*/secret; ls /"]
    shell = 'exec 9<"$0"; exec "$@"'
    (tmp_path / "folder").mkdir()
    ran = subprocess.run(
        ["sh", "-c", shell, str(tmp_path / "folder"), *BOOTSEER, *words],
        env=env, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert "of the host" not in ran.stdout
    assert "bin\n" in ran.stdout, ran.stderr


@pytest.mark.parametrize("setup", [False, True])
def test_copies_of_its_mounts_in_other_namespaces_do_not_hold_up_the_end(
    image: str, env: dict[str, str], node: Node, tmp_path: Path, setup: bool
) -> None:
    """For example on hosts whose root is a private mount, where such copies are not unmounted with the original."""
    (tmp_path / "setup.sh").write_text("echo tool > /opt-tool\n")
    words = ["run", "-q", "--image", image, "--loading", "lazy", *(["--setup", "setup.sh"] if setup else []), "--"]
    script = ["sh", "-c", "echo up; read line; exit 3"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*BOOTSEER, *words, *script], env=env, cwd=tmp_path, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "up\n"
        copying = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]
        with subprocess.Popen(copying, stdout=subprocess.PIPE) as elsewhere:
            try:
                elsewhere.stdout.readline()  # type: ignore[union-attr]
                _, err = process.communicate("go\n", timeout=180)
                assert (process.returncode, "unmounted" in err) == (3, False), err
                nothing_is_left(node)
            finally:
                elsewhere.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "did not come true in 120 s"
        time.sleep(0.02)


def test_a_command_that_is_not_in_the_image_ends_as_a_shell_s_would(run: Run, image: str, node: Node) -> None:
    ran = run("run", "--image", image, "--", "nothing")
    assert ran.returncode == 127
    assert "\nbootseer: nothing: command not found in the container\n" in ran.stderr
    nothing_is_left(node)


def test_the_image_is_a_stage_and_its_start_is_reported(run: Run, events: Events, image: str, node: Node) -> None:
    ran = run("run", "-q", "--image", image, "--loading", "lazy", "--", "sha256sum", "/hot")
    assert ran.returncode == 0
    seen = events()
    stages = {event.stage: event.outcome for event in seen if event.phase == "end"}
    assert {"image_loading", "image_loading.resolve", "image_loading.mount", "command", "run"} <= set(stages)
    assert set(stages.values()) == {"ok"}
    (start,) = [event for event in seen if event.stage == "image_start"]
    assert (start.attrs["mode"], start.attrs["until"], start.attrs["digest"]) == ("lazy", "end", node.digest)
    assert start.attrs["demand_bytes"] > 6 << 20
    report = json.loads(run("report", "--json").stdout)
    (shown,) = report["images"]
    assert (shown["mode"], shown["demand_bytes"]) == ("lazy", start.attrs["demand_bytes"])
    assert "lazily without a hot set" in run("report").stdout


def test_the_second_start_has_the_hot_set_of_the_first(run: Run, events: Events, image: str, tmp_path: Path) -> None:
    words = ("run", "-q", "--image", image, "--loading", "lazy", "--", "sha256sum", "/hot")
    assert run(*words).returncode == 0
    assert run(*words, more={"BOOTSEER_CACHE": str(tmp_path / "other")}).returncode == 0
    modes = [event.attrs["mode"] for event in events() if event.stage == "image_start"]
    assert modes == ["lazy", "hot"]
    shown = json.loads(run("image", "hotset", "show", image, "--json").stdout)["hotsets"]
    assert [(row["workload"], row["runs"]) for row in shown] == [(workload_key(["sha256sum", "/hot"]), 2)]


def test_the_start_of_training_ends_the_record(run: Run, events: Events, env: dict[str, str], image: str) -> None:
    """The hook in the container reports through the spool; here a shell writes its event."""
    line = (
        '@bootseer1 {"wall_ns":%s,"mono_ns":%s,"job":"\'$BOOTSEER_JOB\'","attempt":0,"node":"\'$BOOTSEER_NODE\'",'
        '"stage":"training_began","phase":"instant","span":"00f067aa0ba902b7"}'
    )
    script = (
        "now=$(($(busybox date +%s) + 1))000000000; spool=${BOOTSEER_TRACE#spool:}; "
        f"printf '{line}\\n' $now $now >> $spool/own.events; "
        "while ! busybox grep -q image_start $spool/*.events; do sleep 0.1; done; sha256sum /hot"
    )
    ran = run("run", "-q", "--image", image, "--loading", "lazy", "--", "sh", "-c", script)
    assert ran.returncode == 0, ran.stderr
    (start,) = [event for event in events() if event.stage == "image_start"]
    assert start.attrs["until"] == "training_began"
    assert start.attrs["demand_bytes"] < 6 << 20  # later reads belong to no start


def test_the_hook_s_package_and_the_spool_are_there_and_secrets_are_not(run: Run, image: str) -> None:
    more = {"AWS_SECRET_ACCESS_KEY": "hidden", "MASTER_ADDR": "n0"}
    script = "env; ls $PYTHONPATH/sitecustomize.py ${BOOTSEER_TRACE#spool:}"
    ran = run(
        "run",
        "-q",
        "--image",
        image,
        "--container-env",
        "PYTHONPATH=/own",
        "--",
        "sh",
        "-c",
        f"PYTHONPATH=${{PYTHONPATH%:*}}; {script}",
        more=more,
    )
    assert ran.returncode == 0, ran.stderr
    assert "hidden" not in ran.stdout
    assert "MASTER_ADDR=n0" in ran.stdout


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's python3 to run in the container")
def test_python_in_the_container_finds_the_hook(run: Run, image: str) -> None:
    """The host's Python and libraries, mounted into the image, import the hook as an image's Python would."""
    mounts = [
        word for name in ("/usr", "/lib", "/lib64") if Path(name).exists() for word in ("--mount", f"{name}:{name}:ro")
    ]
    code = "import sitecustomize, sys; print(sitecustomize.__file__)"
    ran = run("run", "-q", "--image", image, *mounts, "--", "/usr/bin/python3", "-c", code)
    assert ran.stdout == "/run/bootseer/bootseer/hook/path/sitecustomize.py\n", ran.stderr


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's python3 to run in the container")
def test_a_launcher_in_the_container_has_a_warm_parent_there(run: Run, image: str, tmp_path: Path) -> None:
    """The record is passed through the spool; an empty package has the name that the hook watches for."""
    (tmp_path / "launch.py").write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '/job/child.py']))"
    )
    (tmp_path / "child.py").write_text("import decimal, safetensors; print(safetensors.__file__)")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "safetensors.py").touch()
    names = ("/usr", "/lib", "/lib64")
    mounts = [word for name in names if Path(name).exists() for word in ("--mount", f"{name}:{name}:ro")]
    mounts += ["--mount", f"{tmp_path}:/job:ro", "--container-env", "PYTHONPATH=/job/library", "--user", "worker"]
    tmp_path.chmod(0o755)
    words = ["run", "--image", image, "--warm", "on", "--loading", "lazy", *mounts]
    words += ["--", "/usr/bin/python3", "/job/launch.py"]
    first, again = run(*words), run(*words)
    elsewhere = run(*words, more={"BOOTSEER_CACHE": str(tmp_path / "other-cache")})
    assert first.stdout == again.stdout == elsewhere.stdout == "/job/library/safetensors.py\n", elsewhere.stderr
    assert "no earlier start of this command is known" in first.stderr
    assert "1 Python program started warm" in again.stderr
    assert "1 Python program started warm" in elsewhere.stderr  # the record came with the image's hot set


def test_another_user_may_write_events_too(run: Run, image: str, env: dict[str, str]) -> None:
    script = "echo x > ${BOOTSEER_TRACE#spool:}/mine.events && id -u"
    ran = run("run", "-q", "--image", image, "--user", "worker", "--", "sh", "-c", script)
    assert (ran.returncode, ran.stdout) == (0, "1000\n"), ran.stderr


@pytest.mark.parametrize("planted", ["moe", "moe/attempt-0"])
def test_a_spool_that_another_user_prepared_is_not_used(
    run: Run, image: str, open_folder: Path, tmp_path: Path, planted: str
) -> None:
    """With a link in a shared folder, root must not give away the link's target."""
    victim = tmp_path / "victim"
    victim.mkdir()
    open_folder.chmod(0o1777)
    link = open_folder / planted
    if link.parent != open_folder:
        link.parent.mkdir()
        os.chown(link.parent, 1000, 1000)
    link.symlink_to(victim)
    os.chown(link, 1000, 1000, follow_symlinks=False)
    ran = run(
        "run", "-q", "--spool", str(open_folder), "--job", "moe", "--attempt", "0", "--image", image,
        "--user", "worker", "--", "sh", "-c", "touch /run/bootseer/spool/here; id -u",
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "1000\n"), ran.stderr
    assert f"{open_folder}/moe" in ran.stderr and "the command runs unmeasured" in ran.stderr
    assert victim.stat().st_uid == 0
    assert list(victim.iterdir()) == []


def test_mounts_are_for_the_container_s_user_whatever_the_umask(run: Run, image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    script = "cd /new/data; > /run/bootseer/spool/x; umask"
    words = ("--user", "worker", "--mount", f"{tmp_path}:/new/data", "--", "sh", "-c", script)
    ran = run("run", "-q", "--image", image, *words, umask=0o077)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0022\n", "")


def test_in_a_shared_spool_each_user_has_folders_of_their_own(run: Run, image: str, open_folder: Path) -> None:
    open_folder.chmod(0o1777)
    words = ["run", "-q", "--spool", str(open_folder), "--job", "moe", "--attempt", "0", "--image", image]
    for _ in range(2):  # like two nodes of one attempt
        ran = run(*words, "--user", "worker", "--", "sh", "-c", "touch /run/bootseer/spool/$$")
        assert (ran.returncode, ran.stderr) == (0, "")
    job, attempt = (open_folder / name for name in ("moe", "moe/attempt-0"))
    assert (job.stat().st_uid, job.stat().st_mode & 0o777) == (0, 0o700)
    assert (attempt.stat().st_uid, attempt.stat().st_mode & 0o777) == (1000, 0o750)
    for path in attempt.glob("*.events"):
        assert path.stat().st_mode & 0o007 == 0


def test_a_cache_below_another_user_s_folder_is_not_used(run: Run, image: str, open_folder: Path) -> None:
    theirs = open_folder / "theirs"
    (theirs / "cache").mkdir(parents=True)
    os.chown(theirs, 1000, 1000)
    ran = run("run", "-q", "--image", image, "--", "true", more={"BOOTSEER_CACHE": str(theirs / "cache")})
    assert ran.returncode == 1
    assert f"{theirs} belongs to user 1000, not to user 0: set BOOTSEER_CACHE to another folder" in ran.stderr


@pytest.mark.parametrize("name", ["converted", "images", "hotsets", "containers", "blocks"])
def test_what_another_user_put_into_the_cache_is_not_used(run: Run, image: str, node: Node, name: str) -> None:
    shutil.rmtree(node.cache, ignore_errors=True)
    (node.cache / name).mkdir(parents=True)
    os.chown(node.cache / name, 1000, 1000)
    ran = run("run", "-q", "--image", image, "--", "true")
    assert ran.returncode == 1
    assert f"{node.cache / name} belongs to user 1000" in ran.stderr


def test_an_image_that_is_not_converted_is_a_fallback_in_the_report(run: Run, events: Events, node: Node) -> None:
    ran = run("run", "-q", "--image", node.reference, "--", "true")
    assert ran.returncode == 0
    assert "is not converted" in ran.stderr
    (start,) = [event for event in events() if event.stage == "image_start"]
    assert start.attrs["mode"] == "fallback"
    assert "image_loading.fallback" in {event.stage for event in events()}
    assert "as a fallback" in run("report").stdout


def test_an_image_that_does_not_exist_ends_the_run_with_one_line(run: Run, events: Events, node: Node) -> None:
    ran = run("run", "-q", "--image", f"{node.registry.host}/no/such:1", "--", "true")
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert f"no such tag or repository: {node.registry.host}/no/such:1" in ran.stderr
    outcomes = {event.stage: event.outcome for event in events() if event.phase == "end"}
    assert (outcomes["image_loading"], outcomes["run"]) == ("failed", "failed")


def test_a_mount_daemon_that_dies_under_the_command_is_reported(image: str, env: dict[str, str], node: Node) -> None:
    words = ["image", "run", "--loading", "lazy", "--entrypoint", "none", image, "--"]
    script = ["sh", "-c", "echo up; read line; cat /cold > /dev/null || echo failed"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*BOOTSEER, *words, *script], env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "up\n"
        (state,) = Runtime(node.runtime).all()
        assert state.daemon is not None
        assert Path(f"/proc/{state.daemon.pid}/comm").read_text() == "bootseer-mount\n"
        state.daemon.signal(signal.SIGKILL)
        until(lambda: state.daemon is not None and not state.daemon.alive)
        _, err = process.communicate("go\n", timeout=180)
    assert "the mount daemon died while the command ran: later reads of the image failed" in err
    assert err.count("mount daemon") == 1


def test_a_damaged_store_is_reported_at_the_end(run: Run, node: Node) -> None:
    store = node.folder / "store"
    assert run("image", "convert", node.reference, str(store)).returncode == 0
    largest = max((path for path in store.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.chmod(0o600)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(bytes(600_000))
    words = ["image", "run", "--store", str(store), "--loading", "lazy", "--entrypoint", "none", node.reference, "--"]
    ran = run(*words, "sh", "-c", "cat /hot /cold > /dev/null; cat /hot /cold > /dev/null; exit 3")
    assert ran.returncode == 3
    assert ran.stderr.count("its store has damaged blocks") == 1
    assert str(store) in ran.stderr


def test_an_interrupt_while_the_image_is_loaded_ends_the_run_at_once(node: Node, env: dict[str, str]) -> None:
    """The registry does not answer; Ctrl-C does not wait for it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        reference = f"127.0.0.1:{silent.getsockname()[1]}/a/b:1"
        words = ["run", "-q", "--image", reference, "--", "true"]
        with subprocess.Popen([*BOOTSEER, *words], env=env, stderr=subprocess.PIPE, text=True) as process:
            link, _ = silent.accept()
            with link:
                process.send_signal(signal.SIGINT)
                assert process.wait(120) == 130
            assert process.stderr is not None
            assert "interrupted by SIGINT" in process.stderr.read()


def test_options_of_a_container_without_an_image_are_refused(run: Run) -> None:
    ran = run("run", "--mount", "/:/host", "--", "true")
    assert ran.returncode == 2
    assert "give --image REF too" in ran.stderr


def test_switched_off_the_command_still_runs_in_its_image(run: Run, image: str, env: dict[str, str]) -> None:
    ran = run("run", "--image", image, "--", "pwd", more={"BOOTSEER_DISABLE": "1"})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "/work\n", "")
    assert not Path(env["BOOTSEER_SPOOL"]).exists()


def test_image_run_runs_the_image_s_own_command(run: Run, image: str) -> None:
    ran = run("image", "run", image, input="echo from the shell; exit 3\n")
    assert (ran.returncode, ran.stdout) == (3, "from the shell\n")


def test_options_of_runs_import_no_modules_for_images() -> None:
    """The options for images must not make a plain run import the modules for images."""
    code = "import sys; from bootseer.cli.run_options import OPTIONS; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("bootseer.image", "bootseer.mounts", "bootseer.store"))]
