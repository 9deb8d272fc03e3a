"""Results of verbs on standard output or in files, and progress on standard error.

Standard output may be closed, full, a pipe without reader, or unable to encode the blocks of a bar: none of these is
worth a traceback. Progress is a single line: on a terminal it is redrawn at most ten times a second and erased at the
end; in a log it is written once if something takes long, to explain the pause.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from bootseer.errors import PermanentError, os_errors_as
from bootseer.io.files import replace_file
from bootseer.launch import supervise
from bootseer.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from bootseer.artifact.progress import ProgressCallback, Unit
    from bootseer.blocks.codec import Buffer


_WIDTH = 80
"""For piped output, which has no width of its own."""
_MIN_WIDTH = 60


class Output(NamedTuple):
    """Prints the result of a verb with `--json`: one document, or lines."""

    schema: str
    as_json: bool

    def __call__(self, document: Mapping[str, object], *lines: object, failed: bool = False) -> None:
        """Print the document or the lines. A line is a string, a rich `Text` or a table; empty tables are omitted.

        If it `failed`, the verb ends here, with the exit code 1.
        """
        if self.as_json:
            print_json({"schema": self.schema, **document})
        else:
            from rich.table import Table

            with terminal() as console:
                for line in lines:
                    if not isinstance(line, Table):
                        console.print(_cleaned(line), soft_wrap=True)
                    elif line.row_count:
                        console.print(line)
        if failed:
            raise SystemExit(1)


def table(*columns: str, right: Collection[str] | None = None) -> Table:
    """A table without borders. Columns in `right`, by default all but the first, are aligned to the right.

    Cells are cleaned: names come from jobs, services and stores, and rich would pass on escape sequences.
    """
    from rich.table import Table

    class Cleaned(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*map(_cleaned, cells), **options)

    right = columns[1:] if right is None else right
    made = Cleaned(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def styled(text: str, style: str) -> Text:
    """A text for a line or a cell, in this colour or weight."""
    from rich.text import Text

    return Text(text, style)


def _cleaned(part: Any) -> Any:
    from rich.text import Text

    from bootseer.report.render.fold import clean

    if isinstance(part, Text):
        part.plain = clean(part.plain)
    return clean(part) if isinstance(part, str) else part


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON document and a newline, in UTF-8 in every locale. Raises `PermanentError` if it cannot be
    written."""
    print_bytes(json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n")


def print_bytes(data: Buffer) -> None:
    """Print bytes as they are. Raises `PermanentError` like `print_json`."""
    with _standard_output() as file:
        file.buffer.write(data)


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file that the user named. Readers see the old or the complete new one. Raises `PermanentError`."""
    content = data.encode() if isinstance(data, str) else data
    with os_errors_as(PermanentError, f"{path}: cannot be written"):
        if not path.exists():
            replace_file(path.resolve(), content, mode=0o666)
        elif path.is_file() and not path.is_relative_to("/dev") and os.access(path.resolve().parent, os.W_OK):
            replace_file(path.resolve(), content, mode=path.stat().st_mode & 0o777)
        else:  # a pipe, /dev/stdout, or a file in a folder that this user cannot change
            path.write_bytes(content)


@contextmanager
def terminal(color: str = "auto", *, least: int = _MIN_WIDTH) -> Iterator[Console]:
    """A console on standard output; `color` is auto, always or never. It has `least` columns also where the terminal
    has fewer, which then breaks lines: rows are easier to read so than cells of a few letters. Raises `PermanentError`
    like `print_json`."""
    from rich.console import Console

    forced = {"always": True, "never": False}.get(color)
    with _standard_output() as file:
        width = None if file.isatty() else _piped_width()
        plain = None if forced is None else not forced  # None: unless NO_COLOR is set
        # Text is shown as it is: names may contain `:100:` or `[b]`.
        console = Console(file=file, width=width, force_terminal=forced, no_color=plain, highlight=False, markup=False,
                          emoji=False)  # fmt: skip
        if least:
            console.width = max(console.width, least)
        yield console


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), _MIN_WIDTH) if columns.isascii() and columns.isdecimal() and len(columns) < 6 else _WIDTH


@contextmanager
def _standard_output() -> Iterator[TextIO]:
    file = sys.stdout
    if file is None:
        raise PermanentError("standard output is closed")
    try:
        yield file
        file.flush()
    except (OSError, SystemExit) as error:
        # The interpreter flushes standard output at exit: without this it would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # `bootseer diff | head`: rich and click would exit with 1, as if the verb had found something.
        if isinstance(error, SystemExit | BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise PermanentError(f"standard output: cannot be written: {error.strerror or error}") from error


_EVERY_S = 0.1
_LONG_S = 2.5
"""Progress is shown after this time; an unmount that waits for short-lived users of a file ends earlier."""
_BAR_WIDTH = 24
_ERASE = "\r\x1b[K"
_COLUMNS = 80


class Progress:
    """A context manager; its `show` methods and `wait` may be called from any thread, as often as wanted.

    `line`: without a terminal, write one line if it takes long; otherwise nothing is written.
    """

    def __init__(self, label: str, *, line: bool = False) -> None:
        self._what = label
        self._began_s = time.monotonic()
        self._next_s = 0.0
        self._on = sys.stderr is not None and sys.stderr.isatty()
        self._line = line and sys.stderr is not None and not self._on
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def show(self, done: int, total: int, note: str = "") -> None:
        """Show progress in any unit."""
        self._show(done, total, f"{done:,} of {total:,}", note)

    def show_bytes(self, done: int, total: int = 0, note: str = "") -> None:
        """Show progress in bytes; a `total` of 0 is unknown."""
        of = f" of {format_bytes(total)}" if total else ""
        self._show(done, total, f"{format_bytes(done)}{of}", note)

    def wait(self) -> None:
        """Show the time waited, once it is long; for work of unknown length."""
        waited_s = time.monotonic() - self._began_s
        if waited_s >= _LONG_S:
            self._show(0, 0, f"for {waited_s:.0f} s", "")

    def _show(self, done: int, total: int, amount: str, note: str) -> None:
        now_s = time.monotonic()
        if self._line and now_s - self._began_s >= _LONG_S:
            self._line = False
            _write(f"bootseer: still {self._what} {amount}{f' {note}' if note else ''}\n")
        if not self._on or (now_s < self._next_s and (done != total or not total)):
            return
        self._next_s = now_s + _EVERY_S
        self._shown, supervise.erase = True, _ERASE
        filled = round(_BAR_WIDTH * min(done / total, 1)) if total else 0
        bar = f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] " if total else ""
        suffix = f", {note}" if note else ""
        # A line that wraps cannot be erased.
        _write(_ERASE + f"{self._what} {bar}{amount}{suffix}"[: _columns() - 1])

    def __exit__(self, *_: object) -> None:
        if self._shown:
            supervise.erase = ""
            _write(_ERASE)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # standard error is closed or full: the work goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def _columns() -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    return _COLUMNS


@contextmanager
def shown(label: str, unit: Unit) -> Iterator[ProgressCallback]:
    """Progress of a job's start, for `launch` and `image`."""
    with Progress(label, line=True) as progress:
        calls: dict[Unit, ProgressCallback] = {
            "bytes": progress.show_bytes,
            "blocks": lambda done, total: progress.show(done, total, "blocks"),
            "": lambda done, total: progress.wait(),
        }
        yield calls[unit]
