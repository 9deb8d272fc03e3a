"""The marks in a training process, and the modules of PyTorch and JAX where they are installed. The stages
and instants are listed in docs/formats/event.md.

After the first steady step all hooks are removed and all functions restored. Every callback is guarded: an error in
BootSeer ends the marking, not the job. Nothing is marked while torch.compile traces, so that compiled code has no
guards on our objects.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

from bootseer.hook.connections import mark_stores
from bootseer.hook.jax_steps import mark_jax
from bootseer.hook.process_groups import mark_launcher, mark_process_group
from bootseer.hook.state import STAGE, active, begin, compiling, guarded
from bootseer.hook.steps import mark_compilation, mark_outer_steps, mark_steps, without_forward_hook
from bootseer.hook.wrap import Describe, Picklable, replace, spanned
from bootseer.trace.event import BEGIN, END, stage_name
from bootseer.trace.tracer import Tracer

FRAMEWORKS = ("torch", "jax")
_LONG_IMPORT_NS = 100_000_000
_MAX_FILES = 64
"""No sizes are requested for larger checkpoints: a sharded one has files of each rank and is read by each rank, which
would cost requests to the file server in proportion to the square of the number of ranks."""


@guarded
def start(tracer: Tracer, started_ns: int, stat: bytes) -> None:
    """Start marking this process, and write the interpreter's start, which has ended already."""
    begin(tracer)
    attrs: dict[str, Any] = {
        "python": sys.version.split()[0],
        "argv0": os.path.basename(sys.argv[0]) if sys.argv else "",
    }
    if tracer.identity.world_size is not None:
        attrs["world_size"] = tracer.identity.world_size
    began_ns = min(_process_start_ns(stat) or started_ns, started_ns)
    tracer.emit_ended(STAGE + "interpreter", began_ns, started_ns, attrs)


def _process_start_ns(stat: bytes) -> int | None:
    """The process's start time on the monotonic clock, with a resolution of 10 ms, from `/proc/self/stat` at the
    interpreter's start.

    None if the process had waited for children by then: it was a shell that ran other programs, maybe for minutes, and
    then replaced itself by this interpreter (`exec python train.py`). The kernel does not keep the time of that.
    """
    try:
        fields = stat.rpartition(b")")[2].split()  # from the third one, of proc_pid_stat(5), on
        page_faults_of_children, ticks = int(fields[8]), int(fields[19])
    except (ValueError, IndexError):
        return None
    if page_faults_of_children:
        return None
    # The kernel's start time includes suspended time since boot, CLOCK_MONOTONIC does not.
    suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")) - suspended_ns


@guarded
def before_import(name: str) -> str:
    """Called before the code of a watched module runs; returns the span of a framework's import, else ""."""
    state = active()
    return state.tracer.emit(f"{STAGE}import_{name}", BEGIN) if state is not None and name in FRAMEWORKS else ""


@guarded
def after_import(name: str, span: str, outcome: str) -> None:
    """Called after the code of a watched module ran."""
    state = active()
    if state is not None and span:
        version = str(getattr(sys.modules.get(name), "__version__", ""))
        attrs = {"version": version} if version else {}
        state.tracer.emit(f"{STAGE}import_{name}", END, span=span, outcome=outcome, attrs=attrs)


@guarded
def note_import(name: str, started_ns: int) -> None:
    """Called after an outermost import: write it as a stage if it was long."""
    state = active()
    if state is not None and time.monotonic_ns() - started_ns >= _LONG_IMPORT_NS:
        stage = stage_name(f"{STAGE}import.{name.replace('.', '_')}")
        state.tracer.emit_ended(stage, started_ns, attrs={"module": name})


def mark_cuda(cuda: ModuleType) -> None:
    """Mark the first call of `torch.cuda._lazy_init`, but by modules that imported it by name before."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        marked = spanned(STAGE + "cuda_init", lambda args, kwargs: {}, original)

        def lazy_init() -> None:
            if compiling():
                original()
                return
            if undo is not None:
                undo()
            note_device()
            marked()

        return lazy_init

    @guarded
    def note_device() -> None:
        state = active()
        if state is not None and state.recorder is not None:
            state.recorder.device_begins()

    undo = replace(cuda, "_lazy_init", make)


def _describe_read(api: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    attrs: dict[str, Any] = {"api": api}
    for place in (*args[:1], *(kwargs.get(key) for key in ("f", "filename", "checkpoint_id"))):
        if not isinstance(place, (str, os.PathLike)):
            continue
        path = os.fsdecode(place)
        if os.path.isfile(path):
            attrs["bytes"] = os.path.getsize(path)
        elif os.path.isdir(path):
            with os.scandir(path) as entries:
                some = list(islice(entries, _MAX_FILES + 1))
            if len(some) <= _MAX_FILES:
                attrs["bytes"] = sum(entry.stat().st_size for entry in some if entry.is_file())
    return attrs


def mark_reads(*names: str, api: str) -> Callable[[ModuleType], None]:
    """A function that marks calls of these functions of a module as `checkpoint_read`; `api` is the name in events.

    A read within another one (DCP uses torch.load) is part of the outer one. File names are not recorded.
    """

    def mark(module: ModuleType) -> None:
        for name in names:
            describe = partial(_describe_read, f"{api}.{name}")

            def make(original: Callable[..., Any], describe: Describe = describe) -> Picklable:
                return Picklable(spanned(STAGE + "checkpoint_read", describe, original))

            replace(module, name, make)

    return mark


def after_import_of() -> dict[str, Callable[[ModuleType], object]]:
    """The watched modules, each with the function that is called with it after its import."""
    return {
        "torch": mark_steps,
        "torch.cuda": mark_cuda,
        "jax": mark_jax,
        "torch.nn.modules.module": without_forward_hook("_has_any_global_hook"),
        "torch._dynamo.convert_frame": without_forward_hook("get_traced_fn"),
        "torch._dynamo.callback": mark_compilation,
        "deepspeed.runtime.engine": mark_outer_steps("DeepSpeedEngine._take_model_step"),
        "megatron.core.optimizer.optimizer": mark_outer_steps(
            "FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step"
        ),
        "torch.serialization": mark_reads("load", api="torch"),
        "torch.distributed.checkpoint.state_dict_loader": mark_reads("load", api="torch.distributed.checkpoint"),
        "torch.distributed.distributed_c10d": mark_process_group,
        "torch.distributed.elastic.rendezvous.registry": mark_launcher,
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend": mark_stores,
        "torch.distributed.elastic.rendezvous.static_tcp_rendezvous": mark_stores,
        "torch.distributed.rendezvous": mark_stores,
        "safetensors.torch": mark_reads("load_file", "load_model", "load", api="safetensors.torch"),
        "bootseer.checkpoint.safetensors.model": mark_reads(
            "load_file", "load_sharded", api="bootseer.checkpoint.safetensors"
        ),
    }
