"""What the hook marks in a training process, and at which public points of PyTorch it does so.

    model_initialization.interpreter       process start to first Python code
    model_initialization.import_torch      the import statement
    model_initialization.launcher_rendezvous   torchrun's agent waits for the other agents
    model_initialization.process_group     init_process_group: store rendezvous, connections
    model_initialization.first_collective  the first collective, where lazy communicators are made
    model_initialization.checkpoint_read   torch.load, torch.distributed.checkpoint.load, safetensors.torch.load_*
    first_step                             first training forward to the end of the first optimizer step
    training_began, steady_step            moments

Everything is one-shot: when the first steady step is seen, the hooks are removed and the functions put back. Every
callback is guarded: an error in BootSeer ends the marking and not the job. Nothing is marked while torch.compile
traces, so that no guard depends on us.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, OK
from bootseer.trace.tracer import TRAINING_BEGAN, Tracer, new_span

F = TypeVar("F", bound=Callable[..., Any])

_STAGE = "model_initialization."
_MAX_STEPS = 50
_STEADY_WITHIN = 0.2
"""Two neighbouring steps whose durations differ by less than this share are steady."""
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


class _State:
    """What is known of this process so far; one instance, made by `start`."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.pid = os.getpid()
        self.importing: dict[str, str] = {}
        self.reading = 0
        self.step_span = ""
        self.steps = 0
        self.step_ends_ns: list[int] = []
        self.optimizer: object = None
        self.undo: list[Callable[[], Any]] = []
        self.collective_undo: list[Callable[[], Any]] = []
        self.began = False


_state: _State | None = None


def _active() -> _State | None:
    """The state, unless marking is over or this is a forked child (a data loader, not a rank)."""
    state = _state
    return state if state is not None and state.pid == os.getpid() else None


def stop() -> None:
    """End the marking: remove every hook, put every function back."""
    global _state
    state, _state = _state, None
    if state is not None:
        for undo in state.collective_undo + state.undo:
            with contextlib.suppress(Exception):
                undo()


