"""The hook's state in a process, and the guard for its callbacks.

One state per process, from `marks.start` to `stop`, which removes every hook and restores every function.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from bootseer.trace.event import BEGIN, END, INSTANT, NO_RANK, OK
from bootseer.trace.tracer import TRAINING_BEGAN, Tracer, from_environment

if TYPE_CHECKING:
    from bootseer.hook.programs import Recorder

F = TypeVar("F", bound=Callable[..., Any])

STAGE = "model_initialization."


class State:
    """The state of marking in this process."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.pid = os.getpid()
        self.nested = 0
        self.marked = 0
        """Number of marked calls."""
        self.step_span = ""
        self.step_ends_ns: list[int] = []
        self.optimizer: object = None
        self.undo: list[Callable[[], Any]] = []
        self.collective_undo: list[Callable[[], Any]] = []
        self.groups: list[tuple[str, float, int]] | None = []
        """For each process group after the first: its name, the seconds that it took, and the keys in the store then,
        if known. None after the first collective."""
        self.began = False
        self.compiled = False
        self.forward_undo: Callable[[], Any] | None = None
        self.backward_undo: Callable[[], Any] | None = None
        self.backward = True
        """A backward pass was seen, or cannot be detected."""
        self.gradients = False
        self.stepping_ns = 0
        self.outer: object = None
        """The framework whose step is running."""
        self.inner_steps = 0
        self.recorder: Recorder | None = None

    def first_step_begins(self, by: str, now_ns: int | None = None) -> None:
        """Write the begin of the first step, unless it has begun. `by`: the attribute `from`; `now_ns`: monotonic."""
        if not self.step_span:
            self.step_span = self.tracer.emit("first_step", BEGIN, mono_ns=now_ns, attrs={"from": by})

    def first_step_ended(self, now_ns: int, *, by: str) -> None:
        """Write the end of the first step at this monotonic time, and that training has begun."""
        self.began = True
        self.first_step_begins("optimizer", self.stepping_ns or now_ns)
        if self.recorder is not None:
            self.recorder.write()  # before the event: `bootseer run` reads the record after it
        self.tracer.emit("first_step", END, span=self.step_span, outcome=OK, mono_ns=now_ns)
        self.tracer.emit(TRAINING_BEGAN, INSTANT, mono_ns=now_ns, attrs={"by": by})
        imports = sys.modules.get("bootseer.hook.imports")
        if imports is not None:
            imports.report_unused(self.tracer)


def active() -> State | None:
    """The state; None if marking is over or this is a forked child (a data loader; see `join`)."""
    state = _state
    return state if state is not None and state.pid == os.getpid() else None


def stop() -> None:
    """End the marking: remove every hook, put every function back."""
    global _state
    state, _state = _state, None
    if state is not None:
        for undo in state.undo:
            with contextlib.suppress(Exception):
                undo()


def guarded(function: F) -> F:
    """Wrap `function` such that an exception ends the marking instead of reaching the program."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if raised_by_signal(error):
                raise
            state = active()
            stop()
            if state is not None:
                with contextlib.suppress(Exception):
                    state.tracer.emit("hook_failed", INSTANT, attrs={"error": repr(error)})
            return None

    return call  # type: ignore[return-value]


@guarded
def join() -> None:
    """Mark this process, too, if it is a fork that joins a process group, of a process without a rank: then it is a
    rank, as accelerate's `notebook_launcher` and Lightning's `ddp_fork` start them."""
    state = _state
    if state is None or state.pid == os.getpid() or state.began or state.tracer.identity.rank != NO_RANK:
        return
    tracer = from_environment(os.environ)
    if tracer is not None:  # the launcher may have set the variables of ranks and restarts
        state.tracer.identity, state.pid = tracer.identity, os.getpid()


def raised_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised this while our code ran: then it is meant for the program, such as
    torchrun's `SignalException`."""
    import signal

    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _code_of(handler: object) -> object:
    """The code of a function, a method, a `functools.partial` or an object with `__call__`; None of others."""
    if not callable(handler):  # SIG_DFL, SIG_IGN, or a handler that was not set by Python
        return None
    function = getattr(handler, "func", handler)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def compiling() -> bool:
    """Whether torch.compile is tracing. Versions without the probe do not trace our code."""
    probe = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
    return probe is not None and bool(probe())


def begin(tracer: Tracer) -> State:
    """Start marking in this process. A copy of a warm parent keeps the state with the marks installed there."""
    global _state
    if _state is None:
        _state = State(tracer)
    _state.tracer, _state.pid = tracer, os.getpid()
    return _state


_state: State | None = None
