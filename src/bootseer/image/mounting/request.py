"""The request for a mount: image, store and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import field

from bootseer.artifact.materialize import MountOptions
from bootseer.image.reference import Reference

if TYPE_CHECKING:
    from bootseer.image.sources.manifest import Platform

Fallback = Literal["convert", "none"]


class Request(MountOptions, frozen=True):
    """The image to mount and how it is fetched."""

    reference: Reference
    store: str | None
    """URI of the store with the converted image; None: the image is converted on this node."""
    fallback: Fallback = "convert"
    platform: Platform | None = None
    layer_limits: Mapping[str, int] = field(default_factory=dict)
    """Limits for layers that are converted here: fields of `LayerLimits`."""
