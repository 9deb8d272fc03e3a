"""The pattern behind `--began-pattern`, for `run` and `report`."""

from __future__ import annotations

import re

from bootseer.errors import UsageError


def compiled(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[bytes]:
    """The pattern as bytes, which is what logs are searched as. Raises `UsageError` when it is none."""
    try:
        return re.compile(text.encode("utf-8", "surrogateescape"), flags)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: too many repetitions, too deep
        raise UsageError(f"--began-pattern {text[:200]!r}: not a regular expression: {error}") from error
