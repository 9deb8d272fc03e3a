"""torchrun's agent: launcher rendezvous, start and failure of workers, restarts.

It reads the agent's log lines, which exist at `LOGLEVEL=INFO`; those of current torch, and of older versions:

    I1120 17:54:26.369000 5426 torch/distributed/elastic/agent/server/api.py:707] [default] Rendezvous'ing worker group
    [2026-11-20 17:54:26,369] torch.distributed.elastic.agent.server.api: [INFO] [default] Rendezvous'ing worker group

and the JSON events of `--event-log-handler=console`. These have neither a usable time (torch leaves `timestamp` 0) nor
a log prefix: unless a log collector stamped them, the rendezvous in them is a fact, and the agent's lines are preferred
to them. `SUCCEEDED` of an AGENT is written for failed workers too, so no outcome is read from it. Rendezvous' own
events (`RdzvEvent`) go to a null handler and are in no log. At the default level only failures and the warning about
OMP_NUM_THREADS are printed: the launcher's start, and each failed worker. An agent prints one failure for each restart,
so that a second failure means that the workers were restarted after the first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bootseer.report.foreign import parser as make
from bootseer.report.foreign.parser import UNKNOWN_JOB, Builder, Findings, Line, Parser, Place
from bootseer.report.foreign.times import milliseconds_to_ns
from bootseer.report.search import Clue
from bootseer.trace.event import NO_RANK

STAGE = "model_initialization.launcher_rendezvous"
MAX_RESTARTS = 1_000_000

_LABEL = re.compile(r"\s*(\[[A-Za-z][\w./-]{0,120}\]:?|\d{1,6}:(?=\s)|\[\d+,\d+\]<std(?:out|err)>:)?", re.ASCII)
_GLOG = re.compile(
    r"[IWE]\d{4}(?:\d{4})? [\d:.]{8,18}\s+(\d{1,9}) torch/distributed/([\w./]{1,120})\.py:\d+\] ?", re.ASCII
)
_OLD = re.compile(r"torch\.distributed\.([\w.]{1,120}): ?(?:\[(?:INFO|WARNING|ERROR)\] )?", re.ASCII)
_RESULT = re.compile(r"\s+(restart_count|group_rank|group_world_size)=(\d{1,9})\s*$", re.ASCII)
_RUN_ID = re.compile(r"\s+run_id\s+: (\S{1,256})\s*$")
_RANDOM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,8}) \(pid: (\d{1,9})\)", re.ASCII)
_SIGNALLED = re.compile(r"Received (?:Signals\.)?(\w{1,16}) death signal", re.ASCII)
_EVENT = '{"name": "torchelastic.worker.status.'


@dataclass(slots=True)
class _Rendezvous:
    line: Line
    restart: int
    begin_ns: int | None
    end_ns: int | None = None
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Agent:
    """One agent process; a log that srun merged contains several."""

    launched: Line | None = None
    restart: int = 0
    rendezvous: _Rendezvous | None = None
    all: list[_Rendezvous] = field(default_factory=list)
    instants: list[tuple[Line, str, int, dict[str, Any]]] = field(default_factory=list)
    """Line, stage, restart, attributes."""
    failures: list[tuple[Line, int, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Recorded:
    """A rendezvous or worker start out of a JSON event."""

    line: Line
    state: str
    node: str
    restart: int
    duration_ns: int | None
    attrs: dict[str, Any]


class TorchElasticParser(Parser):
    """torchrun's agents in one log."""

    name = "torchelastic"
    # Every line of torch's launcher and agent contains the first, also within a message of several lines; lines of
    # older versions contain the second, events the third.
    clues = (
        Clue(b"distributed/", rb"(?<=torch/distributed/)[\w./]{1,120}\.py:\d+\]"),
        Clue(b"distributed.", rb"(?<=torch\.distributed\.)[\w.]{1,120}:"),
        Clue(b'"torchelastic.worker.status.', rb"[A-Z]"),
    )

    def __init__(self) -> None:
        self._agents: dict[tuple[str, str], _Agent] = {}
        self._recorded: list[_Recorded] = []
        self._recorded_restart = 0
        self._job = UNKNOWN_JOB

    def feed(self, line: Line) -> None:
        text = make.plain(line.text)
        start = text.find(_EVENT)
        if start >= 0:
            self._event(line, text[start:])
            return
        found = _GLOG.search(text)
        pid, module = (found[1], found[2]) if found else ("", "")
        if found is None:
            found = _OLD.search(text)
            if found is None:
                return
            module = found[1].replace(".", "/")
        label = _LABEL.match(text)
        agent = self._agents.setdefault((label[0].strip() if label else "", pid), _Agent())
        message = text[found.end() :]
        if module == "run" or module.startswith("launcher/"):
            if agent.launched is None and not agent.all:
                agent.launched = line
            if run_id := _RUN_ID.match(message):
                self._name_job(run_id[1])
        elif module.startswith("elastic/agent/server/"):
            self._agent_line(agent, line, message)
        if failed := _FAILED.search(message):
            attrs = {"exit_code": int(failed[1]), "local_rank": int(failed[2]), "worker_pid": int(failed[3])}
            before = agent.failures[-1][1] + 1 if agent.failures else 0
            agent.failures.append((line, max(agent.restart, self._recorded_restart, before), attrs))

    def _agent_line(self, agent: _Agent, line: Line, message: str) -> None:
        current = agent.rendezvous
        if "] Rendezvous'ing worker group" in message:
            agent.rendezvous = _Rendezvous(line, agent.restart, line.wall_ns)
            agent.all.append(agent.rendezvous)
        elif "] Rendezvous complete for workers. Result:" in message:
            if current is None or current.end_ns is not None:
                current = agent.rendezvous = _Rendezvous(line, agent.restart, None)
                agent.all.append(current)
            current.end_ns = line.wall_ns
        elif result := _RESULT.match(message):
            self._result(agent, result[1], int(result[2]))
        elif "] Starting worker group" in message:
            restart, attrs = (current.restart, current.attrs) if current else (agent.restart, {})
            agent.instants.append((line, "worker_start", restart, attrs))
        elif "attempts left" in message and "will restart worker group" in message:
            agent.restart += 1
        elif signalled := _SIGNALLED.match(message):
            agent.instants.append((line, "launcher_signal", agent.restart, {"signal": signalled[1]}))

    def _result(self, agent: _Agent, key: str, value: int) -> None:
        if agent.rendezvous is None:
            return
        if key != "restart_count":
            agent.rendezvous.attrs[key] = value
        elif value <= MAX_RESTARTS:
            agent.rendezvous.restart = agent.restart = value

    def _event(self, line: Line, text: str) -> None:
        try:
            record, _ = json.JSONDecoder().raw_decode(text)
            metadata = record["metadata"]
            source, state = record["source"], metadata["state"]
            restarts, run_id = metadata["agent_restarts"], metadata["run_id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if isinstance(run_id, str):
            self._name_job(run_id)
        restart = restarts if type(restarts) is int and 0 <= restarts <= MAX_RESTARTS else 0
        self._recorded_restart = restart
        hostname = metadata.get("hostname")
        node = make.name(hostname).partition(".")[0] if isinstance(hostname, str) else ""
        group_rank = make.rank(metadata.get("group_rank"))
        attrs = {} if group_rank == NO_RANK else {"group_rank": group_rank}
        duration_ns = milliseconds_to_ns(metadata.get("duration_ms"))
        if (state == "RENDEZVOUS" and duration_ns is not None) or (state == "START" and source == "WORKER"):
            self._recorded.append(
                _Recorded(line, state, "" if node == "localhost" else node, restart, duration_ns, attrs)
            )

    def _name_job(self, run_id: str) -> None:
        job = make.name(run_id)
        # None was given: the word "none", or with --standalone a random one for each launch.
        if self._job == UNKNOWN_JOB and job and job != "none" and not _RANDOM_ID.fullmatch(job):
            self._job = job

    def finish(self) -> Findings:
        builder = Builder(self.name)
        builder.job = self._job
        seen: set[int] = set()
        for agent in self._agents.values():
            self._add(builder, agent)
            seen.update(rendezvous.restart for rendezvous in agent.all if rendezvous.begin_ns is not None)
        started: set[tuple[str, int]] = set()
        for recorded in self._recorded:
            # The same moments from the agent's lines with times are better.
            if recorded.restart not in seen:
                self._add_recorded(builder, recorded, started)
        return builder.finish()

    @staticmethod
    def _add(builder: Builder, agent: _Agent) -> None:
        if agent.launched is not None:
            builder.instant(agent.launched, "launcher_start", agent.launched.wall_ns)
        for rendezvous in agent.all:
            attrs = {"barrier": _barrier(rendezvous.restart), **rendezvous.attrs}
            builder.span(
                rendezvous.line,
                STAGE,
                rendezvous.begin_ns,
                rendezvous.end_ns,
                place=Place(restart=rendezvous.restart),
                attrs=attrs,
            )
        known = {rendezvous.restart for rendezvous in agent.all}
        for (line, _, _), (_, restart, _) in pairwise(agent.failures):
            if restart not in known:
                builder.instant(line, "launcher_start", line.wall_ns, place=Place(restart=restart))
        failed = [(line, "worker_failed", restart, attrs) for line, restart, attrs in agent.failures]
        for line, stage, restart, attrs in agent.instants + failed:
            builder.instant(line, stage, line.wall_ns, place=Place(restart=restart), attrs=attrs)

    @staticmethod
    def _add_recorded(builder: Builder, recorded: _Recorded, started: set[tuple[str, int]]) -> None:
        line, wall_ns, duration_ns = recorded.line, recorded.line.wall_ns, recorded.duration_ns
        place = Place(recorded.node, recorded.restart)
        if recorded.state == "START":
            # One for each worker; the agent starts them together.
            key = (recorded.node, recorded.restart)
            if key not in started:
                started.add(key)
                builder.instant(line, "worker_start", wall_ns, place=place, attrs=recorded.attrs)
        elif wall_ns is not None and duration_ns is not None:
            attrs = {"barrier": _barrier(recorded.restart), **recorded.attrs}
            builder.span(line, STAGE, wall_ns - duration_ns, wall_ns, place=place, attrs=attrs)
        else:
            text = f"launcher rendezvous, restart {recorded.restart}"
            builder.fact(line, STAGE, text, duration_ns, node=recorded.node)


def _barrier(restart: int) -> str:
    return f"launcher_rendezvous:{restart}"
