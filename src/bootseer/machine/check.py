"""What a probe of this machine answers.

`Check` is the one result type; `probes` collects them, `cli.doctor` shows them. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["ok", "missing", "broken", "limited"]

KERNEL: Final = "kernel"
PYTHON: Final = "Python"
SPOOL: Final = "spool"
REQUIRED: Final = frozenset({KERNEL, PYTHON, SPOOL})
"""Without these nothing can be measured; everything else only opens more features."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that BootSeer can use, and its state on this machine."""

    name: str
    status: Status
    """`ok`; `missing`: not there; `broken`: there, but a real try failed; `limited`: works in part."""
    found: str
    """Version or fact, empty when there is nothing to tell."""
    why: str = ""
    """Reason for a status other than `ok`, one sentence."""
    install: str = ""
    """What to do about it: a command of Debian, or one sentence. Empty when nothing needs to be done."""
    opens: tuple[str, ...] = ()
    """Features of BootSeer that need this."""

    @property
    def required(self) -> bool:
        """Whether BootSeer can do nothing useful without it."""
        return self.name in REQUIRED


def usable(checks: Sequence[Check]) -> bool:
    """Whether everything required is there; what is only limited still measures."""
    return all(check.status in ("ok", "limited") for check in checks if check.required)
