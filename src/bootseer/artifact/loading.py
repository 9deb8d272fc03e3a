"""Lazy or whole: whether a start with blocks on demand is predicted to beat a plain, parallel pull of everything.

The model is deliberately simple: it must be right about the extremes (a small image, a hot set that is nearly
everything, high latency without a hot set), where one of the two is slower by a factor. Its inputs are known before
anything is fetched: sizes, and the hot set of earlier starts of the same workload.

Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from bootseer.blocks.index import Index
from bootseer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from bootseer.cache.cached_file import CachedFile
    from bootseer.fetch.hotset import Block

Loading = Literal["auto", "lazy", "pull"]
"""Lazily, everything first, or whichever is predicted to be faster."""
Mode = Literal["lazy", "pull"]
LAZY: Mode = "lazy"
PULL: Mode = "pull"


class Settings(Struct, frozen=True):
    """The constants of the model, each with its source."""

    small_bytes: int = 32 << 20
    """Up to this size a pull takes well under a second on any cluster network, and a daemon would be overhead."""
    hot_share: float = 0.8
    """From this share on, fetching the rest too costs less than running a daemon for it."""
    bytes_per_s: float = 119e6
    """1 Gbit/s, the slowest network that GPU nodes have."""
    latency_s: float = 0.01
    """Time to first byte of a registry in the same region."""
    verify_bytes_per_s: float = 500e6
    """Decompression and digests on the few cores that a start may use: the upper limit of a pull."""
    used_share: float = 0.35
    """The share of its image that a training start reads: 29 to 42 % of a 412 MB image with PyTorch, by three lazy
    formats."""
    demand_bytes: int = 1 << 20
    """Average bytes per on-demand request, with the kernel's read-ahead."""
    readers: float = 2.0
    """How many readers wait concurrently while programs are imported."""


class CachedLayer(Struct, frozen=True):
    """A layer and the part of it that is on this node."""

    index: Index
    file: CachedFile

    @property
    def stored_bytes(self) -> int:
        return sum(stripe.size_bytes for stripe in self.index.stripes)

    @property
    def missing_bytes(self) -> int:
        """Stored size of the blocks that are not on this node."""
        missing = self.file.missing(0, self.index.size_bytes)
        # Summing up a million blocks would take longer than it is worth.
        if len(missing) == self.index.num_blocks:
            return self.stored_bytes
        return sum(self.index.place(block).length for block in missing)


class Missing(Struct, frozen=True):
    """What has to be fetched, in stored bytes, without what is on this node."""

    stored_bytes: int
    num_blocks: int
    hot_bytes: int | None = None
    """Of the hot set; None without one."""


class Prediction(Struct, frozen=True):
    """The decision, its reason, and the predicted times (None if the sizes alone decided)."""

    mode: Mode
    reason: str
    lazy_s: float | None = None
    pull_s: float | None = None


def choose_loading(loading: Loading, missing: Sequence[CachedLayer], plan: Sequence[Block] | None) -> Prediction:
    """The loading mode: as the user requested, or as predicted for the incomplete layers."""
    if loading == "pull":
        return Prediction(PULL, "requested")
    if loading == "lazy":
        return Prediction(LAZY, "requested")
    num_blocks = sum(layer.index.num_blocks - layer.file.num_ready for layer in missing)
    hot_bytes = None if plan is None else _hot_bytes(missing, plan)
    return predict(Missing(sum(layer.missing_bytes for layer in missing), num_blocks, hot_bytes))


def predict(missing: Missing, settings: Settings | None = None) -> Prediction:
    """Whether to start lazily or to pull everything first."""
    known = settings or Settings()
    stored, hot = missing.stored_bytes, missing.hot_bytes
    if missing.num_blocks == 0:
        return Prediction(PULL, "nothing is missing on this node")
    if stored <= known.small_bytes:
        return Prediction(PULL, f"only {format_bytes(stored)} to fetch: a pull is over at once")
    if hot is not None and hot >= known.hot_share * stored:
        return Prediction(PULL, f"the hot set is {hot / stored:.0%} of what is to be fetched")
    rate, latency_s = min(known.bytes_per_s, known.verify_bytes_per_s), known.latency_s
    pull_s = latency_s + stored / rate
    # A hot set covers nine tenths of what is needed, otherwise it is recorded anew.
    demand_bytes = known.used_share * stored if hot is None else 0.1 * hot
    # Hot blocks are streamed; on-demand reads cost round trips in addition.
    waits = demand_bytes / known.demand_bytes / known.readers
    fetched = min(demand_bytes + (hot or 0), stored)
    lazy_s = latency_s + fetched / rate + waits * latency_s
    how = f"{format_seconds(lazy_s)} lazily against {format_seconds(pull_s)} for all {format_bytes(stored)}"
    basis = "without a hot set" if hot is None else f"hot set {format_bytes(hot)}"
    return Prediction(LAZY if lazy_s < pull_s else PULL, f"predicted {how}, {basis}", lazy_s, pull_s)


def _hot_bytes(missing: Sequence[CachedLayer], plan: Sequence[Block]) -> int:
    layers = {layer.index.identity: layer for layer in missing}
    total = 0
    for identity, block in plan:
        layer = layers.get(identity)
        if layer is not None and block < layer.index.num_blocks and not layer.file.ready(block):
            total += layer.index.place(block).length
    return total
