"""Fixtures of all tests. They live in plugins by topic: `conftest_launch` runs the real program, `conftest_ran`
fails a run that executed nothing, `lock_tracker` watches the locks of what has threads."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["conftest_launch", "conftest_ran", "image_node", "lock_tracker", "ways_image"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory(prefix="bootseer-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that would wait for ever, for example for the other end of a pipe."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# A shell without job control starts background jobs with SIGINT ignored, and children inherit it: then `kill -INT` in a
# test would end nothing. The tests say what is ignored, not the shell that happened to start them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples at each run, and as long for each as the machine takes: whether the tests pass depends on the code
# alone. `pytest --hypothesis-profile=default` looks for new examples.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
