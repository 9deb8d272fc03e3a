"""A bucket as a place: the contract on a real S3 server, and what a bucket alone can do."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from bootseer.places import open_place
from bootseer.places.place import Place
from places.contract import PlaceContract
from s3_server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("jobs")
        yield started


@pytest.fixture
def uri(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://jobs/{secrets.token_hex(4)}"


@pytest.fixture
def place(uri: str) -> Iterator[Place]:
    opened = open_place(uri)
    yield opened
    opened.close()


class TestObjectPlace(PlaceContract):
    """The contract."""

    keeps_modes = False
