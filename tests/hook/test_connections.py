"""The hook's events about connecting ranks, and their lines in the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.analysis.rank_connections import connection_lines
from bootseer.report.analysis.spans import Key, NodeSpans, Span, StartupSpans

JOB = """
import socket, threading
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29400", rank=0, world_size=1)
for thread in threading.enumerate():
    if thread.name == "bootseer-name":
        thread.join()
"""
NETWORK = """
ip link set lo up && ip address add 10.77.0.1/32 dev lo && mount --bind "$1" /etc/resolv.conf && shift && exec "$@"
"""


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_connect_that_waits_for_names_is_reported_with_its_reason(tmp_path: Path) -> None:
    """In a separate network namespace, with a DNS server that does not answer."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    env = {**os.environ, "BOOTSEER_SPOOL": str(tmp_path / "spool"), "RES_OPTIONS": "timeout:2 attempts:1"}
    bootseer = [sys.executable, "-m", "bootseer"]
    words = ["unshare", "-n", "-m", "sh", "-ec", NETWORK, "sh", str(tmp_path / "resolv.conf"), *bootseer, "run"]
    ran = subprocess.run(
        [*words, "--job", "named", "--", sys.executable, str(tmp_path / "job.py")],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = subprocess.run([*bootseer, "report", "named", "--json"], env=env, capture_output=True, text=True, check=True)
    (line,) = json.loads(told.stdout)["connections"]
    assert line.startswith("connecting to the store ")
    assert ": reverse DNS took 2" in line
    assert "for 10.77.0.1" in line


def startup(*marks: tuple[str, int, dict[str, Any]], torch: str = "2.13.0") -> StartupSpans:
    spans = [Span("model_initialization.import_torch", "a", 0, 1, 0, 1, "ok", {"version": torch})]
    instants = [Span(stage, "a", rank, 1, 1, 1, "ok", attrs) for stage, rank, attrs in marks]
    return StartupSpans(Key("job", 0, 0), "first", {"a": NodeSpans("a", spans, instants)}, {})


def test_the_rank_for_which_all_others_waited_is_named_for_each_slow_group() -> None:
    names = {"group_names": "data\n\nexpert", "group_keys": "10 0 30", "keys": 40}
    lines = connection_lines(
        startup(
            ("ranks_connected", 0, {"groups": 3, "groups_s": 4.2, "group_ms": "1200 0 3000", **names}),
            ("ranks_connected", 1, {"groups": 3, "groups_s": 4.1, "group_ms": "1100 1500 1500"}),
            ("ranks_connected", 2, {"groups": 3, "groups_s": 0.1, "group_ms": "50 0 50"}),
        )
    )
    assert lines == [
        "creating 3 process groups after the first took 4.20 s on a rank 0; a rank 2 came last, and waited 0.10 s",
        "process group expert: 3.00 s on a rank 0; a rank 2 came last, and waited 0.05 s; 30 keys in the store then",
        "process group number 2: 1.50 s on a rank 1; a rank 0 came last, and waited 0.00 s",
        "process group data: 1.20 s on a rank 0; a rank 2 came last, and waited 0.05 s; 10 keys in the store then",
        "40 keys in the store after the first collective",
    ]


GROUPS = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.new_group([0], group_desc="quick")
time.sleep(1.5 * dist.get_rank())
dist.new_group([0, 1], group_desc="expert")
dist.barrier()
"""


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_rank_that_creates_a_group_late_is_reported(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(GROUPS)
    env = {**os.environ, "BOOTSEER_SPOOL": str(tmp_path / "spool")}
    bootseer = [sys.executable, "-m", "bootseer"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*bootseer, "run", "--job", "grouped", "--", *torchrun, str(tmp_path / "job.py")],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = subprocess.run([*bootseer, "report", "grouped", "--json"], env=env, capture_output=True, check=True)
    whole, expert, keys = json.loads(told.stdout)["connections"]
    assert whole.startswith("creating 2 process groups after the first took 1.")
    took, last, in_store = expert.split("; ")
    assert re.fullmatch(r"process group expert: 1\.\d\d s on \S+ rank 0", took)
    assert re.fullmatch(r"\S+ rank 1 came last, and waited 0\.\d\d s", last)
    assert re.fullmatch(r"\d+ keys in the store then", in_store)
    assert keys.endswith("keys in the store after the first collective")


def test_settings_known_to_be_slow_for_many_ranks_are_reported() -> None:
    many = ("rank_known", 0, {"world_size": 1440})
    first = {"libuv": True, "nccl": "2.21.5", "somaxconn": 1024, "open_files": 1024}
    assert connection_lines(startup(many, ("ranks_connected", 0, first), torch="2.3.1+cu121")) == [
        "torch 2.3: rendezvous and store are slow for 1440 ranks before 2.4",
        "NCCL 2.21: communicators of 1440 ranks come up slowly before 2.23",
        "net.core.somaxconn is 1024 on rank 0's node, but 1440 ranks connect at once",
        "rank 0 may open 1024 files (ulimit -n), but its store needs a connection for each of 1440 ranks",
    ]
    (line,) = connection_lines(startup(many, ("ranks_connected", 0, {"libuv": False})))
    assert line.startswith("USE_LIBUV=0")
    assert connection_lines(startup(("rank_known", 0, {"world_size": 8}), ("ranks_connected", 0, first))) == []


def test_events_with_invalid_attributes_are_read() -> None:
    odd = {"seconds": "x", "groups": [1], "groups_s": True, "nccl": 7, "somaxconn": -1, "world_size": "8", "keys": None}
    odd |= {"group_ms": "-1 x 9e9", "group_names": 7, "group_keys": ["\n"]}
    stages = ("store_connected", "reverse_dns", "ranks_connected", "rank_known")
    assert connection_lines(startup(*((stage, 0, odd) for stage in stages), torch="new")) == []
