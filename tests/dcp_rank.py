"""One rank of a job that saves or loads a sharded state, for tests: `python dcp_rank.py RANK RANKS MEET WHAT URI`.

It prints its result as one line of JSON. `MEET` is the file for the ranks' rendezvous.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bootseer.checkpoint.dcp import LoadSettings, StripedReader, StripedWriter

COLLECTIVES_S = 1200
"""Far longer than the test's own limit, so that a rank that waits for a collective counts as hanging."""


def full_state() -> dict[str, torch.Tensor]:
    """The state before it is sharded."""
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(1001, 700, generator=generator),
        "columns": torch.randn(50, 999, generator=generator),
        "everywhere": torch.randn(300, 200, generator=generator),
        "few": torch.randn(2, 3, generator=generator),
    }


def sharded(full: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state as DTensors, of which each rank has its shard."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    how = {"rows": Shard(0), "columns": Shard(1), "everywhere": Replicate(), "few": Shard(0)}
    return {name: distribute_tensor(tensor, mesh, [how[name]]) for name, tensor in full.items()}


def main() -> None:
    """Run the rank given by the arguments."""
    rank, ranks, meet, what, uri = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks, timeout=timedelta(seconds=COLLECTIVES_S)
    )
    told: dict[str, Any] = {"rank": rank}
    begin = time.monotonic()
    try:
        if what == "save":
            dcp.save({**sharded(full_state()), "step": 8}, storage_writer=StripedWriter(f"{uri}/ours"))
            dcp.save({**sharded(full_state()), "step": 8}, storage_writer=dcp.FileSystemWriter(f"{uri}/plain"))
        else:
            settings = LoadSettings(direct_bytes=1)
            if what == "load-all":
                told["ours, plainly"] = load(dcp.FileSystemReader(f"{uri}/ours"))
                told["plain"] = load(StripedReader(f"{uri}/plain", settings=settings))
            told["ours"] = load(StripedReader(f"{uri}/ours", settings=settings))
    except BaseException as error:
        told |= {"error": type(error).__name__, "message": str(error)}
    told["seconds"] = time.monotonic() - begin
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


def load(reader: Any) -> list[str]:
    """Load into zeros; returns the names of wrong values."""
    state: dict[str, Any] = sharded({name: torch.zeros_like(one) for name, one in full_state().items()})
    expected = sharded(full_state())
    state["step"] = 0
    dcp.load(state, storage_reader=reader)
    wrong = [name for name, one in expected.items() if not torch.equal(local(state[name]), local(one))]
    return wrong if state["step"] == 8 else [*wrong, "step"]


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local()


if __name__ == "__main__":
    main()
