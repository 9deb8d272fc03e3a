"""Leases in a store: a builder announces its work with a heartbeat that other nodes watch.

The first process creates the lease. Its holder writes a new heartbeat number every few seconds; a waiter takes over a
lease whose number does not change (`lease_state`). Two processes may briefly both believe that they hold it: in stores
without atomic creation, and when two take over at once. Then both build, the first to publish wins, and nothing is
wrong. If the store refuses leases, nothing waits. Everything has a deadline. A `Lease` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from bootseer.artifact.lease_state import MAX_BYTES, TTL_S, LeaseObservation, LeaseRecord
from bootseer.artifact.objects import put, read_all
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.retry import retrying
from bootseer.store.store import Store

_LOOK_S = 5.0
_SETTLE_S = (0.2, 0.5)
"""Delay between writing a taken lease and reading it back: longer than a competitor takes from reading to writing."""


class Held(Struct, frozen=True):
    """Another process holds the lease and builds."""

    words: str


class NoLease(Struct, frozen=True):
    """It is unknown whether another process builds."""

    why: str


class Lease:
    """A lease held by this process."""

    def __init__(self, store: Store, name: str, record: LeaseRecord) -> None:
        self._store = store
        self._name = name
        self._record = record
        self.lost = False
        """Another process took this one for dead and holds the lease now. The result may still be published: the first
        publisher wins."""

    @property
    def interval_s(self) -> float:
        """The maximum time between heartbeats."""
        return self._record.interval_s

    def beat(self) -> bool:
        """Write a heartbeat; False once the lease is lost. If the store does not respond, the next beat tries again."""
        # After an error the next beat is soon, and waiters do not count time in which they could not read either.
        with contextlib.suppress(BootseerError):
            if not self._is_ours():
                self.lost = True
            else:
                self._record = self._record.next()
                put(self._store, self._name, self._record.encode(), timeout_s=self.interval_s)
        return not self.lost

    def release(self) -> None:
        """Give the lease back if it is still ours. If the store does not respond, it will look dead to others."""
        with contextlib.suppress(BootseerError):
            if self.lost or not self._is_ours():
                self.lost = True
                return
            try:
                self._store.delete(self._name)
            except BootseerError:
                # Many registries do not support deletion.
                put(self._store, self._name, replace(self._record.next(), released=True).encode())

    def _is_ours(self) -> bool:
        """Whether the store still shows this process as the holder. Raises when the store does not respond."""
        seen = look(self._store, self._name)
        if seen.kind == "unknown":
            raise TransientError(seen.why)
        return seen.record is not None and seen.record.nonce == self._record.nonce


def look(store: Store, name: str) -> LeaseObservation:
    """Observe a lease once; raises none of the store's errors."""
    data = b""
    try:
        data = read_all(store, name, MAX_BYTES, _LOOK_S)
        record = LeaseRecord.parse(data)
    except NotFoundError:
        return LeaseObservation("free")
    except CorruptError:
        return LeaseObservation("held", hashlib.sha256(data).hexdigest())
    except BootseerError as error:  # one that may not be read cannot be waited for
        return LeaseObservation("unknown", why=str(error))
    return LeaseObservation("free" if record.released else "held", f"{record.nonce} {record.beat}", record)


def acquire(store: Store, name: str, node: str, *, ttl_s: float = TTL_S) -> Lease | Held | NoLease:
    """Take the lease if it is free."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), time.time(), ttl_s)
    try:
        created = retrying(
            lambda left_s: store.create(name, record.encode(), timeout_s=min(left_s, 2 * _LOOK_S)),
            attempts=2,
            deadline_s=4 * _LOOK_S,
        )
    except BootseerError as error:
        return NoLease(str(error))
    seen = LeaseObservation("free") if created else look(store, name)
    # It may have been created although the response was lost.
    if created or (seen.record is not None and seen.record.nonce == record.nonce):
        return Lease(store, name, record)
    if seen.kind != "free":
        return _as_held(seen, time.time())
    # Released by a node that cannot delete, or just now: overwrite it, and check which node got it.
    return _taken(store, name, record, seen, time.sleep)


def take_over(
    store: Store,
    name: str,
    node: str,
    dead: LeaseObservation,
    *,
    ttl_s: float = TTL_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | Held | NoLease:
    """Take over a lease observed as dead; if several nodes do, the last writer holds it."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), time.time(), ttl_s, taken=True)
    return _taken(store, name, record, dead, sleep)


def _taken(
    store: Store, name: str, record: LeaseRecord, before: LeaseObservation, sleep: Callable[[float], None]
) -> Lease | Held | NoLease:
    try:
        now = look(store, name)
        if now.kind not in ("free", "unknown") and now.mark != before.mark:
            return _as_held(now, record.since_s)
        put(store, name, record.encode(), timeout_s=2 * _LOOK_S)
    except BootseerError as error:
        return NoLease(str(error))
    sleep(random.uniform(*_SETTLE_S))  # noqa: S311 - spreads requests, no secret
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
