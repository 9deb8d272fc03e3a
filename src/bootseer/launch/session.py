"""One measured run on this node: identity, spool, tracer, the children's environment, observers beside the command.

Imports here cost every job: what only some runs need (scheduler, exporter, file digests) is imported where it is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bootseer.errors import BootseerError
from bootseer.launch.supervise import log, say
from bootseer.trace import spools, traceparent
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, NO_RANK, OK, Event, fingerprint
from bootseer.trace.identity import OUTER_JOB, OUTER_NODE, Identity, discover
from bootseer.trace.sinks import FanOut, safe_name
from bootseer.trace.tracer import TRAINING_BEGAN, Tracer, new_span, open_sink, spool_word

if TYPE_CHECKING:
    import threading

    from bootseer.launch.command import Options
    from bootseer.launch.observers import Observers, Shipping, StartReport
    from bootseer.launch.peers import PeersStart
    from bootseer.launch.warm import WarmStart
    from bootseer.trace.spool_tail import SpoolTail

_HOOK_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "hook", "path")
_SET_BACK_NS = 3600 * 10**9
"""How far the clock may be set back during a run."""
PODINFO = "/etc/podinfo"
"""Where Kubernetes' own examples mount the downward API volume."""


@contextmanager
def session_stage(session: Session, name: str, attrs: Mapping[str, object] | None = None) -> Iterator[dict[str, Any]]:
    """A measured stage. Yields the attributes of the stage's end event; one named `error` makes the stage failed."""
    began_s = time.monotonic()
    if session.peers is not None:
        session.peers.announce_stage(name)
    with session.tracer.span(name, attrs) as span:
        yield span.attrs
        if "error" in span.attrs:
            span.fail(str(span.attrs["error"]))
    log(__name__, "stage %s took %.3f s: %s", name, time.monotonic() - began_s, span.attrs)


class RunEvents:
    """The events of one run on this node. Its spool is shared with other processes, and maybe with other runs."""

    def __init__(self, tracer: Tracer, span: str, folder: str) -> None:
        """`span` is the run's, `folder` the spool of the attempt."""
        self.tracer, self.span, self.folder = tracer, span, folder
        self.began_ns, self._began_mono_ns = time.time_ns(), time.monotonic_ns()

    def owns(self, event: Event) -> bool:
        """Whether an event of the spool belongs to this run."""
        identity = self.tracer.identity
        mine = event.node == identity.node and identity.rank in (NO_RANK, event.rank)
        # The clock may have been set back meanwhile. The monotonic one alone does not tell: it restarts at a boot.
        elapsed_ns = event.mono_ns - self._began_mono_ns
        is_later = elapsed_ns >= 0 and event.wall_ns >= self.began_ns + elapsed_ns - _SET_BACK_NS
        # The scheduler's stages lie before the run, and have it as their parent.
        return mine and (is_later or event.wall_ns >= self.began_ns or event.parent == self.span)

    def tail(self) -> SpoolTail:
        """Reads this run's events. Of a spool that a thousand nodes share, each reads only its own files."""
        from bootseer.trace.spool_tail import SpoolTail

        return SpoolTail(self.folder, self.tracer.identity.node, self.owns)


