"""Run one command: its options, start, wait and events."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bootseer.artifact.progress import Show, no_progress
from bootseer.launch import supervise
from bootseer.launch.supervise import say
from bootseer.trace.event import BEGIN, END, FAILED, OK

if TYPE_CHECKING:
    from bootseer.launch.checkpoint import CheckpointOptions
    from bootseer.launch.environment.task import EnvironmentOptions
    from bootseer.launch.image.start import ImageOptions
    from bootseer.launch.peers import PeersOptions
    from bootseer.launch.relay import Relay
    from bootseer.launch.restart import Restarts
    from bootseer.launch.session import Session
    from bootseer.trace.tracer import Tracer


class Options(NamedTuple):
    """The options of `bootseer run`; None and empty mean the defaults of the environment."""

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
    """Whether a Python launcher's processes are forked from a warm parent: `off`, `auto`, or `on`, which is verbose."""
    image: ImageOptions | None = None
    """The container image that the command runs in."""
    environment: EnvironmentOptions | None = None
    """Snapshots of the environment; None: the setup runs without them."""
    checkpoint: CheckpointOptions | None = None
    """Checkpoints to mount for the command."""
    restarts: int | None = None
    """Maximum number of restarts after transient failures; None: none at all, not even on request."""
    restart_delay: int = 0
    """Seconds before each restart."""
    peers: PeersOptions | None = None
    """Fetching blocks from the job's other nodes; None: only from the origin."""
    process_snapshot: bool = False
    """Whether a warm parent is restored from memory, and dumped for later starts."""
    show: Show = no_progress
    """Displays progress while a start waits."""


def run_stage(name: str, attrs: Mapping[str, object], command: Sequence[str], env: Mapping[str, str]) -> int:
    """`bootseer stage`: run the command between a begin and an end event; returns its exit code.

    Without tracing, exec the command.
    """
    from bootseer.trace.tracer import from_environment

    tracer = from_environment(env)
    if tracer is None:
        return supervise.replace_process(command, env)
    supervise.block_signals()
    with tracer.span(name, attrs) as span:
        code = run_program(command, env, tracer)
        if code:
            span.fail(f"exit code {code}")
    return code


def run_program(
    argv: Sequence[str],
    env: Mapping[str, str],
    tracer: Tracer,
    *,
    of_setup: bool = False,
    enter: Callable[[], None] | None = None,
) -> int:
    """Run a program and return its exit code; a shell's exit code, and a message, if it cannot be started.

    Signals must be blocked: they are forwarded to the program. `of_setup`: its output goes to standard error, and it
    gets no input, which is the command's and in no request key; if it fails after a signal that asked it to end, the
    exit code is that of the signal, as pip and conda have others.
    """
    try:
        with open(os.devnull, "rb") as empty:
            streams = {0: empty.fileno(), 1: 2} if of_setup else {}
            pid = supervise.spawn(argv, {**env, **tracer.environment()}, streams, enter=enter)
    except supervise.StartError as error:
        say(str(error))
        return error.code
    signals: list[int] = []
    code = supervise.wait(pid, on_signal=signals.append, tracer=tracer)
    return next((128 + number for number in signals if of_setup and code and number in supervise.ENDING), code)


