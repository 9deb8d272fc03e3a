"""A builder in a separate process: `builder.py STORE KEY NODE TTL_S WHAT`, controlled by its standard input.

Prints `lease`, `held` or `none`; with a lease, it sends heartbeats until it reads a line. `WHAT` is `elect`, which
first waits for a line, so that several begin at once, or `take`, which does not.
"""

from __future__ import annotations

import select
import sys

from bootseer.artifact.lease import Held, Lease, acquire
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.election import elect, lease_name
from bootseer.store.open import open_store


def main(uri: str, key: str, node: str, ttl_s: float, what: str) -> None:
    catalog = Catalog(open_store(uri, plain_http=True))
    if what == "elect":
        print("ready", flush=True)
        sys.stdin.readline()
        found = elect(catalog, key, node)
    else:
        found = acquire(catalog.store, lease_name(key), node, ttl_s=ttl_s)
    if not isinstance(found, Lease):
        print("held" if isinstance(found, Held) else f"none: {found}", flush=True)
        return
    print("lease", flush=True)
    while not select.select([sys.stdin], [], [], found.interval_s)[0] and found.beat():
        pass
    sys.stdin.readline()
    found.release()
    print(not found.lost, flush=True)


main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
