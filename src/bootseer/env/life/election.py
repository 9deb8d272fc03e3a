"""One builder per request key: election by a lease in the store, and waiting for the builder.

Without a lease there is no waiting: whatever the store refuses, the start installs for itself. Everything has a
deadline; clock, sleep and chance are arguments.
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
class Waited:
    """How the waiting ended: the arguments of `decide.waited`."""

    ended: Ended
    document: EnvironmentDocument | None = None
    lease: Lease | None = None
    """It is this start's turn to build."""
    words: str = ""


def lease_name(key: str) -> str:
    """Where a store keeps the lease of a request key."""
    ENVIRONMENTS.check_key(key)
    return f"environments/{key}/lease"


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

    Returns the lease; its holder; why there is none; or the snapshot that was published meanwhile.
    """
    lease = acquire(catalog.store, lease_name(key), node, ttl_s=ttl_s, clock=clock)
    if isinstance(lease, Lease):
        # Between our first look and the lease, another one may have built and given it back.
        document = fresh(catalog, key, replaces)
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
) -> Waited:
    """Wait for the builder, at most `timeout_s`: until there is a snapshot other than `replaces`, or it ends.

    Only the lease is looked at on the way: a builder publishes first and releases then.
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
        document = fresh(catalog, key, replaces)
        if document is not None:
            return Waited("published", document)
        if step is Next.LEFT:
            return Waited("builder-gave-up")  # the next one may give up, too: a start does not wait for a second
        if step is Next.OVER:
            return Waited("waited-too-long", words=seen.why)
        if step is Next.FREE:
            lease = acquire(store, name, node, ttl_s=ttl_s)
            return Waited("builder-gave-up", lease=lease if isinstance(lease, Lease) else None)
        taken = take_over(store, name, node, seen, ttl_s=ttl_s, rng=rng, sleep=sleep)
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
