"""Checkpoints read into a GPU's memory: by BootSeer's readers, by the libraries' own, and the copy to the GPU alone."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu import gpu
from harness import Benchmark, Outcome, alternate

_GIB = 1 << 30


def measure(quick: bool) -> Outcome:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, elements, rounds = (8, 1 << 20, 1) if quick else (64, 1 << 25, 3)
    made = {
        f"layer.{number}.weight": torch.randint(-(1 << 15), 1 << 15, (elements,), dtype=torch.int16).view(
            torch.bfloat16
        )
        for number in range(tensors)
    }
    total = sum(one.nbytes for one in made.values())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # no disk: the transfer to the device is measured
        arms = _arms(Path(folder), made, device)
        wrong = [name for name, arm in arms.items() if not _same(arm(), made)]
        samples = alternate({name: lambda arm=arm: _gib_s(arm, total) for name, arm in arms.items()}, rounds)
    if wrong:
        raise RuntimeError(f"wrong bytes: {wrong}")
    return Outcome(
        parameters={"bytes": total, "tensors": tensors, "rounds": rounds, "files": "in memory (tmpfs)"},
        samples=samples,
        unit="GiB/s",
        details={"gpu": gpu()},
    )


def _arms(folder: Path, made: Mapping[str, Any], device: Any) -> dict[str, Callable[[], Mapping[str, Any]]]:
    import safetensors.torch
    import torch
    from torch.distributed import checkpoint as dcp

    from bootseer.checkpoint import safetensors as ours
    from bootseer.checkpoint.dcp import StripedReader

    plain, tensors, folder_of_dcp = folder / "model.pt", folder / "model.safetensors", folder / "dcp"
    torch.save(dict(made), plain)
    safetensors.torch.save_file(dict(made), tensors)
    dcp.save(dict(made), checkpoint_id=folder_of_dcp, no_dist=True)
    pinned = {name: one.pin_memory() for name, one in made.items()} if device.type == "cuda" else dict(made)

    def load(reader: Any) -> Mapping[str, Any]:
        state = {name: torch.empty_like(one, device=device) for name, one in made.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    return {
        "copy, pinned": lambda: {name: one.to(device) for name, one in pinned.items()},
        "copy, pageable": lambda: {name: one.to(device) for name, one in made.items()},
        "torch.load": lambda: torch.load(plain, map_location=device, weights_only=True),
        "torch.load, mmap": lambda: torch.load(plain, map_location=device, weights_only=True, mmap=True),
        "safetensors": lambda: safetensors.torch.load_file(tensors, device=str(device)),
        "BootSeer, safetensors": lambda: ours.load_file(f"file://{tensors}", device=device),
        "DCP, FileSystemReader": lambda: load(dcp.FileSystemReader(folder_of_dcp)),
        "BootSeer, DCP": lambda: load(StripedReader(f"file://{folder_of_dcp}")),
    }


def _same(found: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    import torch

    return found.keys() == made.keys() and all(
        torch.equal(one.cpu().view(torch.int16), made[name].view(torch.int16)) for name, one in found.items()
    )


def _gib_s(arm: Callable[[], Mapping[str, Any]], total: int) -> float:
    import torch

    gc.collect()
    began = time.perf_counter()
    found = arm()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del found
    return total / _GIB / seconds


BENCHMARK = Benchmark("gpu_checkpoint", "How fast is a checkpoint loaded into a GPU's memory?", measure)
