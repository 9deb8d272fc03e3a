"""Leases in a store: what is being built is announced by its builder, with a heartbeat that others watch.

A lease is created by the process that comes first. Its holder writes a new beat number every few seconds; a waiter
takes over a lease whose beat stands still (`lease_state`). Two processes may believe for a moment that they hold it: in
stores that cannot create in one step, and when two take over at once. Both then build, the first to publish wins, and
nothing is wrong. Where the store refuses a lease, nothing waits. Everything has a deadline; clock, sleep and chance are
arguments. A `Lease` belongs to one thread, with the one that beats it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bootseer.artifact.lease_state import MAX_BYTES, TTL_S, LeaseObservation, LeaseRecord
from bootseer.artifact.objects import put, read_all
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.logs import logger
from bootseer.store.store import Store

_log = logger(__name__)
_LOOK_S = 5.0
_ATTEMPTS = 2
_SETTLE_S = (0.2, 0.5)
"""Between writing a taken lease and reading it again: longer than the other's way from its look to its write."""


@dataclass(frozen=True, slots=True)
class Held:
    """Another process builds."""

    words: str


@dataclass(frozen=True, slots=True)
class NoLease:
    """It is not known whether another process builds."""

    why: str


class Lease:
    """A lease that this process holds."""

    def __init__(self, store: Store, name: str, record: LeaseRecord) -> None:
        self._store = store
        self._name = name
        self._record = record
        self._lock = threading.Lock()
        self.lost = False
        """Another process took this one for dead and has it now. What was built may be published all the same: the
        first
        wins."""

    @property
    def interval_s(self) -> float:
        """When to beat again, at the latest."""
        return self._record.interval_s

    def beat(self) -> bool:
        """Show that the holder lives; false once the lease is lost. A store that does not answer is tried later."""
        with self._lock:
            try:
                if not self._is_ours():
                    self.lost = True
                else:
                    self._record = self._record.next()
                    put(self._store, self._name, self._record.encode(), timeout_s=self.interval_s)
            except BootseerError:
                pass  # the next beat is soon; a waiter does not count the time in which it could not look either
            return not self.lost

    def release(self) -> bool:
        """Give it back, if it is still ours: whether others see that. Otherwise they see that it is silent."""
        with self._lock:
            try:
                if self.lost or not self._is_ours():
                    self.lost = True
                    return True
                try:
                    self._store.delete(self._name)
                except BootseerError:
                    # Many registries delete nothing.
                    put(self._store, self._name, replace(self._record.next(), released=True).encode())
            except BootseerError:
                return False
            return True

    def _is_ours(self) -> bool:
        """Whether the store still shows it as ours. Raises for a store that does not say."""
        seen = look(self._store, self._name)
        if seen.kind == "unknown":
            raise TransientError(seen.why)
        return seen.record is not None and seen.record.nonce == self._record.nonce


def look(store: Store, name: str) -> LeaseObservation:
    """One look at a lease; raises nothing for what the store does."""
    data = b""
    try:
        data = read_all(store, name, MAX_BYTES, _LOOK_S)
        record = LeaseRecord.parse(data)
    except NotFoundError:
        return LeaseObservation("free")
    except CorruptError:
        return LeaseObservation("broken", hashlib.sha256(data).hexdigest())
    except TransientError as error:
        return LeaseObservation("unknown", why=str(error))
    except BootseerError as error:
        # What is larger than any lease is malformed; one that may not be read cannot be waited for.
        broken = "is larger than" in str(error)
        return LeaseObservation("broken", "large") if broken else LeaseObservation("unknown", why=str(error))
    return LeaseObservation("free" if record.released else "held", f"{record.nonce} {record.beat}", record)


def acquire(
    store: Store, name: str, node: str, *, ttl_s: float = TTL_S, clock: Callable[[], float] = time.time
) -> Lease | Held | NoLease:
    """Take the lease if it is free."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), clock(), ttl_s)
    reason = ""
    for _ in range(_ATTEMPTS):
        created, reason = False, ""
        try:
            created = store.create(name, record.encode(), timeout_s=2 * _LOOK_S)
        except TransientError as error:
            reason = str(error)
        except BootseerError as error:
            return NoLease(str(error))
        seen = LeaseObservation("free") if created else look(store, name)
        # It may have been written, and only the answer be lost.
        if created or (seen.record is not None and seen.record.nonce == record.nonce):
            return Lease(store, name, record)
        if seen.kind != "free":
            return _as_held(seen, clock())
        if not reason:
            # Given back by a node that may not delete, or just now: write over it, and see which node has it.
            return _taken(store, name, record, seen, random.Random(), time.sleep)  # noqa: S311 - no secret
    return NoLease(reason)


def take_over(
    store: Store,
    name: str,
    node: str,
    dead: LeaseObservation,
    *,
    ttl_s: float = TTL_S,
    rng: random.Random | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | Held | NoLease:
    """Take a lease whose holder is dead, as it was seen; of several nodes that do, the last writer has it."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), time.time(), ttl_s, taken=True)
    return _taken(store, name, record, dead, rng or random.Random(), sleep)  # noqa: S311 - spreads requests, no secret


def _taken(
    store: Store,
    name: str,
    record: LeaseRecord,
    before: LeaseObservation,
    rng: random.Random,
    sleep: Callable[[float], None],
) -> Lease | Held | NoLease:
    try:
        now = look(store, name)
        if now.kind not in ("free", "unknown") and now.mark != before.mark:
            return _as_held(now, record.since_s)
        put(store, name, record.encode(), timeout_s=2 * _LOOK_S)
    except BootseerError as error:
        return NoLease(str(error))
    sleep(rng.uniform(*_SETTLE_S))
    now = look(store, name)
    if now.record is not None and now.record.nonce == record.nonce:
        return Lease(store, name, record)
    if now.kind == "unknown":
        Lease(store, name, record).release()
    return _as_held(now, record.since_s)


def _as_held(seen: LeaseObservation, now_s: float) -> Held | NoLease:
    if seen.kind == "unknown":
        return NoLease(seen.why)
    return Held(seen.record.words(now_s) if seen.record is not None else "by a node whose lease cannot be read")


@contextlib.contextmanager
def announced(store: Store, name: str, node: str) -> Iterator[None]:
    """Show others for as long as the block lasts that something is being built, by a lease of a name that only this
    process uses. A store that refuses it costs a log line: then others do not see it."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), time.time())
    lease, over = Lease(store, name, record), threading.Event()
    try:
        put(store, name, record.encode(), timeout_s=2 * _LOOK_S)
    except BootseerError as error:
        _log.info("%s is not announced: %s", name, error)
        yield
        return

    def beat() -> None:
        while not over.wait(lease.interval_s):
            lease.beat()

    thread = threading.Thread(target=beat, name="bootseer-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _LOOK_S + lease.interval_s)
        lease.release()
