"""Objects that are too large for one request, on a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from bootseer.errors import BootseerError
from bootseer.places import objects, open_place, uploads
from bootseer.places.place import Place
from places.contract import names, opened, read
from s3_server import S3Server, environment_for

pytestmark = pytest.mark.slow

_MIB = 1 << 20


@pytest.fixture
def place(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in environment_for(s3_server.host).items():
        monkeypatch.setenv(name, value)
    if "large" not in s3_server.ask("GET", "/")[1].decode():
        s3_server.make_bucket("large")
    with closing(open_place("s3://large/tests")) as opened_place:
        yield opened_place


def test_what_is_larger_than_one_copy_is_copied_in_parts(
    place: Place, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects.MAX_COPY_BYTES, "s3", 8 * _MIB)
    monkeypatch.setattr(uploads, "_COPY_BYTES", 5 * _MIB)
    data = os.urandom(12 * _MIB + 3)
    place.write_bytes("one", data)
    place.rename("one", "two")
    with opened(place, "two") as file:
        assert read(file, 0, len(data)) == data
    assert names(place, "") == {"two"}
    assert place.stat("two").version.endswith(f'-3"-{len(data):x}')
    bucket = uploads.Uploads("s3://large")
    with pytest.raises(BootseerError):  # which leaves no upload behind
        bucket.copy("tests/none", "elsewhere", len(data), '"other"')
    assert s3_server.uploads("large") == []


def test_files_of_many_parts_are_uploaded_in_larger_ones(place: Place) -> None:
    data = os.urandom(20 * _MIB)
    for most_bytes, num_parts in ((10_000 * 9 * _MIB, 3), (1 << 62, 3), (10_000 * 19 * _MIB, 2)):
        (part,) = place.begin_parts(["part"], part_bytes=most_bytes)
        part.write(data)
        part.close()
        assert place.stat("part").version.endswith(f'-{num_parts}"-{len(data):x}')
