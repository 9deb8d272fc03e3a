"""One measured run on this node: identity, spool, tracer, the children's environment, what goes on beside the command.

What is imported here costs every job: what only some runs need (the scheduler's programs, the exporter, digests of
files) is imported where it is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bootseer.errors import BootseerError
from bootseer.launch.supervise import EXIT_FLUSH_S, log, say
from bootseer.trace import spools, traceparent
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, NO_RANK, OK, Event
from bootseer.trace.identity import Identity, discover
from bootseer.trace.sinks import safe_name
from bootseer.trace.spools import fingerprint
from bootseer.trace.tracer import TRAINING_BEGAN, Tracer, open_sink, spool_word

if TYPE_CHECKING:
    import threading

    from bootseer.launch.command import Options
    from bootseer.launch.observers import Observers, Shipping
    from bootseer.launch.peers import PeersStart
    from bootseer.launch.warm import WarmStart

_HOOK_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hook", "path")
PODINFO = "/etc/podinfo"
"""Where Kubernetes' own examples mount the downward API volume."""


@contextmanager
def staged(session: Session | None, name: str, attrs: Mapping[str, object] | None = None) -> Iterator[dict[str, Any]]:
    """A stage of the session, if there is one. What is put into the facts that it yields goes into the stage's end.

    A fact named `error` makes it a failed one.
    """
    if session is None:
        yield {}
        return
    began_s = time.monotonic()
    if session.peers is not None:
        session.peers.at_stage(name)
    with session.tracer.span(name, attrs) as span:
        yield span.attrs
        if "error" in span.attrs:
            span.fail(str(span.attrs["error"]))
    log(__name__, "stage %s took %.3f s: %s", name, time.monotonic() - began_s, span.attrs)


