"""Two launchers with a common rendezvous: the events of both nodes become one report with barriers between them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from conftest_launch import BOOTSEER
from registry import free_port

TORCHRUN = shutil.which("torchrun", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
]
DELAY_S = 3.0

JOB = """
import gc, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
gc.freeze()  # otherwise Python collects all objects of PyTorch at exit, in 0.6 s of processor time
"""


def _node(env, folder: Path, name: str, port: int, setup: Path) -> subprocess.Popen[str]:
    launcher = [
        TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    words = [*BOOTSEER, "run", "--job", "two", "--node", name, "--num-nodes", "2", "--spool", str(folder / "shared")]
    words += ["--setup", str(setup), "--", *map(str, launcher), "--rdzv-id=two", str(folder / "job.py")]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_slow_node_is_the_last_at_the_barrier_and_the_other_waits(env, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    quick, slow = tmp_path / "quick.sh", tmp_path / "slow.sh"
    quick.write_text("true\n")
    # On a busy machine, too, the other node reaches the barrier first.
    slow.write_text(f"until grep -rqs launcher_rendezvous {tmp_path}/shared; do sleep 1; done; sleep {DELAY_S}\n")
    port = free_port()
    first = _node(env, tmp_path, "node-a", port, quick)
    second = _node(env, tmp_path, "node-b", port, slow)
    for process in (first, second):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    found = scan(sources([str(tmp_path / "shared")]))
    report = analyse(found.events, Options(), read=found.input())
    assert {node.node for node in report.nodes} == {"node-a", "node-b"}
    assert (report.coverage.nodes_heard, report.coverage.ranks_heard) == (2, 2)
    chain = {link.barrier: link for link in report.critical_chain}
    launcher = chain["launcher_rendezvous:0"]
    assert (launcher.node, launcher.stage) == ("node-b", "environment_setup.script")
    assert "process_group" in chain
    waited = {node.node: node.wait_s for node in report.nodes}
    assert waited["node-a"] > DELAY_S / 2
    assert waited["node-b"] < waited["node-a"]
    for node in report.nodes:
        assert node.work_s + node.wait_s + node.untracked_s == pytest.approx(node.end_s - node.start_s, rel=0.01)
