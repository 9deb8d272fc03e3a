"""One builder per request key: a lease in the store, beaten by its holder, watched by everybody else.

`environments/<key>/lease` is created by whoever comes first. Its holder writes a new beat number every few seconds;
who waits takes a lease over whose beat stands still (`lease_state`). Two may believe for a moment that they hold it:
in stores that cannot create in one step, and when two take over at once. Both then build, the first who publishes wins,
and nothing is wrong. Without a lease there is no waiting: whatever the store refuses, the caller installs for himself.
 Everything has a
deadline; clock, sleep and chance are arguments. A `Lease` belongs to one thread, with the one that beats it.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bootseer.artifact.objects import put
from bootseer.env.document import EnvironmentDocument, is_key
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import Ended
from bootseer.env.life.lease_state import MAX_BYTES, TTL_S, LeaseRecord, Next, Sight, Watch
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError, UsageError
from bootseer.store.retry import read_all
from bootseer.store.store import Store

_LOOK_S = 5.0
_ATTEMPTS = 2
_SETTLE_S = (0.2, 0.5)
"""Between writing a taken lease and looking who has it: longer than the other's way from its look to its write."""


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else builds."""

    words: str


@dataclass(frozen=True, slots=True)
class NoLease:
    """Nobody can say who builds."""

    why: str


class Lease:
    """A lease that this process holds."""

    def __init__(self, store: Store, key: str, record: LeaseRecord) -> None:
        self._store = store
        self._name = lease_name(key)
        self._record = record
        self._lock = threading.Lock()
        self.lost = False
        """Somebody took it for dead and has it now. What was built may be published all the same: the first wins."""

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
                pass  # the next beat is soon; who waits does not count the time in which he could not look either
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
        sight = look(self._store, self._name)
        if sight.kind == "unknown":
            raise TransientError(sight.why)
        return sight.record is not None and sight.record.nonce == self._record.nonce


@dataclass(frozen=True, slots=True)
class Waited:
    """How the waiting ended: the arguments of `decide.waited`."""

    ended: Ended
    document: EnvironmentDocument | None = None
    lease: Lease | None = None
    """It is this start's turn to build."""
    words: str = ""


def lease_name(key: str) -> str:
    """Where a store keeps the lease of a request key."""
    if not is_key(key):
        raise UsageError(f"{key[:80]!r} is not a request key", hint="a key has 64 hexadecimal digits")
    return f"environments/{key}/lease"


def look(store: Store, name: str) -> Sight:
    """One look at a lease; raises nothing for what the store does."""
    data = b""
    try:
        data = read_all(store, name, MAX_BYTES, _LOOK_S)
        record = LeaseRecord.parse(data)
    except NotFoundError:
        return Sight("free")
    except CorruptError:
        return Sight("broken", hashlib.sha256(data).hexdigest())
    except TransientError as error:
        return Sight("unknown", why=str(error))
    except BootseerError as error:
        # Larger than any lease is a lease that is none; that nobody may read it means that nobody can wait.
        broken = "is larger than" in str(error)
        return Sight("broken", "large") if broken else Sight("unknown", why=str(error))
    return Sight("free" if record.released else "held", f"{record.nonce} {record.beat}", record)


def elect(
    catalog: Catalog,
    key: str,
    node: str,
    *,
    replaces: EnvironmentDocument | None = None,
    ttl_s: float = TTL_S,
    clock: Callable[[], float] = time.time,
) -> Lease | Held | NoLease | EnvironmentDocument:
    """Ask to be the builder of a snapshot that is not there, or of one in place of `replaces`.

    Returns the lease; who holds it; why there is none; or the snapshot that was published meanwhile.
    """
    lease = acquire(catalog.store, key, node, ttl_s=ttl_s, clock=clock)
    if isinstance(lease, Lease):
        # Between our first look and the lease, another one may have built and given it back.
        document = fresh(catalog, key, replaces)
        if document is not None:
            lease.release()
            return document
    return lease


