"""Runs commands in forked processes: these tests are not about the start of the program."""

from __future__ import annotations

import pytest

from conftest_launch import Run


@pytest.fixture
def run(run_copy: Run) -> Run:
    return run_copy
