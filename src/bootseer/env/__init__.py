"""What users may want of the environment's snapshot.

Here, because the command line's table reads it in front of every `bootseer run`.
"""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["auto", "refresh", "bypass", "require"]
"""Use a snapshot if there is one, and make one if there is none; make it anew; neither use nor make any; end where
none can be used."""
MODES: tuple[Mode, ...] = get_args(Mode)