def guarded(function: F) -> F:
    """`function`, made harmless: an exception ends the marking and goes nowhere else."""

    @functools.wraps(function)
    def harmless(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            state = _active()
            stop()
            if state is not None:
                with contextlib.suppress(Exception):
                    state.tracer.emit("hook_failed", INSTANT, attrs={"error": repr(error)})
            return None

    return harmless  # type: ignore[return-value]


def _compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


@guarded
def start(tracer: Tracer, started_ns: int) -> None:
    """Begin marking this process; writes the interpreter's own start, which is over by now."""
    global _state
    _state = _State(tracer)
    span = new_span()
    attrs: dict[str, Any] = {
        "python": sys.version.split()[0],
        "argv0": os.path.basename(sys.argv[0]) if sys.argv else "",
    }
    if tracer.identity.world_size is not None:
        attrs["world_size"] = tracer.identity.world_size
    name = _STAGE + "interpreter"
    tracer.emit(name, BEGIN, span=span, mono_ns=min(_process_start_ns() or started_ns, started_ns), attrs=attrs)
    tracer.emit(name, END, span=span, mono_ns=started_ns, outcome=OK)


def _process_start_ns() -> int | None:
    """When the kernel made this process, on the monotonic clock (10 ms steps)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    # The kernel counts from boot with suspended time, CLOCK_MONOTONIC without.
    suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")) - suspended_ns


@guarded
def before_import(name: str) -> None:
    """A watched module is about to run; only torch itself is a stage."""
    state = _active()
    if state is not None and name == "torch":
        state.importing[name] = state.tracer.emit(_STAGE + "import_torch", BEGIN)


@guarded
def after_import(name: str, *, failed: bool = False) -> None:
    """A watched module has run."""
    state = _active()
    span = state.importing.pop(name, "") if state is not None else ""
    if state is not None and span:
        version = str(getattr(sys.modules.get(name), "__version__", ""))
        outcome = FAILED if failed else OK
        state.tracer.emit(
            _STAGE + "import_torch", END, span=span, outcome=outcome, attrs={"version": version} if version else {}
        )


def _replace(module: ModuleType, name: str, make: Callable[[Any], Any]) -> Callable[[], None] | None:
    """Put `make(original)` in the place of a function; the result puts the original back if ours still stands there."""
    original = getattr(module, name, None)
    if original is None:
        return None
    ours = functools.wraps(original)(make(original))
    setattr(module, name, ours)

    def undo() -> None:
        for holder in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
            if holder is not None and getattr(holder, name, None) is ours:
                setattr(holder, name, original)

    return undo


def _spanned(
    stage: str, describe: Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]
) -> Callable[..., Any]:
    """A wrapper maker: the original runs exactly as called, between a begin and an end event."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            state = _active()
            if state is None or state.reading or _compiling():
                return original(*args, **kwargs)
            span = _begin(stage, args, kwargs)
            outcome = FAILED
            state.reading += 1
            try:
                result = original(*args, **kwargs)
                outcome = OK
                return result
            finally:
                state.reading -= 1
                _end(stage, span, outcome)

        @guarded
        def _begin(stage: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
            state = _active()
            return state.tracer.emit(stage, BEGIN, attrs=describe(args, kwargs)) if state is not None else ""

        return marked

    return make


@guarded
def _end(stage: str, span: str | None, outcome: str) -> None:
    state = _active()
    if state is not None and span:
        state.tracer.emit(stage, END, span=span, outcome=outcome)


# --- process groups ---------------------------------------------------------------------------------------------------


def _mark_process_group(c10d: ModuleType) -> None:
    def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        backend = kwargs.get("backend", args[0] if args else None)
        return {"barrier": "process_group", "backend": str(backend or "default")}

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        spanned = _spanned(_STAGE + "process_group", describe)(original)

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = spanned(*args, **kwargs)
            _await_first_collective(c10d)
            return result

        return init_process_group

    _keep_undo(_replace(c10d, "init_process_group", make))


def _keep_undo(undo: Callable[[], None] | None) -> None:
    state = _active()
    if state is not None and undo is not None:
        state.undo.append(undo)


@guarded
def _await_first_collective(c10d: ModuleType) -> None:
    """Replace the collectives until one of them has run: between the two moments only."""
    state = _active()
    if state is None or state.collective_undo or state.began:
        return
    rank, world_size = int(c10d.get_rank()), int(c10d.get_world_size())
    # Launchers without RANK (mpirun, plain Slurm) tell the rank only here.
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

        spanned = _spanned(_STAGE + "first_collective", describe)(original)

        def collective(*args: Any, **kwargs: Any) -> Any:
            if _compiling():
                return original(*args, **kwargs)
            _restore_collectives()
            return spanned(*args, **kwargs)

        return collective

    for name in _COLLECTIVES:
        original = getattr(c10d, name, None)
        if original is None:
            continue
        public = sys.modules.get("torch.distributed")
        undo = _replace(c10d, name, make)
        if public is not None and getattr(public, name, None) is original:
            setattr(public, name, getattr(c10d, name))
        if undo is not None:
            state.collective_undo.append(undo)


@guarded
def _restore_collectives() -> None:
    state = _active()
    if state is not None:
        for undo in state.collective_undo:
            undo()
        state.collective_undo = [lambda: None]


def _mark_launcher(registry: ModuleType) -> None:
    """torchrun's agent: time each rendezvous of the handler that the public registry makes."""
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
            rounds += 1
            return {"barrier": f"launcher_rendezvous:{rounds - 1}", "backend": str(handler.get_backend())}

        handler.next_rendezvous = functools.wraps(next_rendezvous)(
            _spanned(_STAGE + "launcher_rendezvous", describe)(next_rendezvous)
        )

    _keep_undo(_replace(registry, "get_rendezvous_handler", make))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _describe_read(api: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        attrs: dict[str, Any] = {"api": api}
        for place in (*args[:1], *(kwargs.get(key) for key in ("f", "filename", "checkpoint_id"))):
            if not isinstance(place, (str, os.PathLike)):
                continue
            path = os.fsdecode(place)
            if os.path.isfile(path):
                attrs["bytes"] = os.path.getsize(path)
            elif os.path.isdir(path):
                attrs["bytes"] = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return attrs

    return describe


def _mark_reads(*names: str, api: str) -> Callable[[ModuleType], None]:
    def mark(module: ModuleType) -> None:
        for name in names:
            make = _spanned(_STAGE + "checkpoint_read", _describe_read(f"{api}.{name}"))
            _keep_undo(_replace(module, name, make))

    return mark


# --- steps ------------------------------------------------------------------------------------------------------------


def _mark_steps(optimizer_module: ModuleType) -> None:
    state = _active()
    if state is not None:
        before = optimizer_module.register_optimizer_step_pre_hook(_before_step)
        after = optimizer_module.register_optimizer_step_post_hook(_after_step)
        state.undo += [before.remove, after.remove]


def _mark_forward(module: ModuleType) -> None:
    state = _active()
    if state is None:
        return

    def before_forward(layer: Any, args: Any) -> None:
        if not _compiling():
            handle.remove()
            _first_forward(layer)

    handle = module.register_module_forward_pre_hook(before_forward)
    state.undo.append(handle.remove)


@guarded
def _first_forward(layer: Any) -> None:
    state = _active()
    torch = sys.modules.get("torch")
    if state is None or state.step_span or torch is None:
        return
    if layer.training and torch.is_grad_enabled():
        state.step_span = state.tracer.emit("first_step", BEGIN, attrs={"from": "forward"})
    else:
        _mark_forward(sys.modules["torch.nn.modules.module"])


def _only_initializes(state: _State, optimizer: Any) -> bool:
    """torch.distributed.checkpoint steps an optimizer with a rate of 0 to make its state exist before a load.

    A warm-up that starts at 0 looks the same but for the forward pass in front of it.
    """
    return not state.step_span and all(float(group.get("lr", 1)) == 0 for group in optimizer.param_groups)


@guarded
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    state = _active()
    if state is None or state.began or _compiling() or _only_initializes(state, optimizer):
        return
    if not state.step_span:
        state.step_span = state.tracer.emit("first_step", BEGIN, attrs={"from": "optimizer"})


@guarded
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    state = _active()
    if state is None or _compiling():
        return
    now = time.monotonic_ns()
    if not state.began:
        if _only_initializes(state, optimizer):
            return
        state.began = True
        state.optimizer = type(optimizer), id(optimizer)
        state.tracer.emit("first_step", END, span=state.step_span, outcome=OK, mono_ns=now)
        state.tracer.emit(TRAINING_BEGAN, INSTANT, mono_ns=now, attrs={"by": "optimizer_step"})
    elif state.optimizer != (type(optimizer), id(optimizer)):
        return
    ends = state.step_ends_ns
    ends.append(now)
    if len(ends) >= 3:
        last, previous = ends[-1] - ends[-2], ends[-2] - ends[-3]
        if abs(last - previous) < _STEADY_WITHIN * max(last, previous):
            attrs = {"step": len(ends) - 1, "step_s": previous / 1e9}
            state.tracer.emit("steady_step", INSTANT, mono_ns=ends[-2], attrs=attrs)
            stop()
            return
    if len(ends) > _MAX_STEPS:
        stop()


def after_import_of() -> dict[str, Callable[[ModuleType], None]]:
    """Which modules are watched, and what is done when each has been imported."""

    def nothing(module: ModuleType) -> None:
        return None

    return {
        "torch": nothing,
        "torch.nn.modules.module": _mark_forward,
        "torch.optim.optimizer": _mark_steps,
        "torch.serialization": _mark_reads("load", api="torch"),
        "torch.distributed.checkpoint.state_dict_loader": _mark_reads("load", api="torch.distributed.checkpoint"),
        "torch.distributed.distributed_c10d": _mark_process_group,
        "torch.distributed.elastic.rendezvous.registry": _mark_launcher,
        "safetensors.torch": _mark_reads("load_file", "load_model", "load", api="safetensors.torch"),
    }