def run_command(
    command: Sequence[str],
    options: Options,
    env: dict[str, str],
    session: Session,
    *,
    program: Sequence[str] = (),
    span: str = "",
    enter: Callable[[], None] | None = None,
    renew: Callable[[Mapping[str, str]], None] | None = None,
) -> int:
    """Run the command between begin and end events, restarting it if asked; returns its exit code.

    Signals must be blocked. `program` is the command as the user wrote it, if `command` differs (a container runtime);
    `span` is the span id if it was passed to other processes already; `enter` runs in the child before exec, to enter
    namespaces; `renew` prepares the container for a restart with the given variables.
    """
    program = program or command
    restarts = None
    process_folder = ""
    if session.warm is not None:
        session.warm.hand_over(in_container=options.image is not None)
        process_folder = session.warm.process_folder
    if session.peers is not None:
        session.peers.wait_for_nodes()
    if options.peers is not None and options.image is None:
        enter = with_hosts_file(env, enter)
    if options.restarts is not None:
        from bootseer.launch.restart import Restarts
        from bootseer.trace.tracer import new_span

        warm = options.warm != "off" and "BOOTSEER_WARM" in env
        restarts = Restarts(options.restarts, options.restart_delay, program, session, renew, warm=warm)
        restarts.tag_environment(env)
        restarts.restore_process(process_folder, program, env, enter)
    while True:
        attrs = {"program": os.path.basename(program[0])}
        span = session.tracer.emit("command", BEGIN, parent=session.span, span=span, attrs=attrs)
        env.update(session.tracer.environment(span))
        signals: list[int] = []
        code = _run_once(command, options, env, session, restarts, enter, signals.append)
        session.is_asked_to_end |= not supervise.ENDING.isdisjoint(signals)
        outcome = OK if code == 0 else FAILED
        emit = partial(session.tracer.emit, "command", END, span=span, parent=session.span, outcome=outcome)
        if not supervise.write_beside(partial(emit, attrs={"exit_code": code})).acquire(timeout=supervise.LAST_EVENT_S):
            session.drop_events()
        if restarts is None:
            return code
        span = new_span()
        env.update(session.tracer.environment(span))
        ended = restarts.prepare(code, signals, env)
        if ended is not None:
            if ended == 0:
                restarts.record_process(process_folder, program, env, enter)
            restarts.close()
            return ended


def with_hosts_file(env: dict[str, str], enter: Callable[[], None] | None) -> Callable[[], None] | None:
    """`enter`, followed by a mount namespace whose /etc/hosts lists the job's nodes (`peers.names`).

    Where that cannot be mounted, the resolver gets short timeouts, unless the user has set RES_OPTIONS.
    """
    from bootseer.errors import BootseerError
    from bootseer.mounts import kernel
    from bootseer.peers.names import RES_OPTIONS, SYSTEM, hosts_for

    hosts = hosts_for(env)
    if hosts is None:
        return enter

    def enter_with_hosts() -> None:
        if enter is not None:
            enter()
        try:
            if os.geteuid() == 0:
                kernel.unshare_mounts()
                kernel.attach(kernel.clone_mount(hosts), SYSTEM.resolve())
                return
        except (BootseerError, OSError) as error:
            say(f"the job's node names are resolved by DNS: {error}")
        env.setdefault("RES_OPTIONS", RES_OPTIONS)

    return enter_with_hosts


def _run_once(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session,
    restarts: Restarts | None,
    enter: Callable[[], None] | None,
    on_signal: Callable[[int], None],
) -> int:
    relays: list[Relay] = []
    if options.began_pattern is not None and session.is_measured:
        import threading

        from bootseer.launch.relay import Relay

        began, unseen = session.training_began, threading.Lock()

        def found() -> None:
            if unseen.acquire(blocking=False):  # once, whichever output it is found in
                began()

        try:
            # One for both if they go to the same place, which keeps their order, and lines whole.
            for target in (1,) if os.path.samestat(os.fstat(1), os.fstat(2)) else (1, 2):
                relays.append(Relay(target, options.began_pattern, found))  # noqa: PERF401 - the second may fail
        except (OSError, RuntimeError) as error:  # out of pseudo terminals, descriptors or threads
            say(f"the output cannot be searched for --began-pattern ({error}); the command runs without it")
            for relay in relays:
                relay.release()  # its thread ends
            relays.clear()

        def resize(*_: object) -> None:
            for relay in relays:
                relay.resize()

        signal.signal(signal.SIGWINCH, resize)
    try:
        stdout, stderr = (relays[0].write, relays[-1].write) if relays else (None, None)
        pid = restarts.spawn_warm(env, {1: stdout, 2: stderr}) if restarts is not None else None
        if pid is None:
            pid = supervise.spawn(command, env, {1: stdout, 2: stderr}, enter=enter)
    except supervise.StartError as error:
        say(str(error))
        session.command_did_not_start()
        return error.code
    finally:
        for relay in relays:
            relay.release()
    gc.enable()  # off until here: see `cli.run_options.start`
    session.start_observers(env)  # after the spawn, so that the job does not wait for it
    code = supervise.wait(
        pid,
        reaps_orphans=restarts is not None and restarts.warm is not None,
        on_signal=on_signal,
        on_restart_request=restarts.request if restarts is not None else None,
        tracer=session.tracer,
    )
    deadline_s = time.monotonic() + supervise.EXIT_FLUSH_S
    for relay in relays:
        relay.finish(deadline_s)
    return code
