"""`bootseer run`: set the stage for a command, run it, and write down what can be seen from outside.

The order is chosen so that the command starts as early as it can: identity and spool first (they cost a few system
calls), then the setup, then the command; what the scheduler knows and the export to a collector happen beside it.
Nothing here may fail the job: without a spool the command runs unmeasured, and one line says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.launch import environment_setup, scheduler, spools, supervise
from bootseer.trace import traceparent
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, NO_RANK, OK
from bootseer.trace.identity import Identity, discover
from bootseer.trace.sinks import safe_name
from bootseer.trace.tracer import TRAINING_BEGAN, Tracer, open_sink, spool_word

_EXIT_FLUSH_S = 2.0
_HOOK_FOLDER = str(Path(__file__).absolute().parents[1] / "hook" / "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
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


def say(message: str) -> None:
    """One line for the user, on standard error: standard output belongs to the job."""
    sys.stderr.write(f"bootseer: {message}\n")
    sys.stderr.flush()


def run(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """Run the command; returns the exit code to end with. Raises `UsageError` before anything was started."""
    steps = environment_setup.steps(options.setup, options.requirements)
    if env.get("BOOTSEER_DISABLE") == "1":
        return _unmeasured(command, steps, env)
    supervise.block_signals()
    own_group = not supervise.in_foreground()
    session = _open_session(command, options, env)
    tracer = session.tracer if session is not None else None
    child_env = session.child_env(env, hook=options.hook) if session is not None else dict(env)
    code, what = 0, ""
    if steps:
        code, what = environment_setup.run(steps, child_env, tracer, own_group=own_group)
    if code:
        say(f"the environment setup failed ({what}, exit code {code}); the command was not started")
    else:
        code = _run_command(command, options, child_env, session, own_group=own_group)
    if session is not None:
        session.close(code)
    return code


def _unmeasured(command: Sequence[str], steps: Sequence[environment_setup.Step], env: Mapping[str, str]) -> int:
    """Without BootSeer: the setup is part of the job and still runs, then the command takes our place."""
    if steps:
        supervise.block_signals()
        own_group = not supervise.in_foreground()
        code, what = environment_setup.run(steps, env, None, own_group=own_group)
        if code:
            say(f"the environment setup failed ({what}, exit code {code}); the command was not started")
            return code
        supervise.unblock_signals()
    return supervise.replace_process(command, env)


def _run_command(
    command: Sequence[str], options: Options, env: dict[str, str], session: Session | None, *, own_group: bool
) -> int:
    span = ""
    if session is not None:
        span = session.tracer.emit("command", BEGIN, parent=session.span, attrs={"program": Path(command[0]).name})
        env.update(session.tracer.environment(span))
    relays = []
    if options.began_pattern is not None and session is not None:
        from bootseer.launch.relay import Relay, follow_window_size

        found = _once(session.training_began)
        relays = [Relay(target, options.began_pattern, found) for target in (1, 2)]
        follow_window_size(relays)
    try:
        stdout, stderr = (relay.write for relay in relays) if relays else (None, None)
        pid = supervise.spawn(command, env, own_group=own_group, stdout=stdout, stderr=stderr)
    except supervise.CannotStart as error:
        say(str(error))
        code = error.code
    else:
        for relay in relays:
            relay.start()
        if session is not None:
            session.start_beside(env)  # behind the spawn: the job does not wait for it
        code = supervise.wait(pid, own_group=own_group)
        for relay in relays:
            relay.finish(_EXIT_FLUSH_S)
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


def _once(function: Callable[[str], None]) -> Callable[[str], None]:
    lock = threading.Lock()

    def first(line: str) -> None:
        if lock.acquire(blocking=False):
            function(line)

    return first


def _open_session(command: Sequence[str], options: Options, env: Mapping[str, str]) -> Session | None:
    try:
        return Session(command, options, env)
    except OSError as error:
        say(f"events cannot be written ({error}); the command runs unmeasured")
        return None


class Session:
    """One measured run on this node: its identity, its tracer and what goes on beside the command."""

    def __init__(self, command: Sequence[str], options: Options, env: Mapping[str, str]) -> None:
        identity = discover(env, hostname=os.uname().nodename)
        if not identity.job:
            identity = identity._replace(job=_job_of(command))
        root = options.spool or str(spools.default_root(env))
        self.folder, attempt = spools.make_attempt(Path(root), identity.job, identity.attempt)
        identity = identity._replace(attempt=attempt, rank=NO_RANK)
        words = [spool_word(str(self.folder))] if "spool" in options.sinks else []
        words += ["stderr"] if "stderr" in options.sinks else []
        self.otlp = next((word for word in options.sinks if word.partition("=")[0] == "otlp"), None)
        if self.otlp and not words:
            words = [spool_word(str(self.folder))]  # the exporter reads the spool
        self.sinks = ",".join(words)
        given = traceparent.parse(env.get(traceparent.VARIABLE, ""))
        digest = hashlib.blake2b(f"{identity.job}\0{attempt}".encode(), digest_size=16).hexdigest()
        self.tracer = Tracer(
            open_sink(self.sinks, identity.node),
            identity,
            trace=given.trace if given else digest,
            parent=given.span if given else "",
        )
        self.quiet = options.quiet
        self.began_ns = time.time_ns()
        self.span = self.tracer.emit("run", BEGIN, attrs=_facts(command, identity, options))
        self.tracer.parent = self.span
        self._beside: list[threading.Thread] = []
        self._ended = threading.Event()

    def child_env(self, env: Mapping[str, str], *, hook: bool) -> dict[str, str]:
        """The environment for the setup and the command."""
        who = self.tracer.identity
        child = {
            **env,
            "BOOTSEER_TRACE": self.sinks,
            "BOOTSEER_JOB": who.job,
            "BOOTSEER_ATTEMPT": str(who.attempt),
            "BOOTSEER_KIND": who.kind,
            "BOOTSEER_NODE": who.node,
            **self.tracer.environment(self.span),
        }
        if hook and env.get("BOOTSEER_HOOK") != "0":
            child["PYTHONPATH"] = os.pathsep.join(word for word in (_HOOK_FOLDER, env.get("PYTHONPATH")) if word)
        return child

    def training_began(self, line: str) -> None:
        """The user's pattern was found in the output."""
        self.tracer.emit(TRAINING_BEGAN, INSTANT, parent=self.span, attrs={"by": "pattern", "line": line})

    def start_beside(self, env: Mapping[str, str]) -> None:
        """Start what goes on while the command runs."""
        # As PID 1 all children are reaped together, so that no helper program may run beside the command.
        if scheduler.asks_slurm(env) and os.getpid() == 1:
            self._scheduler_times({**env, "SLURM_JOB_ID": ""})
        elif scheduler.asks_slurm(env):
            self._start(lambda: self._scheduler_times(env))
        else:
            self._scheduler_times(env)
        if self.otlp is not None:
            self._start(self._export)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._beside.append(thread)

    def _scheduler_times(self, env: Mapping[str, str]) -> None:
        found = scheduler.times(env)
        began_ns = self.began_ns
        if found.submitted_ns and found.submitted_ns <= began_ns:
            self._past("queue", found.submitted_ns, min(found.started_ns or began_ns, began_ns), found.source)
        if found.started_ns and found.started_ns <= began_ns:
            # Kubernetes' node pulled the image between the two moments; Slurm's ran its prolog.
            stage = "image_loading" if found.source == "kubernetes" else "allocation"
            self._past(stage, found.started_ns, began_ns, found.source)

    def _past(self, stage: str, begin_ns: int, end_ns: int, told_by: str) -> None:
        attrs = {"told_by": told_by or "BOOTSEER_SUBMITTED"}
        span = self.tracer.emit(stage, BEGIN, parent=self.span, wall_ns=begin_ns, attrs=attrs)
        self.tracer.emit(stage, END, span=span, parent=self.span, wall_ns=end_ns, outcome=OK)

    def _export(self) -> None:
        from bootseer.launch.export import export_spool

        url = (self.otlp or "").partition("=")[2]
        export_spool(str(self.folder), self.tracer.identity.node, url or None, self._ended, say)

    def close(self, code: int) -> None:
        """Write the end, and give what runs beside a moment to finish."""
        lost = self.tracer.sink.lost
        attrs: dict[str, int] = {"exit_code": code, **({"events_lost": lost} if lost else {})}
        self.tracer.emit("run", END, span=self.span, parent="", outcome=OK if code == 0 else FAILED, attrs=attrs)
        self._ended.set()
        deadline = time.monotonic() + _EXIT_FLUSH_S
        for thread in self._beside:
            thread.join(max(deadline - time.monotonic(), 0))
        if not self.quiet and "spool" in self.sinks:
            who = self.tracer.identity
            say(f"events of job {who.job}, attempt {who.attempt}: {self.folder}  (bootseer report {who.job})")


def _job_of(command: Sequence[str]) -> str:
    """A job without a name is called after its program: the script, where an interpreter or launcher runs one."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return safe_name(Path(word).stem)
    return safe_name(Path(command[0]).name)


def _facts(command: Sequence[str], identity: Identity, options: Options) -> dict[str, object]:
    """What the report and `diff` should know of this run. The command's arguments may hold secrets and stay out."""
    from bootseer import __version__

    gpus = identity.gpus
    if gpus is None:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    facts: dict[str, object] = {
        "bootseer": __version__,
        "program": Path(command[0]).name,
        "command_digest": hashlib.blake2b("\0".join(command).encode("utf-8", "replace"), digest_size=8).hexdigest(),
        "gpus": gpus,
        "launcher": identity.source,
        "kernel": os.uname().release,
        "hook": options.hook,
    }
    if identity.num_nodes:
        facts["num_nodes"] = identity.num_nodes
    for path in options.requirements:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        facts["requirements_digest"] = digest
    return facts
