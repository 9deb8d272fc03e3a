"""One start in `image`, and the goals of its arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import node
from harness import Must

LINKS: Mapping[str, int | None] = {"loopback": None, "1 Gbit/s": 1000, "200 Mbit/s": 200}
"""Mbit/s by name; None: no limit."""


class Names:
    """Names of ways to start. An arm's name is that of a way and of a link."""

    CONTAINERD = "containerd"
    PARALLEL = "parallel pull"
    FOLDER = "plain folder"
    PULL = "bootseer, full pull"
    LAZY = "bootseer, not recorded"
    RECORDED = "bootseer, recorded"
    OTHER = "bootseer, recorded for other work"
    COLD_TOOLS = "bootseer, cold tools"


_FASTER = 7.0
_FASTER_ON = ("loopback", "1 Gbit/s")
"""On slower links the figure is only reported: the link bounds it."""
_STARGZ_S = 5.4 / 2
"""Half the time of stargz-snapshotter with an image optimized for the same work, on a similar machine."""
_MORE_BYTES = 1.15
_AGAIN_WARM = 1.15
_AGAIN_FROM_DISK = 1.3
_WRONG_RECORD = 1.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One cold start, and the starts after it on the same node."""

    cold: node.Started
    link_bytes: int
    """Received over the link until the first useful work, with all headers."""
    requests: int
    """Requests that the registry had completed by then."""
    again: tuple[node.Started, node.Started] | None
    """A later start, warm, and one with an empty page cache; None if not measured."""
    hot_bytes: int | None
    """Stored size of the start's hot set; None without one."""


def claims(found: Mapping[str, Sequence[Sample]]) -> list[Must]:
    """All claims, from the samples by arm."""
    return [*_cold(found), *_later(found)]


def _ready_s(of_arm: Sequence[Sample]) -> float:
    return median(sample.cold.ready_s for sample in of_arm)


def _cold(found: Mapping[str, Sequence[Sample]]) -> list[Must]:
    result = []
    for link in _FASTER_ON:
        faster = _ready_s(found[f"{Names.CONTAINERD}, {link}"]) / _ready_s(found[f"{Names.RECORDED}, {link}"])
        result.append(Must(f"{Names.CONTAINERD} / {Names.RECORDED}, {link}", faster, _FASTER, "x", at_least=True))
    result.append(Must(f"{Names.RECORDED}, loopback", _ready_s(found[f"{Names.RECORDED}, loopback"]), _STARGZ_S, "s"))
    for link in LINKS:
        of_arm = found[f"{Names.RECORDED}, {link}"]
        more = median(sample.link_bytes / sample.hot_bytes for sample in of_arm if sample.hot_bytes)
        result.append(Must(f"bytes until the first work / hot blocks, {link}", more, _MORE_BYTES, "x"))
    for link in LINKS:
        slower = _ready_s(found[f"{Names.OTHER}, {link}"]) / _ready_s(found[f"{Names.LAZY}, {link}"])
        result.append(Must(f"{Names.OTHER} / not recorded, {link}", slower, _WRONG_RECORD, "x"))
    return result


def _later(found: Mapping[str, Sequence[Sample]]) -> list[Must]:
    """The cost of reading through the mount, because everything is local. That of the tool is in the details."""
    result = []
    plain = _again_work_s(found[Names.FOLDER])
    for name, words in ((Names.PULL, "after a full pull"), (Names.RECORDED, "after the rest was streamed")):
        ours = _again_work_s(found[f"{name}, loopback"])
        for state, limit, value, of_plain in zip(
            ("warm", "cold page cache"), (_AGAIN_WARM, _AGAIN_FROM_DISK), ours, plain, strict=True
        ):
            result.append(Must(f"import, later start {words} / {Names.FOLDER}, {state}", value / of_plain, limit, "x"))
    return result


def _again_work_s(of_arm: Sequence[Sample]) -> tuple[float, float]:
    pairs = [sample.again for sample in of_arm if sample.again is not None]
    return median(warm.work_s for warm, _ in pairs), median(from_disk.work_s for _, from_disk in pairs)
