"""The sample reports, built once per run."""

from __future__ import annotations

import pytest

from bootseer.report.model import Report
from report.render import sample


@pytest.fixture(scope="session")
def small() -> Report:
    return sample.small()


@pytest.fixture(scope="session")
def big() -> Report:
    return sample.big()


@pytest.fixture(scope="session")
def empty() -> Report:
    return sample.empty()


@pytest.fixture(scope="session")
def hostile() -> Report:
    return sample.hostile()
