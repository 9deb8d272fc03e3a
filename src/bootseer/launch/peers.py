"""`bootseer run --peers`: the peer service of this node, from before the first mount to the end of the command.

Without peers nothing of it is imported. What goes wrong with it is told, and the start goes on with the origin alone.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bootseer.artifact.owned_folder import OwnedFolder, delete_abandoned
from bootseer.artifact.places import own_folder
from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, UsageError, error_named
from bootseer.io.locks import flocked, try_flock
from bootseer.launch.background import Background, Tell, start_background
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import ENDED, StartEnd, harmless
from bootseer.launch.session import Session, staged
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.peers.job import BLOCKS, FOLDER, JobPeers
from bootseer.peers.readiness import READY, Readiness
from bootseer.trace.event import INSTANT
from bootseer.trace.sinks import safe_name
from bootseer.trace.tracer import TRAINING_BEGAN

_LOG = logger(__name__)
_PREFIX = "job-"
_READY_S = 15.0
_LOOK_S = 0.1
_SAY_S, _SAY_AGAIN_S = 5.0, 30.0
_TOGETHER_S = 2.0
"""Nodes of a job start within seconds of each other: so long is waited for those that are known to come. A block that
is asked for before its owner is there comes from the origin more than once."""


@dataclass(frozen=True, slots=True)
class PeersWanted:
    """What the user said of peers."""

    source: str
    """As `--peers`: where the job's nodes are listed."""
    secret: Path | None
    interfaces: tuple[str, ...]
    before: int | None
    """Bytes per second that may be sent until training begins."""
    after: int | None
    """From then on; None: a twentieth of the links' speed; 0: nothing."""
    runtime: Path
    tls: bool = False
    """Whether the nodes encrypt what they say to each other."""
    wait_s: int = 0
    """How long the command waits at most for nodes whose starts go on; 0: not at all."""
    min_nodes: int = 0
    """With fewer nodes that are ready by then it does not start."""