class Session:
    """One measured run; writes its begin when it is made and its end in `close`."""

    @classmethod
    def opened(cls, command: Sequence[str], options: Options, env: Mapping[str, str]) -> Session | None:
        """A session, or None and a word to the user when events cannot be written anywhere."""
        try:
            return cls(command, options, env)
        except (OSError, BootseerError) as error:
            say(f"events cannot be written ({error}); the command runs unmeasured")
            return None

    def __init__(self, command: Sequence[str], options: Options, env: Mapping[str, str]) -> None:
        self._env = env
        identity = discover(env, hostname=os.uname().nodename)
        if not identity.job:
            identity = identity._replace(job=_job_of(command))
        root = options.spool or spools.default_root(env)
        self.in_default_root = options.spool is None
        attempt = identity.attempt
        if attempt is None and (options.peers is not None or _has_company(identity, command, env)):
            attempt = 0  # a number that this node makes up would not be the other nodes'
        self.folder, attempt = spools.make_attempt(root, identity.job, attempt)
        identity = identity._replace(attempt=attempt)
        self.otlp = next((word for word in options.sinks if word.partition("=")[0] == "otlp"), None)
        self.service = next((word for word in options.sinks if word.partition("=")[0] == "service"), None)
        # The exporter and the shipper read the spool.
        words = [spool_word(self.folder)] if "spool" in options.sinks or self.otlp or self.service else []
        words += ["stderr"] if "stderr" in options.sinks else []
        self.sinks = ",".join(words)
        given = traceparent.parse(env.get(traceparent.VARIABLE, ""))
        own = fingerprint(f"{identity.job}\0{attempt}")
        self.tracer = Tracer(
            open_sink(self.sinks, identity.node),
            identity,
            trace=given.trace if given else own,
            parent=given.span if given else "",
        )
        self.quiet = options.quiet
        self._first = identity
        self._warm = options.warm
        self.warm: WarmStart | None = None
        self.peers: PeersStart | None = None
        self.began_ns = time.time_ns()
        self.span = self.tracer.emit("run", BEGIN, attrs=_facts(command, identity, options, env))
        self.tracer.parent = self.span
        label = f"{identity.job}, attempt {attempt}, node {identity.node}"
        log(__name__, "%s (by %s): events in %s (%s)", label, identity.source, self.folder, self.sinks)
        self._observers: Observers | None = None
        self._shipping: Shipping | None = None
        self._more: list[Callable[[threading.Event], None]] = []

    def child_env(self, env: Mapping[str, str], *, hook: bool) -> dict[str, str]:
        """The environment for the setup and the command."""
        identity = self.tracer.identity
        child = {
            **env,
            "BOOTSEER_TRACE": self.sinks,
            "BOOTSEER_JOB": identity.job,
            "BOOTSEER_ATTEMPT": str(identity.attempt),
            "BOOTSEER_KIND": identity.kind,
            "BOOTSEER_NODE": identity.node,
            **self.tracer.environment(self.span),
        }
        child.pop("BOOTSEER_SERVICE_TOKEN", None)  # the service's secret is no concern of the job's
        if hook and env.get("BOOTSEER_HOOK") != "0":
            if self._warm != "off":
                child["BOOTSEER_WARM"] = self.folder
            child["PYTHONPATH"] = os.pathsep.join(word for word in (_HOOK_FOLDER, env.get("PYTHONPATH")) if word)
        return child

    def begin_restart(self) -> int:
        """What is written from now on belongs to the command's next start; its number."""
        from bootseer.trace.spool_tail import SpoolTail

        last = max((event.restart for event in SpoolTail(self.folder).poll(last=True) if self.owns(event)), default=0)
        restart = max(last, self.tracer.identity.restart) + 1  # an elastic launcher counts its own too
        self.tracer.identity = self._first._replace(restart=restart, kind="restart")
        return restart

    def nothing_ran(self) -> None:
        """The command could not be started: unless it ran before, there is nothing that a report could tell of."""
        self.quiet = self.quiet or self.tracer.identity == self._first

    def training_began(self) -> None:
        """The user's pattern was found in the output."""
        self.tracer.emit(TRAINING_BEGAN, INSTANT, parent=self.span, attrs={"by": "pattern"})

    def also_beside(self, work: Callable[[threading.Event], None]) -> None:
        """Let `work(ended)` run too while the command runs."""
        self._more.append(work)

    def start_beside(self, env: Mapping[str, str]) -> None:
        """Start what goes on while the command runs, unless it does already."""
        if self._observers is not None:
            return
        scheduled = (
            env.get("SLURM_JOB_ID")
            or env.get("BOOTSEER_SUBMITTED")
            or env.get("KUBERNETES_SERVICE_HOST")
            or os.path.isdir(env.get("BOOTSEER_PODINFO", PODINFO))
        )
        if self.otlp is None and self.service is None and not scheduled and not self._more:
            return
        from bootseer.launch.observers import Observers, Shipping, load_exporter

        self._observers = Observers()
        for work in self._more:
            self._observers.start(work)
        if self.otlp is not None:
            self._observers.start(self._export, load=load_exporter)
        if self.service is not None:
            self._shipping = Shipping(self.folder, self.service.partition("=")[2], self._env)
            self._observers.start(self._shipping.watch, awaited=False)
        if scheduled:
            self._observers.start(lambda ended: self._scheduler_times(env, ended))

    def _scheduler_times(self, env: Mapping[str, str], ended: threading.Event) -> None:
        from bootseer.launch import scheduler

        # As PID 1 all children are reaped together, so that no program may run beside the command.
        found = scheduler.times({"BOOTSEER_PODINFO": PODINFO, **env}, ended, may_ask=os.getpid() != 1)
        began_ns = self.began_ns
        log(__name__, "the scheduler's times: %s", found)
        if found.submitted_ns and found.submitted_ns <= began_ns:
            self._past("queue", found.submitted_ns, min(found.started_ns or began_ns, began_ns), found.submitted_by)
        if found.started_ns and found.started_ns <= began_ns:
            # Kubernetes' node pulled the image between the two moments; Slurm's ran its prolog.
            stage = "image_loading" if found.started_by == scheduler.KUBERNETES else "allocation"
            self._past(stage, found.started_ns, began_ns, found.started_by)

    def _past(self, stage: str, begin_ns: int, end_ns: int, told_by: str) -> None:
        span = self.tracer.emit(stage, BEGIN, parent=self.span, wall_ns=begin_ns, attrs={"told_by": told_by})
        self.tracer.emit(stage, END, span=span, parent=self.span, wall_ns=end_ns, outcome=OK)

    def _export(self, ended: threading.Event) -> None:
        from bootseer.launch.observers import export_spool

        url = (self.otlp or "").partition("=")[2]
        export_spool(self.folder, self.owns, url or None, ended, say)

    def owns(self, event: Event) -> bool:
        """Whether an event is this run's: others may share the folder, the node, or the attempt's number."""
        identity = self.tracer.identity
        mine = event.node == identity.node and identity.rank in (NO_RANK, event.rank)
        # What the scheduler reported lies before the run, which it names as its parent.
        return mine and (event.wall_ns >= self.began_ns or event.parent == self.span)

    def close(self, code: int) -> None:
        """Write the end, and give what runs beside a moment to finish."""
        lost = self.tracer.sink.lost
        self.tracer.identity = self._first
        attrs: dict[str, int] = {"exit_code": code, **({"events_lost": lost} if lost else {})}
        self.tracer.emit("run", END, span=self.span, parent="", outcome=OK if code == 0 else FAILED, attrs=attrs)
        if self._observers is not None and not self._observers.finish(EXIT_FLUSH_S) and self.otlp:
            say(f"not all spans reached the collector in {EXIT_FLUSH_S:g} s; the spool keeps the events: {self.folder}")
        if self._shipping is not None:
            self._shipping.finish()
        if lost:
            say(f"{lost} events could not be written to {self.folder}; the report will miss them")
        elif not self.quiet and "spool" in self.sinks:
            import shlex

            where = shlex.quote(self.tracer.identity.job if self.in_default_root else self.folder)
            say(f"where the startup's time went: bootseer report {where}")


