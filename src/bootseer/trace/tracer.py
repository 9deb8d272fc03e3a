"""Emit events: spans of stages, and instants.

`stage()` and `training_began()` are the public API. They, `bootseer run` and the hook in Python children write with
`Tracer`. Tracing is off, at no cost, unless `BOOTSEER_TRACE` names sinks; `bootseer run` sets it:

    BOOTSEER_TRACE=spool:/var/spool/bootseer/moe,stderr
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from _thread import RLock  # as `threading.RLock`, whose import would delay every job by 1.5 ms
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from bootseer.io.fork import after_fork
from bootseer.trace import traceparent
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, OK, Event, encode, stage_name
from bootseer.trace.identity import Identity, discover, without_outer_job
from bootseer.trace.sinks import FanOut, Sink, SpoolSink, StderrSink

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

TRAINING_BEGAN = "training_began"
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_GENERATOR = 0x20 | 0x200  # inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_current: ContextVar[str] = ContextVar("bootseer_span", default="")


class Tracer:
    """Writes events with the identity of one process to a sink."""

    def __init__(self, sink: Sink, identity: Identity, *, trace: str, parent: str = "") -> None:
        self.sink = sink
        self.identity = identity
        self.trace = trace
        self.parent = parent

    def emit(
        self,
        stage: str,
        phase: str,
        *,
        span: str = "",
        parent: str | None = None,
        outcome: str = "",
        attrs: Mapping[str, Any] | None = None,
        wall_ns: int | None = None,
        mono_ns: int | None = None,
    ) -> str:
        """Write one event and return its span id.

        The time is now, or a past one in `mono_ns`, `wall_ns` (ns) or both; a missing one is computed from the other.
        """
        now_wall, now_mono = time.time_ns(), time.monotonic_ns()
        if wall_ns is None:
            wall_ns = now_wall if mono_ns is None else now_wall - (now_mono - mono_ns)
        if mono_ns is None:
            mono_ns = now_mono - (now_wall - wall_ns)
        identity = self.identity
        span = span or new_span()
        event = Event(
            wall_ns=wall_ns,
            mono_ns=mono_ns,
            job=identity.job,
            attempt=identity.attempt or 0,
            restart=identity.restart,
            kind=identity.kind,
            node=identity.node,
            rank=identity.rank,
            pid=os.getpid(),
            trace=self.trace,
            span=span,
            parent=(_current.get() or self.parent) if parent is None else parent,
            stage=stage,
            phase=phase,
            outcome=outcome,
            attrs=attrs or {},
        )
        self.sink.write(encode(event))
        return span

    def emit_ended(
        self, stage: str, begin_ns: int, end_ns: int | None = None, attrs: Mapping[str, Any] | None = None
    ) -> None:
        """Write begin and end of a span that has ended well, at these monotonic times; None is now."""
        span = self.emit(stage, BEGIN, mono_ns=begin_ns, attrs=attrs)
        self.emit(stage, END, span=span, mono_ns=end_ns, outcome=OK)

    def span(self, stage: str, attrs: Mapping[str, Any] | None = None) -> Span:
        """A context manager that writes begin and end. An exception makes the outcome `failed` and is not caught."""
        return Span(self, stage_name(str(stage)), attrs or {})

    def environment(self, span: str = "") -> dict[str, str]:
        """The variables that pass this trace to a child process."""
        parent = span or _current.get() or self.parent
        known = parent and self.trace
        return {traceparent.VARIABLE: str(traceparent.TraceParent(self.trace, parent))} if known else {}


class Span:
    """A running stage. `attrs` may be changed until the end, and are written with begin and end."""

    __slots__ = ("_failed", "_stage", "_token", "_tracer", "attrs", "id")

    def __init__(self, tracer: Tracer, stage: str, attrs: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._stage = stage
        self._token: Any = None
        self._failed = False
        self.attrs = dict(attrs)
        self.id = new_span()

    def __enter__(self) -> Span:
        self._tracer.emit(self._stage, BEGIN, span=self.id, attrs=self.attrs)
        self._token = _current.set(self.id)
        return self

    def fail(self, why: str) -> None:
        """Make the outcome `failed` without an exception."""
        self._failed = True
        self.attrs["error"] = why

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # ValueError: an async generator was closed in another context, which has nothing to reset.
        with contextlib.suppress(ValueError):
            _current.reset(self._token)
        if kind is not None and not (isinstance(error, SystemExit) and not error.code):
            self.fail(kind.__name__)
        outcome = FAILED if self._failed else OK
        self._tracer.emit(self._stage, END, span=self.id, outcome=outcome, attrs=self.attrs)


def new_span() -> str:
    """A new span id, 16 hex digits."""
    return os.urandom(8).hex()


def spool_word(folder: str) -> str:
    """A spool folder's entry in the list of sinks, with commas escaped."""
    return "spool:" + folder.replace("%", "%25").replace(",", "%2C")


