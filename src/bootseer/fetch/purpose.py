"""Why a block is read. A higher purpose goes before all lower ones, and a block has the highest that anybody has.

Decides and touches nothing.
"""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    """Ordered: `DEMAND > HOT > COLD`."""

    COLD = 1
    """The rest of the file, in the background, so that the origin is not needed any more."""
    HOT = 2
    """An earlier startup needed it."""
    DEMAND = 3
    """A reader waits for it now."""