def _has_company(identity: Identity, command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether other processes run this attempt too, so that its number must be the same for all."""
    return (
        identity.source not in ("host", "flag")
        or identity.rank != NO_RANK
        or (identity.num_nodes or 1) > 1
        or bool(env.get("BOOTSEER_NODE"))
        or any(word.startswith(("--nnodes", "--num-nodes", "--num_nodes", "--num_machines")) for word in command)
    )


def _job_of(command: Sequence[str]) -> str:
    """A job without a name is called after its program: the script, where an interpreter or launcher runs one."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return safe_name(os.path.basename(word).rpartition(".")[0])
    return safe_name(os.path.basename(command[0]))


_BELONGS = (
    ("team", ("BOOTSEER_TEAM", "SLURM_JOB_ACCOUNT")),
    ("queue", ("BOOTSEER_QUEUE", "SLURM_JOB_PARTITION")),
    ("user", ("SLURM_JOB_USER", "USER")),
    ("cluster", ("BOOTSEER_CLUSTER", "SLURM_CLUSTER_NAME")),
)
"""What a fleet's figures are divided by, and the variables that tell it."""


def _facts(command: Sequence[str], identity: Identity, options: Options, env: Mapping[str, str]) -> dict[str, object]:
    """What the report and `diff` should know of this run. The command's arguments may hold secrets and stay out."""
    from bootseer import __version__

    gpus = identity.gpus
    if gpus is None:
        gpus = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in os.listdir("/dev"))
    facts: dict[str, object] = {
        "bootseer": __version__,
        "program": os.path.basename(command[0]),
        "command_digest": fingerprint("\0".join(command))[:16],
        "gpus": gpus,
        "launcher": identity.source,
        "kernel": os.uname().release,
        "hook": options.hook,
    }
    if identity.num_nodes:
        facts["num_nodes"] = identity.num_nodes
    if identity.topology:
        facts["topology"] = identity.topology
    for name, variables in _BELONGS:
        if value := next((env[variable] for variable in variables if env.get(variable)), ""):
            facts[name] = value
    if options.requirements:
        import hashlib

        digest = hashlib.blake2b()
        for path in options.requirements:
            with open(path, "rb") as file:
                digest.update(file.read())
        facts["requirements_digest"] = digest.hexdigest()[:16]
    return facts
