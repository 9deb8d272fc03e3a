"""Fixtures of all tests. They live in plugins by topic: `conftest_launch` runs the real program."""

from __future__ import annotations

pytest_plugins = ["conftest_launch"]
