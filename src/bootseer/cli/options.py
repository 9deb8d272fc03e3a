"""Options of a verb that starts jobs, as one table with two parsers.

`run` adds its own time to every job, and importing click takes longer than everything else that it does
(docs/adr/0002). So plain command lines are parsed by `plain`, which reports no errors: whatever it does not
understand, including wrong input and `--help`, is left to click, which uses the same table. Decides and touches
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.errors import UsageError

TEXT = "text"
COUNT = "count"
FLAG = "flag"
MAX_COUNT = 999_999_999


class Option(NamedTuple):
    """One option of a verb."""

    words: str
    """Its flags as typed, separated by blanks; a flag that can be switched off has its `--no-` form last."""
    help: str
    kind: str = TEXT
    metavar: str | None = None
    many: bool = False
    """May be repeated; the value is a tuple."""
    least: int = 0
    """Smallest value of a count."""
    most: int = MAX_COUNT
    """Largest value of a count."""
    choices: tuple[str, ...] = ()
    default: object = None
    dest: str = ""
    """Key of its value; empty: as the first flag."""

    @property
    def flags(self) -> list[str]:
        return self.words.split()

    @property
    def name(self) -> str:
        """Key of its value."""
        return self.dest or self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def start(self) -> object:
        """The value if it is not given."""
        return () if self.many and self.default is None else self.default


Values = dict[str, Any]


def plain(arguments: Sequence[str], options: Sequence[Option]) -> Values | None:
    """The values of a command line that has only known options, fully spelled; None: leave it to click."""
    by_flag: Mapping[str, Option] = {flag: option for option in options for flag in option.flags}
    values: Values = {option.name: option.start for option in options}
    given: set[str] = set()
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        option = by_flag.get(flag if word.startswith("--") else word)
        if option is None:
            return None
        if option.kind == FLAG:
            if equals:
                return None
            values[option.name] = not flag.startswith("--no-")
            continue
        if not equals:
            value = next(rest, "")
        read = _read(option, value)
        if read is None:
            return None
        if option.many:
            before = values[option.name] if option.name in given else ()
            values[option.name] = (*before, read)
        else:
            values[option.name] = read
        given.add(option.name)
    return values


def _read(option: Option, value: str) -> object:
    if not value or value.startswith("-"):
        return None
    if option.choices and value not in option.choices:
        return None
    if option.kind == COUNT:
        if not (value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_COUNT))):
            return None
        return int(value) if option.least <= int(value) <= option.most else None
    return value


def split(
    values: Values, options: Sequence[Option], *, given: bool, allowed: Collection[str] = (), about: str, hint: str
) -> tuple[Values, Values]:
    """Split the values into those of other options and those of `options`.

    `given` is whether there is what these options are about. Raises `UsageError` if not, and one of them is given that
    is not `allowed` even then.
    """
    ours = {option.name: values[option.name] for option in options}
    for option in options:
        if not given and option.name not in allowed and ours[option.name] != option.start:
            flag = [flag for flag in option.flags if flag.startswith("--")][-1]
            raise UsageError(f"{flag} needs {about}", hint=hint)
    return {name: value for name, value in values.items() if name not in ours}, ours


def parse_size(text: str, option: str) -> int:
    """Bytes of `512`, `64k`, `8g`, `1.5T`, with or without `B` or `iB`. Raises `UsageError`."""
    import re

    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if match is None:
        raise UsageError(f"{option} {text!r} is not a size", hint="for example 512m or 8g")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
