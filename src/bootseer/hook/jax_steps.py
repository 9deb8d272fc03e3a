"""Mark JAX: the first step is the first compiled function that takes a gradient, until its results are computed.

The initialisation of parameters is compiled, too; only a gradient taken during tracing distinguishes a training step.
JAX returns results before they are computed, so the hook waits for those of this one step. Calls of a compiled function
run in C++ from the second one on; only the first one passes the Python object that is marked here.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bootseer.hook.state import STAGE, active, guarded, stop
from bootseer.hook.wrap import Picklable, replace, spanned
from bootseer.trace.event import INSTANT

_COMPILED = "/jax/core/compile/backend_compile_duration"


def mark_jax(jax: ModuleType) -> None:
    """Install the marks, after the import of jax."""
    # JAX records the user's source line in each operation: exclude our files.
    exclude = getattr(sys.modules.get("jax._src.source_info_util"), "register_exclusion", None)
    if exclude is not None:
        exclude(__file__)
        exclude(sys.modules[Picklable.__module__].__file__)
    for name in ("grad", "value_and_grad"):
        replace(jax, name, _wrap_gradient)
    replace(jax, "vjp", lambda original: Picklable(_noting_gradient(original)))
    execution = sys.modules.get("jax._src.interpreters.pxla")
    replace(getattr(execution, "ExecuteReplicated", None), "__call__", _wrap_execute)
    replace(sys.modules.get("jax.distributed"), "initialize", _wrap_initialize)
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


class _Gradient(Picklable):
    """A marked function that JAX made: pickled as what it wraps, because another machine may not have this module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.__wrapped__,)


def _wrap_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def transform(*args: Any, **kwargs: Any) -> Any:
        gradient = original(*args, **kwargs)
        return functools.wraps(gradient)(_Gradient(_noting_gradient(gradient)))

    return Picklable(transform)


def _noting_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        _note_gradient()
        return original(*args, **kwargs)

    return marked


@guarded
def _note_gradient() -> None:
    state = active()
    if state is not None:
        state.first_step_begins("gradient")


@guarded
def _note_compilation(event: str, duration_s: float, **_: Any) -> None:
    state = active()
    if state is not None and state.step_span and not state.began and event == _COMPILED and _is_outside_trace():
        now_ns = time.monotonic_ns()
        state.tracer.emit_ended("first_step.compile", now_ns - int(duration_s * 1e9), now_ns, {"backend": "jax"})


def _wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(self, *args, **kwargs)
        _note_execution(results)
        return results

    return execute


@guarded
def _note_execution(results: Any) -> None:
    state = active()
    if state is not None and state.step_span and not state.began and _is_outside_trace():
        sys.modules["jax"].block_until_ready(results)
        state.first_step_ended(time.monotonic_ns(), by="compiled_step")
        stop()  # later steps cannot be observed


def _is_outside_trace() -> bool:
    """Whether no function is being traced. During tracing, only its constants are computed."""
    probe = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    return probe is None or bool(probe())


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {"barrier": "process_group", "backend": "jax"}

    marked = spanned(STAGE + "process_group", describe, original)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = marked(*args, **kwargs)
        _note_rank()
        return result

    return initialize


@guarded
def _note_rank() -> None:
    state = active()
    known = sys.modules["jax._src.distributed"].global_state
    if state is not None and known.process_id is not None:
        rank, world_size = int(known.process_id), int(known.num_processes)
        state.tracer.identity = state.tracer.identity._replace(rank=rank, world_size=world_size)
        state.tracer.emit("rank_known", INSTANT, attrs={"world_size": world_size})