class Session(RunEvents):
    """One run; its begin event is written by the constructor, its end event by `close`."""

    is_measured = True
    is_asked_to_end = False
    """A signal asked the command to end: after a time of grace, a scheduler kills all that is left."""
    sinks = ""
    warm: WarmStart | None = None
    peers: PeersStart | None = None
    _observers: Observers | None = None
    _shipping: Shipping | None = None

    def __init__(self, command: Sequence[str], options: Options, env: Mapping[str, str]) -> None:
        self._env = env
        identity = discover(env, hostname=os.uname().nodename)
        if not identity.job:
            identity = identity._replace(job=_default_job_name(command))
        self.in_default_root = options.spool is None
        attempt = identity.attempt
        if attempt is None and (options.peers is not None or _has_other_processes(identity, command, env)):
            attempt = 0  # a number drawn by this node would differ from the other nodes'
        self.otlp = next((word for word in options.sinks if word.partition("=")[0] == "otlp"), None)
        self.service = next((word for word in options.sinks if word.partition("=")[0] == "service"), None)
        needs_spool = bool("spool" in options.sinks or self.otlp or self.service)  # exporter and shipper read it
        try:
            folder, attempt = spools.make_attempt(options.spool or spools.default_root(env), identity.job, attempt)
        except (BootseerError, OSError) as error:
            if "stderr" not in options.sinks:
                raise
            if needs_spool:
                say(f"events go only to stderr: {error}")
            folder, attempt, self.otlp, self.service = "", attempt or 0, None, None
        identity = identity._replace(attempt=attempt)
        sinks = [spool_word(folder)] if folder and (needs_spool or _reads_events(options)) else []
        sinks += ["stderr"] if "stderr" in options.sinks else []
        self.sinks = ",".join(sinks)
        given = traceparent.parse(env.get(traceparent.VARIABLE, ""))
        own = fingerprint(f"{identity.job}\0{attempt}")
        tracer = Tracer(
            open_sink(self.sinks, identity.node),
            identity,
            trace=given.trace if given else own,
            parent=given.span if given else "",
        )
        super().__init__(tracer, new_span(), folder if "spool" in self.sinks else "")
        self.quiet = options.quiet
        self._initial_identity = identity
        tracer.emit("run", BEGIN, span=self.span, attrs=_run_attributes(command, identity, options, env))
        tracer.parent = self.span
        label = f"{identity.job}, attempt {attempt}, node {identity.node}"
        log(__name__, "%s (by %s): events in %s (%s)", label, identity.source, self.folder, self.sinks)
        self.reports: list[StartReport] = []
        """Sent when training begins, in this order."""

    @property
    def warm_folder(self) -> str:
        """The folder for records of imports, hidden in the spool. Nodes may share a spool, and have their own caches of
        records."""
        return os.path.join(self.folder, f".warm-{safe_name(self.tracer.identity.node)}")

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
        if "SLURM_JOB_ID" in env:
            child.update({OUTER_JOB: env["SLURM_JOB_ID"], OUTER_NODE: env.get("SLURMD_NODENAME", "")})
        for name in ("BOOTSEER_SERVICE_TOKEN", "BOOTSEER_WARM"):  # a secret that the job does not need; an outer run's
            child.pop(name, None)
        if hook and env.get("BOOTSEER_HOOK") != "0":
            if self.warm is not None:
                child["BOOTSEER_WARM"] = self.warm_folder
            child["PYTHONPATH"] = os.pathsep.join(word for word in (_HOOK_FOLDER, env.get("PYTHONPATH")) if word)
        return child

    def drop_events(self) -> None:
        """Write no more events: the file server does not answer, and the run has to end."""
        if self.folder and not self.sinks.endswith("stderr"):  # else it may be standard error
            say(f"{self.folder} does not answer: the end of the run is not recorded")
        self.tracer.sink, self.quiet = FanOut([]), True

    def command_did_not_start(self) -> None:
        """Suppress the hint at the report, unless an earlier start of the command has run."""
        self.quiet = self.quiet or self.tracer.identity == self._initial_identity

    def training_began(self) -> None:
        """Emit that the user's pattern was found in the output."""
        self.tracer.emit(TRAINING_BEGAN, INSTANT, parent=self.span, attrs={"by": "pattern"})

    def start_observers(self, env: Mapping[str, str]) -> None:
        """Start the threads beside the command, once."""
        if self._observers is not None:
            return
        scheduled = (
            env.get("SLURM_JOB_ID")
            or env.get("BOOTSEER_SUBMITTED")
            or env.get("KUBERNETES_SERVICE_HOST")
            or os.path.isdir(env.get("BOOTSEER_PODINFO") or PODINFO)
        )
        if self.otlp is None and self.service is None and not scheduled and not self.reports:
            return
        from bootseer.launch import observers

        self._observers = observers.Observers()
        if self.warm is not None and self.warm.is_pending:
            unpack = self.warm.unpack
            self._observers.start(lambda ended: unpack())
        if self.reports:
            self._observers.start(lambda ended: observers.report_when_training_begins(self, ended))
        if self.otlp is not None:
            url = self.otlp.partition("=")[2]
            export_s = observers.EXPORT_S
            self._observers.start(lambda ended: observers.export_spool(self, url, ended), within_s=export_s)
        if self.service is not None:
            self._shipping = observers.Shipping(self.folder, self.service.partition("=")[2], self._env)
            self._observers.start(self._shipping.watch, within_s=0)
        if scheduled:
            self._observers.start(lambda ended: self._scheduler_times(env, ended))

    def _scheduler_times(self, env: Mapping[str, str], ended: threading.Event) -> None:
        from bootseer.launch import queue_times

        podinfo = env.get("BOOTSEER_PODINFO") or PODINFO
        found = queue_times.times({**env, "BOOTSEER_PODINFO": podinfo}, ended)
        began_ns = self.began_ns
        log(__name__, "the scheduler's times: %s", found)
        if found.submitted_ns and found.submitted_ns <= began_ns:
            self._emit_past_span(
                "queue", found.submitted_ns, min(found.started_ns or began_ns, began_ns), found.submitted_by
            )
        if found.started_ns and found.started_ns <= began_ns:
            # Between the two times Kubernetes pulled the image; Slurm ran its prolog.
            stage = "image_loading" if found.started_by == queue_times.KUBERNETES else "allocation"
            self._emit_past_span(stage, found.started_ns, began_ns, found.started_by)

    def _emit_past_span(self, stage: str, begin_ns: int, end_ns: int, told_by: str) -> None:
        span = self.tracer.emit(stage, BEGIN, parent=self.span, wall_ns=begin_ns, attrs={"told_by": told_by})
        self.tracer.emit(stage, END, span=span, parent=self.span, wall_ns=end_ns, outcome=OK)

    def close(self, code: int) -> None:
        """Write the end event, and wait a moment for the observers."""
        lost = self.tracer.sink.lost
        self.tracer.identity = self._initial_identity
        attrs: dict[str, int] = {"exit_code": code, **({"events_lost": lost} if lost else {})}
        self.tracer.emit("run", END, span=self.span, parent="", outcome=OK if code == 0 else FAILED, attrs=attrs)
        if self._observers is not None:
            self._observers.finish()
        if self._shipping is not None:
            self._shipping.finish()
        if lost:
            say(f"{lost} events could not be written to {self.folder or 'stderr'}; the report will miss them")
        elif not self.quiet and "spool" in self.sinks:
            import shlex

            job = self.tracer.identity.job
            is_name = self.in_default_root and not os.path.exists(job)  # `report` takes a name that exists for a path
            say(f"where the startup's time went: bootseer report {shlex.quote(job if is_name else self.folder)}")


