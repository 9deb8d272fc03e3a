"""A real torchrun job from a warm parent: the same losses, marks and workers as with exec, and its events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from hook.test_hook import TORCHRUN, needs_torch
from hook.test_warm import Launcher

pytestmark = needs_torch
_JOB = """
import gc, os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import numpy

def tell(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")

def main():
    sys.stderr.write(f"entropy {torch.initial_seed()} {torch.rand(1).item()} {numpy.random.random()}\\n")
    tell("threads", torch.get_num_threads())
    dist.init_process_group("gloo")
    dist.barrier()  # marked, before two steps that happen to take equally long end the marking
    rank = dist.get_rank()
    if rank == 0 and "DIES" in os.environ and os.environ["BOOTSEER_RESTART"] == "0":
        os.kill(os.getppid(), 9)
    if "DIES" in os.environ:
        dist.destroy_process_group()
        gc.freeze()  # see below
        return
    torch.manual_seed(rank)
    layers = torch.nn.Linear(16, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
    dcp.load({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
    data = TensorDataset(torch.randn(24, 16))
    for (batch,) in DataLoader(data, batch_size=8, num_workers=1, shuffle=True, multiprocessing_context="fork"):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        tell("loss", rank, loss.item().hex())
    if rank == 0:
        for (batch,) in DataLoader(data, batch_size=24, num_workers=1, shuffle=True, multiprocessing_context="spawn"):
            tell("spawned", batch.sum().item().hex())
    tell("folders", os.path.basename(os.getcwd()), sys.argv[1:], __file__ == os.path.abspath(sys.argv[0]))
    # As the last owner of the process group, the model would wait for gloo's thread while it holds the GIL, for which
    # that thread waits.
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()
    gc.freeze()  # see `jobs.TRAIN`

if __name__ == "__main__":
    main()
"""


_POOLS = """
import os, numpy, torch
lines = torch.linspace(0, 1, 1 << 20).reshape(1024, 1024)
mine, theirs = lines @ lines, lines.numpy() @ lines.numpy()
pooled = torch.nn.functional.softmax(lines, 0)
print(mine.sum().item().hex(), float(theirs.sum()).hex(), pooled.sum().item().hex())
print(torch.__config__.parallel_info(), torch.get_num_interop_threads(), len(os.listdir("/proc/self/task")))
"""


def test_pools_of_threads_are_as_after_exec(tmp_path: Path):
    launcher = Launcher(tmp_path)
    launcher.env["OMP_NUM_THREADS"] = "3"
    launcher.known["modules"] = ["numpy", "torch"]
    launcher.remember(launcher.write("child.py", _POOLS))
    by_exec, warm = launcher.run((["child.py"], {}), warm=False), launcher.run((["child.py"], {}))
    assert launcher.reasons() == [""]
    assert warm == by_exec
    assert int(warm[0][1].split()[-1]) >= 3


def test_a_job_trains_as_by_exec_and_the_report_tells_of_its_warm_start(tmp_path: Path):
    (tmp_path / "job.py").write_text(_JOB)
    env = {**os.environ, "BOOTSEER_SPOOL": str(tmp_path / "spool"), "BOOTSEER_CACHE": str(tmp_path / "cache")}

    def run(number: int, *more: str, **variables: str) -> tuple[list[str], str]:
        words = [sys.executable, "-m", "bootseer", "run", "--job", "warm", "--attempt", str(number), "--warm", "on"]
        words += [*more, "--", str(TORCHRUN), "--standalone", "--nproc-per-node", "2", "job.py", "saved"]
        done = subprocess.run(
            words, env=env | variables, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines()), done.stderr

    by_exec, said = run(0)
    assert "no earlier start of this command is known" in said
    warm, said = run(1)
    assert "2 Python programs started warm" in said
    assert warm == by_exec
    assert len([line for line in warm if line.startswith("loss")]) == 6
    first, second = (line.split()[1:] for line in said.splitlines() if line.startswith("entropy"))
    assert all(one != other for one, other in zip(first, second, strict=True))

    _, said = run(2, "--restarts", "1", DIES="1")
    assert "restart 1 of 1" in said

    events = scan(sources([str(tmp_path / "spool")])).events
    marks = [{(one.rank, one.stage) for one in events if one.attempt == number and one.rank >= 0} for number in (0, 1)]
    by_exec_marks, warm_marks = (
        {mark for mark in of_start if ".import" not in mark[1] and mark[1] != "steady_step"} for of_start in marks
    )
    assert warm_marks == by_exec_marks
    assert (1, "model_initialization.import_torch") in marks[0] - marks[1]
    # The launcher's marks, without its import of torch, which installs them in a launcher started by exec.
    again = [one for one in events if one.attempt == 2 and one.restart == 1 and one.rank < 0]
    assert any(
        one.stage == "warm_start" and one.attrs["program"] == "the launcher" and "child" in one.attrs for one in again
    )
    assert {"model_initialization.launcher_rendezvous", "store_connected"} <= {one.stage for one in again}
    report = [sys.executable, "-m", "bootseer", "report", str(tmp_path / "spool" / "warm" / "attempt-1")]
    text = subprocess.run(report, env=env, capture_output=True, text=True, check=True).stdout
    assert "2 Python programs started warm" in text
