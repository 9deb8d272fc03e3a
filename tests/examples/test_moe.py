"""The demo job, with real processes, checkpoints and damage."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import warm

MOE = Path(__file__).parents[2] / "examples" / "moe"
TINY = "--layers 2 --hidden 32 --heads 2 --experts 4 --checkpoint-mb 2 --sequence 32 --batch 4 --lr 0.01 --text-mb 1"
MISSING = [
    name for name in ("torch", "einops", "humanize", "psutil", "tqdm", "yaml") if not importlib.util.find_spec(name)
]

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(bool(MISSING), reason=f"needs scripts/requirements.txt; not installed: {', '.join(MISSING)}"),
]


def command(checkpoints: Path, flags: str, *, ranks: int | None = None) -> list[str]:
    """The job without or with torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    sizes = [*TINY.split(), *flags.split()]  # the last of repeated flags applies
    return [sys.executable, *torchrun, str(MOE / "train.py"), "--checkpoint-dir", str(checkpoints), *sizes]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def trained(checkpoints: Path, flags: str, *, ranks: int = 1) -> dict[int, float]:
    """Run the job, which must succeed. Returns the loss of each step."""
    return losses(run(checkpoints, flags, ranks=ranks))


def losses(result: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert result.returncode == 0, result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+) ", result.stdout, re.M)}


def torchrun(checkpoints: Path, flags: str, ranks: int) -> subprocess.CompletedProcess[str]:
    words = command(checkpoints, flags, ranks=ranks)
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600, check=False)


def run(checkpoints: Path, flags: str, *, ranks: int = 1, **limits: int) -> subprocess.CompletedProcess[str]:
    """The job without the seconds that each process takes to import PyTorch; of ranks, the first that failed or is."""
    commands = [command(checkpoints, flags)[2:]] * ranks
    results = warm.run(MOE / "train.py", *commands, folder=checkpoints.with_name("output"), **limits)
    return max(results, key=lambda result: result.returncode != 0)


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """The single error line that a failed run must print."""
    assert result.returncode == 1
    assert "train.py" not in result.stderr.replace("train.py: error: ", "")  # a traceback would name it
    lines = [line for line in result.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def newest(checkpoints: Path) -> Path:
    return checkpoints / (checkpoints / "latest").read_text().strip()


def files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}


def test_two_ranks_learn_and_a_stop_changes_nothing(tmp_path: Path) -> None:
    whole = losses(torchrun(tmp_path / "whole", "--steps 8", 2))
    assert sorted(whole) == list(range(1, 9))
    assert whole[8] < whole[1] - 1

    first = trained(tmp_path / "parts", "--steps 5", ranks=2)
    assert newest(tmp_path / "parts").name == "step-00000005"
    second = trained(tmp_path / "parts", "--steps 3", ranks=2)
    assert first | second == whole
    state = files(newest(tmp_path / "whole"))
    assert len(state) == 2
    assert sum(map(len, state.values())) == pytest.approx(2e6, rel=0.1)  # --checkpoint-mb 2
    assert files(newest(tmp_path / "parts")) == state

    # Half the ranks with twice the batch size use the same windows; one rank then has the experts of both.
    (tmp_path / "parts" / "latest").write_text("step-00000005\n")
    alone = trained(tmp_path / "parts", "--steps 3 --batch 8")
    assert alone == pytest.approx(second, abs=2e-3)


def test_ranks_that_cannot_share_the_experts_fail_with_one_line(tmp_path: Path) -> None:
    results = warm.run(MOE / "train.py", *[command(tmp_path, "--experts 3")[2:]] * 2, folder=tmp_path / "output")
    assert [result.returncode for result in results] == [1, 1]
    said = "".join(result.stderr for result in results)
    assert said.count("train.py: error: --experts 3 cannot be divided among 2 ranks\n") == 1


def test_kill_during_save_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    big = "--checkpoint-mb 60 --steps 2"
    trained(tmp_path, big)
    # A new session, so that the kill hits all of its processes and no others.
    process = subprocess.Popen(
        command(tmp_path, big),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not any((tmp_path / "step-00000004").glob("*.distcp")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    done = int(newest(tmp_path).name.removeprefix("step-"))
    assert done in (2, 4)
    assert sorted(trained(tmp_path, big)) == [done + 1, done + 2]
    assert newest(tmp_path).name == f"step-{done + 2:08d}"


def cut(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def scribble(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"\x00not a pickle")


def point_nowhere(checkpoint: Path) -> None:
    (checkpoint.parent / "latest").write_text("step-00000009\n")


def point_outside(checkpoint: Path) -> None:
    (checkpoint.parent / "latest").write_text("../elsewhere\n")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moe") / "checkpoints"
    trained(root, "--steps 1")
    return root


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "cannot load"),
        (scribble, "cannot load"),
        (point_nowhere, "names step-00000009, which is not there"),
        (point_outside, "does not name a checkpoint"),
    ],
)
def test_damaged_checkpoint_is_named(
    checkpoints: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(checkpoints, copy)
    damage(newest(copy))
    line = error_of(run(copy, "--steps 1"))
    assert said in line
    assert str(copy) in line


def test_full_disk_is_an_error_and_keeps_the_last_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(checkpoints, copy)
    assert "cannot save" in error_of(run(copy, "--steps 1", max_file_bytes=512 * 1024))
    assert newest(copy).name == "step-00000001"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layers 3", "is of another model"),
        ("--checkpoint-mb 1 --hidden 128", "--checkpoint-mb 1 is too small"),
        ("--text no/such/file", "cannot read the text: No such file or directory: no/such/file"),
    ],
)
def test_what_cannot_run_is_an_error_in_one_line(checkpoints: Path, flags: str, said: str) -> None:
    assert said in error_of(run(checkpoints, flags))


def test_the_job_does_not_know_bootseer() -> None:
    sources = [path.read_text() for path in MOE.glob("*.py")]
    assert sources
    assert not any("bootseer" in source for source in sources)
