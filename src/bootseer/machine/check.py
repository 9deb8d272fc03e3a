"""The result of a probe of this machine. `probes` runs all probes, `cli.doctor` prints the results. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["ok", "missing", "broken", "limited"]

KERNEL: Final = "kernel"
PYTHON: Final = "Python"
SPOOL: Final = "spool"
REQUIRED: Final = frozenset({KERNEL, PYTHON, SPOOL})
"""Nothing can be measured without these. All others only enable further features."""
CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")
"""Where container engines look for CDI files; later folders have precedence."""


@dataclass(frozen=True, slots=True)
class Check:
    """The state of one facility on this machine."""

    name: str
    status: Status
    """`ok`; `missing`: not installed; `broken`: installed, but a trial failed; `limited`: works in part."""
    found: str
    """Version or other finding; may be empty."""
    why: str = ""
    """Reason for a status other than `ok`, one sentence."""
    install: str = ""
    """The remedy: a Debian command, or one sentence. Empty if there is none to suggest."""
    opens: tuple[str, ...] = ()
    """Features of BootSeer that need the facility."""

    @property
    def required(self) -> bool:
        """Whether BootSeer can measure nothing without it."""
        return self.name in REQUIRED


def usable(checks: Sequence[Check]) -> bool:
    """Whether BootSeer can measure: everything required works, at least in part."""
    return all(check.status in ("ok", "limited") for check in checks if check.required)
