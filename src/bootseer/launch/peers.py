"""`bootseer run --peers`: the peer service of this node, from before the first mount to the end of the command.

Errors of the service are reported, and the start continues with the origin alone.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer.artifact.owned_folder import OwnedFolder, delete_abandoned
from bootseer.artifact.places import own_folder
from bootseer.errors import (
    BootseerError,
    Interrupted,
    NotFoundError,
    PermanentError,
    TransientError,
    UsageError,
)
from bootseer.io.locks import flocked, try_flock
from bootseer.launch.background import Background, Send, start_background
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import COMMAND_ENDED, StartReport, reporting_errors
from bootseer.launch.session import Session, session_stage
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.peers.job import FOLDER, JobPeers
from bootseer.peers.readiness import READY, Readiness
from bootseer.trace.event import INSTANT
from bootseer.trace.sinks import safe_name
from bootseer.trace.spools import folder_name
from bootseer.trace.tracer import TRAINING_BEGAN

_LOG = logger(__name__)
_PREFIX = "job-"
_READY_S = 15.0
_POLL_S = 0.1
_FIRST_MESSAGE_S, _REPEAT_MESSAGE_S = 5.0, 30.0
_TOGETHER_S = 2.0
"""How long the service waits for expected nodes, which start within seconds of each other: a block that is requested
before its owner is there is fetched from the origin more than once."""


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """The options of `--peers`."""

    source: str
    """Value of `--peers`: where the job's nodes are listed."""
    secret: Path | None
    interfaces: tuple[str, ...]
    before: int | None
    """Limit of sent bytes per second until training begins."""
    after: int | None
    """Limit from then on; None: a twentieth of the links' speed, or `before` if that is less; 0: send nothing."""
    runtime: Path
    tls: bool = False
    """Whether nodes encrypt their connections."""
    wait_s: int = 0
    """How long the command waits for nodes that are still starting; 0: not at all."""
    min_nodes: int = 0
    """The command does not start with fewer ready nodes than this after `wait_s`."""
    store: str = ""
    """The start's store, where its nodes may meet."""


