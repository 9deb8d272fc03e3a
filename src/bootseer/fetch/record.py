"""The needs of one startup, recorded while it runs: docs/formats/record.md.

`RecordWriter` appends to a file and flushes once a second, so that `kill -9` of the daemon costs at most the last
second. `read_record` accepts a truncated or missing end. The mount daemon writes one record per mount; when training
has begun, or at the next start, it is merged into its `hotset.HotSet`.

A thread of its own flushes; `need` may be called from any thread and never waits for the disk.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch.hotset import MAX_BLOCK, MAX_MS, MAX_NEEDS, Availability, Need, Record

SCHEMA = "bootseer.record/1"
_FLUSH_S = 1.0
_CLOSE_S = 10.0
_MAX_LINE = 256
_MAX_FILES = 4096


class RecordWriter:
    """Writes the record of one startup, until `end` or `close`."""

    def __init__(
        self,
        path: Path,
        *,
        started_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Create the file `path`. Raises `OSError`. `started_s` is the current time, seconds since 1970.

        `on_finished` is called with the path after `close`.
        """
        self._path = path
        self._on_finished = on_finished
        self._clock = clock
        self._begin = clock()
        self._files: dict[str, int] = {}
        self._num_needs = 0
        self._ended = False
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._file: IO[bytes] = path.open("xb", buffering=0)
        self._append({"schema": SCHEMA, "started_s": started_s})
        self._flush()
        self._thread = threading.Thread(target=self._flush_each_second, name="bootseer-record", daemon=True)
        self._thread.start()

    def need(self, file: str, block: int, found: Availability) -> None:
        """A reader needed a block of the file with this identity for the first time."""
        passed_s = self._clock() - self._begin
        with self._changed:
            if self._ended or self._num_needs >= MAX_NEEDS:
                return
            number = self._files.get(file)
            if number is None:
                if len(self._files) == _MAX_FILES:
                    return
                number = self._files[file] = len(self._files)
                self._append({"file": file})
            self._num_needs += 1
            # Formatted by hand for speed: a reader is waiting.
            self._lines.append(f"[{number},{block},{int(passed_s * 1000)},{found:d}]\n")
            self._changed.notify()

    def end(self) -> None:
        """The startup is over (training has begun): ignore later needs."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._append({"end_ms": int((self._clock() - self._begin) * 1000)})
            self._changed.notify()

    def close(self) -> None:
        """Write what is pending, and call `on_finished`."""
        self.end()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # otherwise it hangs in a write: the pending lines are lost
            self._flush()
            self._file.close()
        self._on_finished(self._path)

    def _append(self, value: object) -> None:
        self._lines.append(json.dumps(value, separators=(",", ":")) + "\n")

    def _flush_each_second(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                self._changed.wait_for(lambda: self._closed, timeout=_FLUSH_S)
                if self._closed:
                    return
            self._flush()

    def _flush(self) -> None:
        with self._changed:
            data, self._lines = "".join(self._lines).encode(), []
        while data:
            try:
                data = data[self._file.write(data) :]
            except OSError:  # a full disk must not end the startup; the written part stays readable
                return


def read_record(path: Path) -> Record:
    """Read the file of a `RecordWriter`, as far as it was written. Raises `OSError`.

    Raises `CorruptError` if it is not a record, `PermanentError` for an unknown version. Everything after the first
    truncated or invalid line is ignored.
    """
    with path.open("rb") as file:
        started_s = _header(file.readline(_MAX_LINE))
        files: list[str] = []
        needs: dict[tuple[int, int], Need] = {}
        last_ms = 0
        while len(needs) < MAX_NEEDS:
            line = file.readline(_MAX_LINE)
            value = _value(line)
            if isinstance(value, list):
                need = _need(value, files, last_ms)
                if need is None:
                    break
                last_ms = need.t_ms
                needs.setdefault((value[0], value[1]), need)
            elif isinstance(value, dict) and isinstance(value.get("file"), str) and len(files) < _MAX_FILES:
                files.append(value["file"])
            else:
                if isinstance(value, dict) and _is_number(value.get("end_ms"), MAX_MS):
                    last_ms = max(last_ms, value["end_ms"])
                break
    return Record(started_s, last_ms, tuple(needs.values()))


def _header(line: bytes) -> float:
    value = _value(line)
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(schema, str) or not schema.startswith("bootseer.record/"):
        raise CorruptError("this is not the record of a startup")
    if schema != SCHEMA:
        raise PermanentError(f"a record of the version {schema!r}; this BootSeer supports {SCHEMA}")
    started_s = value.get("started_s")
    if isinstance(started_s, bool) or not isinstance(started_s, int | float) or not 0 <= started_s < 2**40:
        raise CorruptError("a record does not say when it began")
    return float(started_s)


def _value(line: bytes) -> object:
    """The JSON value of a complete line; None for others."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _need(value: list[object], files: list[str], last_ms: int) -> Need | None:
    if len(value) != 4:
        return None
    number, block, t_ms, found = value
    limits = (len(files), MAX_BLOCK, MAX_MS, len(Availability))
    if not all(_is_number(item, limit) for item, limit in zip(value, limits, strict=True)):
        return None
    # Two threads may have read the clock in one order and written in the other.
    return Need(files[number], block, max(t_ms, last_ms), Availability(found))  # type: ignore[arg-type, call-overload]


def _is_number(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
