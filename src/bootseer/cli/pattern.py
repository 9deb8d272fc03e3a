"""Values of `--began-pattern` (`run`, `report`) and `--pattern` (`report`, `serve`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bootseer.errors import UsageError
from bootseer.trace.event import stage_name

_MAX_FILE = 1 << 20
_GROUPS = {"begin", "end", "s", "ms"}


def of_stages(given: Sequence[str]) -> list[tuple[str, re.Pattern[bytes]]]:
    """Stages and patterns of `STAGE=REGEX` values and of the lines of each `@FILE`, where `#` begins a comment.

    Raises `UsageError`, which names the file and the line.
    """
    found = []
    for text in given:
        if not text.startswith("@"):
            found.append(of_stage(text))
            continue
        try:
            with Path(text[1:]).open(encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise UsageError(f"--pattern {text}: cannot be read: {error.strerror or error}") from None
        if len(lines) > _MAX_FILE:
            raise UsageError(f"--pattern {text}: longer than {_MAX_FILE} characters")
        for number, line in enumerate(lines.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    found.append(of_stage(line.strip()))
                except UsageError as error:
                    raise UsageError(f"{text[1:]}, line {number}: {error}", hint=error.hint) from None
    return found


def of_stage(text: str) -> tuple[str, re.Pattern[bytes]]:
    """Stage and pattern of `STAGE=REGEX`. Raises `UsageError` for any other text."""
    stage, equals, regex = text.partition("=")
    if not equals or stage_name(stage) != stage:
        raise UsageError(
            f"--pattern {text[:200]!r}: does not begin with the name of a stage",
            hint="write --pattern STAGE=REGEX, such as --pattern 'model_initialization.tokenizer=(?P<s>[0-9.]+) s'",
        )
    pattern = compiled(regex, re.MULTILINE, option="--pattern")
    if not _GROUPS & pattern.groupindex.keys():
        raise UsageError(
            f"--pattern {text[:200]!r}: has no named group",
            hint="add (?P<begin>...) and (?P<end>...) for lines, or (?P<s>...) or (?P<ms>...) for a duration",
        )
    return stage, pattern


def compiled(text: str, flags: re.RegexFlag = re.NOFLAG, option: str = "--began-pattern") -> re.Pattern[bytes]:
    """The pattern compiled for bytes, because logs are searched undecoded. Raises `UsageError` if it is invalid."""
    try:
        return re.compile(text.encode("utf-8", "surrogateescape"), flags)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: too many repetitions, too deep
        raise UsageError(f"{option} {text[:200]!r}: not a regular expression: {error}") from error
