"""Which store, and which of its snapshots: what the verbs of `env` share.

A key may be given by its first digits, as long as only one snapshot has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootseer.cli.options import FLAG, Option
from bootseer.cli.signing_options import signatures
from bootseer.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.env.document import EnvironmentDocument
    from bootseer.env.life.catalog import Catalog

STORE = (
    Option("store", ("--store",), "Where the snapshots are (default: this node's cache).", metavar="URI"),
    Option("plain_http", ("--plain-http",), "Speak to a registry without encryption.", FLAG, default=False),
)
_LEAST_DIGITS = 4


def cache() -> Path:
    """The node's cache."""
    from bootseer.artifact.places import cache_root

    return cache_root(os.environ, os.getuid())


def store_uri(given: str | None) -> str:
    """The store that the user means."""
    from bootseer.artifact.places import STORE as VARIABLE
    from bootseer.launch.environment.task import own_store

    return given or os.environ.get(VARIABLE) or own_store(cache())


@contextmanager
def catalog_of(given: str | None, plain_http: bool, trust: Mapping[str, Any] | None = None) -> Iterator[Catalog]:
    """The snapshots of a store. `trust` are the values of `TRUST`, for verbs that use what is in a snapshot."""
    from bootseer.artifact.places import STORE as VARIABLE
    from bootseer.artifact.signatures import UNSIGNED
    from bootseer.env.life.catalog import Catalog
    from bootseer.launch.supervise import say
    from bootseer.store.open import open_store

    with closing(open_store(store_uri(given), plain_http=plain_http)) as store:
        # This node's own store holds nothing but what this node made.
        is_own = not given and not os.environ.get(VARIABLE)
        yield Catalog(store, say, UNSIGNED if trust is None or is_own else signatures(trust, os.environ))


def full_key(catalog: Catalog, digits: str) -> str:
    """The key that begins with these digits. Raises `UsageError` when there is none, or more than one."""
    from bootseer.env.document import is_key

    if is_key(digits):
        return digits
    if len(digits) < _LEAST_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise UsageError(
            f"{digits!r} is not a key", hint=f"give at least its first {_LEAST_DIGITS} digits: bootseer env list"
        )
    found = sorted(key for key in catalog.keys("document") if key.startswith(digits))
    if len(found) > 1:
        raise UsageError(f"{len(found)} snapshots begin with {digits}", hint="give more digits: bootseer env list")
    if not found:
        raise UsageError(
            f"{catalog.store.uri}: no snapshot begins with {digits}", hint="bootseer env list", exit_code=1
        )
    return found[0]


def document_of(catalog: Catalog, digits: str) -> EnvironmentDocument:
    """The snapshot whose key begins with these digits. Raises `UsageError` when there is none."""
    key = full_key(catalog, digits)
    document = catalog.find(key)
    if document is None:
        raise NotFoundError(f"{catalog.store.uri}: no snapshot has the key {key[:12]}; bootseer env list shows all")
    return document
