"""Save and load the sharded state: weights, Adam's moments, and the step.

    checkpoints/
      latest              the name of the newest complete checkpoint, in one line
      step-00000008/      what torch.distributed.checkpoint writes, and shape.yaml

`latest` is updated last and atomically, so a job killed at any moment resumes from a complete checkpoint. Each rank
writes and reads its own experts; the dense part is written once. A job may resume on another number of ranks.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from errors import JobError
from model import Model, Shape
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_NAME = re.compile(r"step-\d{8,}")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHAPE = "shape.yaml"


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    pointer = root / "latest"
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read {pointer}: {error}") from None
    if not _NAME.fullmatch(name):
        raise JobError(f"{pointer} does not name a checkpoint; write the name of a step-* folder into it")
    if not (root / name).is_dir():
        raise JobError(f"{pointer} names {name}, which is not there; write the name of another step-* folder into it")
    return root / name


def save(root: Path, step: int, model: Model, optimizer: torch.optim.Optimizer, shape: Shape) -> Path:
    """Write the state after `step` steps, then update `latest`. All ranks call this together."""
    path = root / f"step-{step:08d}"

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        if path.exists():  # left by a save that was killed, and not named by `latest`
            shutil.rmtree(path)
        path.mkdir()
        (path / _SHAPE).write_text(yaml.safe_dump(asdict(shape)))

    _first_rank(prepare, f"cannot save {path}")
    try:
        dcp.save({**_state(model, optimizer), "step": step}, checkpoint_id=path)
    except (OSError, dcp.CheckpointException) as error:
        raise JobError(f"cannot save {path}: {_reason(error)}") from None
    _first_rank(lambda: _publish(root, path.name), f"cannot save {path}")
    return path


def load(path: Path, model: Model, optimizer: torch.optim.Optimizer, shape: Shape) -> int:
    """Load model and optimizer from a checkpoint; returns its number of steps. All ranks call this together."""
    _check_shape(path, shape)
    state: dict[str, Any] = {**_state(model, optimizer), "step": 0}
    try:
        dcp.load(state, checkpoint_id=path)
    except (Exception, dcp.CheckpointException) as error:  # a damaged file raises anything from KeyError to EOFError
        raise JobError(
            f"cannot load {path}: {_reason(error)}; write the name of another step-* folder into {path.parent}/latest"
        ) from None
    for moments in optimizer.state.values():
        moments["step"].fill_(state["step"])
    return state["step"]


def _state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of the training state by name; those of experts as shards of one tensor over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        if not moments:  # AdamW creates these in its first step, which is after loading
            moments["step"] = torch.zeros(())
            moments.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS})
        for key, tensor in (("weight", parameter.detach()), *((moment, moments[moment]) for moment in _MOMENTS)):
            sharded = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) if model.is_expert(name) else tensor
            state[f"{name}.{key}"] = sharded
    return state


def _check_shape(path: Path, shape: Shape) -> None:
    try:
        saved = yaml.safe_load((path / _SHAPE).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise JobError(f"cannot load {path}: {_reason(error)}") from None
    if saved != asdict(shape):
        raise JobError(
            f"{path} is of another model: {saved}, this run asks for {asdict(shape)}; "
            "use the same sizes or another --checkpoint-dir"
        )


def _first_rank(action: Callable[[], None], problem: str) -> None:
    """Do this on one rank; all ranks continue or fail together."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome = [f"{problem}: {_reason(error)}"]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise JobError(outcome[0])


def _publish(root: Path, name: str) -> None:
    temporary = root / "latest.tmp"
    with temporary.open("w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / "latest")
    folder = os.open(root, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _reason(error: BaseException) -> str:
    """One line; of what all ranks report, the first rank's word."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
