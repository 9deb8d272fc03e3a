"""Real frameworks with a step that is not torch's: JAX, DeepSpeed, Megatron. Each runs where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from conftest_launch import stages


def needs(module: str, package: str) -> list[pytest.MarkDecorator]:
    missing = find_spec(module) is None
    return [pytest.mark.skipif(missing, reason=f"{package} is not installed (pip install {package}, some 100 MB)")]


JAX = """
import time, jax, jax.numpy as jnp
params = jax.jit(lambda key: jax.random.normal(key, (4, 4)))(jax.random.key(0))

def step(params, batch):
    return params - jax.grad(lambda p: jnp.tanh(batch @ p * jnp.ones(4)).sum())(params)

time.sleep(0.3)
print(time.monotonic_ns())
{step}
for _ in range(3):
    params = step(params, jnp.ones((2, 4)))
    params.block_until_ready()
    print(time.monotonic_ns())
    time.sleep(0.1)
"""
JITTED = "step = jax.jit(step, donate_argnums=0)"
AHEAD = "step = jax.jit(step).lower(params, jnp.ones((2, 4))).compile()"


@pytest.mark.parametrize("step", [pytest.param(step, marks=needs("jax", "jax")) for step in (JITTED, AHEAD)])
def test_the_first_compiled_step_of_jax(run, events, step):
    done = run("run", "-q", "--", sys.executable, "-c", JAX.format(step=step))
    before_ns, first_ns, _, _ = map(int, done.stdout.split())
    found = events()
    assert "model_initialization.import_jax" in stages(found, "end")
    (began,) = [event for event in found if event.stage == "training_began"]
    assert before_ns < began.mono_ns <= first_ns
    assert stages([e for e in found if e.stage.startswith("first_step")], "end") == ["first_step.compile", "first_step"]
    assert "hook_failed" not in stages(found, "instant")


SHOWS_CODE = """
import jax, jax.numpy as jnp
def step(params, batch):
    return params - jax.value_and_grad(lambda p: jnp.tanh(batch @ p).sum())(params)[1]
lowered = jax.jit(step).lower(jnp.ones((4, 4)), jnp.ones((2, 4)))
print(lowered.as_text(debug_info=True), lowered.compile().as_text())
"""


@pytest.mark.parametrize("_", [pytest.param("jax", marks=needs("jax", "jax"))])
def test_jax_compiles_as_without_us(run, _):
    shown = [run("run", "-q", *more, "--", sys.executable, "-c", SHOWS_CODE).stdout for more in ([], ["--no-hook"])]
    assert "transpose(jvp" in shown[0]
    assert shown[0] == shown[1]


SENT_TO_A_WORKER = """
import pickle, jax
gradient = jax.grad(abs)
for function in (jax.grad, jax.value_and_grad, jax.vjp):
    print(pickle.dumps(function)[:0], pickle.loads(pickle.dumps(function)) is getattr(jax, function.__name__))
print(gradient.__reduce_ex__(4)[1][0].__module__, b"bootseer" in pickle.dumps(jax.grad))
"""


@pytest.mark.parametrize("_", [pytest.param("jax", marks=needs("jax", "jax"))])
def test_jax_functions_are_pickled_for_machines_without_us(run, _):
    done = run("run", "-q", "--", sys.executable, "-c", SENT_TO_A_WORKER)
    assert done.returncode == 0, done.stderr


ONE_RANK = """
import os, time, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
last_ns = []
register_optimizer_step_pre_hook(lambda *_: last_ns.append(time.monotonic_ns()))
"""

DEEPSPEED = """
import deepspeed
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "sub_group_size": 64},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
for step in range(2):
    print("@", time.monotonic_ns(), len(last_ns))
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    engine.step()
print("@", last_ns[-1], len(last_ns))
"""

MEGATRON = """

class WithoutGpu(torch.overrides.TorchFunctionMode):  # Megatron keeps scales and norms there
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)

WithoutGpu().__enter__()
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel()
weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0)
chained = ChainedOptimizer([FP32Optimizer(torch.optim.AdamW([w]), config, lambda *_: None) for w in weights])
for weight in weights:
    weight.grad = torch.zeros_like(weight)
chained.step()
sum((weight * 2).sum() for weight in weights).backward()
print("@", time.monotonic_ns(), len(last_ns))
chained.step()
print("@", last_ns[-1], len(last_ns))
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(DEEPSPEED, marks=needs("deepspeed", "deepspeed"), id="deepspeed"),
        pytest.param(MEGATRON, marks=needs("megatron", "megatron-core"), id="megatron"),
    ],
)
def test_a_step_of_many_optimizers_counts_whole(run, events, program):
    """Earlier steps only create the optimizers' state; the first real one ends after the last of its optimizers."""
    done = run("run", "-q", "--", sys.executable, "-c", ONE_RANK + program)
    assert done.returncode == 0, done.stderr
    told = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("@")]
    (before_ns, before), (last_ns, steps) = told[-2:]
    (began,) = [event for event in events() if event.stage == "training_began"]
    assert steps - before > 1
    assert before_ns < last_ns < began.mono_ns
