"""Identity of a start: the precedence of launchers, and the effect of invalid variables."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.trace.event import KINDS
from bootseer.trace.identity import discover, expand_hosts, number, without_outer_job
from bootseer.trace.tracer import from_environment

VARIABLES = [
    "BOOTSEER_JOB",
    "BOOTSEER_ATTEMPT",
    "BOOTSEER_RESTART",
    "BOOTSEER_KIND",
    "BOOTSEER_NODE",
    "BOOTSEER_GPUS",
    "BOOTSEER_NUM_NODES",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_NNODES",
    "SLURMD_NODENAME",
    "PET_RDZV_ID",
    "PET_NNODES",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SKYPILOT_TASK_ID",
    "NODE_NAME",
    "POD_UID",
    "RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
]


def test_without_variables_the_identity_is_unknown() -> None:
    who = discover({}, hostname="box")
    assert (who.job, who.attempt, who.restart, who.kind, who.node, who.rank) == ("", None, 0, "full", "box", -1)
    assert (who.num_nodes, who.world_size, who.gpus, who.source) == (None, None, None, "host")
    assert discover({}, hostname="").node == "unknown"


@pytest.mark.parametrize(
    ("env", "job", "source"),
    [
        ({"BOOTSEER_JOB": "a", "SLURM_JOB_ID": "5"}, "a", "flag"),
        ({"SLURM_JOB_ID": "5", "TORCHELASTIC_RUN_ID": "x"}, "5", "slurm"),
        ({"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "moe"}, "moe-5", "slurm"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "m"}, "m-7_3", "slurm"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "9"}, "7_3", "slurm"),
        ({"PET_RDZV_ID": "k", "TORCHELASTIC_RUN_ID": "x"}, "k", "kubeflow"),
        ({"TORCHELASTIC_RUN_ID": "none", "SKYPILOT_TASK_ID": "s"}, "s", "skypilot"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "x", "torchrun"),
        ({"BOOTSEER_JOB": "  "}, "", "host"),
    ],
)
def test_job(env: dict[str, str], job: str, source: str) -> None:
    who = discover(env, hostname="box")
    assert (who.job, who.source) == (job, source)


def test_a_pod_made_again_is_another_node() -> None:
    first = discover({"NODE_NAME": "w-0", "POD_UID": "u1"}, hostname="box")
    second = discover({"NODE_NAME": "w-0", "POD_UID": "u2"}, hostname="box")
    assert first.node != second.node
    assert discover({"BOOTSEER_NODE": "mine", "POD_UID": "u1"}, hostname="box").node == "mine"


@pytest.mark.parametrize(
    ("outer", "here", "node"),
    [("n1", "n1", "mine"), ("n1", "n2", "n2"), ("", "n2", "n2"), ("n1", "", "mine"), (None, "n2", "mine")],
)
def test_a_process_that_srun_started_on_another_node_is_not_on_the_runs(
    outer: str | None, here: str, node: str
) -> None:
    env = {
        "BOOTSEER_NODE": "mine",
        "SLURMD_NODENAME": here,
        **({} if outer is None else {"BOOTSEER_SLURM_NODE": outer}),
    }
    assert discover(env, hostname="box").node == node


def test_a_job_that_a_runs_command_submits_is_not_part_of_the_run(tmp_path: Path) -> None:
    """`sbatch` passes the environment of its caller to the new job."""
    of_run = {"BOOTSEER_JOB": "first", "BOOTSEER_ATTEMPT": "3", "BOOTSEER_TRACE": f"spool:{tmp_path}", "HOME": "/h"}
    inside = {**of_run, "BOOTSEER_SLURM_JOB": "7", "SLURM_JOB_ID": "7"}
    submitted = {**inside, "SLURM_JOB_ID": "8"}
    assert discover(without_outer_job(inside), hostname="box")[:2] == ("first", 3)
    assert discover(without_outer_job(submitted), hostname="box")[:2] == ("8", None)
    assert without_outer_job(submitted)["HOME"] == "/h"
    assert from_environment(inside) is not None
    assert from_environment(submitted) is None
    assert from_environment({**submitted, "SLURM_HET_SIZE": "2"}) is not None


def test_the_script_of_a_batch_job_is_no_task() -> None:
    """sbatch sets SLURM_PROCID and SLURM_NTASKS for it; srun sets the variables of steps."""
    batch = {"SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
    assert discover(batch, hostname="box")[5:8] == (-1, 1, None)
    step = {**batch, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}
    assert discover(step, hostname="box")[5:8] == (3, 1, 8)


def test_the_number_of_a_pod_is_not_a_rank() -> None:
    """With the variables of Kubeflow, Volcano and others; torchrun gets it as the node rank."""
    volcano = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "w-0", "MASTER_PORT": "29500"}
    assert discover(volcano, hostname="box").rank == -1
    assert discover({**volcano, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, hostname="box").rank == 9
    pod = {"RANK": "1", "WORLD_SIZE": "16", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
    assert discover(pod, hostname="box")[5:8] == (-1, 2, 16)
    assert discover({**pod, "RANK": "9", "LOCAL_RANK": "1"}, hostname="box").rank == 9


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ({}, "full"),
        ({"BOOTSEER_KIND": "hot_update"}, "hot_update"),
        ({"BOOTSEER_KIND": "unheard of"}, "full"),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "restart"),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "BOOTSEER_KIND": "hot_update"}, "hot_update"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, "full"),
    ],
)
def test_kind(env: dict[str, str], kind: str) -> None:
    assert discover(env, hostname="box").kind == kind


@pytest.mark.parametrize(
    ("failures", "rendezvous", "restart"), [("0", "1", 1), ("1", "1", 1), ("1", "3", 3), ("2", "", 2)]
)
def test_workers_that_were_replaced_because_of_another_node_are_of_its_restart(
    failures: str, rendezvous: str, restart: int
) -> None:
    env = {"TORCHELASTIC_RESTART_COUNT": failures, "BOOTSEER_RENDEZVOUS": rendezvous}
    assert discover(env, hostname="box").restart == restart
    assert discover({**env, "BOOTSEER_RESTART": "4"}, hostname="box").restart == 4 + restart


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1,"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"BOOTSEER_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
    ],
)
def test_gpus(env: dict[str, str], gpus: int | None) -> None:
    assert discover(env, hostname="box").gpus == gpus


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3", "OMPI_COMM_WORLD_RANK": "1"}, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "2", "OMPI_COMM_WORLD_RANK": "1", "SLURM_GPUS_ON_NODE": "8"}, ""),
    ],
)
def test_names_of_a_ranks_own_gpus(env: dict[str, str], devices: str) -> None:
    assert discover(env, hostname="box").devices == devices


@pytest.mark.parametrize("text", ["", "-1", "1.5", "0x10", "٣", "1e3", "9" * 19, "abc", "1 2"])
def test_what_is_no_count_is_not_reported(text: str) -> None:
    assert number({"RANK": text}, "RANK") is None


def test_first_number_that_is_one() -> None:
    assert number({"A": "x", "B": " 7 ", "C": "8"}, "A", "B", "C") == 7


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text()), st.text())
def test_no_environment_raises(env: dict[str, str], hostname: str) -> None:
    who = discover(env, hostname=hostname)
    assert who.node
    assert who.kind in KINDS
    assert who.restart >= 0


@pytest.mark.parametrize(
    ("env", "topology"),
    [
        ({"SLURM_TOPOLOGY_ADDR": "s0.s4.s8.node1"}, "s0.s4.s8"),
        ({"SLURM_TOPOLOGY_ADDR": "node1"}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "s0.node1", "BOOTSEER_TOPOLOGY": "zone-a.rack7"}, "zone-a.rack7"),
    ],
)
def test_topology(env: dict[str, str], topology: str) -> None:
    assert discover(env, hostname="box").topology == topology


@pytest.mark.parametrize(
    ("env", "number"),
    [({"JOB_COMPLETION_INDEX": "3"}, 3), ({"PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "3"}, 1), ({}, None)],
)
def test_number_of_the_node(env: dict[str, str], number: int | None) -> None:
    assert discover(env, hostname="h").node_rank == number


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("r[1-2]n[08-10]-ib", [f"r{rack}n{n}-ib" for rack in (1, 2) for n in ("08", "09", "10")]),
        ("a[1]b,c", ["a1b", "c"]),
    ],
)
def test_slurms_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "a[", "a]", "a[b", "a[x]", "a[]", "a[3-1]", "node[4-1],a", "a[1]]"])
def test_malformed_host_lists_name_none(text: str) -> None:
    assert expand_hosts(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999999]",
        "n" + "[1-99]" * 500,
        ",".join(["n[1-9999]"] * 400),
        "n[" + ",".join(["1-19999"] * 500) + "]",
        "n[" + "0" * 4000 + "1-19999]",
        "n[1-20000]" + "[1]" * 1300,
        ",".join(["n[1-99999][1-99999][1-99999][9-1]"] * 120),
    ],
)
def test_too_long_host_lists_name_none_and_cost_no_time(text: str) -> None:
    """They may come from a log, which is not trusted."""
    began_s = time.process_time()
    assert expand_hosts(text) == []
    assert time.process_time() - began_s < 1
