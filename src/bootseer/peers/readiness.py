"""Which nodes of a job are ready for their command: each reports to one of them, the collector.

The collector is the first by name of the responding nodes. Nodes whose lists differ for a moment report to different
ones, and soon to the same one: each repeats its report, a ready node less often.

    GET /v1/start HTTP/1.1
    Bootseer-Sender: NAME
    Bootseer-Stage: STAGE | ready               the stage that its start is in

The response is JSON: {"ready": NUMBER, "others": {NAME: [STAGE, SECONDS SINCE ITS LAST REPORT], ...}}, with the first
few of the other nodes by name, those without a report, of stage "", last. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec
from msgspec import Struct

from bootseer.errors import CorruptError

TARGET: Final = "/v1/start"
READY: Final = "ready"
_NAME: Final = re.compile(r"[!-~]{1,255}")
_STAGE: Final = re.compile(r"[\w.-]{1,100}", re.ASCII)
_MAX_NODES: Final = 20_000
_MAX_LISTED: Final = 20


class StartReport(Struct, frozen=True):
    """A node's stage of its start."""

    sender: str
    stage: str

    @property
    def lines(self) -> str:
        """The first lines of the request."""
        return f"GET {TARGET} HTTP/1.1\r\nBootseer-Sender: {self.sender}\r\nBootseer-Stage: {self.stage}\r\n"

    @classmethod
    def of(cls, fields: dict[str, str]) -> StartReport:
        """From the fields of a request. Raises `CorruptError`."""
        sender, stage = fields.get("bootseer-sender", ""), fields.get("bootseer-stage", "")
        if not _NAME.fullmatch(sender) or not _STAGE.fullmatch(stage):
            raise CorruptError("malformed report of a node's start")
        return cls(sender, stage)


class Readiness(Struct, frozen=True, omit_defaults=True):
    """How many nodes are ready, and for some others their stage and the seconds since their last report."""

    ready: int
    others: dict[str, tuple[str, float]]
    nodes: int = 0
    """How many nodes are listed."""

    @classmethod
    def of(cls, body: bytes) -> Readiness:
        """Parse the response of `RollCall.answer`. Raises `CorruptError`."""
        try:
            return _READINESS.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise CorruptError("malformed answer about the nodes that are ready") from error

    def missing(self, num_nodes: int) -> str:
        """The nodes that are not ready, of `num_nodes` in all, for messages."""
        late = list(self.others.items())[: max(num_nodes - self.ready, 0)]
        words = [_described(name, stage, silent_s) for name, (stage, silent_s) in late]
        if (unknown := num_nodes - self.ready - len(words)) > 0:
            words.append(f"{unknown} more" if words else f"{unknown} that nothing was heard of")
        return ", ".join(words)


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_READINESS: Final = msgspec.json.Decoder(Readiness)
_SILENT_S: Final = 10.0


def _described(name: str, stage: str, silent_s: float) -> str:
    if not stage:
        return f"{name} (nothing was heard of it)"
    return f"{name} ({stage}{f', silent for {silent_s:.0f} s' if silent_s > _SILENT_S else ''})"


class RollCall:
    """The latest report of each node."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[str, float]] = {}
        self._listed: Collection[str] = ()

    def answer(self, report: StartReport, listed: Collection[str], now_s: float) -> bytes:
        """Record a report. Returns the state of all nodes, including `listed` ones without a report."""
        if report.sender in self._stages or len(self._stages) < _MAX_NODES:
            self._stages[report.sender] = report.stage, now_s
        if listed is not self._listed:  # the same for many reports
            for name in set(self._listed).difference(listed):
                # A pod that is replaced has a new name, its address. A stage is kept: it tells where the node failed.
                if self._stages.get(name, ("",))[0] == READY:
                    del self._stages[name]
            self._listed = listed
        late = sorted((name, (stage, now_s - at_s)) for name, (stage, at_s) in self._stages.items() if stage != READY)
        num_ready = len(self._stages) - len(late)
        late += sorted((name, ("", 0.0)) for name in listed if name not in self._stages)
        return msgspec.json.encode(Readiness(num_ready, dict(late[:_MAX_LISTED])))
