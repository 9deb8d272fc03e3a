"""The environment as the command finds it: which way it came, how to get there, and what to undo at the end.

Made by `environment_restore`, `environment_capture` and `environment_stage`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bootseer.env.life.decide import Decision

if TYPE_CHECKING:
    from bootseer.env.restoring.layer import Layer

Mode = Literal["restored", "captured", "installed"]


@dataclass(slots=True)
class Shown:
    """Close it when the command has ended."""

    mode: Mode
    decision: Decision
    """Why it came this way."""
    env: dict[str, str]
    """The command's environment."""
    facts: dict[str, object] = field(default_factory=dict)
    """For the report."""
    enter: Callable[[], None] | None = None
    """For the command's process, before it becomes the command; None: it needs nothing."""
    layer: Layer | None = None
    """What is served while the command runs."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class NotShown(Exception):  # noqa: N818 - it is no end: the setup runs on the machine itself
    """The snapshot cannot be used, or the setup not be captured; `code` is one of `decide.FALLBACKS`."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code
