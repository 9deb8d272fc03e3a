"""Which nodes of a job are ready for their command: each reports to one of them, the collector.

The collector is the first by name of the responding nodes. Nodes whose lists differ for a moment report to different
ones, and soon to the same one: each repeats its report, a ready node less often. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final

from msgspec import Meta, Struct

READY: Final = "ready"
_MAX_NODES: Final = 20_000
_MAX_LISTED: Final = 20
_SILENT_S: Final = 10.0


class StartReport(Struct, frozen=True, tag=True):
    """A node's stage of its start."""

    sender: Annotated[str, Meta(pattern=r"\A[!-~]{1,255}\Z")]
    stage: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,100}\Z")]
    """The stage that its start is in, or `ready`."""


class Readiness(Struct, frozen=True, omit_defaults=True):
    """How many nodes are ready, and for some others their stage and the seconds since their last report."""

    ready: int
    others: dict[str, tuple[str, float]]
    """The first few by name; those without a report, of stage "", are last."""
    nodes: int = 0
    """How many nodes are listed."""

    def missing(self, num_nodes: int) -> str:
        """The nodes that are not ready, of `num_nodes` in all, for messages."""
        late = list(self.others.items())[: max(num_nodes - self.ready, 0)]
        words = [_described(name, stage, silent_s) for name, (stage, silent_s) in late]
        if (unknown := num_nodes - self.ready - len(words)) > 0:
            words.append(f"{unknown} more" if words else f"{unknown} that nothing was heard of")
        return ", ".join(words)


def _described(name: str, stage: str, silent_s: float) -> str:
    if not stage:
        return f"{name} (nothing was heard of it)"
    return f"{name} ({stage}{f', silent for {silent_s:.0f} s' if silent_s > _SILENT_S else ''})"


class RollCall:
    """The latest report of each node."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[str, float]] = {}
        self._listed: Collection[str] = ()

    def answer(self, report: StartReport, listed: Collection[str], now_s: float) -> Readiness:
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
        return Readiness(num_ready, dict(late[:_MAX_LISTED]))
