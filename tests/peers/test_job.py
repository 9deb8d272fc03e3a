"""The peers folder: one process reads what another writes; damaged and foreign files are ignored."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError, PermanentError
from bootseer.peers.choice import Peer
from bootseer.peers.job import BLOCKS, FOLDER, SWITCH, JobPeers

PEERS = [Peer("n0", ("10.0.0.1:7400", "10.1.0.1:7400"), "r0"), Peer("n1", ("10.0.0.2:7400",))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return JobPeers.create(tmp_path / "peers", bytes(32)).folder


def test_members_are_seen_by_another_process_and_a_change_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = JobPeers.open(folder)
    assert seen.members().peers == ()
    JobPeers.open(folder).write_members("n1", PEERS)
    assert seen.members().peers == ()  # cached: the folder was read a moment ago
    monkeypatch.setattr("bootseer.peers.job._LOOK_EVERY_S", 0.0)
    assert seen.members().peers == tuple(PEERS)
    assert seen.members().own == "n1"
    assert seen.members() is seen.members()
    (folder / "members.json").write_text('{"own": "n1", "peers": [{}]}')
    assert seen.members().peers == tuple(PEERS)
    JobPeers.open(folder).write_members("n1", PEERS[1:])
    assert seen.members().peers == tuple(PEERS[1:])


def test_a_file_of_blocks_is_found_by_its_identity(folder: Path) -> None:
    identity, job = "ab" * 32, JobPeers.open(folder)
    assert job.registered(identity) is None
    job.register_blocks(identity, "s3://bucket/blocks", True, Path("/cache"))
    fields = {"kind": BLOCKS, "store": "s3://bucket/blocks", "plain_http": True, "cache": "/cache"}
    assert JobPeers.open(folder).registered(identity) == fields
    assert JobPeers.open(folder).identities() == {identity}
    (folder / "files" / f"{identity}.json").write_text("[]")
    assert job.registered(identity) is None


@pytest.mark.parametrize("identity", ["", "../secret", "AB" * 32, "ab" * 32 + "\n"])
def test_an_invalid_identity_names_no_file(folder: Path, identity: str) -> None:
    with pytest.raises(ValueError, match="identity"):
        JobPeers.open(folder).registered(identity)


def test_the_folder_and_its_files_are_private(folder: Path) -> None:
    job = JobPeers.open(folder)
    job.write_members("n1", PEERS)
    job.write_state({"bytes_sent": 1})
    job.register("ab" * 32, "checkpoint", {"offset": 3})
    assert job.state() == {"bytes_sent": 1}
    assert job.registered("ab" * 32) == {"kind": "checkpoint", "offset": 3}
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0
    folder.chmod(0o750)
    with pytest.raises(PermanentError):
        JobPeers.open(folder)


def test_the_environment_says_whether_there_are_peers(folder: Path) -> None:
    found = JobPeers.of_environment({FOLDER: os.fspath(folder)})
    assert found is not None
    assert found.secret == JobPeers.open(folder).secret
    assert JobPeers.of_environment({}) is None
    assert JobPeers.of_environment({FOLDER: os.fspath(folder), SWITCH: "0"}) is None
    with pytest.raises(NotFoundError):
        JobPeers.of_environment({FOLDER: "/nowhere"})


def test_nodes_that_ask_at_the_same_moment_are_all_noted(folder: Path) -> None:
    job, together = JobPeers.open(folder), threading.Barrier(8)

    def note(node: str, identity: str) -> None:
        together.wait(10)
        job.note_ahead(identity, node)

    nodes = {f"n{number}" for number in range(8)}
    for identity in ("ab" * 32, "cd" * 32, "ef" * 32, "01" * 32, "23" * 32):
        threads = [threading.Thread(target=note, args=(node, identity)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert JobPeers.open(folder).ahead(identity) == nodes


def test_what_a_process_gets_is_limited(folder: Path) -> None:
    job = JobPeers.open(folder)
    job.pace(1 << 30)  # without a limit nothing waits
    job.write_members("n1", PEERS, 1 << 20)
    seen = JobPeers.open(folder)
    began_s = time.monotonic()
    for _ in range(4):
        seen.pace(1 << 17)
    assert time.monotonic() - began_s >= 0.4
