"""Ingest of native lines and OTLP. A request is acknowledged once its lines are durable; all other work comes later.

`POST /v1/lines` accepts event lines as in a spool, `/v1/traces` and `/v1/logs` requests of OpenTelemetry collectors
(`otlp_in`). A batch is split by job and attempt, each part becomes one object of raw lines, and then the request is
acknowledged. Database rows, by which the deriver finds new batches, are written shortly afterwards by a thread: they
can be recreated from the objects, so ingest does not depend on the database.

Memory is bounded: bodies that are being read or wait for a thread take at most `MAX_HELD_BYTES` in total; further
requests get 429 and Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import anyio
import anyio.to_thread
import msgspec
import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from bootseer.errors import BootseerError, TransientError
from bootseer.logs import logger
from bootseer.service import schema
from bootseer.service.access import Grant, of_team, refusal
from bootseer.service.database import Database
from bootseer.service.raw import EVENTS, LOG, RawStore
from bootseer.service.raw import MAX_PLAIN_BYTES as MAX_OBJECT_BYTES
from bootseer.service.repeated import Repeated
from bootseer.service.rows import day_of
from bootseer.trace.event import MAX_READ_BYTES, TAG_STEM, Malformed, decode, encodable, written_name
from bootseer.trace.stacks import MAX_REQUESTS, StackRequest

MAX_BODY_BYTES: Final = 4 << 20
"""Size of a request as sent."""
MAX_PLAIN_BYTES: Final = 16 << 20
"""Size of a request, uncompressed."""
MAX_HELD_BYTES: Final = 64 << 20
MAX_ATTEMPTS: Final = 256
"""Attempts in one batch: a collector may send those of many jobs."""
SENDER, SEQUENCE, KIND, JOB = (f"x-bootseer-{word}" for word in ("sender", "sequence", "kind", "job"))
"""Headers of a batch: its sender, its number among the sender's batches, `lines` or `log`, and the job of a log."""

_LOG = logger(__name__)
NEXT: Final = "x-bootseer-next"
"""Response header: seconds until the sender should send again, which limits the rate of requests of many senders."""
_RATE = 500
"""Target number of requests per second."""
_WINDOW_S = 10.0
_THREADS = 4
_BODY_S = 30.0
"""Maximum time to receive a body."""
_GATHER_S = 0.2
_RETRY_S = 1.0
_END_S = 10.0
_MAX_ROWS = 50_000
_SENDERS = 50_000
_TAG = b"@bootseer1 {"
_TOO_LARGE = f"a body may have {MAX_BODY_BYTES} bytes; send less at once"
_PIECE_BYTES = 1 << 10
"""Of zstd at a time: at most 32 MiB uncompressed."""
_NUMBER = re.compile(r"\d{1,18}")
_NUL = b"\\u0000"
"""Not allowed in text of PostgreSQL, and never written by BootSeer."""


class _Head(msgspec.Struct):
    """The fields by which lines are sorted."""

    job: str
    attempt: int = 0
    restart: int = 0


_head = msgspec.json.Decoder(_Head)
Attempt = tuple[str, int]


class Batch(NamedTuple):
    """Lines of one request."""

    sender: str
    sequence: int
    team: str
    parts: dict[Attempt, list[bytes]]
    suffix: str = EVENTS


class Outcome(NamedTuple):
    """The result of a batch."""

    accepted: int
    """Lines."""
    rejected: int
    is_new: bool
    """False if all of it had been stored before."""