class Unmeasured(Session):
    """A run whose events are not written, and whose programs do not know of it."""

    is_measured = False
    quiet = True

    def __init__(self, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        """`command`: names the job for its other nodes."""
        identity = discover(env, hostname=os.uname().nodename)
        if not identity.job and command:
            identity = identity._replace(job=_default_job_name(command))
        self._initial_identity = identity
        RunEvents.__init__(self, Tracer(FanOut([]), identity, trace=""), new_span(), "")
        self.reports = []

    def child_env(self, env: Mapping[str, str], *, hook: bool) -> dict[str, str]:
        return dict(env)

    def start_observers(self, env: Mapping[str, str]) -> None:
        pass


def _reads_events(options: Options) -> bool:
    """Whether parts of the run look for events of the command, such as the begin of training: in the spool."""
    parts = (options.image, options.environment, options.checkpoint, options.peers, options.restarts)
    return options.warm != "off" or any(part is not None for part in parts)


def option_values(command: Sequence[str], *names: str) -> Iterator[str]:
    """The values of these options in a command line, given as `--name value` or `--name=value`."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            yield value if equals else following


def _has_other_processes(identity: Identity, command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether other processes take part in this attempt, so that all need the same attempt number."""
    return (
        identity.source not in ("host", "flag")
        or identity.rank != NO_RANK
        or (identity.num_nodes or 1) > 1
        or bool(env.get("BOOTSEER_NODE"))
        or any(value != "1" for value in option_values(command, *_NODES))
    )


_NODES = ("--nnodes", "--num-nodes", "--num_nodes", "--num_machines")


def _default_job_name(command: Sequence[str]) -> str:
    """Name of an unnamed job: its script if an interpreter or launcher runs one, else its program."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return safe_name(os.path.basename(word).rpartition(".")[0])
    return safe_name(os.path.basename(command[0]))


_OWNERSHIP = (
    ("team", ("BOOTSEER_TEAM", "SLURM_JOB_ACCOUNT")),
    ("queue", ("BOOTSEER_QUEUE", "SLURM_JOB_PARTITION")),
    ("user", ("SLURM_JOB_USER", "USER")),
    ("cluster", ("BOOTSEER_CLUSTER", "SLURM_CLUSTER_NAME")),
)
"""Attributes by which a fleet's figures are grouped, and the variables that hold them."""


def _command_digest(command: Sequence[str]) -> str:
    """16 hex digits. Not a `fingerprint`, from which a password among the arguments can be computed."""
    try:
        from _blake2 import blake2b  # 3 ms faster than hashlib
    except ImportError:
        from hashlib import blake2b
    return blake2b("\0".join(command).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _run_attributes(
    command: Sequence[str], identity: Identity, options: Options, env: Mapping[str, str]
) -> dict[str, object]:
    """Attributes of the run for the report and `diff`, without the command's arguments, which may hold secrets."""
    from bootseer import __version__

    gpus = identity.gpus
    if gpus is None:
        devices = os.listdir("/dev")
        gpus = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in devices)
        gpus = None if not gpus and "kfd" in devices else gpus  # AMD's are not counted
    facts: dict[str, object] = {
        "bootseer": __version__,
        "program": os.path.basename(command[0]),
        "command_digest": _command_digest(command),
        "gpus": gpus,
        "launcher": identity.source,
        "kernel": os.uname().release,
        "hook": options.hook,
    }
    if identity.devices:
        facts["devices"] = identity.devices
    if identity.num_nodes:
        facts["num_nodes"] = identity.num_nodes
    if identity.topology:
        facts["topology"] = identity.topology
    for name, variables in _OWNERSHIP:
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
