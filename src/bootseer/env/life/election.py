"""One builder for each request key: election by a lease in the store, and waiting for the builder.

If the store does not grant leases, a start does not wait but installs for itself. All waits have deadlines; clock,
sleep and random numbers are arguments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.artifact.lease import Held, Lease, NoLease, acquire, look, take_over
from bootseer.artifact.lease_state import TTL_S, Next, Watch
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.catalog import ENVIRONMENTS, Catalog
from bootseer.env.life.decide import Ended


@dataclass(frozen=True, slots=True)
class WaitResult:
    """The result of a wait: arguments of `decide.after_wait`."""

    ended: Ended
    document: EnvironmentDocument | None = None
    lease: Lease | None = None
    """Set if this start is the builder now."""
    words: str = ""


def lease_name(key: str) -> str:
    """Name of the lease of a request key in a store."""
    ENVIRONMENTS.check_key(key)
    return f"environments/{key}/lease"


def elect(
    catalog: Catalog, key: str, node: str, *, replaces: EnvironmentDocument | None = None
) -> Lease | Held | NoLease | EnvironmentDocument:
    """Ask for the builder's lease, for a new snapshot or one that replaces `replaces`.

    Returns the lease, its holder, why there is none, or the snapshot that was published meanwhile.
    """
    lease = acquire(catalog.store, lease_name(key), node)
    if isinstance(lease, Lease):
        # Another start may have published and released the lease since the lookup.
        document = new_document(catalog, key, replaces)
        if document is not None:
            lease.release()
            return document
    return lease


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
) -> WaitResult:
    """Wait for the builder, at most `timeout_s`, until it has published a snapshot other than `replaces` or has ended.

    Only the lease is polled, which a builder releases after publishing. If the holder stops sending heartbeats, this
    start takes the lease over and builds. It does not wait for a second builder after one that gave up.
    """
    rng = rng or random.Random()  # noqa: S311 - spreads requests, keeps no secret
    store, name = catalog.store, lease_name(key)
    watch = Watch(clock() + timeout_s, ttl_s=ttl_s)
    while True:
        seen = look(store, name)
        step = watch.see(seen, clock())
        if step is Next.LOOK:
            sleep(watch.pause_s(clock(), rng.random()))
            continue
        document = new_document(catalog, key, replaces)
        if document is not None:
            return WaitResult("published", document)
        if step is Next.LEFT:
            return WaitResult("builder-gave-up")
        if step is Next.OVER:
            return WaitResult("waited-too-long", words=seen.why)
        if step is Next.FREE:
            lease = acquire(store, name, node, ttl_s=ttl_s)
            return WaitResult("builder-gave-up", lease=lease if isinstance(lease, Lease) else None)
        taken = take_over(store, name, node, seen, ttl_s=ttl_s, sleep=sleep)
        if isinstance(taken, Lease):
            return WaitResult("builder-died", lease=taken)
        if isinstance(taken, NoLease):
            return WaitResult("no-lease", words=taken.why)


def new_document(catalog: Catalog, key: str, replaces: EnvironmentDocument | None) -> EnvironmentDocument | None:
    """The published snapshot, unless it is the one that is to be replaced."""
    document = catalog.look(key).document
    if document is None or (replaces is not None and build_id(document) == build_id(replaces)):
        return None
    return document


def build_id(document: EnvironmentDocument) -> tuple[str, str, float]:
    """Distinguishes two builds of one key; independent of the age limit, which a start may shorten."""
    return document.digest, document.builder, document.built_s
