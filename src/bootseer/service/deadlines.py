"""How long a stage may take before a node is late, learned from the starts of the last weeks.

A node is late if its stage takes 15 s longer than it did on 99 % of the nodes in nine of ten starts with the same
scale, kind and cache state; if there are too few of these, of all starts with the same scale. Decides and touches
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bootseer.report.analysis.lanes import TRAINING_BEGAN
from bootseer.service.histogram import quantile_s, sum_of
from bootseer.units import format_seconds

LEARNED_DAYS: Final = 28
_LEAST: Final = 5
"""Minimum number of starts."""
_STARTS: Final = 0.9
_UNDER_WAY_S: Final = 15.0
"""The line that ends a stage may take so long until it is sent and analysed."""
_SHOWN: Final = 4
Day = tuple[int, str, str, str, Sequence[int]]
"""Scale, kind, cache state and stage, and the histogram of the starts' 99th percentiles over nodes on one day."""


class Deadlines:
    """The learned limits."""

    def __init__(self, days: Iterable[Day]) -> None:
        self._hists: dict[tuple[int | str, ...], list[int]] = defaultdict(list)
        for bucket, kind, cache_state, stage, hist in days:
            for key in ((bucket, kind, cache_state, stage), (bucket, stage)):
                self._hists[key] = sum_of(self._hists[key], hist)

    def limit_s(self, bucket: int, kind: str, cache_state: str, stage: str) -> float | None:
        """Seconds that the stage may take; None if unknown."""
        for key in ((bucket, kind, cache_state, stage), (bucket, stage)):
            if sum(hist := self._hists.get(key, [])) >= _LEAST:
                return quantile_s(hist, _STARTS)
        return None

    def late(self, moment: Mapping[str, Any], bucket: int, kind: str, cache_state: str) -> list[dict[str, Any]]:
        """The late nodes of a start, latest first: of those missing in `moment` (`live.Moment.to_json()`) the ones that
        should have finished their stage, with its `limit_s`."""
        found = []
        for missing in moment.get("missing", ()):
            stage, took_s = missing["stage"], missing["seconds"]
            limit_s = self.limit_s(bucket, kind, cache_state, stage) if stage and took_s is not None else None
            if limit_s is not None and took_s > limit_s + _UNDER_WAY_S:
                found.append({**missing, "limit_s": limit_s})
        return sorted(found, key=lambda one: one["limit_s"] - one["seconds"])


def words(moment: Mapping[str, Any], late: Sequence[Mapping[str, Any]]) -> str:
    """A summary line: `1,438 of 1,440 at process_group; missing: node-17 (STAGE, 41 s over p99)`."""
    where = {"": "seen", TRAINING_BEGAN: "began training"}.get(moment["barrier"], f"at {moment['barrier']}")
    line = f"{moment['arrived']:,} of {moment['expected']:,} {where}"
    if late:
        more = f", {len(late) - _SHOWN:,} more" if len(late) > _SHOWN else ""
        line += f"; {'missing' if moment['barrier'] else 'late'}: {', '.join(map(_one, late[:_SHOWN]))}{more}"
    return line


def _one(late: Mapping[str, Any]) -> str:
    where = f", in {late['stack'].partition(' < ')[0]}" if late["stack"] else ""
    return f"{late['node']} ({late['stage']}, {format_seconds(late['seconds'] - late['limit_s'])} over p99{where})"
