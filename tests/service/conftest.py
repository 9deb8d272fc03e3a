"""The output and effects of subcommands are tested here, not the start of their process."""

from __future__ import annotations

import pytest

from conftest_launch import Run


@pytest.fixture
def run(run_copy: Run) -> Run:
    return run_copy
