"""Fixtures of all tests. They live in plugins by topic: `conftest_launch` runs the real program, `conftest_ran`
fails a run that executed nothing."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["conftest_launch", "conftest_ran", "image_node", "ways_image"]

# A shell without job control starts background jobs with SIGINT ignored, and children inherit it: then `kill -INT` in a
# test would end nothing. The tests say what is ignored, not the shell that happened to start them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples at each run, and as long for each as the machine takes: whether the tests pass depends on the code
# alone. `pytest --hypothesis-profile=default` looks for new examples.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
