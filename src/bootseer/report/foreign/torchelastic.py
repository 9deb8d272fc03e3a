"""torchrun's agent: launcher rendezvous, start and failure of workers, restarts.

It reads the agent's log lines, which exist at `LOGLEVEL=INFO`, as torch has written them since 2.3:

    I1120 17:54:26.369000 5426 torch/distributed/elastic/agent/server/api.py:707] [default] Rendezvous'ing worker group

2.3 and 2.4 have a number of the thread. `torch/` may follow other folders, such as `site-packages/`.

At the default level only failures and the warning about OMP_NUM_THREADS are printed: the launcher's start, and each
failed worker. An agent prints one failure for each restart, so that a second failure means that the workers were
restarted after the first.

`restart_count` counts failures of the agent's own workers. When those of another node fail, the agent finds that node
waiting, and restarts its workers with the same count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bootseer.report.foreign import parser as make
from bootseer.report.foreign.parser import Findings, Line, Parser, Place
from bootseer.report.search import Clue

STAGE = "model_initialization.launcher_rendezvous"
LINE = r"(?<=torch/distributed/)[\w./]{1,120}\.py:\d+\]"
"""What follows `distributed/` in every line of torch's launcher and agent, also within a message of several lines."""
AGENT = b"torch/distributed/elastic/"
"""In every line about the start and the failure of workers."""
MAX_RESTARTS = 1_000_000

_LABEL = re.compile(r"\s*(\[[A-Za-z][\w./-]{0,120}\]:?|\d{1,6}:(?=\s)|\[\d+,\d+\]<std(?:out|err)>:)?", re.ASCII)
_GLOG = re.compile(
    r"[IWE]\d{4}(?:\d{4})? [\d:.]{8,18}\s+(\d{1,20}) (?:[^\s\]]{1,300}/)?torch/distributed/([\w./]{1,120})\.py:\d+\] ?",
    re.ASCII,
)
_RESULT = re.compile(r"\s+(restart_count|group_rank|group_world_size)=(\d{1,9})\s*$", re.ASCII)
_RUN_ID = re.compile(r"\s+run_id\s+: (\S{1,256})\s*$")
_RANDOM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FAILED = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,8}) \(pid: (\d{1,9})\)", re.ASCII)
_SIGNALLED = re.compile(r"Received (?:Signals\.)?(\w{1,16}) death signal", re.ASCII)


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
    by_others: int = 0
    """How many of the restarts were made because another node waited."""
    rendezvous: _Rendezvous | None = None
    all: list[_Rendezvous] = field(default_factory=list)
    instants: list[tuple[Line, str, int, dict[str, Any]]] = field(default_factory=list)
    """Line, stage, restart, attributes."""
    failures: list[tuple[Line, int, dict[str, Any]]] = field(default_factory=list)


class TorchElasticParser(Parser):
    """torchrun's agents in one log."""

    name = "torchelastic"
    clues = (Clue(b"distributed/", LINE.encode()),)

    def __init__(self) -> None:
        self._agents: dict[tuple[str, str], _Agent] = {}
        self._job = ""

    def feed(self, line: Line) -> None:
        text = make.plain(line.text)
        found = _GLOG.search(text)
        if found is None:
            return
        pid, module = found[1], found[2]
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
            agent.failures.append((line, max(agent.restart, before), attrs))

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
        elif "will restart worker group" in message:
            agent.restart += 1
            agent.by_others += " new nodes from " in message
        elif signalled := _SIGNALLED.match(message):
            agent.instants.append((line, "launcher_signal", agent.restart, {"signal": signalled[1]}))

    def _result(self, agent: _Agent, key: str, value: int) -> None:
        if agent.rendezvous is None:
            return
        if key != "restart_count":
            agent.rendezvous.attrs[key] = value
        elif value <= MAX_RESTARTS:
            agent.rendezvous.restart = agent.restart = value + agent.by_others

    def _name_job(self, run_id: str) -> None:
        job = make.name(run_id)
        # None was given: the word "none", or with --standalone a random one for each launch.
        if not self._job and job and job != "none" and not _RANDOM_ID.fullmatch(job):
            self._job = job

    def finish(self) -> Findings:
        found = Findings(self.name)
        for agent in self._agents.values():
            self._add(found, agent)
        return found

    def _add(self, found: Findings, agent: _Agent) -> None:
        if agent.launched is not None:
            found.instant(agent.launched, "launcher_start", agent.launched.wall_ns, place=Place(job=self._job))
        for rendezvous in agent.all:
            attrs = {"barrier": f"launcher_rendezvous:{rendezvous.restart}", **rendezvous.attrs}
            found.span(
                rendezvous.line,
                STAGE,
                rendezvous.begin_ns,
                rendezvous.end_ns,
                place=Place(restart=rendezvous.restart, job=self._job),
                attrs=attrs,
            )
        known = {rendezvous.restart for rendezvous in agent.all}
        for (line, _, _), (_, restart, _) in pairwise(agent.failures):
            if restart not in known:
                found.instant(line, "launcher_start", line.wall_ns, place=Place(restart=restart, job=self._job))
        failed = [(line, "worker_failed", restart, attrs) for line, restart, attrs in agent.failures]
        for line, stage, restart, attrs in agent.instants + failed:
            found.instant(line, stage, line.wall_ns, place=Place(restart=restart, job=self._job), attrs=attrs)