def acquire(
    store: Store, key: str, node: str, *, ttl_s: float = TTL_S, clock: Callable[[], float] = time.time
) -> Lease | Held | NoLease:
    """Take the lease if nobody has it."""
    name = lease_name(key)
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), clock(), ttl_s)
    why = ""
    for _ in range(_ATTEMPTS):
        created, why = False, ""
        try:
            created = store.create(name, record.encode(), timeout_s=2 * _LOOK_S)
        except TransientError as error:
            why = str(error)
        except BootseerError as error:
            return NoLease(str(error))
        sight = Sight("free") if created else look(store, name)
        # It may have been written, and only the answer be lost.
        if created or (sight.record is not None and sight.record.nonce == record.nonce):
            return Lease(store, key, record)
        if sight.kind != "free":
            return _as_held(sight, clock())
        if not why:
            # Given back by somebody who may not delete, or just now: write over it, and see who has it.
            return _taken(store, key, record, sight, random.Random(), time.sleep)  # noqa: S311 - no secret
    return NoLease(why)


def take_over(
    store: Store,
    key: str,
    node: str,
    dead: Sight,
    *,
    ttl_s: float = TTL_S,
    rng: random.Random | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | Held | NoLease:
    """Take a lease whose holder is dead, as it was seen; of several who do, the one who wrote last has it."""
    record = LeaseRecord(secrets.token_hex(16), node, os.getpid(), time.time(), ttl_s, taken=True)
    return _taken(store, key, record, dead, rng or random.Random(), sleep)  # noqa: S311 - spreads requests, no secret


def _taken(
    store: Store, key: str, record: LeaseRecord, seen: Sight, rng: random.Random, sleep: Callable[[float], None]
) -> Lease | Held | NoLease:
    name = lease_name(key)
    try:
        now = look(store, name)
        if now.kind not in ("free", "unknown") and now.mark != seen.mark:
            return _as_held(now, record.since_s)
        put(store, name, record.encode(), timeout_s=2 * _LOOK_S)
    except BootseerError as error:
        return NoLease(str(error))
    sleep(rng.uniform(*_SETTLE_S))
    now = look(store, name)
    if now.record is not None and now.record.nonce == record.nonce:
        return Lease(store, key, record)
    if now.kind == "unknown":
        Lease(store, key, record).release()
    return _as_held(now, record.since_s)


def wait(
    catalog: Catalog,
    key: str,
    node: str,
    *,
    timeout_s: float,
    replaces: EnvironmentDocument | None = None,
    ttl_s: float = TTL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> Waited:
    """Wait for whoever builds, at most `timeout_s`: until there is a snapshot other than `replaces`, or he ends.

    Only the lease is looked at on the way: a builder publishes first and releases then.
    """
    rng = rng or random.Random()  # noqa: S311 - spreads requests, keeps no secret
    store, name = catalog.store, lease_name(key)
    watch = Watch(clock() + timeout_s, ttl_s=ttl_s)
    while True:
        sight = look(store, name)
        step = watch.see(sight, clock())
        if step is Next.LOOK:
            sleep(watch.pause_s(clock(), rng.random()))
            continue
        document = fresh(catalog, key, replaces)
        if document is not None:
            return Waited("published", document)
        if step is Next.LEFT:
            return Waited("builder-gave-up")  # the next one may give up, too: nobody waits for a second
        if step is Next.OVER:
            return Waited("waited-too-long", words=sight.why)
        if step is Next.FREE:
            lease = acquire(store, key, node, ttl_s=ttl_s)
            return Waited("builder-gave-up", lease=lease if isinstance(lease, Lease) else None)
        taken = take_over(store, key, node, sight, ttl_s=ttl_s, rng=rng, sleep=sleep)
        if isinstance(taken, Lease):
            return Waited("builder-died", lease=taken)
        if isinstance(taken, NoLease):
            return Waited("no-lease", words=taken.why)


def fresh(catalog: Catalog, key: str, replaces: EnvironmentDocument | None) -> EnvironmentDocument | None:
    """The snapshot that is there now, unless it is the one that shall be replaced."""
    document = catalog.look(key).document
    if document is None or (replaces is not None and _made(document) == _made(replaces)):
        return None
    return document


def _made(document: EnvironmentDocument) -> tuple[str, str, float]:
    """What tells two snapshots of one key apart, also where a start shortens the age limit of what it found."""
    return document.digest, document.builder, document.built_s


def _as_held(sight: Sight, now_s: float) -> Held | NoLease:
    if sight.kind == "unknown":
        return NoLease(sight.why)
    return Held(sight.record.words(now_s) if sight.record is not None else "by a node whose lease cannot be read")