class Refused(Exception):  # noqa: N818 - an answer, not an error of the program
    """A request is rejected with `status`."""

    def __init__(self, status: int, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.retry_after_s = retry_after_s


def sort_lines(lines: Iterable[bytes]) -> tuple[dict[Attempt, list[bytes]], int]:
    """The lines by attempt, and the number of lines that are not events; empty ones are ignored."""
    parts: dict[Attempt, list[bytes]] = {}
    rejected = 0
    for line in filter(None, lines):
        attempt = _attempt(line)
        if attempt is None:
            rejected += 1
        else:
            parts.setdefault(attempt, []).append(line)
    return parts, rejected


def _attempt(line: bytes) -> Attempt | None:
    if len(line) > MAX_READ_BYTES or _NUL in line:
        return None
    place = line.find(_TAG)
    head = None
    if place >= 0:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            head = _head.decode(memoryview(line)[place + len(_TAG) - 1 :])
    if head is not None:
        job, attempt, restart = encodable(head.job[:256]), head.attempt, head.restart
    elif TAG_STEM in line:
        try:
            event = decode(line)  # also handles wrappers of collectors
        except Malformed:
            return None
        job, attempt, restart = event.job, event.attempt, event.restart
    else:
        return None
    return (job, attempt) if job and 0 <= attempt < 2**31 and restart < 2**31 else None  # as columns are


class Ingest:
    """Accepts batches. `arrived` is called from a background thread after rows of new batches were written."""

    def __init__(self, raw: RawStore, database: Database, arrived: Callable[[], None] = lambda: None) -> None:
        self.problem = ""
        """Why batches cannot be stored now; empty if they can."""
        self._raw = raw
        self._database = database
        self._arrived = arrived
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._oldest_s: float | None = None
        """Since when rows wait."""
        self._thread = Repeated("rows", self._write_rows, _RETRY_S, once_more=True)
        self.start = self._thread.start
        self._held = 0
        self._seen: dict[str, float] = {}
        self._threads: anyio.CapacityLimiter | None = None
        self._late: dict[Attempt, list[StackRequest]] = {}

    def ask_stacks(self, open_starts: Sequence[Mapping[str, Any]]) -> None:
        """From now on ask the senders of these starts (`over_time.now`) for the stacks of their late processes."""
        self._late = {
            (row["job"], row["attempt"]): [
                StackRequest(
                    row["job"], row["attempt"], one["restart"], one["node"], one["rank"], one["stage"], one["pid"]
                )
                for one in row["late"]
                if one["pid"] and not one["stack"]
            ][:MAX_REQUESTS]
            for row in open_starts
        }

    def _stacks(self, parts: Mapping[Attempt, Sequence[bytes]]) -> list[dict[str, Any]]:
        found = []
        for attempt, lines in parts.items():
            for one in self._late.get(attempt, ()):
                node = msgspec.json.encode(one.node)
                if any(node in line for line in lines):
                    found.append(one._asdict())
        return found[:MAX_REQUESTS]

    def close(self) -> None:
        """Write the pending rows and stop."""
        self._thread.close(_END_S)

    @property
    def lag_s(self) -> float:
        """How long the oldest row has waited for the database."""
        oldest_s = self._oldest_s
        return 0.0 if oldest_s is None else time.monotonic() - oldest_s

    async def answer(self, request: Request) -> Response:
        """The response to a batch of lines."""
        try:
            headers = request.headers
            sender, number = headers.get(SENDER, ""), headers.get(SEQUENCE, "")
            if not sender or len(sender) > 256 or not sender.isprintable():
                raise Refused(400, f"{SENDER} is missing or not a valid name")
            if number and not _NUMBER.fullmatch(number):
                raise Refused(400, f"{SEQUENCE} is not a number")
            kind, job = headers.get(KIND, "lines"), written_name(unquote(headers.get(JOB, "")).replace("\0", ""))
            if kind not in ("lines", "log") or (kind == "log" and not job):
                raise Refused(400, f"{KIND} must be lines, or log with {JOB}")
            grant: Grant = request.state.grant
            sequence = int(number or 0)

            def work(data: bytes) -> tuple[Outcome, list[dict[str, Any]]]:
                lines = list(filter(None, data.split(b"\n")))
                is_log = kind == "log"
                parts, rejected = ({(job, 0): lines} if lines else {}, 0) if is_log else sort_lines(lines)
                batch = Batch(sender, sequence, grant.team, parts, LOG if is_log else EVENTS)
                return self.keep(batch, rejected), self._stacks(parts)

            outcome, stacks = await self.take(request, work)
        except Refused as refused:
            return self.refuse(refused)
        answer = {"accepted": outcome.accepted, "rejected": outcome.rejected, "duplicate": not outcome.is_new}
        return JSONResponse(
            answer | ({"stacks": stacks} if stacks else {}),
            202,
            {NEXT: f"{self._next_s(sender):.1f}"},
        )

    def _next_s(self, sender: str) -> float:
        now_s = time.monotonic()
        self._seen.pop(sender, None)
        self._seen[sender] = now_s  # keeps the order by time
        while len(self._seen) > _SENDERS or now_s - self._seen[next(iter(self._seen))] > _WINDOW_S:
            del self._seen[next(iter(self._seen))]
        return min(max(2.0, len(self._seen) / _RATE), 30.0)

    def refuse(self, refused: Refused) -> Response:
        wait = refused.retry_after_s
        return refusal(refused.status, str(refused), {"retry-after": f"{wait:.0f}"} if wait is not None else None)

    async def take(self, request: Request, work: Callable[[bytes], Any]) -> Any:
        """The result of `work`, called in a thread with the uncompressed body. Raises `Refused`."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_THREADS)
        async with self._body(request) as packed:
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            return await anyio.to_thread.run_sync(lambda: work(unpacked(packed, encoding)), limiter=self._threads)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        text = request.headers.get("content-length", "")
        size = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else MAX_BODY_BYTES
        is_large = size > MAX_BODY_BYTES
        if is_large or self._held + size > MAX_HELD_BYTES:
            await _drain(request)  # a response before the last byte would look like a broken connection to the sender
            if is_large:
                raise Refused(413, _TOO_LARGE)
            raise Refused(429, "busy", random.uniform(1.0, 5.0))  # noqa: S311 - jitter, not for security
        self._held += size
        try:
            body, got = bytearray(), 0
            try:
                async with asyncio.timeout(_BODY_S):
                    async for piece in request.stream():
                        got += len(piece)
                        if got <= size:
                            body += piece
                        elif got > MAX_PLAIN_BYTES:
                            break
            except TimeoutError:
                raise Refused(408, f"the body took longer than {_BODY_S:g} s") from None
            except ClientDisconnect:
                raise Refused(400, "the connection was closed") from None
            if got > size:
                raise Refused(413, _TOO_LARGE)
            yield bytes(body)
        finally:
            self._held -= size

    def keep(self, batch: Batch, rejected: int = 0) -> Outcome:
        """Make a batch durable. Raises `Refused` on failure: the sender then keeps it."""
        if len(batch.parts) > MAX_ATTEMPTS:
            raise Refused(413, f"a batch may contain {MAX_ATTEMPTS} attempts of jobs; send less at once")
        now_ns, is_new, accepted, rows = time.time_ns(), False, 0, []
        day = day_of(now_ns)
        for (job, attempt), came in batch.parts.items():
            lines = came
            if batch.team:  # lines of a log stay if no event is in them
                is_log = batch.suffix == LOG
                lines = [of_team(line, batch.team) or (line if is_log else b"") for line in came]
            accepted += len(lines)
            # Lines made from spans are several times as long; of a log, each number stands for one object.
            for piece in _pieces(lines) if batch.suffix == EVENTS else [lines]:
                data = b"\n".join([*piece, b""])
                if len(data) > MAX_OBJECT_BYTES:  # with the team in each of its events
                    most = f"with its team, a body may have {MAX_OBJECT_BYTES} bytes uncompressed"
                    raise Refused(413, f"{most}; send less at once")
                try:
                    kept = self._raw.put(data, day=day, job=job, attempt=attempt, sender=batch.sender,
                                         sequence=batch.sequence, suffix=batch.suffix)  # fmt: skip
                except BootseerError as error:
                    self.problem = str(error)
                    _LOG.warning("a batch cannot be stored: %s", error)
                    why = "the lines cannot be stored now"
                    raise Refused(503, why, random.uniform(5.0, 15.0)) from error  # noqa: S311
                is_new |= kept.is_new
                rows.append({"raw_key": kept.name, "day": day, "job": job, "attempt": attempt,
                             "received_ns": now_ns, "done": False})  # fmt: skip
        self.problem = ""
        if rows:
            with self._lock:
                if len(self._rows) < _MAX_ROWS:  # otherwise `upkeep.reconcile` finds the objects without rows later
                    self._rows += rows
                self._oldest_s = self._oldest_s or time.monotonic()
            self._thread.wake()
        return Outcome(accepted, rejected, is_new or not rows)

    def _write_rows(self) -> None:
        self._thread.ended.wait(_GATHER_S)  # one transaction for all that come meanwhile
        with self._lock:
            rows = list(self._rows)
        if not rows:
            return
        try:
            with self._database.write() as connection:
                connection.execute(self._database.insert(schema.batch).on_conflict_do_nothing(), rows)
        except TransientError:  # tried again
            raise
        except Exception:  # `upkeep.reconcile` creates the rows later
            _LOG.exception("rows of %d batches cannot be written", len(rows))
        with self._lock:
            del self._rows[: len(rows)]
            self._oldest_s = time.monotonic() if self._rows else None
        self._arrived()


def _pieces(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The lines in pieces as large as a body may be: one object of raw lines holds them."""
    begin = size = 0
    for end, line in enumerate(lines):
        if size + len(line) > MAX_PLAIN_BYTES:
            yield lines[begin:end]
            begin, size = end, 0
        size += len(line) + 1
    yield lines[begin:]


async def _drain(request: Request) -> None:
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_BODY_S):
            got = 0
            async for piece in request.stream():
                got += len(piece)
                if got > MAX_PLAIN_BYTES:
                    return