class PeersStart:
    """One start's peers."""

    def __init__(self, wanted: PeersWanted, session: Session, env: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._session = session
        self._env = env
        self._owned: OwnedFolder | None = None
        self._folder: Path | None = None
        self._is_ready = False
        self._service: Background | None = None
        self._told: list[dict[str, Any]] = []
        """What the service said, once it has ended."""
        self._end = StartEnd(session, self._record)

    def __enter__(self) -> dict[str, str]:
        """Start the service; the variable that tells the job's processes of it. Signals must be blocked.

        Raises `UsageError` for what can never work, and `Interrupted`.
        """
        identity = self._session.tracer.identity
        if identity.num_nodes == 1 and self._wanted.source == "auto":
            return {}
        name = safe_name(f"{identity.job}.{identity.attempt}.{identity.node}")
        try:
            # Several processes of one node may run this each, as `srun` starts them: one serves for all.
            path, lock = _locked(self._wanted.runtime / "peers", name)
            if lock is not None:
                self._owned = OwnedFolder(path, lock)
                with interruptible():
                    self._start(path)
            else:
                until = time.monotonic() + _READY_S
                while not (path / "members.json").exists() and time.monotonic() < until:
                    time.sleep(0.02)
        except (BootseerError, OSError) as error:
            self._stop()
            if isinstance(error, UsageError):
                raise
            say(f"no peers: {error}; all comes from the origin")
            return {}
        self._folder = path
        os.environ[FOLDER] = str(path)  # for the daemons, which are forked
        self._session.also_beside(self._end.watch)
        return {FOLDER: str(path)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The command has ended: the service ends, and its folder goes."""
        os.environ.pop(FOLDER, None)
        with harmless("the peer service did not end as it should"):
            if self._service is not None:
                self._service.stop()
                self._told = self._service.messages()
                self._end.tell(ENDED)
            self._stop()

    def at_stage(self, name: str) -> None:
        """Tell the other nodes what this one's start is doing."""
        if self._owned is not None and self._wanted.wait_s and not self._is_ready:
            self._is_ready = name == READY
            with suppress(BootseerError, OSError):  # then they know less of it
                JobPeers.open(self._owned.path).write_stage(name)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes of the job are ready for their commands, within the time that the user allows.

        Raises `TransientError` when there are too few then, and `Interrupted`. Signals must be blocked.
        """
        wanted, num_nodes = self._wanted, self._session.tracer.identity.num_nodes or 0
        if not wanted.wait_s or self._folder is None or num_nodes == 1:
            return
        job, began_s = JobPeers.open(self._folder), time.monotonic()
        said_s = began_s + _SAY_S
        with staged(self._session, "nodes_ready", {"barrier": "nodes_ready"}) as facts, interruptible():
            self.at_stage(READY)
            while True:
                readiness, listed = job.readiness() or (Readiness(0, {}), 0)
                expected = max(num_nodes, listed)
                missing = readiness.missing(expected)
                now_s = time.monotonic()
                if readiness.ready >= expected > 1 or now_s >= began_s + wanted.wait_s:
                    break
                if now_s >= said_s:
                    said_s = now_s + _SAY_AGAIN_S
                    say(f"{readiness.ready} of {expected} nodes are ready; waiting for {missing}")
                time.sleep(_LOOK_S)
            facts.update(ready=readiness.ready, nodes=expected, missing=missing)
        if readiness.ready < min(wanted.min_nodes, expected):
            raise TransientError(
                f"{readiness.ready} of {expected} nodes are ready after {wanted.wait_s} s, --min-nodes is"
                f" {wanted.min_nodes}; missing: {missing}"
            )
        if expected < 2:
            say(f"no other node is known after {wanted.wait_s} s; --num-nodes says how many the job has")
        elif missing:
            say(f"{readiness.ready} of {expected} nodes are ready after {wanted.wait_s} s; missing: {missing}")

    def _start(self, folder: Path) -> None:
        wait_for = self._session.tracer.identity.num_nodes or 0

        def work(tell: Tell) -> None:
            try:
                self._serve(folder, tell, wait_for)
            finally:
                # Whether the run is still alive to do it is not known: as long as one of its threads does not die, it
                # is our parent.
                with suppress(BootseerError):
                    tell({"state": JobPeers.open(folder).state()})
                shutil.rmtree(folder, ignore_errors=True)

        self._service = start_background(work, name="bootseer-peers", log=folder / "log")
        reply = self._service.answer(_READY_S)
        if reply.get("hint"):
            raise UsageError(str(reply["error"]), hint=str(reply["hint"]))
        if "error" in reply:
            raise error_named(str(reply["kind"]), str(reply["error"]))

    def _serve(self, folder: Path, tell: Tell, wait_for: int) -> None:
        """In the service's process."""
        from bootseer.peers.members import Listed, open_source
        from bootseer.peers.objects import OBJECT, ObjectFiles
        from bootseer.peers.readers import CHECKPOINT, CachedFiles
        from bootseer.peers.rendezvous import rendezvous_name
        from bootseer.peers.service import BlockFiles, Limits, Service

        wanted, identity = self._wanted, self._session.tracer.identity
        source = open_source(
            wanted.source,
            self._env,
            attempt=rendezvous_name(safe_name(identity.job), identity.attempt),
            name=safe_name(identity.node),
            rack=safe_name(identity.topology) if identity.topology else "",
            interface_names=wanted.interfaces,
            secret_file=wanted.secret,
        )
        if isinstance(source, Listed):  # the agent may serve there what earlier jobs have read
            source.before_listening = lambda addresses: _tell_agent(
                wanted.runtime, {"addresses": addresses}, begins=True
            )
        blocks, chunks, objects = BlockFiles(), CachedFiles(), ObjectFiles()
        openers = {BLOCKS: blocks.open, CHECKPOINT: chunks.open, OBJECT: objects.open}
        service = None
        try:
            limits = Limits(wanted.before, wanted.after)
            name = safe_name(identity.node) if wanted.wait_s else ""
            service = Service(folder, source, openers, limits, blocks.figures, tls=wanted.tls, name=name)
            service.run(lambda: tell({"ready": True}), wait_for=wait_for, wait_s=_TOGETHER_S)
        finally:
            if service is not None:
                service.close()
                left = service.state_for_agent() if isinstance(source, Listed) else None
                if left is not None:
                    _tell_agent(wanted.runtime, left, begins=False)
            blocks.close()
            chunks.close()
            objects.close()

    def _stop(self) -> None:
        if self._service is not None:
            self._service.stop()
            self._service = None
        if self._owned is not None:
            self._owned.remove()
            self._owned = None

    def _record(self, until: str) -> None:
        """What is known at the end of the start: when training began, or with the command."""
        if self._owned is None:
            return
        job = JobPeers.open(self._owned.path) if self._owned.path.exists() else None
        if until == TRAINING_BEGAN and job is not None:
            job.training_began()
        states = [message["state"] for message in self._told if "state" in message]
        state = states[-1] if states else job.state() if job is not None else {}
        if not state:  # it was killed before it had written any
            return
        attrs = {
            "until": until,
            "peers": len(state["peers"]),
            "unreachable": len(state["unreachable"]),
            **{name: state[name] for name in ("sent_bytes", "requests", "refused", "filled_bytes")},
            "interfaces": " ".join(f"{name}={count}" for name, count in sorted(state["by_interface"].items())),
        }
        from bootseer.report.analysis.starts import PEERS_START  # not in front of the command

        self._session.tracer.emit(PEERS_START, INSTANT, parent=self._session.span, attrs=attrs)


def _tell_agent(runtime: Path, body: dict[str, Any], *, begins: bool) -> None:
    """Tell the node's agent, if there is one, that a job with peers begins or has ended."""
    if not (runtime / "agent").exists():  # it need not be imported
        return
    from bootseer.agent.agent import PEERS, PEERS_BEGIN, request

    with suppress(NotFoundError):
        try:
            request(runtime, PEERS_BEGIN if begins else PEERS, body)
        except (TransientError, PermanentError) as error:
            _LOG.warning("the agent serves nothing of this job: %s", error)


def _locked(parent: Path, name: str) -> tuple[Path, int | None]:
    """The folder of this name below `parent`, and its lock; None where another process holds it."""
    parent = own_folder(parent, private=True)
    with flocked(parent / "lock", deadline_s=5.0):
        delete_abandoned(parent, _PREFIX)
        path = parent / f"{_PREFIX}{name}"
        path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_flock(lock):
            return path, lock
        os.close(lock)
        return path, None
