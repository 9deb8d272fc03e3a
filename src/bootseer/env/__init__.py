"""Snapshot modes of environments; a light module, which every `bootseer run` imports for its options."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["auto", "refresh", "bypass", "require"]
"""auto: use a snapshot, or create one if there is none; refresh: create a new one; bypass: neither; require: fail if
none can be used."""
MODES: tuple[Mode, ...] = get_args(Mode)
