"""The environment as the command finds it: which way it came, how to get there, and what to undo at the end.

Made by `environment_restore`, `environment_capture`, `environment_private` and `image_environment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bootseer.env.life.decide import REASONS, Decision, fell_back

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


def given_up(decision: Decision, error: Exception) -> Decision:
    """What follows when a snapshot could not be used after all, or the setup not be captured."""
    if isinstance(error, NotShown):
        return fell_back(decision, error.code, str(error))
    return fell_back(decision, "failed", f"{REASONS['failed']}: {type(error).__name__}: {error}")
