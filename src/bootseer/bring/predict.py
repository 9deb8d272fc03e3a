"""Lazy or whole: whether a start with blocks on demand will beat a plain, parallel pull of everything.

The prediction is a handful of products, on purpose: it has to be right about extremes (a small image, a hot set that is
nearly everything, a slow round trip without a hot set), where one way is slower by a factor. Its inputs are what is
known before anything is fetched, and what earlier starts of the same workload left behind.

Decides and touches nothing. Called by `image.mounting.mount`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bootseer.units import format_bytes, format_seconds

Mode = Literal["lazy", "pull"]
LAZY: Mode = "lazy"
PULL: Mode = "pull"


@dataclass(frozen=True, slots=True)
class Settings:
    """The model's constants, each with where it comes from."""

    small_bytes: int = 32 << 20
    """Below this a pull takes well under a second on any cluster's network, and a daemon would only be in the way."""
    hot_share: float = 0.8
    """From here on the rest is so little that fetching it too costs less than a daemon for it."""
    assumed_bytes_per_s: float = 119e6
    """1 Gbit/s, the slowest network that GPU nodes have."""
    assumed_latency_s: float = 0.01
    """A registry in the same region, time to first byte included."""
    verify_bytes_per_s: float = 500e6
    """Decompression and digests on the few cores that a start may take; a pull cannot be faster."""
    used_share: float = 0.35
    """What a training start reads of its image: 29 to 42 % of a 412 MB image with PyTorch, by three lazy formats."""
    demand_bytes: int = 1 << 20
    """What one request of a waiting reader brings on average, with the kernel's read-ahead."""
    readers: float = 2.0
    """How many readers wait at once while programs are imported."""


@dataclass(frozen=True, slots=True)
class Image:
    """What is to be fetched, bytes as stored. What this node has already is left out of all of it."""

    stored_bytes: int
    num_blocks: int
    hot_bytes: int | None = None
    """Of the hot set; None when there is none."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the origin as measured; None is not measured."""

    bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class PastStart:
    """What an earlier lazy start of the same image and workload had fetched when training began."""

    demand_bytes: int
    """For readers that waited."""
    fetched_bytes: int
    """For all purposes."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Which way, why, and the two times that were compared (None: not computed, the sizes alone decided)."""

    mode: Mode
    reason: str
    lazy_s: float | None = None
    pull_s: float | None = None


def predict(image: Image, link: Link, past: Sequence[PastStart] = (), settings: Settings | None = None) -> Prediction:
    """Whether to start lazily or to pull everything first."""
    known = settings or Settings()
    if image.num_blocks == 0:
        return Prediction(PULL, "nothing is missing on this node")
    if image.stored_bytes <= known.small_bytes:
        return Prediction(PULL, f"only {format_bytes(image.stored_bytes)} to fetch: a pull is over at once")
    if image.hot_bytes is not None and image.hot_bytes >= known.hot_share * image.stored_bytes:
        share = image.hot_bytes / image.stored_bytes
        return Prediction(PULL, f"the hot set is {share:.0%} of what is to be fetched")
    rate = min(link.bytes_per_s or known.assumed_bytes_per_s, known.verify_bytes_per_s)
    latency_s = known.assumed_latency_s if link.latency_s is None else link.latency_s
    pull_s = latency_s + image.stored_bytes / rate
    demand_bytes = _demand_bytes(image, past, known)
    # Hot blocks stream in one after the other; what readers wait for costs round trips on top.
    waits = demand_bytes / known.demand_bytes / known.readers
    fetched = min(demand_bytes + (image.hot_bytes or 0), image.stored_bytes)
    lazy_s = latency_s + fetched / rate + waits * latency_s
    mode = LAZY if lazy_s < pull_s else PULL
    how = f"{format_seconds(lazy_s)} lazily against {format_seconds(pull_s)} for all {format_bytes(image.stored_bytes)}"
    return Prediction(mode, f"predicted {how}, {_basis(image, past)}", lazy_s, pull_s)


def _demand_bytes(image: Image, past: Sequence[PastStart], known: Settings) -> float:
    """How much will be fetched because a reader waits for it."""
    if past:
        return min(median(start.demand_bytes for start in past), image.stored_bytes)
    if image.hot_bytes is not None:
        return 0.1 * image.hot_bytes  # a hot set covers nine tenths of what is needed, or is recorded anew
    return known.used_share * image.stored_bytes


def _basis(image: Image, past: Sequence[PastStart]) -> str:
    hot = "without a hot set" if image.hot_bytes is None else f"hot set {format_bytes(image.hot_bytes)}"
    return f"{hot}, {len(past)} earlier starts known" if past else hot