class PeersStart:
    """The peer service of one start."""

    def __init__(self, options: PeersOptions, session: Session, env: Mapping[str, str]) -> None:
        self._options = options
        self._session = session
        self._env = env
        self._owned_folder: OwnedFolder | None = None
        self._folder: Path | None = None
        self._is_ready = False
        self._serve_until_s = 0.0
        self._service: Background | None = None
        self._messages: list[dict[str, Any]] = []
        """Messages of the service, once it has ended."""
        self._report = StartReport(session, self._record)

    def __enter__(self) -> dict[str, str]:
        """Start the service; returns the variable by which the job's processes find it. Signals must be blocked.

        Raises `UsageError` for invalid options, and `Interrupted`.
        """
        identity = self._session.tracer.identity
        if identity.num_nodes == 1 and self._options.source == "auto":
            return {}
        name = folder_name(f"{identity.job}.{identity.attempt}.{identity.node}")
        try:
            # Several processes of one node may run this, as started by `srun`: one of them serves for all.
            path, lock = _claim_folder(self._options.runtime / "peers", name)
            if lock is not None:
                self._owned_folder = OwnedFolder(path, lock)
                with interruptible():
                    self._start(path)
            else:
                until, members = time.monotonic() + _READY_S, path / "members.json"
                while path.exists() and not members.exists() and time.monotonic() < until:
                    time.sleep(0.02)
                if not members.exists():
                    raise TransientError("another process of this node did not start the peer service")
        except (BootseerError, OSError) as error:
            self._stop()
            if isinstance(error, UsageError):
                raise
            say(f"no peers: {error}; all blocks come from the origin")
            return {}
        self._folder = path
        os.environ[FOLDER] = str(path)  # for the daemons, which are forked
        return {FOLDER: str(path)}

    def __exit__(self, *_: object) -> None:
        os.environ.pop(FOLDER, None)
        with reporting_errors("the peer service was not stopped cleanly"):
            if self._service is not None:
                time.sleep(max(self._serve_until_s - time.monotonic(), 0.0))
                self._service.stop()
                self._messages = self._service.messages()
                self._report.send(COMMAND_ENDED)
            self._stop()

    def announce_stage(self, name: str) -> None:
        """Let the other nodes know the stage of this node's start."""
        if self._owned_folder is not None and self._options.wait_s and not self._is_ready:
            self._is_ready = name == READY
            with suppress(BootseerError, OSError):  # only informative
                JobPeers.open(self._owned_folder.path).write_stage(name)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes of the job are ready to start their commands, at most `wait_s`.

        Raises `TransientError` for fewer than `min_nodes` then, and `Interrupted`. Signals must be blocked.
        """
        options, num_nodes = self._options, self._session.tracer.identity.num_nodes or 0
        if not options.wait_s or num_nodes == 1:
            return
        if self._folder is None:
            if options.min_nodes > 1:
                raise TransientError(f"no other node is known without peers, and --min-nodes is {options.min_nodes}")
            say("without peers the command does not wait for other nodes")
            return
        began_s = time.monotonic()
        next_message_s = began_s + _FIRST_MESSAGE_S
        with session_stage(self._session, "nodes_ready", {"barrier": "nodes_ready"}) as facts, interruptible():
            self.announce_stage(READY)
            while True:
                known = self._readiness(self._folder)
                readiness = known or Readiness(0, {})
                # A list may name more nodes than the job has: all of a fleet, or killed ones that left their records.
                expected = num_nodes or max(readiness.nodes, options.min_nodes)
                missing = readiness.missing(expected)
                now_s = time.monotonic()
                if known is None or readiness.ready >= expected > 1 or now_s >= began_s + options.wait_s:
                    break
                if now_s >= next_message_s:
                    next_message_s = now_s + _REPEAT_MESSAGE_S
                    say(f"{readiness.ready} of {expected} nodes are ready; waiting for {missing}")
                time.sleep(_POLL_S)
            facts.update(ready=readiness.ready, nodes=expected, missing=missing)
        # If this command ends at once, the others can still learn for two reports' time that this node was ready.
        self._serve_until_s = now_s + 1.0 + 0.002 * expected
        if known is None:
            say("the peer service has ended: the command does not wait for other nodes")
        if readiness.ready < min(options.min_nodes, expected):
            raise TransientError(
                f"{readiness.ready} of {expected} nodes are ready after {now_s - began_s:.0f} s, --min-nodes is"
                f" {options.min_nodes}; missing: {missing}"
            )
        if known is None:
            return
        if expected < 2:
            say(f"no other node is known after {options.wait_s} s; --num-nodes says how many the job has")
        elif missing:
            say(f"{readiness.ready} of {expected} nodes are ready after {options.wait_s} s; missing: {missing}")

    def _readiness(self, folder: Path) -> Readiness | None:
        """The readiness of the job's nodes; None when the peer service has ended."""
        if self._service is not None and self._service.wait(0.0):
            return None
        try:
            return JobPeers.open(folder).readiness()
        except BootseerError:  # the service, of another process of this node, has deleted it
            return None

    def _start(self, folder: Path) -> None:
        def work(send: Send) -> None:
            try:
                self._serve(folder, send)
            except Interrupted:
                # Not left to the run, which may have been killed: that cannot be told by the parent process id, which
                # stays the run's as long as one of its threads is alive. A service that fails leaves the folder to the
                # run: containers are still to be started with it, and processes get blocks from the other nodes.
                shutil.rmtree(folder, ignore_errors=True)
                raise

        self._service = start_background(work, name="bootseer-peers", log=folder / "log")
        who = f"the peer service, which meets the other nodes through {self._options.source:.200},"
        while "state" in self._service.next_message(_READY_S, who):
            pass  # it ended before it was ready: its error follows

    def _serve(self, folder: Path, send: Send) -> None:
        from bootseer.peers.members import Listed, open_source
        from bootseer.peers.rendezvous import rendezvous_name
        from bootseer.peers.service import Limits, Service

        options, identity = self._options, self._session.tracer.identity
        source = open_source(
            options.source,
            self._env,
            attempt=rendezvous_name(folder_name(identity.job), identity.attempt),
            name=folder_name(identity.node),
            rack=safe_name(identity.topology) if identity.topology else "",
            interface_names=options.interfaces,
            secret_file=options.secret,
            store=options.store,
        )
        if isinstance(source, Listed):
            source.say = lambda line: send({"say": line})
            # The agent may listen there, serving blocks of earlier jobs.
            source.before_listening = lambda addresses: _notify_agent(
                options.runtime, {"addresses": addresses}, begins=True
            )
        service = None
        try:
            limits = Limits(options.before, options.after)
            name = folder_name(identity.node) if options.wait_s else ""
            service = Service(folder, source, limits, tls=options.tls, name=name)
            service.run(lambda: send({"ready": True}), wait_for=identity.num_nodes or 0, wait_s=_TOGETHER_S)
        finally:
            if service is not None:
                service.close()
                with suppress(BootseerError):
                    send({"state": JobPeers.open(folder).state()})
                left = service.state_for_agent() if isinstance(source, Listed) else None
                if left is not None:
                    _notify_agent(options.runtime, left, begins=False)

    def _stop(self) -> None:
        if self._service is not None:
            self._service.stop()
            self._service = None
        if self._owned_folder is not None:
            # `remove` would keep it while a process that the job left behind has its hosts file mounted. That is not
            # affected, and the next start of this name must not find the state of this one.
            shutil.rmtree(self._owned_folder.path, ignore_errors=True)
            self._owned_folder.remove()
            self._owned_folder = None

    def _record(self, until: str) -> None:
        if self._owned_folder is None:
            return
        job = JobPeers.open(self._owned_folder.path) if self._owned_folder.path.exists() else None
        if until == TRAINING_BEGAN and job is not None:
            job.training_began()
        states = [message["state"] for message in self._messages if "state" in message]
        state = states[-1] if states else job.state() if job is not None else {}
        if not state:  # the service was killed before it wrote any
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


def _notify_agent(runtime: Path, body: dict[str, Any], *, begins: bool) -> None:
    """Notify the node's agent, if there is one, that a job with peers begins or has ended."""
    if not (runtime / "agent").exists():  # saves its import
        return
    from bootseer.agent.agent import PEERS, PEERS_BEGIN, request

    with suppress(NotFoundError):
        try:
            request(runtime, PEERS_BEGIN if begins else PEERS, body)
        except (TransientError, PermanentError) as error:
            _LOG.warning("the agent serves no blocks of this job: %s", error)


def _claim_folder(parent: Path, name: str) -> tuple[Path, int | None]:
    """The folder of this name below `parent`, and its lock; None if another process holds the lock."""
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
