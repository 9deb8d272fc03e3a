"""The identity of a process: job, attempt, node and rank, from environment variables.

Sources in order of precedence: the user (`BOOTSEER_*`, set by `bootseer run` from its options), Slurm, Kubeflow
(`PET_*`), TorchX, torchrun, mpirun, SkyPilot, host name. No I/O: environment and host name are arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bootseer.trace.event import KINDS, NO_RANK

Env = Mapping[str, str]
MAX_HOSTS = 20_000
_MAX_PIECES = 10
"""Slurm's names have at most five numbers."""
RESTART = "BOOTSEER_RESTART"
RENDEZVOUS = "BOOTSEER_RENDEZVOUS"
"""Set by the hook in torchrun's agent for its workers: the number of its rendezvous, from 0."""
OUTER_NODE = "BOOTSEER_SLURM_NODE"
"""Set by a run in a job of Slurm: the name of its node; empty where `salloc` was called."""
OUTER_JOB = "BOOTSEER_SLURM_JOB"
"""Set by a run in a job of Slurm: the number of the job."""
_SET_BY_RUN = frozenset(
    "BOOTSEER_TRACE BOOTSEER_JOB BOOTSEER_ATTEMPT BOOTSEER_KIND BOOTSEER_NODE BOOTSEER_RESTART BOOTSEER_RENDEZVOUS "  # noqa: SIM905
    "BOOTSEER_RUN_ID BOOTSEER_NUM_NODES BOOTSEER_GPUS BOOTSEER_CHECKPOINT BOOTSEER_PEERS_DIR BOOTSEER_WARM "
    "TRACEPARENT".split()
)


class Identity(NamedTuple):
    """The identity in every event of a process. Unknown fields are empty or None."""

    job: str = ""
    attempt: int | None = None
    restart: int = 0
    kind: str = KINDS[0]
    node: str = ""
    rank: int = NO_RANK
    num_nodes: int | None = None
    """Number of nodes of the job according to the launcher, for the report's coverage."""
    world_size: int | None = None
    gpus: int | None = None
    """GPUs of this node allocated to the job."""
    devices: str = ""
    """Their names, with commas between, if `gpus` is the number of devices that this rank may use."""
    source: str = "host"
    """The launcher that gave the job's name."""
    node_rank: int | None = None
    """Number of this node in the job, from 0."""
    topology: str = ""
    """The node's location in the network: switches or racks from the top, separated by dots."""


def without_outer_job(env: Env) -> Env:
    """The environment without the variables of the run whose command submitted this job of Slurm: `sbatch` passes them
    on. Components of a heterogeneous job have numbers of their own."""
    here = env.get("SLURM_JOB_ID", "")
    if not here or env.get(OUTER_JOB, here) == here or "SLURM_HET_SIZE" in env:
        return env
    return {name: value for name, value in env.items() if name not in _SET_BY_RUN}


def number(env: Env, *names: str) -> int | None:
    """The first of the variables that has a non-negative integer; None without one."""
    for name in names:
        text = env.get(name, "").strip()
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
    return None


