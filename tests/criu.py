"""The CRIU of the tests: `criu` on PATH, or the one that scripts/criu.sh puts into .criu/."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.machine.criu import PROGRAM, check_criu, find_criu

FETCHED = Path(__file__).parents[1] / ".criu" / "criu"


def usable_criu() -> str:
    """The path of a CRIU that works here. Raises `LookupError` with the reason."""
    env = {name: value for name, value in os.environ.items() if name != PROGRAM}
    try:
        path = find_criu(env)
    except LookupError:
        if not FETCHED.exists():
            raise
        path = find_criu({**env, PROGRAM: str(FETCHED)})
    if reason := check_criu(path, env):
        raise LookupError(f"criu check --unprivileged: {reason}")
    return path


@pytest.fixture(scope="session")
def criu() -> str:
    """The path of a CRIU that works here; without one, the test is skipped."""
    try:
        return usable_criu()
    except LookupError as error:
        pytest.skip(f"{error}; scripts/criu.sh fetches CRIU")
