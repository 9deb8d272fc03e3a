"""Which image is wanted, and how it is to come. A value: made by the command line, read by `image.mounting.mount`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bootseer.artifact.loading import Loading
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.image.reference import Reference

if TYPE_CHECKING:
    from bootseer.image.sources.manifest import Platform

Fallback = Literal["convert", "none"]


@dataclass(frozen=True, slots=True)
class Request:
    """Which image, and how it is to come."""

    reference: Reference
    store: str | None
    """URI of the store with the converted image; None: it is converted on this node."""
    cache: Path
    """The node's cache."""
    runtime: Path
    """Where the state of mounts lies."""
    plain_http: bool = False
    loading: Loading = "auto"
    fallback: Fallback = "convert"
    workload: str = ""
    """Which hot set; empty: none is used, and none is recorded under a name."""
    platform: Platform | None = None
    signatures: Signatures = UNSIGNED
    layer_limits: Mapping[str, int] = field(default_factory=dict)
    """What a layer may cost when it is converted here: fields of `LayerLimits`."""
    publish: bool = True
    """Whether what was recorded goes to the store."""
