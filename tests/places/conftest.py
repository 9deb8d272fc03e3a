"""A bucket of the shared S3 server, and a place in it for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from bootseer.places import open_place
from bootseer.places.place import Place
from fault_proxy import FaultProxy
from s3_server import S3Server, environment_for


@pytest.fixture(scope="module")
def server(s3_server: S3Server) -> S3Server:
    s3_server.make_bucket("jobs")
    return s3_server


@pytest.fixture
def uri(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://jobs/{secrets.token_hex(4)}"


@pytest.fixture
def place(uri: str) -> Iterator[Place]:
    opened_place = open_place(uri)
    yield opened_place
    opened_place.close()


@pytest.fixture
def proxy(server: S3Server, uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy between the server and places that the test itself opens."""
    with FaultProxy(server.host) as started:
        for name, value in environment_for(started.host).items():
            monkeypatch.setenv(name, value)
        yield started
