"""`bootseer run`: set the stage for a command, run it, and write down what can be seen from outside.

The order is chosen so that the command starts as early as it can: identity and spool first (they cost a few system
calls), then the setup, then the command; what the scheduler knows and the export to a collector happen beside it.
Nothing here may fail the job: without a spool the command runs unmeasured, and one line says so.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from bootseer.artifact.progress import Show, no_progress
from bootseer.errors import Interrupted
from bootseer.launch import supervise
from bootseer.launch.session import EXIT_FLUSH_S, Session
from bootseer.launch.supervise import say
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, OK

if TYPE_CHECKING:
    from bootseer.launch.checkpoint_stage import CheckpointWanted
    from bootseer.launch.environment_setup import Ended, Step
    from bootseer.launch.environment_wanted import EnvironmentWanted
    from bootseer.launch.image_stage import Wanted
    from bootseer.trace.tracer import Tracer


class Options(NamedTuple):
    """What the user said to `bootseer run`; None and empty leave it to the environment."""

    setup: str | None = None
    requirements: Sequence[str] = ()
    spool: str | None = None
    """Root folder of the spools."""
    sinks: Sequence[str] = ("spool",)
    """`spool`, `stderr`, `otlp` or `otlp=URL`."""
    hook: bool = True
    began_pattern: re.Pattern[bytes] | None = None
    quiet: bool = False
    image: Wanted | None = None
    """The container image that the command runs in."""
    environment: EnvironmentWanted | None = None
    """How what the setup makes is to come; None: by running it."""
    checkpoint: CheckpointWanted | None = None
    """Checkpoints that are mounted for the command."""
    show: Show = no_progress
    """Shows people what a start waits for."""


def run(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """Run the command; returns the exit code to end with. Raises `UsageError` before anything was started."""
    if options.image is not None:
        from bootseer.launch.image_stage import run_in_image

        return run_in_image(command, options, env)
    steps = _setup_steps(options)
    measured = env.get("BOOTSEER_DISABLE") != "1"
    if not measured and options.checkpoint is None:
        return _unmeasured(command, steps, env)
    supervise.block_signals()
    own_group = not supervise.in_foreground()
    session = Session.opened(command, options, env) if measured else None
    child_env = session.child_env(env, hook=options.hook) if session is not None else dict(env)
    code = 1
    try:
        with checkpoint_of(options, session) as where:
            child_env.update(where)
            if steps and options.environment is not None and options.environment.mode != "bypass" and measured:
                from bootseer.launch.environment_stage import run_in_environment

                code = run_in_environment(command, options, child_env, session, own_env=env, own_group=own_group)
            elif steps:
                came = {"mode": "bypassed", "code": "bypass"}
                code = run_set_up(command, options, child_env, session, own_group=own_group, came=came)
            else:
                code = run_command(command, options, child_env, session, own_group=own_group)
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted} before the command was started")
        code = interrupted.exit_code
    finally:
        if session is not None:
            session.close(code)
    return code


def checkpoint_of(options: Options, session: Session | None) -> AbstractContextManager[Mapping[str, str]]:
    """Has the checkpoints mounted while it lasts, and gives the variable that tells the command where they are."""
    if options.checkpoint is None:
        return nullcontext({})
    from bootseer.launch.checkpoint_stage import CheckpointStart

    return CheckpointStart(options.checkpoint, session, options.show)


def _setup_steps(options: Options) -> Sequence[Step]:
    if not options.setup and not options.requirements:
        return ()
    from bootseer.launch import environment_setup

    return environment_setup.steps(options.setup, options.requirements)


def run_set_up(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session | None,
    *,
    own_group: bool,
    came: Mapping[str, object],
) -> int:
    """Run the setup on this machine itself, then the command; returns the exit code. Signals must be blocked.

    `came` is what the event `environment_start` says of how the environment came.
    """
    tracer = session.tracer if session is not None else None
    ended = _run_setup(_setup_steps(options), env, tracer, own_group=own_group)
    if ended.code:
        return ended.code
    if tracer is not None:
        tracer.emit("environment_start", INSTANT, attrs=came)
    return run_command(command, options, dict(ended.env), session, own_group=own_group)


def _run_setup(
    steps: Sequence[Step], env: Mapping[str, str], tracer: Tracer | None, *, own_group: bool, exports: bool = True
) -> Ended:
    from bootseer.launch import environment_setup

    ended = environment_setup.run(steps, env, tracer, own_group=own_group, exports=exports)
    if ended.code:
        say(f"the environment setup failed ({ended.what}, exit code {ended.code}); the command was not started")
    return ended


def _unmeasured(command: Sequence[str], steps: Sequence[Step], env: Mapping[str, str]) -> int:
    """Without BootSeer: the setup is part of the job and still runs, then the command takes our place."""
    if steps:
        supervise.block_signals()
        own_group = not supervise.in_foreground()
        # What it exports ends with it, as it does for a wrapper script that calls the setup.
        ended = _run_setup(steps, env, None, own_group=own_group, exports=False)
        if ended.code:
            return ended.code
        supervise.unblock_signals()
    return supervise.replace_process(command, env)


def run_command(
    command: Sequence[str],
    options: Options,
    env: dict[str, str],
    session: Session | None,
    *,
    own_group: bool,
    program: str = "",
    span: str = "",
    enter: Callable[[], None] | None = None,
) -> int:
    """Start the command, wait for it, and write down both; returns its exit code. Signals must be blocked.

    `program` is what the command is called where it is not its first word; `span` is its span's id where others know
    it already; `enter` leads the command's process to where it is to run.
    """
    if session is not None:
        attrs = {"program": os.path.basename(program or command[0])}
        span = session.tracer.emit("command", BEGIN, parent=session.span, span=span, attrs=attrs)
        env.update(session.tracer.environment(span))
    relays = []
    if options.began_pattern is not None and session is not None:
        from bootseer.launch.relay import Relay, follow_window_size

        found = _once(session.training_began)
        try:
            relays = [Relay(target, options.began_pattern, found) for target in (1, 2)]
        except OSError as error:  # no pseudo terminal is left, or no descriptor
            say(f"the output cannot be watched for the pattern ({error}); the command runs without")
        else:
            follow_window_size(relays)
    try:
        stdout, stderr = (relay.write for relay in relays) if relays else (None, None)
        pid = supervise.spawn(command, env, own_group=own_group, stdout=stdout, stderr=stderr, enter=enter)
    except supervise.CannotStart as error:
        say(str(error))
        code = error.code
        if session is not None:
            session.quiet = True  # nothing ran that a report could tell of
    else:
        for relay in relays:
            relay.start()
        if session is not None:
            session.start_beside(env)  # behind the spawn: the job does not wait for it
        code = supervise.wait(pid, own_group=own_group, tracer=session.tracer if session is not None else None)
        deadline_s = time.monotonic() + EXIT_FLUSH_S
        for relay in relays:
            relay.finish(deadline_s)
    if session is not None:
        session.tracer.emit(
            "command",
            END,
            span=span,
            parent=session.span,
            outcome=OK if code == 0 else FAILED,
            attrs={"exit_code": code},
        )
    return code


def _once(function: Callable[[], None]) -> Callable[[], None]:
    import threading

    lock = threading.Lock()

    def first() -> None:
        if lock.acquire(blocking=False):
            function()

    return first
