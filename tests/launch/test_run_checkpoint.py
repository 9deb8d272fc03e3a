"""`bootseer run --checkpoint`: checkpoints are mounted while the command runs, and the report shows the reads."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.mounts import kernel
from bootseer.trace.event import Event
from conftest_launch import BOOTSEER
from image_node import Node, have_converted

pytestmark = [pytest.mark.root, pytest.mark.fuse]

Run = Callable[..., subprocess.CompletedProcess[str]]
Events = Callable[[], list[Event]]
SIZE = 20 << 20


@pytest.fixture
def env(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**env, "BOOTSEER_CACHE": str(tmp_path / "cache"), "BOOTSEER_RUNTIME": str(tmp_path / "runtime")}


@pytest.fixture
def job(run: Run, tmp_path: Path) -> Path:
    """A job's folder with one striped checkpoint, which `latest` names."""
    step = tmp_path / "step-1"
    step.mkdir()
    (step / "weights").write_bytes(os.urandom(SIZE))
    (step / "config.json").write_text("{}")
    assert run("ckpt", "put", str(step), str(tmp_path / "job")).returncode == 0
    assert (tmp_path / "job/step-1/weights").stat().st_size < SIZE, "it is striped"
    return tmp_path / "job"


@pytest.fixture
def ordinary(tmp_path: Path) -> Path:
    """A job's folder on this machine's disk, written without BootSeer."""
    step = tmp_path / "plain job/step-1"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(os.urandom(SIZE))
    (step.parent / "latest").write_text("step-1\n")
    return step.parent


def nothing_is_mounted(tmp_path: Path) -> None:
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]


def the(events: list[Event], stage: str) -> Event:
    (found,) = (event for event in events if event.stage == stage and event.phase in ("instant", "end"))
    return found


def test_the_command_reads_its_checkpoint_and_the_report_tells(
    run: Run, events: Events, job: Path, tmp_path: Path
) -> None:
    copy = 'cat "$BOOTSEER_CHECKPOINT/$(cat $BOOTSEER_CHECKPOINT/latest)/weights" > copy'
    ran = run("run", "-q", "--job", "j", "--checkpoint", str(job), "--", "sh", "-c", copy)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "step-1/weights").read_bytes()
    assert the(events(), "model_initialization.checkpoint_mount").outcome == "ok"
    told = the(events(), "checkpoint_start").attrs
    assert (told["uri"], told["until"], told["refused"], told["fallback"]) == (str(job), "end", 0, "")
    assert told["read_bytes"] >= SIZE
    assert told["place_bytes"] >= SIZE
    report = json.loads(run("report", "--json", "j").stdout)
    assert report["checkpoints"][0]["read_bytes"] == told["read_bytes"]
    nothing_is_mounted(tmp_path)


