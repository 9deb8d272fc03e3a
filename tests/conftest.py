"""Fixtures of all tests. They live in plugins by topic: `conftest_launch` runs the real program, `conftest_ran`
fails a run that executed nothing."""

from __future__ import annotations

pytest_plugins = ["conftest_launch", "conftest_ran"]
