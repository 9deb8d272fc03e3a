"""One command: what the user said of it, and how it is started, waited for and written down."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bootseer.artifact.progress import Show, no_progress
from bootseer.launch import supervise
from bootseer.launch.supervise import say
from bootseer.trace.event import BEGIN, END, FAILED, OK

if TYPE_CHECKING:
    from bootseer.launch.checkpoint import CheckpointWanted
    from bootseer.launch.environment.task import EnvironmentWanted
    from bootseer.launch.image.start import Wanted
    from bootseer.launch.peers import PeersWanted
    from bootseer.launch.restart import Restarts
    from bootseer.launch.session import Session
    from bootseer.trace.tracer import Tracer


class Options(NamedTuple):
    """What the user said to `bootseer run`; None and empty leave it to the environment."""

    setup: str | None = None
    requirements: Sequence[str] = ()
    spool: str | None = None
    """Root folder of the spools."""
    sinks: Sequence[str] = ("spool",)
    """`spool`, `stderr`, `otlp` or `otlp=URL`, `service` or `service=URL`."""
    hook: bool = True
    began_pattern: re.Pattern[bytes] | None = None
    quiet: bool = False
    warm: str = "off"
    """Whether what a Python launcher starts comes from a warm parent: `off`, `auto`, or `on`, which says more."""
    image: Wanted | None = None
    """The container image that the command runs in."""
    environment: EnvironmentWanted | None = None
    """How what the setup makes is to come; None: by running it."""
    checkpoint: CheckpointWanted | None = None
    """Checkpoints that are mounted for the command."""
    restarts: int = 0
    """How often the command is started again when it fails for a transient reason."""
    restart_delay: int = 0
    """Seconds before each of these starts."""
    peers: PeersWanted | None = None
    """How blocks come from the job's other nodes; None: from the origin alone."""
    show: Show = no_progress
    """Shows people what a start waits for."""


def run_stage(name: str, attrs: Mapping[str, object], command: Sequence[str], env: Mapping[str, str]) -> int:
    """`bootseer stage`: run the command between a begin and an end event; returns its exit code.

    Without tracing, become the command.
    """
    from bootseer.trace.tracer import from_environment

    tracer = from_environment(env)
    if tracer is None:
        return supervise.replace_process(command, env)
    supervise.block_signals()
    with tracer.span(name, attrs) as span:
        code = run_program(command, env, tracer, own_group=not supervise.in_foreground())
        if code:
            span.fail(f"exit code {code}")
    return code


def run_program(
    argv: Sequence[str],
    env: Mapping[str, str],
    tracer: Tracer | None,
    *,
    own_group: bool,
    stdout: int | None = None,
    enter: Callable[[], None] | None = None,
) -> int:
    """Run a program to its end; its exit code. One that cannot be started is reported, with the exit code of a shell.

    Signals must be blocked: one that arrives meanwhile goes to the program.
    """
    env = {**env, **tracer.environment()} if tracer is not None else env
    try:
        pid = supervise.spawn(argv, env, own_group=own_group, stdout=stdout, enter=enter)
    except supervise.CannotStart as error:
        say(str(error))
        return error.code
    return supervise.wait(pid, own_group=own_group, tracer=tracer)


def run_command(
    command: Sequence[str],
    options: Options,
    env: dict[str, str],
    session: Session | None,
    *,
    own_group: bool,
    program: Sequence[str] = (),
    span: str = "",
    enter: Callable[[], None] | None = None,
    renew: Callable[[Mapping[str, str]], None] | None = None,
) -> int:
    """Start the command, wait for it, and write down both; returns its exit code. Signals must be blocked.

    `program` is the command as the user wrote it where `command` is another; `span` is its span's id where others know
    it already; `enter` leads the command's process to where it is to run; `renew` makes that place ready for one more
    start of the command with these variables (`--restarts`).
    """
    program = program or command
    restarts = None
    if session is not None and session.warm is not None:
        session.warm.give()
    if session is not None and session.peers is not None:
        session.peers.wait_for_nodes()
    if options.peers is not None and options.image is None:
        enter = with_names(env, enter)
    if options.restarts:
        from bootseer.launch.restart import Restarts
        from bootseer.trace.tracer import new_span

        warm = options.warm != "off" and "BOOTSEER_WARM" in env
        restarts = Restarts(options.restarts, options.restart_delay, program, session, renew, warm=warm)
        restarts.mark(env)
    while True:
        if session is not None:
            attrs = {"program": os.path.basename(program[0])}
            span = session.tracer.emit("command", BEGIN, parent=session.span, span=span, attrs=attrs)
            env.update(session.tracer.environment(span))
        signals: list[int] = []
        code = _run_once(command, options, env, session, restarts, own_group, enter, signals.append)
        if session is not None:
            outcome = OK if code == 0 else FAILED
            facts = {"exit_code": code}
            session.tracer.emit("command", END, span=span, parent=session.span, outcome=outcome, attrs=facts)
        if restarts is None:
            return code
        span = new_span()
        if session is not None:
            env.update(session.tracer.environment(span))
        ended = restarts.again(code, signals, env)
        if ended is not None:
            restarts.close()
            return ended


def with_names(env: dict[str, str], enter: Callable[[], None] | None) -> Callable[[], None] | None:
    """`enter`, and then a mount namespace in which /etc/hosts knows the job's nodes (`peers.names`).

    Where it cannot be shown, the resolver is configured to give up early, unless the user has configured it.
    """
    from bootseer.errors import BootseerError
    from bootseer.mounts import kernel
    from bootseer.peers.names import RES_OPTIONS, SYSTEM, hosts_for

    hosts = hosts_for(env)
    if hosts is None:
        return enter

    def entered() -> None:
        if enter is not None:
            enter()
        try:
            if os.geteuid() == 0:
                kernel.unshare_mounts()
                kernel.attach(kernel.clone_mount(hosts), SYSTEM.resolve())
                return
        except (BootseerError, OSError) as error:
            say(f"the names of the job's nodes are left to DNS: {error}")
        env.setdefault("RES_OPTIONS", RES_OPTIONS)

    return entered


def _run_once(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session | None,
    restarts: Restarts | None,
    own_group: bool,
    enter: Callable[[], None] | None,
    on_signal: Callable[[int], None],
) -> int:
    """One start of the command, to its end."""
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
        pid = restarts.spawn_warm(env, {1: stdout, 2: stderr}, own_group=own_group) if restarts is not None else None
        if pid is None:
            pid = supervise.spawn(command, env, own_group=own_group, stdout=stdout, stderr=stderr, enter=enter)
    except supervise.CannotStart as error:
        say(str(error))
        if session is not None:
            session.nothing_ran()
        return error.code
    for relay in relays:
        relay.start()
    if session is not None:
        session.start_beside(env)  # behind the spawn: the job does not wait for it
    tracer = session.tracer if session is not None else None
    code = supervise.wait(pid, own_group=own_group, on_signal=on_signal, tracer=tracer)
    deadline_s = time.monotonic() + supervise.EXIT_FLUSH_S
    for relay in relays:
        relay.finish(deadline_s)
    return code


def _once(function: Callable[[], None]) -> Callable[[], None]:
    import threading

    lock = threading.Lock()

    def first() -> None:
        if lock.acquire(blocking=False):
            function()

    return first