def _job(env: Env) -> tuple[str, str]:
    for source, names in (
        ("flag", ("BOOTSEER_JOB",)),
        ("slurm", ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")),
        ("kubeflow", ("PET_RDZV_ID", "PET_RUN_ID")),
        ("torchx", ("TORCHX_JOB_ID",)),
        ("torchrun", ("TORCHELASTIC_RUN_ID",)),
        ("mpi", ("PMIX_NAMESPACE",)),
        ("skypilot", ("SKYPILOT_TASK_ID",)),
    ):
        for name in names:
            value = env.get(name, "").strip()
            if value and value != "none":  # torchrun's default run id is "none"
                if source == "slurm":
                    # All submissions of a script share the name, and the number alone says little to users.
                    named = env.get("SLURM_JOB_NAME", "").strip()
                    value = f"{named}-{value}" if named else value
                task = env.get("SLURM_ARRAY_TASK_ID", "") if name == "SLURM_ARRAY_JOB_ID" else ""
                return (f"{value}_{task}" if task else value), source
    return "", "host"


def _node(env: Env, hostname: str) -> str:
    slurms = env.get("SLURMD_NODENAME", "")
    # Processes that a run's command starts by `srun` inherit the run's variables on all nodes.
    is_moved = slurms and env.get(OUTER_NODE, slurms) != slurms
    given = "" if is_moved else env.get("BOOTSEER_NODE", "")
    name = given or slurms or env.get("NODE_NAME") or hostname
    # A recreated pod has the same name, but another uid.
    pod = env.get("POD_UID", "")
    return f"{name}/{pod}" if pod and not given else name


def _rank(env: Env) -> tuple[int | None, int | None]:
    """Rank and world size if the launcher starts one process per rank: torchrun, mpirun, srun."""
    # The RANK of Kubeflow's PyTorchJob, Volcano and others is the pod's number; torchrun replaces it for its processes.
    is_pods = bool(env.get("PET_NODE_RANK") or env.get("MASTER_ADDR")) and not env.get("LOCAL_RANK")
    for rank, size in (
        ("" if is_pods else "RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        if number(env, rank) is not None:
            return number(env, rank), number(env, size)
    # One task per node is a launcher such as torchrun; several are ranks. The script of sbatch is no task, although it
    # has SLURM_PROCID and SLURM_NTASKS: many jobs request tasks to get processors.
    tasks = number(env, "SLURM_STEP_NUM_TASKS")
    nodes = number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if tasks is not None and nodes is not None and tasks > nodes and number(env, "SLURM_PROCID") is not None:
        return number(env, "SLURM_PROCID"), tasks
    return None, number(env, "WORLD_SIZE")


def _gpus(env: Env) -> tuple[int | None, list[str]]:
    """The number of GPUs, and their names if the number is theirs."""
    gpus = number(env, "BOOTSEER_GPUS", "SLURM_GPUS_ON_NODE", "SKYPILOT_NUM_GPUS_PER_NODE")
    listed = env.get("CUDA_VISIBLE_DEVICES") or env.get("NVIDIA_VISIBLE_DEVICES") or ""
    if gpus is not None or listed in ("", "all", "none", "void", "NoDevFiles", "-1"):
        return gpus, []
    devices = [device for device in map(str.strip, listed.split(",")) if device]
    return len(devices), devices


def discover(env: Env, *, hostname: str) -> Identity:
    """The identity according to the environment; never raises."""
    job, source = _job(env)
    # `bootseer run --restarts` starts the launcher again, whose own count then restarts at 0. torchrun counts only
    # failures of the node's own workers; on the other nodes, workers are replaced after another rendezvous.
    launchers = max(number(env, RENDEZVOUS) or 0, number(env, "TORCHELASTIC_RESTART_COUNT") or 0)
    restart = (number(env, RESTART) or 0) + launchers
    kind = env.get("BOOTSEER_KIND", "")
    if restart and kind != "hot_update":
        kind = "restart"
    rank, world_size = _rank(env)
    gpus, devices = _gpus(env)
    return Identity(
        job=job,
        attempt=number(env, "BOOTSEER_ATTEMPT", "SLURM_RESTART_COUNT"),
        restart=restart,
        kind=kind if kind in KINDS else KINDS[0],
        node=_node(env, hostname) or "unknown",
        rank=NO_RANK if rank is None else rank,
        num_nodes=number(
            env, "BOOTSEER_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PET_NNODES", "SKYPILOT_NUM_NODES"
        ),
        world_size=world_size,
        gpus=gpus,
        devices="" if rank is None else ",".join(devices),
        source=source,
        node_rank=number(
            env,
            *("GROUP_RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SKYPILOT_NODE_RANK"),
            "JOB_COMPLETION_INDEX",  # indexed Jobs of Kubernetes
        ),
        # Slurm's topology address ends with the node's name.
        topology=env.get("BOOTSEER_TOPOLOGY", "").strip() or env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
    )


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it: `gpu[001-003,007],login1`; none of an invalid one, or of too many."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        found = [""]
        pieces = re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word)
        for literal, inside in pieces:
            ends = [literal] if literal else _numbers(inside)
            if len(pieces) > _MAX_PIECES or not 0 < len(found) * len(ends) <= MAX_HOSTS - len(hosts):
                return []
            found = [prefix + end for prefix in found for end in ends]
        hosts += found
    return hosts if set("[]").isdisjoint(re.sub(r"\[[^\[\]]*\]", "", text)) else []


def _numbers(inside: str) -> list[str]:
    """`001`, `002`, `007` of `001-002,007`."""
    numbers: list[str] = []
    for part in inside.split(","):
        if re.fullmatch(r"\d{1,9}(-\d{1,9})?", part, re.ASCII) is None:
            return []
        first, _, last = part.partition("-")
        if not int(first) <= int(last or first) < int(first) + MAX_HOSTS - len(numbers):
            return []
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
