"""Mark the first step (first training forward to the end of the first optimizer step) and the first steady step.

torch.compile needs care: code that was compiled with a hook is compiled again after the hook is removed. So the hooks
of forward and backward are removed before the first compilation, and after a compilation the optimizer hooks stay
without effect. They also stay if other hooks were registered after them, because torch iterates over the hooks while
ours runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bootseer.hook.state import STAGE, State, active, guarded, stop
from bootseer.hook.wrap import replace
from bootseer.trace.event import BEGIN, END, INSTANT, OK

_MAX_STEPS = 50
_STEADY_WITHIN = 0.2
"""Two consecutive steps are steady if their durations differ by less than this share of the longer one."""


def mark_steps(torch: ModuleType) -> None:
    """Register the hooks, after the import of torch."""
    state = active()
    if state is None:
        return
    optim, is_compiling = sys.modules["torch.optim.optimizer"], _compiler_probe(torch)

    # A step may itself be compiled: then this test is traced, and nothing else may be.
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            _before_step(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            _after_step(optimizer)

    handles = (optim.register_optimizer_step_pre_hook(before), optim.register_optimizer_step_post_hook(after))

    def undo() -> None:
        # Compiled code has guards on the registered hooks: removing one would compile it again.
        for handle in () if state.compiled else handles:
            hooks = handle.hooks_dict_ref()
            # This runs in one of the hooks, while torch iterates over the dict: only the last hook may be removed.
            if hooks and next(reversed(hooks)) == handle.id:
                handle.remove()

    state.undo.append(undo)
    _mark_backward(torch, state)
    _mark_forward(torch, state)


def _compiler_probe(torch: ModuleType) -> Callable[[], bool]:
    """torch.compiler.is_compiling itself, not a wrapper, because the compiler recognizes it by identity."""
    probe: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
    return probe


def _mark_forward(torch: ModuleType, state: State) -> None:
    is_compiling, has_gradients = _compiler_probe(torch), torch.is_grad_enabled

    # It stays through all of a job's inference, and is called for each layer.
    def before_forward(layer: Any, args: Any) -> None:
        if not is_compiling() and layer.training and has_gradients():
            handle.remove()
            _first_forward()

    handle = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(before_forward)
    state.forward_undo = handle.remove
    state.undo.append(handle.remove)


def without_forward_hook(name: str) -> Callable[[ModuleType], object]:
    """A function that has the forward hook removed when this function of a module is called: those that look for global
    hooks, of which torch.compile warns, and with which torch.export fails."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            state = active()
            if state is not None and state.forward_undo is not None:
                state.forward_undo()
            return original(*args, **kwargs)

        return look

    return lambda module: replace(module, name, make)


@guarded
def _first_forward() -> None:
    state = active()
    if state is not None:
        state.first_step_begins("forward")


def mark_compilation(callbacks: ModuleType) -> None:
    """Mark torch.compile as a stage. From its first use on, no hook may be added or removed."""
    ours = active()
    if ours is None:
        return
    handler = callbacks.callback_handler
    span = stage = ""

    @guarded
    def started(*_: Any) -> None:  # older versions of torch pass nothing
        nonlocal span, stage
        state = active()
        if state is None or state.began:
            return
        state.compiled = True
        for undo in (state.forward_undo, state.backward_undo):
            if undo is not None:
                undo()
        state.forward_undo = state.backward_undo = None
        state.backward = True  # cannot be detected any more
        if sys.modules["torch"].is_grad_enabled():
            state.first_step_begins("compile")
        stage = "first_step.compile" if state.step_span else STAGE + "compile"
        span = state.tracer.emit(stage, BEGIN, attrs={"backend": "torch.compile"})

    @guarded
    def ended(*_: Any) -> None:
        nonlocal span
        state = active()
        if state is not None and span:
            state.tracer.emit(stage, END, span=span, outcome=OK)
        span = ""

    handler.register_start_callback(started)
    handler.register_end_callback(ended)
    ours.undo.append(lambda: handler.remove_start_callback(started))
    ours.undo.append(lambda: handler.remove_end_callback(ended))


def mark_outer_steps(*names: str) -> Callable[[ModuleType], None]:
    """A function that marks steps of a framework, named `Class.method`, each as one step, however many steps of
    torch's optimizers it consists of. A framework's step without any is not counted."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = _enter_outer_step(self)
            try:
                return original(self, *args, **kwargs)
            finally:
                if outermost:
                    _leave_outer_step(self)

        return step

    def mark(module: ModuleType) -> None:
        for name in names:
            owner, _, method = name.partition(".")
            replace(getattr(module, owner, None), method, make)

    return mark


@guarded
def _enter_outer_step(outer: object) -> bool:
    state = active()
    if state is None or state.outer is not None:
        return False
    state.outer, state.inner_steps = outer, 0
    return True


@guarded
def _leave_outer_step(outer: object) -> None:
    state = active()
    if state is not None and state.outer is outer:
        state.outer = None
        if state.inner_steps:
            _note_step(state, outer)


def _mark_backward(torch: ModuleType, state: State) -> None:
    """Detect the first backward pass. All ways to start one use this engine object."""
    variable, engine = torch.autograd.Variable, getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        return

    class Engine(type(engine)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            on_gradients()
            return super().run_backward(*args, **kwargs)

    def on_gradients() -> None:
        state.backward = True
        undo()

    def undo() -> None:
        if variable._execution_engine is ours:
            variable._execution_engine = engine

    variable._execution_engine = ours = Engine()
    state.backward, state.backward_undo = False, undo
    state.undo.append(undo)


def _has_gradients(optimizer: Any) -> bool:
    """Whether a backward pass gave the optimizer gradients. Many programs call `step` once before training, only to
    create the optimizer's state."""
    state = active()
    return (state is not None and state.backward) and any(
        parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


@guarded
def _before_step(optimizer: Any) -> None:
    state = active()
    if state is not None and not state.began:
        state.stepping_ns, state.gradients = time.monotonic_ns(), _has_gradients(optimizer)


@guarded
def _after_step(optimizer: Any) -> None:
    state = active()
    # Checked before and after: a closure may compute gradients in the step, and the step may clear them.
    if state is None or not (state.began or state.gradients or _has_gradients(optimizer)):
        return
    if state.outer is None:
        _note_step(state, optimizer)
    state.inner_steps += 1


def _note_step(state: State, optimizer: object) -> None:
    now = time.monotonic_ns()
    if not state.began:
        state.optimizer = type(optimizer), id(optimizer)
        state.first_step_ended(now, by="optimizer_step")
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
