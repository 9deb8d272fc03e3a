"""A training job on one GPU with its own timestamps, to compare with the hook's marks.

    gpu_job.py --way eager --out points.json [--backend nccl] [--steps 20] [--width 512]

It writes the monotonic times (ns) of `torch` (imported), `context` (first CUDA context), `group`, `collective`, and in
the first step `queued` (the optimizer's step has returned) and `done` (its kernels have finished). Only the last one
synchronizes with the device, and only with `--stopwatch`. The losses are written as hexadecimal floats.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

points: dict[str, int] = {"main": time.monotonic_ns()}
ends: list[int] = []
losses: list[str] = []
facts: dict[str, Any] = {}


def at(name: str) -> None:
    points.setdefault(name, time.monotonic_ns())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", default="eager")
    parser.add_argument("--backend", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--stopwatch", action="store_true")
    parser.add_argument("--imports", default="")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args()


def _device(given: argparse.Namespace) -> Any:
    import torch

    at("torch")
    if given.deterministic:
        torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at("context_begin")
    torch.zeros(1, device=device)
    _wait()
    at("context")
    return device


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _join(backend: str, device: Any) -> None:
    import torch
    import torch.distributed as dist

    if not backend:
        return
    at("group_begin")
    dist.init_process_group(backend)
    at("group")
    dist.all_reduce(torch.ones(1, device=device if backend == "nccl" else "cpu"))
    at("collective_queued")
    _wait()
    at("collective")


def _model(given: argparse.Namespace, device: Any) -> Any:
    import torch

    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(
        given.width, max(1, given.width // 64), 4 * given.width, dropout=0.0, batch_first=True
    )
    return torch.nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False).to(device)


def _note_step(given: argparse.Namespace, loss: Any) -> None:
    at("queued")
    if given.stopwatch:
        if "done" not in points:
            _wait()
            at("done")
        losses.append(float(loss.detach()).hex())
    ends.append(time.monotonic_ns())


def _train(given: argparse.Namespace) -> None:
    import torch

    device = _device(given)
    _join(given.backend, device)
    model = _model(given, device)
    if given.backend:
        ids = [device.index or 0] if device.type == "cuda" and given.backend == "nccl" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if given.way in ("compile", "reduce-overhead"):
        model = torch.compile(model, mode="reduce-overhead" if given.way == "reduce-overhead" else None)
    fused = given.way in ("fused", "graph")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, capturable=given.way == "graph")
    scaler = torch.amp.GradScaler(device.type, enabled=given.way == "amp")
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(given.batch, given.length, given.width, generator=generator).to(device)

    def forward_backward() -> Any:
        half = torch.float16 if given.way == "amp" else torch.bfloat16
        with torch.autocast(device.type, half, cache_enabled=given.way != "graph"):
            loss = model(made).float().square().mean()
        scaler.scale(loss).backward()
        return loss

    def step() -> Any:
        loss = forward_backward()
        if given.way == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=given.way != "graph")
        return loss

    at("ready")
    if given.way == "graph" and device.type == "cuda":
        _graph_steps(given, step)
        return
    for _ in range(given.steps):
        _note_step(given, step())


def _graph_steps(given: argparse.Namespace, step: Callable[[], Any]) -> None:
    """A whole step as a CUDA graph, like PyTorch's documentation: warm-up on a side stream, capture, replay."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss = step()
            at("queued")
            if given.stopwatch and "done" not in points:
                _wait()
                at("done")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    at("captured")
    for _ in range(given.steps):
        graph.replay()
        _note_step(given, loss)


def _trainer(given: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    at("torch")

    class Stopwatch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            _note_step(given, torch.zeros(1))

    config = LlamaConfig(
        hidden_size=given.width, intermediate_size=2 * given.width, num_hidden_layers=2, vocab_size=1000
    )
    arguments = TrainingArguments(
        output_dir=str(Path(given.out).with_suffix(".trainer")),
        max_steps=given.steps,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        logging_steps=5,
        bf16=torch.cuda.is_available(),
    )
    made = [{"input_ids": torch.arange(64) % 1000, "labels": torch.arange(64) % 1000} for _ in range(256)]
    at("ready")
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=made, callbacks=[Stopwatch()]).train()


def _lightning(given: argparse.Namespace) -> None:
    import lightning as pl
    import torch

    at("torch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(given, "cpu")

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_batch_end(self, *_: Any) -> None:
            _note_step(given, torch.zeros(1))

    made = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 64, given.width)), batch_size=8)
    at("ready")
    root = Path(given.out).with_suffix(".lightning")
    trainer = pl.Trainer(max_steps=given.steps, devices=1, logger=False, default_root_dir=root)
    trainer.fit(Module(), made)


def _accelerate(given: argparse.Namespace) -> None:
    import torch
    from accelerate import Accelerator

    at("torch")
    accelerator = Accelerator(mixed_precision="bf16")
    at("group")
    model = _model(given, "cpu")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    made = torch.randn(given.batch, given.length, given.width, device=accelerator.device)
    at("ready")
    for _ in range(given.steps):
        loss = model(made).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        _note_step(given, loss)


def _jax(given: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp

    at("torch")
    facts["devices"] = [str(one) for one in jax.devices()]
    at("context")
    keys = jax.random.split(jax.random.key(0), given.layers)
    weights = [jax.random.normal(key, (given.width, given.width)) / given.width for key in keys]
    made = jax.random.normal(jax.random.key(1), (given.batch * given.length, given.width))

    def loss_of(weights: Any, made: Any) -> Any:
        for one in weights:
            made = jnp.tanh(made @ one)
        return (made**2).mean()

    @jax.jit
    def step(weights: Any, made: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, made)
        return [one - 0.1 * gradient for one, gradient in zip(weights, gradients, strict=True)], loss

    at("ready")
    for number in range(given.steps):
        weights, loss = step(weights, made)
        at("queued")
        if number == 0:
            jax.block_until_ready((weights, loss))
            at("done")
        ends.append(time.monotonic_ns())


def _mpi(given: argparse.Namespace) -> None:
    from mpi4py import MPI

    facts["mpi_ranks"] = MPI.COMM_WORLD.Get_size()
    _train(given)


def main() -> None:
    given = _arguments()
    for name in filter(None, given.imports.split(",")):
        __import__(name)
    ways = {"trainer": _trainer, "lightning": _lightning, "accelerate": _accelerate, "jax": _jax, "mpi": _mpi}
    ways.get(given.way, _train)(given)
    at("end")
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    facts["threads"] = len(list(Path("/proc/self/task").iterdir()))
    found = {"points": points, "ends": ends, "losses": losses, "facts": facts}
    out = Path(given.out)
    out.with_name(f"{out.stem}-{rank}{out.suffix}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