def open_sink(spec: str, node: str) -> Sink:
    """The sinks in a comma-separated list: `spool:DIR`, `stderr`. Unknown entries are ignored."""
    sinks: list[Sink] = []
    for word in spec.split(","):
        name, _, argument = word.strip().partition(":")
        if name == "spool" and argument:
            sinks.append(SpoolSink(argument.replace("%2C", ",").replace("%25", "%"), node))
        elif name == "stderr":
            sinks.append(StderrSink())
    return sinks[0] if len(sinks) == 1 else FanOut(sinks)


def from_environment(env: Mapping[str, str]) -> Tracer | None:
    """The tracer for `BOOTSEER_TRACE` and the launcher's variables; None if tracing is off."""
    spec = without_outer_job(env).get("BOOTSEER_TRACE", "")
    if not spec or env.get("BOOTSEER_DISABLE") == "1":
        return None
    identity = discover(env, hostname=os.uname().nodename)
    if not identity.job:
        identity = identity._replace(job="unnamed")
    parent = traceparent.parse(env.get(traceparent.VARIABLE, ""))
    return Tracer(
        open_sink(spec, identity.node),
        identity,
        trace=parent.trace if parent else os.urandom(16).hex(),
        parent=parent.span if parent else "",
    )


class _Stage(contextlib.ContextDecorator):
    """The result of `stage()`: a context manager and decorator. It looks up the process's tracer when entered."""

    def __init__(self, name: str, attrs: Mapping[str, Any]) -> None:
        self._name = name
        self._attrs = attrs
        self._span: Span | None = None

    def __enter__(self) -> _Stage:
        tracer = process_tracer()
        if tracer is not None:
            self._span = tracer.span(self._name, self._attrs)
            self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(kind, error, trace)

    def note(self, **attrs: object) -> None:
        """Add facts known only while the stage runs; they go into its end event."""
        if self._span is not None:
            self._span.attrs.update(attrs)

    def __call__(self, function: F) -> F:
        """Wrap a function or coroutine function. A generator function is returned unchanged: its call does no work."""
        flags = getattr(getattr(function, "__code__", None), "co_flags", 0)  # avoids importing `inspect`
        if flags & _COROUTINE:
            return cast("F", self._awaited(function))
        return function if flags & _GENERATOR else super().__call__(function)

    def _recreate_cm(self) -> _Stage:
        return _Stage(self._name, self._attrs)  # calls may overlap

    def _awaited(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(function)
        async def staged(*args: P.args, **kwargs: P.kwargs) -> R:
            with _Stage(self._name, self._attrs):
                return await function(*args, **kwargs)

        return staged


def stage(name: str, /, **attrs: object) -> _Stage:
    """Mark a stage of the startup, as a context manager or as a decorator.

    `name` is dotted (`environment_setup.install`); attributes are str, int, float, bool or None. Example:

        with bootseer.stage("environment_setup.install", packages=12) as install:
            install.note(bytes=download())
    """
    return _Stage(name, attrs)


def training_began(**attrs: object) -> None:
    """Mark the end of the first training step, for frameworks without a hook. Only the first call counts."""
    global _began
    with _lock:
        tracer = process_tracer()
        if tracer is None or _began:
            return
        _began = True
    tracer.emit(TRAINING_BEGAN, INSTANT, attrs={"by": "api", **attrs})


_lock = RLock()


def _renew_lock() -> None:
    """After a fork, an inherited lock may be held by a thread that does not exist in the child."""
    global _lock
    _lock = RLock()


after_fork(_renew_lock)
_began = False
_resolved = False
_tracer: Tracer | None = None


def process_tracer() -> Tracer | None:
    """The tracer of this process, created from its environment at the first call."""
    global _resolved, _tracer
    if not _resolved:
        with _lock:
            if not _resolved:
                _tracer = from_environment(os.environ)
                _resolved = True
    return _tracer
