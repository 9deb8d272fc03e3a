"""What is here of block files and what is missing, in bytes, and which way it had better come. Called by `bringing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bootseer.blocks.index import Index
from bootseer.bring.predict import LAZY, PULL, Image, Link, Prediction, predict
from bootseer.cache.file import CachedFile
from bootseer.fetch.hotset import Block

Loading = Literal["auto", "lazy", "pull"]
"""Lazily, all of it first, or whichever is predicted to be faster."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer and what this node has of it."""

    index: Index
    file: CachedFile

    @property
    def stored_bytes(self) -> int:
        """Its size as stored."""
        return sum(stripe.size_bytes for stripe in self.index.stripes)

    @property
    def missing_bytes(self) -> int:
        """What of that is not on this node."""
        missing = self.file.missing(0, self.index.size_bytes)
        # Adding up a million places one by one would take longer than it is worth.
        if len(missing) == self.index.num_blocks:
            return self.stored_bytes
        return sum(self.index.place(block).length for block in missing)


def forecast(loading: Loading, missing: Sequence[CachedLayer], plan: Sequence[Block] | None) -> Prediction:
    """Lazily or not: as the user said, or as is predicted for the layers that are not complete."""
    if loading == "pull":
        return Prediction(PULL, "asked for")
    if loading == "lazy":
        return Prediction(LAZY, "asked for")
    num_blocks = sum(layer.index.num_blocks - layer.file.num_ready for layer in missing)
    hot_bytes = None if plan is None else _hot_bytes(missing, plan)
    return predict(Image(sum(layer.missing_bytes for layer in missing), num_blocks, hot_bytes), Link())


def _hot_bytes(missing: Sequence[CachedLayer], plan: Sequence[Block]) -> int:
    layers = {layer.index.identity: layer for layer in missing}
    total = 0
    for identity, block in plan:
        layer = layers.get(identity)
        if layer is not None and block < layer.index.num_blocks and not layer.file.ready(block):
            total += layer.index.place(block).length
    return total