def test_what_the_command_writes_is_published(run: Run, job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write = 'mkdir "$0/step-2" && cp step-1/weights "$0/step-2/weights" && echo step-2 > "$0/latest"'
    ran = run("run", "-q", "--checkpoint", str(job), "--checkpoint-dir", str(folder), "--", "sh", "-c", write, folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert run("ckpt", "latest", str(job)).stdout == "step-2\n"
    assert run("ckpt", "get", f"{job}/step-2", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/weights").read_bytes() == (tmp_path / "step-1/weights").read_bytes()
    nothing_is_mounted(tmp_path)


_KILLED = """
import os, shutil, sys
os.mkdir(os.environ["BOOTSEER_CHECKPOINT"] + "/new")
file = os.open(os.environ["BOOTSEER_CHECKPOINT"] + "/new/half", os.O_WRONLY | os.O_CREAT)
os.write(file, bytes(1 << 20))
shutil.rmtree(sys.argv[1] + "/new")  # by another program
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_command_wrote_and_could_not_be_published_is_reported(run: Run, job: Path) -> None:
    """The daemon's log is removed with the mount."""
    ran = run("run", "-q", "--no-hook", "--checkpoint", str(job), "--", sys.executable, "-c", _KILLED, str(job))
    assert ran.returncode == 137
    assert f"bootseer: NOT published to {job} when their programs, or the mount, were killed: new/half" in ran.stderr


def test_the_next_start_finds_what_this_one_read_in_the_cache(run: Run, events: Events, job: Path) -> None:
    read = 'cat "$BOOTSEER_CHECKPOINT/step-1/weights" >/dev/null'
    for _ in range(2):
        assert run("run", "-q", "--job", "j", "--checkpoint", str(job), "--", "sh", "-c", read).returncode == 0
    first, second = (event.attrs for event in events() if event.stage == "checkpoint_start")
    assert first["place_bytes"] >= SIZE
    assert second["place_bytes"] < SIZE / 4
    assert second["cache_bytes"] >= SIZE


def test_a_place_that_cannot_be_reached_is_an_error_before_the_command(run: Run, tmp_path: Path) -> None:
    ran = run("run", "--checkpoint", str(tmp_path / "nowhere"), "--", "touch", "began")
    assert ran.returncode not in (0, 2)
    assert "nowhere" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "began").exists()
    nothing_is_mounted(tmp_path)


def test_a_folder_for_it_that_is_a_loop_of_links_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    words = ("--checkpoint", str(tmp_path / "plain"), "--checkpoint-dir", str(loop), "--checkpoint-read", "mount")
    ran = run("run", "-q", *words, "--", "true")
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (2, f"bootseer: {loop}: not a folder")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_a_limit_of_open_files_that_is_too_low_for_a_mount_is_named(run: Run, job: Path) -> None:
    ran = run("run", "-q", "--checkpoint", str(job), "--", "touch", "began", become=_few_files)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (
        2,
        "bootseer: a mount needs 256 open files; ulimit -Hn allows 64",
    )


def test_options_of_a_checkpoint_need_one(run: Run) -> None:
    ran = run("run", "--checkpoint-dir", "/x", "--", "true")
    assert ran.returncode == 2
    assert "give --checkpoint URI too" in ran.stderr
    ran = run("run", "--checkpoint", "/x", "--checkpoint-memory", "much", "--", "true")
    assert (ran.returncode, "is not a size" in ran.stderr) == (2, True)


def test_unmeasured_it_is_mounted_all_the_same(run: Run, job: Path, tmp_path: Path) -> None:
    words = ["run", "--checkpoint", str(job), "--", "sh", "-c", 'cat "$BOOTSEER_CHECKPOINT/latest"']
    ran = run(*words, more={"BOOTSEER_DISABLE": "1"})
    assert (ran.returncode, ran.stdout) == (0, "step-1\n")
    assert not (tmp_path / "spool").exists()
    nothing_is_mounted(tmp_path)


def test_unmeasured_nothing_is_restarted(run: Run, job: Path) -> None:
    words = ["run", "--restarts", "1", "--checkpoint", str(job), "--", "sh", "-c", "echo ran; exit 1"]
    ran = run(*words, more={"BOOTSEER_DISABLE": "1"})
    assert (ran.returncode, ran.stdout) == (1, "ran\n")


def test_what_is_left_running_does_not_keep_the_mount_and_is_reported(run: Run, job: Path, tmp_path: Path) -> None:
    leave = 'cd "$BOOTSEER_CHECKPOINT" && { setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!; }'
    ran = run("run", "-q", "--checkpoint", str(job), "--", "sh", "-c", leave)
    try:
        assert ran.returncode == 0
        assert "it is unmounted anyway, and processes that still use it get errors" in ran.stderr
        until = time.monotonic() + 120
        while [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.kill(int(ran.stdout), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_then_the_mount(
    env: dict[str, str], job: Path, tmp_path: Path, number: int
) -> None:
    words = ["run", "-q", "--checkpoint", str(job), "--", "sh", "-c", "echo ready; exec sleep 600"]
    with subprocess.Popen([*BOOTSEER, *words], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(300) == 128 + number
    nothing_is_mounted(tmp_path)


def test_a_container_has_the_checkpoints_too(
    run: Run, node: Node, env: dict[str, str], job: Path, ordinary: Path, tmp_path: Path
) -> None:
    more = {**node.env, "BOOTSEER_CACHE": env["BOOTSEER_CACHE"]}
    have_converted(node)
    script = 'cat "$BOOTSEER_CHECKPOINT/latest"; echo more > "$BOOTSEER_CHECKPOINT/note"'
    ran = run(
        "run", "-q", "--image", node.reference, "--checkpoint", str(job), "--", "sh", "-c", script, more=more
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "step-1\n"), ran.stderr
    assert (job / "note").read_text() == "more\n"
    words = ["run", "-q", "--image", node.reference, "--checkpoint", str(ordinary)]  # and one that is not mounted
    ran = run(*words, "--", "cat", f"{ordinary}/latest", more=more)
    assert (ran.returncode, ran.stdout) == (0, "step-1\n"), ran.stderr


def test_a_folder_on_a_local_disk_is_read_in_place_and_the_report_shows_why(
    run: Run, events: Events, ordinary: Path, tmp_path: Path
) -> None:
    script = 'echo "$BOOTSEER_CHECKPOINT"; cp -r "$BOOTSEER_CHECKPOINT/step-1" copy'
    ran = run("run", "-q", "--job", "j", "--checkpoint", str(ordinary), "--", "sh", "-c", script)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{ordinary}\n", "")
    assert (tmp_path / "copy/weights").read_bytes() == (ordinary / "step-1/weights").read_bytes()
    assert not (tmp_path / "cache").exists(), "a second copy"
    told = the(events(), "checkpoint_start").attrs
    assert (told["mode"], told["read_bytes"]) == ("plain", 0)
    (row,) = json.loads(run("report", "--json", "j").stdout)["checkpoints"]
    assert (row["mode"], row["reason"]) == ("plain", told["reason"])
    report = " ".join(run("report", "j").stdout.split())
    assert "read it directly from its folder: it lies on this machine (" in report


def test_one_that_is_not_mounted_is_not_shown_elsewhere(run: Run, ordinary: Path, tmp_path: Path) -> None:
    start = ["run", "-q", "--checkpoint", f"file://{ordinary}", "--checkpoint-dir"]
    ran = run(*start, str(tmp_path / "ckpt"), "--", "touch", "began")
    assert (ran.returncode, "leave --checkpoint-dir out" in ran.stderr) == (2, True)
    assert not (tmp_path / "began").exists()
    ran = run(*start, str(ordinary), "--", "sh", "-c", 'cat "$BOOTSEER_CHECKPOINT/latest"')
    assert (ran.returncode, ran.stdout) == (0, "step-1\n"), ran.stderr


def test_what_only_a_mount_can_show_or_the_user_wants_mounted_is_mounted(
    run: Run, events: Events, job: Path, ordinary: Path, tmp_path: Path
) -> None:
    look = 'wc -c < "$BOOTSEER_CHECKPOINT/step-1/weights"'
    for more in ([str(job)], [str(ordinary), "--checkpoint-read", "mount"]):
        ran = run("run", "-q", "--job", "j", "--checkpoint", *more, "--", "sh", "-c", look)
        assert (ran.returncode, ran.stdout) == (0, f"{SIZE}\n"), ran.stderr
    # A mount there may be a network file system.
    assert run("ckpt", "mount", str(ordinary), str(tmp_path / "far")).returncode == 0
    ran = run("run", "-q", "--job", "j", "--checkpoint", str(tmp_path / "far"), "--", "sh", "-c", look)
    assert run("ckpt", "umount", str(tmp_path / "far")).returncode == 0
    assert (ran.returncode, ran.stdout) == (0, f"{SIZE}\n"), ran.stderr
    found = [event.attrs for event in events() if event.stage == "checkpoint_start"]
    assert [one["mode"] for one in found] == ["mounted"] * 3
    assert found[0]["reason"] == f"striped files, or a policy that asks for them, are in {job}/step-1"
    assert found[1]["reason"] == "--checkpoint-read mount was given"
    assert found[2]["reason"] == "its file system (fuse.bootseer) may be far away"


@pytest.mark.parametrize("uri", ["job", "hdfs://127.0.0.1:1/x"])
def test_a_checkpoint_that_cannot_be_read_plainly_is_an_error(run: Run, job: Path, uri: str) -> None:
    ran = run("run", "--checkpoint", uri, "--checkpoint-read", "plain", "--", "touch", "began")
    assert (ran.returncode, "the checkpoint cannot be read plainly: " in ran.stderr) == (2, True)
    assert not (job.parent / "began").exists()
