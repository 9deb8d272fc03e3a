"""Has attempts analysed while their lines arrive, from a thread of the service.

It polls for new batches and starts a worker process for each analysis (`derive`), which reads all lines of the attempt
again. With a fixed interval, a start of 1,440 nodes, whose analysis takes seconds, would keep a core busy. So an
attempt is analysed when no batch has arrived for `_QUIET_S`; while batches keep arriving, `_PACE` times the duration of
its last analysis must pass, so that analyses take at most a fifth of the time, and small starts are still updated about
every second.

Several services may share one PostgreSQL: each claims an attempt for `_CLAIMED_S` at a time.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, func, select, update

from bootseer.errors import TransientError
from bootseer.logs import logger
from bootseer.service import schema
from bootseer.service.database import Database
from bootseer.service.derive import Attempt, Derived, Patterns, close_starts, derive_attempt, skip_alive
from bootseer.service.raw import RawStore
from bootseer.service.repeated import Repeated
from bootseer.store.open import open_store
from bootseer.units import NS_PER_S

_LOG = logger(__name__)
_LOOK_EVERY_S: Final = 0.25
_MOST_POLLED: Final = 1_000_000
"""Number of waiting batches that a poll looks at, the oldest first."""
_QUIET_S: Final = 0.5
"""Time without batches after which an analysis begins."""
_PACE: Final = 4
"""Multiple of the last analysis's duration after which one begins even if batches keep arriving."""
_LEAST_S: Final = 1.0
_CLAIMED_S: Final = 30
_LEFT_S: Final = 900
"""Time after a claim's end after which an open start counts as left by its service: most are closed earlier."""
_CLOCKS_DIFFER_S: Final = 60
"""Maximum difference between the clocks of several services' machines."""
_TRIES: Final = 3
"""Number of failures after which an attempt is given up; `bootseer serve reindex` tries again."""
_WORKER_S: Final = 600
# Forks of the forkserver have all imports; forks of the service itself would inherit locks of its threads.
_processes: Final = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class _Worker:
    """A process that analyses one attempt and then ends, which returns the memory that a large start needs."""

    def __init__(self, *of: Any) -> None:
        """`of`: the arguments of `_work`, after the first."""
        self.results, results = _processes.Pipe(duplex=False)
        self._process = _processes.Process(target=_work, args=(results, *of), daemon=True)
        try:
            self._process.start()
        finally:
            results.close()

    def end(self) -> tuple[str, Derived | str]:
        """Its result: `derived`, `transient` or `error`; `killed` if it sent none."""
        result: tuple[str, Derived | str] = ("killed", "its process was killed")
        with contextlib.suppress(EOFError):
            result = self.results.recv()
        return result

    def kill(self) -> None:
        """Kill the process if it is still running, and release it."""
        self.results.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _work(
    results: multiprocessing.connection.Connection,
    raw_uri: str,
    database_url: str,
    patterns: Patterns,
    attempt: Attempt,
) -> None:
    result: tuple[str, Derived | str]
    gc.disable()  # not worth it in such a short-lived process
    try:
        raw, database = RawStore(open_store(raw_uri)), Database(database_url)
        result = ("derived", _derived(raw, database, attempt, patterns))
        database.close()
    except TransientError as error:
        result = ("transient", str(error))
    except Exception as error:  # one attempt that cannot be analysed must not stop the others
        result = ("error", "".join(traceback.format_exception(error)))
    results.send(result)


def _derived(raw: RawStore, database: Database, attempt: Attempt, patterns: Patterns) -> Derived:
    if skip_alive(raw, database, attempt):
        return Derived(0, frozenset(), None)
    batch = schema.batch
    with database.read() as connection:
        rows = connection.execute(select(batch.c.raw_key, batch.c.received_ns).where(attempt.of(batch)))
        batches = [(name, received_ns) for name, received_ns in rows]
    if not batches:  # its raw lines were deleted: an open start never changes again
        return Derived(0, frozenset(), 0)
    return derive_attempt(raw, database, attempt, batches, time.time_ns(), patterns)


