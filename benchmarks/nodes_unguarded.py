"""BootSeer with one guard of its peers disabled: `nodes_unguarded.py GUARD VERB...`. `nodes_faults` uses it to show
that the guard is needed. The program itself has no such option."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from bootseer.cli.main import main
from bootseer.peers import choice, health

GIVE_UP_S = 0.5


def without_second_request() -> None:
    """No request counts as late."""
    health.Health.late_at = lambda self, request: request.active_s + 1e6  # type: ignore[method-assign]


def without_breaker() -> None:
    """A late or slow node is used again at once."""
    health._MAX_LATE = health._RECENT + 1  # type: ignore[misc]
    health._SLOW_S = float("inf")  # type: ignore[misc]


def without_patience() -> None:
    """An owner that waits for the origin counts as late, and every node may use the origin itself."""
    route = choice.Members.route

    def routed(self: choice.Members, file: str, run: int, *how: object) -> choice.Route:
        return replace(route(self, file, run, *how), may_ask_origin=True)

    health.Health.late_at = lambda self, request: request.begun_s + GIVE_UP_S  # type: ignore[method-assign]
    choice.Members.route = routed  # type: ignore[method-assign]


GUARDS = {"second request": without_second_request, "breaker": without_breaker, "patience": without_patience}

if __name__ == "__main__":
    GUARDS[sys.argv.pop(1)]()
    sys.argv[0] = "bootseer"
    main()