def unpacked(packed: bytes, encoding: str) -> bytes:
    """The uncompressed body. Raises `Refused`: 400 if it is damaged, 413 if it is too large, 415 for other codings."""
    try:
        if encoding in ("", "identity"):
            data, ended = packed, True
        elif encoding == "gzip":
            unpacker = zlib.decompressobj(wbits=31)
            data = unpacker.decompress(packed, MAX_PLAIN_BYTES + 1)
            ended = unpacker.eof and not unpacker.unused_data
        elif encoding == "zstd":
            unpacker_zstd = zstandard.ZstdDecompressor(max_window_size=1 << 24).decompressobj()
            plain = bytearray()
            for place in range(0, len(packed), _PIECE_BYTES):
                plain += unpacker_zstd.decompress(packed[place : place + _PIECE_BYTES])
                if len(plain) > MAX_PLAIN_BYTES:
                    break
            data, ended = bytes(plain), unpacker_zstd.eof and not unpacker_zstd.unused_data
        else:
            raise Refused(415, "the body must be plain, gzip or zstd")
    except (zlib.error, zstandard.ZstdError, MemoryError):
        raise Refused(400, f"the body is not valid {encoding}") from None
    if len(data) > MAX_PLAIN_BYTES:
        raise Refused(413, f"a body may have {MAX_PLAIN_BYTES} bytes uncompressed; send less at once")
    if not ended:
        raise Refused(400, f"the body is not complete {encoding}")
    return data
