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
from typing import IO, Annotated

import msgspec

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch.hotset import MAX_BLOCK, MAX_FILES, MAX_MS, MAX_NEEDS, Availability, Need, Record

SCHEMA = "bootseer.record/1"
_FLUSH_S = 1.0
_CLOSE_S = 10.0
_MAX_LINE = 256


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
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._file: IO[bytes] = path.open("xb", buffering=0)
        self._append({"schema": SCHEMA, "started_s": started_s})
        self._flush()
        self._thread = threading.Thread(target=self._flush_each_second, name="bootseer-record", daemon=True)
        self._thread.start()

    def need(self, file: str, block: int, found: Availability) -> None:
        """A reader needed a block of the file with this identity for the first time."""
        passed_s = self._clock() - self._begin
        with self._lock:
            if self._ended or self._num_needs >= MAX_NEEDS:
                return
            number = self._files.get(file)
            if number is None:
                if len(self._files) == MAX_FILES:
                    return
                number = self._files[file] = len(self._files)
                self._append({"file": file})
            self._num_needs += 1
            # Formatted by hand for speed: a reader is waiting.
            self._lines.append(f"[{number},{block},{int(passed_s * 1000)},{found:d}]\n")

    def end(self) -> None:
        """The startup is over (training has begun): ignore later needs."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._append({"end_ms": int((self._clock() - self._begin) * 1000)})

    def close(self) -> None:
        """Write what is pending, and call `on_finished`."""
        self.end()
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # otherwise it hangs in a write: the pending lines are lost
            self._flush()
            self._file.close()
        self._on_finished(self._path)

    def _append(self, value: object) -> None:
        self._lines.append(json.dumps(value, separators=(",", ":")) + "\n")

    def _flush_each_second(self) -> None:
        while not self._closed.wait(_FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
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
        started_s = _started_s(file.readline(_MAX_LINE))
        files: list[str] = []
        needs: dict[tuple[int, int], Need] = {}
        last_ms = 0
        while len(needs) < MAX_NEEDS and (line := file.readline(_MAX_LINE)).endswith(b"\n"):
            try:
                value = _LINE.decode(line)
            except _INVALID:
                break
            if isinstance(value, tuple):
                number, block, t_ms, found = value
                if number >= len(files):
                    break
                # Two threads may have read the clock in one order and written in the other.
                last_ms = max(t_ms, last_ms)
                needs.setdefault((number, block), Need(files[number], block, last_ms, found))
            elif value.file and len(files) < MAX_FILES:
                files.append(value.file)
            else:
                last_ms = max(last_ms, value.end_ms)
                break
    return Record(started_s, last_ms, tuple(needs.values()))


_Time = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MS)]
_Need = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCK)], _Time, Availability]


class _Other(msgspec.Struct):
    """A line that begins a file, or ends the record."""

    file: str = ""
    end_ms: _Time = 0


class _Header(msgspec.Struct):
    schema: str
    started_s: Annotated[float, msgspec.Meta(ge=0, lt=2**40)] | None = None


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_HEADER, _LINE = msgspec.json.Decoder(_Header), msgspec.json.Decoder(_Need | _Other)
_INVALID = (msgspec.MsgspecError, ValueError, RecursionError)


def _started_s(line: bytes) -> float:
    try:
        header = _HEADER.decode(line)
    except _INVALID as error:
        raise CorruptError("this is not the record of a startup") from error
    if header.schema != SCHEMA and header.schema.startswith("bootseer.record/"):
        raise PermanentError(f"a record of the version {header.schema!r}; this BootSeer supports {SCHEMA}")
    if header.schema != SCHEMA or header.started_s is None:
        raise CorruptError("this is not the record of a startup")
    return header.started_s
