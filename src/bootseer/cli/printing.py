"""What `report`, `diff` and `doctor` print on standard output, and how wide.

Standard output may be closed, full, a pipe that nobody reads, or unable to encode a bar's blocks: none of these is
worth a traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from bootseer.errors import PermanentError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 80
"""Piped output has no width of its own; 80 columns fit everywhere."""
_MIN_WIDTH = 60


def print_json(value: Mapping[str, object]) -> None:
    """One JSON document and a newline. Raises `PermanentError` when it cannot be written."""
    with _standard_output() as file:
        json.dump(value, file, ensure_ascii=False)
        file.write("\n")


@contextmanager
def terminal(color: str = "auto") -> Iterator[Console]:
    """A console on standard output; `color` is auto, always or never. Raises `PermanentError` as `print_json`."""
    from rich.console import Console

    forced = {"always": True, "never": False}.get(color)
    with _standard_output() as file:
        width = None if file.isatty() else _piped_width()
        console = Console(
            file=file, width=width, force_terminal=forced, no_color=forced is False, highlight=False, markup=False
        )
        yield console


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), _MIN_WIDTH) if columns.isascii() and columns.isdecimal() and len(columns) < 6 else _WIDTH


@contextmanager
def _standard_output() -> Iterator[TextIO]:
    file = sys.stdout
    if file is None:
        raise PermanentError("standard output is closed: there is nowhere to print to")
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    try:
        yield file
        file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Nothing may be left for the interpreter to flush at its exit: it would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise PermanentError(f"standard output: cannot be written: {error.strerror or error}") from error
