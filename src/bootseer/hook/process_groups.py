"""Mark where ranks wait for each other: torchrun's rendezvous, init_process_group, the first collective.

These are the job's barriers: a span begins with the arrival and ends with the release. The collectives' function
objects are not replaced, because compilers and tables that are built at import compare them by identity. But PyTorch
decorates each collective, and between init_process_group and the first collective these decorators call our wrappers.

torchrun's launchers are also made to wait less for each other (`_shorter_delays`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from bootseer.hook.connections import mark_groups, ranks_connected
from bootseer.hook.state import STAGE, active, compiling, guarded, join
from bootseer.hook.wrap import replace, replace_decorated, spanned
from bootseer.trace.event import INSTANT
from bootseer.trace.identity import RENDEZVOUS, discover

_FULL_DELAY_NODES = 100
"""From this many nodes on, launchers wait as long as PyTorch lets them."""
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "reduce_scatter_tensor",
)


def mark_process_group(c10d: ModuleType) -> None:
    """Mark init_process_group, the creation of further groups, and the first collective."""

    def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        state = active()
        if state is not None and state.recorder is not None:
            state.recorder.groups_begin()
        backend = kwargs.get("backend", args[0] if args else None)
        return {"barrier": "process_group", "backend": str(backend or "default")}

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        marked = spanned(STAGE + "process_group", describe, original)

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            join()
            result = marked(*args, **kwargs)
            _await_first_collective(c10d)
            return result

        return init_process_group

    replace(c10d, "init_process_group", make)
    mark_groups(c10d)


@guarded
def _await_first_collective(c10d: ModuleType) -> None:
    """Mark the collectives until one of them has run."""
    state = active()
    if state is None or state.collective_undo or state.began:
        return
    rank, world_size = int(c10d.get_rank()), int(c10d.get_world_size())
    # Without RANK (mpirun, plain Slurm) the rank is known only from here on.
    state.tracer.identity = state.tracer.identity._replace(rank=rank, world_size=world_size)
    state.tracer.emit("rank_known", INSTANT, attrs={"world_size": world_size})
    if world_size < 2:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
            # Only the group of all ranks is a barrier for the job.
            whole = kwargs.get("group") is None and not any(isinstance(arg, c10d.ProcessGroup) for arg in args)
            attrs = {"api": original.__name__}
            return {**attrs, "barrier": "first_collective"} if whole else attrs

        marked = spanned(STAGE + "first_collective", describe, original)

        def collective(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            _restore_collectives()
            result = marked(*args, **kwargs)
            ranks_connected(c10d)
            return result

        return collective

    for name in _COLLECTIVES:
        undo = replace_decorated(getattr(c10d, name, None), make)
        if undo is not None:
            state.collective_undo.append(undo)


@guarded
def _restore_collectives() -> None:
    state = active()
    if state is not None:
        for undo in state.collective_undo:
            undo()
        state.collective_undo = [lambda: None]


def mark_launcher(registry: ModuleType) -> None:
    """Mark each rendezvous of torchrun's agent, at the handler that the public registry returns."""
    rounds = 0

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_rendezvous_handler(*args: Any, **kwargs: Any) -> Any:
            handler = original(*args, **kwargs)
            wrap_handler(handler)
            return handler

        return get_rendezvous_handler

    @guarded
    def wrap_handler(handler: Any) -> None:
        next_rendezvous = handler.next_rendezvous

        def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal rounds
            os.environ[RENDEZVOUS] = str(rounds)
            rounds += 1
            state = active()
            if state is not None:  # this one, too, belongs to the restart of the workers that it precedes
                known = state.tracer.identity
                now = discover(os.environ, hostname=known.node)
                state.tracer.identity = known._replace(restart=now.restart, kind=now.kind)
            return {"barrier": f"launcher_rendezvous:{rounds - 1}", "backend": str(handler.get_backend())}

        def join(*args: Any, **kwargs: Any) -> Any:
            with _shorter_delays(handler):
                return next_rendezvous(*args, **kwargs)

        handler.next_rendezvous = functools.wraps(next_rendezvous)(
            spanned(STAGE + "launcher_rendezvous", describe, join)
        )

    replace(registry, "get_rendezvous_handler", make)


@contextlib.contextmanager
def _shorter_delays(handler: Any) -> Iterator[None]:
    """Let the launchers of a small job ask the rendezvous store more often whether all nodes have joined.

    PyTorch's launcher sleeps for up to 0.3 s before its first request and for 1 s between two requests, and uses a
    state that it read less than 1 s ago again, so that a thousand launchers do not overload the store. But launchers of
    a few nodes then learn up to a second late that the last one has joined, and all GPUs wait for them. Here N nodes
    send as many requests per second as `_FULL_DELAY_NODES` do in PyTorch. After the rendezvous all is as before: while
    the job trains, each launcher looks for new nodes ten times a second, and should not ask the store each time. A
    spare launcher (more than `max_nodes`) waits here for as long as the others train, with PyTorch's delays.
    """
    try:
        module: Any = sys.modules.get(type(handler).__module__)
        factor = min(handler.settings.max_nodes / _FULL_DELAY_NODES, 1.0) if handler.get_backend() == "c10d" else 1.0
        delay = getattr(module._delay, "__wrapped__", module._delay)  # ours, if another thread joins meanwhile
        node, holder = handler._this_node, handler._state_holder
        cached_s, _ = holder._cache_duration, holder.state.redundancy_list
    except AttributeError:  # static or etcd rendezvous, or another version of PyTorch
        yield
        return

    @functools.wraps(delay)
    def shorter(seconds: float | tuple[float, float]) -> None:
        share = 1.0 if node in holder.state.redundancy_list else factor
        delay(tuple(limit * share for limit in seconds) if isinstance(seconds, tuple) else seconds * share)

    module._delay, holder._cache_duration = shorter, cached_s * factor
    try:
        yield
    finally:
        module._delay, holder._cache_duration = delay, cached_s
