"""Which blocks a startup will need, and when: learned from several startups of the same workload.

One startup's record lies: it holds blocks that only a crash, a debugging session or one rank read. So the last few
records are kept, a block is hot when at least half of the runs needed it, and its turn comes by the early quantile of
the times at which it was needed. What no run needs any more disappears by itself; runs that have nothing in common
with the newest ones are dropped, and a set that has stopped to cover what is needed starts over.

The key is (image identity, workload key): two strings of whoever asks. Written down by `hotset_format`; the plan goes
to the fetcher. A set comes from outside and may be nonsense: then it costs bandwidth, never a wrong byte.
Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bootseer.fetch.need import Found, Need

Block = tuple[str, int]
"""Identity of a block file, number of a block."""

MAX_RUNS = 8
# Two newest runs decide who belongs to them, so that one odd run does not wipe out the others.
_JUDGES = 2
_MIN_AGREEMENT = 0.3
# With one or two runs that is all that any of them needed.
_MIN_CONFIDENCE = 0.5
_EARLY = 0.25
_STALE_COVERAGE = 0.6
# Too short to speak for or against anything.
_MIN_NEEDS = 24


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a plan met one startup."""

    needs: int
    covered: int
    """Needs that were planned."""
    late: int
    """Planned, but not here when they were needed."""
    planned: int
    wasted: int
    """Planned, and not needed."""

    @property
    def coverage(self) -> float:
        """Planned part of the needs; 1 when nothing was needed."""
        return self.covered / self.needs if self.needs else 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """The needs of one startup, in the order of their time, each block once."""

    started_s: float
    """When it began, seconds since 1970: orders the runs."""
    duration_ms: int
    """How long needs were recorded: this run says nothing about what comes later."""
    needs: tuple[Need, ...]
    coverage: float | None = None
    """What part of the needs the plan of that time covered; None when there was none."""

    @property
    def blocks(self) -> frozenset[Block]:
        """All blocks that were needed."""
        return frozenset((need.file, need.block) for need in self.needs)


@dataclass(frozen=True, slots=True)
class HotSet:
    """What is known of one image with one workload: the newest records, oldest first."""

    image: str
    workload: str
    records: tuple[Record, ...] = ()

    def merge(self, record: Record) -> HotSet:
        """The set with one more run."""
        return self.union(replace(self, records=(record,)))

    def union(self, other: HotSet) -> HotSet:
        """With the runs of both, each once; gone are those beyond the newest few, and those of another workload."""
        runs = {(run.started_s, run.duration_ms, len(run.needs)): run for run in (*self.records, *other.records)}
        records = sorted(runs.values(), key=lambda run: run.started_s)[-MAX_RUNS:]
        merged = replace(self, records=tuple(records))
        if merged.stale:
            return replace(self, records=tuple(records[-_JUDGES:]))
        judges = [each.blocks for each in records[-_JUDGES:]]
        kept = [
            each
            for each in records[:-_JUDGES]
            if any(_agreement(each.blocks, judge) >= _MIN_AGREEMENT for judge in judges)
        ]
        return replace(self, records=(*kept, *records[-_JUDGES:]))

    @property
    def stale(self) -> bool:
        """Whether the plans have missed the newest runs, all of them: the workload or its code has changed."""
        newest = [each for each in self.records if len(each.needs) >= _MIN_NEEDS][-_JUDGES:]
        return len(newest) == _JUDGES and all(
            each.coverage is not None and each.coverage < _STALE_COVERAGE for each in newest
        )

    def plan(self) -> list[Block]:
        """The hot blocks, those that are needed early first. The same for equal sets."""
        early = {block: _early(at) for block, at in self._times().items()}
        hot = [block for block, share in self.confidence().items() if share >= _MIN_CONFIDENCE]
        return sorted(hot, key=lambda block: (early[block], block))

    def confidence(self) -> Mapping[Block, float]:
        """For each block that any run needed, the part of the runs that needed it."""
        durations = [record.duration_ms for record in self.records]
        return {block: _confidence(len(at), _early(at), durations) for block, at in self._times().items()}

    def _times(self) -> dict[Block, list[int]]:
        """When each block was needed, in milliseconds, once for each run that needed it."""
        times: dict[Block, list[int]] = {}
        for record in self.records:
            for need in record.needs:
                times.setdefault((need.file, need.block), []).append(need.t_ms)
        return times


def judge(plan: Sequence[Block], record: Record) -> Quality:
    """How well a plan met what one startup needed."""
    planned = frozenset(plan)
    covered = [need for need in record.needs if (need.file, need.block) in planned]
    return Quality(
        needs=len(record.needs),
        covered=len(covered),
        late=sum(need.found is not Found.READY for need in covered),
        planned=len(planned),
        wasted=len(planned) - len(covered),
    )


def _early(times: list[int]) -> int:
    """The early quantile: soon enough for most runs, and one run that was in a hurry does not decide."""
    return sorted(times)[int(_EARLY * (len(times) - 1))]


def _confidence(num_needed: int, early_ms: int, durations: Sequence[int]) -> float:
    """Part of the runs that needed a block. A run that ended before its time has come has no say."""
    return num_needed / max(num_needed, sum(duration >= early_ms for duration in durations))


def _agreement(one: frozenset[Block], other: frozenset[Block]) -> float:
    """Common part of two runs: 1 when one of them is the beginning of the other."""
    return len(one & other) / max(min(len(one), len(other)), 1)
