"""What the verbs say and do is tested here, not how their process starts."""

from __future__ import annotations

import pytest

from conftest_launch import Run


@pytest.fixture
def run(run_copy: Run) -> Run:
    return run_copy