@dataclass(slots=True)
class _State:
    """An attempt whose lines are arriving."""

    waiting: tuple[int, int] = (0, 0)
    """Batches that are not analysed at the last poll: their number, and when the newest one arrived."""
    is_changed: bool = True
    """Whether there are batches to analyse."""
    arrived_s: float = 0.0
    """When `waiting` last changed."""
    ended_s: float = 0.0
    took_s: float = 0.0
    running: _Worker | None = None
    began_s: float = 0.0
    failures: int = 0
    closes_ns: int | None = None
    claimed_s: float = float("-inf")


class Deriver:
    """Derives arriving batches. Call `wake` when a batch has arrived."""

    def __init__(
        self,
        database: Database,
        database_url: str,
        raw_uri: str,
        *,
        workers: int = 1,
        name: str = "",
        patterns: Patterns = (),
        on_derived: Callable[[Derived], None] = lambda derived: None,
    ) -> None:
        """patterns: as for `derive_attempt`.
        name: name of this service, the same after a restart, so that its claims remain valid.

        `on_derived` is called from the deriver's thread when rows were replaced.
        """
        self._database = database
        self._places = (raw_uri, database_url, patterns)
        self._workers = workers
        self._on_derived = on_derived
        self._name = f"{socket.gethostname()}:{name or os.getpid()}"
        self._states: defaultdict[Attempt, _State] = defaultdict(_State)
        self._reopens_s = 0.0
        self._thread = Repeated("derive", self._look, _LOOK_EVERY_S)
        self.start, self.wake = self._thread.start, self._thread.wake

    def close(self) -> None:
        """Stop the thread. The next service derives the rest."""
        self._thread.close()
        for state in self._states.values():
            if state.running is not None:
                state.running.kill()

    def _look(self) -> None:
        if time.monotonic() >= self._reopens_s:
            self._reopen()
        self._collect()
        self._take()
        self._submit()
        self._close_starts()

    def _reopen(self) -> None:
        """Continue the attempts with open starts, so that they are closed eventually: at the beginning all, later those
        that another service has left."""
        start, live = schema.start, schema.live
        found = select(start.c.job, start.c.attempt).where(start.c.state == schema.OPEN).distinct()
        if self._reopens_s:
            found = found.join(live, (live.c.job == start.c.job) & (live.c.attempt == start.c.attempt))
            found = found.where(live.c.owned_until_ns < time.time_ns() - _LEFT_S * NS_PER_S)
        with self._database.read() as connection:
            for job, number in connection.execute(found):
                self._states.setdefault(Attempt(job, number), _State())
        self._reopens_s = time.monotonic() + _CLAIMED_S

    def _take(self) -> None:
        """Poll for new batches of attempts that no other service has claimed."""
        batch, live = schema.batch, schema.live
        to_do = select(batch.c.job, batch.c.attempt, batch.c.received_ns).where(batch.c.done.is_(False))
        # Without the limit SQLite reads all batches in the order of the groups, if the database has been analysed.
        to_do = to_do.order_by(batch.c.received_ns).limit(_MOST_POLLED)
        waits = to_do.subquery().c
        claim = (live.c.job == waits.job) & (live.c.attempt == waits.attempt)
        with self._database.read() as connection:
            rows = connection.execute(
                select(waits.job, waits.attempt, func.count(), func.max(waits.received_ns))
                .outerjoin(live, claim)
                .where(live.c.owner.is_(None) | self._is_free())
                .group_by(waits.job, waits.attempt)
                .order_by(func.min(waits.received_ns))
            ).all()
        for job, number, count, newest_ns in rows:
            attempt, waiting = Attempt(job, number), (count, newest_ns)
            if not self._claim(attempt):
                continue
            state = self._states[attempt]
            state.is_changed = True
            if state.waiting != waiting:
                state.waiting, state.arrived_s = waiting, time.monotonic()

    def _is_free(self) -> ColumnElement[bool]:
        """The condition for an attempt's row in `live` that this service may claim it."""
        live, now_ns = schema.live, time.time_ns()
        # A claim even further in the future was made before a clock was set back: it counts as expired.
        until_ns = now_ns + (_CLAIMED_S + _CLOCKS_DIFFER_S) * NS_PER_S
        return (live.c.owner == self._name) | ~live.c.owned_until_ns.between(now_ns, until_ns)

    def _claim(self, attempt: Attempt) -> bool:
        """Claim the attempt for this process, or renew the claim. Returns whether it succeeded."""
        state = self._states.get(attempt)
        if state is not None and time.monotonic() - state.claimed_s < _CLAIMED_S / 3:
            return True
        live = schema.live
        claim = {"owner": self._name, "owned_until_ns": time.time_ns() + _CLAIMED_S * NS_PER_S}
        renewed = update(live).where(attempt.of(live), self._is_free()).values(claim)
        made = self._database.insert(live).values(**attempt._asdict(), **claim).on_conflict_do_nothing()
        with self._database.write() as connection:
            # No upsert: in PostgreSQL it locks the row also where it changes nothing, and so waits for its owner.
            is_ours = connection.execute(renewed).rowcount > 0
            if not is_ours and connection.execute(select(live.c.owner).where(attempt.of(live))).first() is None:
                is_ours = connection.execute(made.returning(live.c.owner)).first() is not None
        if is_ours:
            self._states[attempt].claimed_s = time.monotonic()
        return is_ours

    def _submit(self) -> None:
        now_s = time.monotonic()
        idle = self._workers - sum(state.running is not None for state in self._states.values())
        # The one that has waited longest first: a few whose lines keep arriving would keep all others from their turn.
        for attempt, state in sorted(self._states.items(), key=lambda item: item[1].ended_s):
            if state.running or not state.is_changed or not idle:
                continue
            # Once lines pause and a second has passed since the last analysis; at the latest when its pace allows.
            paced_s = state.ended_s + max(_LEAST_S, _PACE * state.took_s)
            if now_s < min(max(state.arrived_s + _QUIET_S, state.ended_s + _LEAST_S), paced_s):
                continue
            if not self._claim(attempt):
                state.ended_s = now_s + _CLAIMED_S / 3  # each try is a transaction, and open starts may be thousands
                continue
            state.began_s, state.running = now_s, _Worker(*self._places, attempt)
            idle -= 1

    def _collect(self) -> None:
        for attempt, state in self._states.items():
            worker = state.running
            if worker is None:
                continue
            # If a worker was killed, its pipe is at end of file, which `poll` reports, too.
            late = time.monotonic() - state.began_s > _WORKER_S
            if not late and not worker.results.poll():
                continue
            what, result = ("late", f"took longer than {_WORKER_S} s") if late else worker.end()
            worker.kill()
            state.running, state.ended_s = None, time.monotonic()
            state.took_s = state.ended_s - state.began_s
            if isinstance(result, Derived):
                state.is_changed, state.failures, state.closes_ns = False, 0, result.closes_ns
                self._on_derived(result)
                continue
            _LOG.warning("%r, attempt %d was not analysed: %s", *attempt, result)
            if what != "transient":  # one that was killed may need more memory than there is
                state.failures += 1
                if state.failures >= _TRIES:
                    with self._database.write() as connection:
                        batch = schema.batch
                        connection.execute(update(batch).where(attempt.of(batch)).values(done=True))
                    _LOG.warning("%r, attempt %d: not tried again before `bootseer serve reindex`", *attempt)
                    state.is_changed = False
                    state.closes_ns = state.closes_ns or 0  # unknown if an earlier service left the start open

    def _close_starts(self) -> None:
        """Close starts whose time has come, and forget attempts that are finished."""
        live = schema.live
        for attempt, state in list(self._states.items()):
            if state.is_changed or state.running:
                continue
            if state.closes_ns is not None:
                if time.time_ns() < state.closes_ns:
                    continue
                with self._database.write() as connection:
                    days = close_starts(connection, attempt)
                state.closes_ns = None
                self._on_derived(Derived(0, frozenset(days), None))
            if time.monotonic() - state.arrived_s > _CLAIMED_S:
                with self._database.write() as connection:
                    connection.execute(delete(live).where(attempt.of(live), live.c.owner == self._name))
                del self._states[attempt]
