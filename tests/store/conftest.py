"""Registries shared by the tests in this folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from registry import Registry

_numbers = itertools.count()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without authentication."""
    with Registry(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture
def repository() -> str:
    """A repository that no other test uses."""
    return f"tests/number-{next(_numbers)}"


@pytest.fixture(autouse=True)
def no_logins(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user who runs the tests may have logins."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path_factory.getbasetemp() / "no-logins"))
    monkeypatch.delenv("BOOTSEER_PLAIN_HTTP", raising=False)
