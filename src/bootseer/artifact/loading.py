"""Lazy or whole: whether a start with blocks on demand is predicted to beat a plain, parallel pull of everything.

Two rules decide: a small image, and a hot set that is nearly everything, are pulled. All else is loaded lazily. At
1 Gbit/s and 10 ms to the registry, a start that reads 35 % of its image on demand takes 4.6 ns per byte of the image, a
pull 8.4 ns; with a hot set the lazy start is faster up to a share of 86 %.

Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from bootseer.units import format_bytes

if TYPE_CHECKING:
    from bootseer.cache.cached_file import CachedFile
    from bootseer.fetch.hotset import Block

Loading = Literal["auto", "lazy", "pull"]
"""Lazily, everything first, or whichever is predicted to be faster."""
Mode = Literal["lazy", "pull"]
LAZY: Mode = "lazy"
PULL: Mode = "pull"
_SMALL_BYTES = 32 << 20
"""Up to this size a pull takes well under a second on any cluster network, and a daemon would be overhead."""
_HOT_SHARE = 0.8
"""From this share on, fetching the rest too costs less than running a daemon for it."""


class Prediction(NamedTuple):
    """The decision and its reason."""

    mode: Mode
    reason: str


def choose_loading(loading: Loading, missing: Sequence[CachedFile], plan: Sequence[Block] | None) -> Prediction:
    """The loading mode: as the user requested, or as predicted for the incomplete layers."""
    if loading != "auto":
        return Prediction(loading, "requested")
    hot_bytes = None if plan is None else _hot_bytes(missing, plan)
    return predict(sum(layer.missing_bytes for layer in missing), hot_bytes)


def predict(stored_bytes: int, hot_bytes: int | None) -> Prediction:
    """Whether to start lazily or to pull everything first. Stored bytes of what is not on this node: of all blocks, and
    of the hot set (None without one)."""
    size = format_bytes(stored_bytes)
    if stored_bytes <= _SMALL_BYTES:
        return Prediction(PULL, f"only {size} to fetch: a pull is over at once")
    if hot_bytes is None:
        return Prediction(LAZY, f"{size} to fetch, without a hot set")
    reason = f"the hot set is {hot_bytes / stored_bytes:.0%} of what is to be fetched"
    return Prediction(PULL if hot_bytes >= _HOT_SHARE * stored_bytes else LAZY, reason)


def _hot_bytes(missing: Sequence[CachedFile], plan: Sequence[Block]) -> int:
    layers = {layer.index.identity: layer for layer in missing}
    total = 0
    for identity, block in plan:
        layer = layers.get(identity)
        if layer is not None and block < layer.index.num_blocks and not layer.ready(block):
            total += layer.index.place(block).length
    return total
