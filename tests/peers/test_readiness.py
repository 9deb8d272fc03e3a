"""Which nodes are ready: the answer to each report."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.errors import CorruptError
from bootseer.peers.job import SECRET_BYTES, JobPeers
from bootseer.peers.protocol import Signed, Signer
from bootseer.peers.readiness import READY, Readiness, RollCall, StartReport


def test_nodes_that_are_not_ready_are_reported_with_their_stage_and_so_are_silent_ones() -> None:
    roll = RollCall()
    roll.answer(StartReport("a", READY), [], 0.0)
    roll.answer(StartReport("b", "image_loading"), [], 0.0)
    told = roll.answer(StartReport("c", "environment_setup.install"), ["0", "a", "b", "c"], 30.0)
    assert told.ready == 1
    assert told.others == {"b": ("image_loading", 30.0), "c": ("environment_setup.install", 0.0), "0": ("", 0.0)}
    assert told.missing(6) == (
        "b (image_loading, silent for 30 s), c (environment_setup.install), 0 (nothing was heard of it), 2 more"
    )
    # In this case 0 is not a node of the job.
    assert told.missing(3) == "b (image_loading, silent for 30 s), c (environment_setup.install)"
    for name in ("0", "b", "c"):
        told = roll.answer(StartReport(name, READY), ["0", "a", "b", "c"], 31.0)
    assert (told.ready, told.others, told.missing(4)) == (4, {}, "")


def test_a_ready_node_that_is_listed_no_more_does_not_count() -> None:
    """Like a pod that was replaced by one with another address."""
    roll = RollCall()
    for name, stage in (("10.0.0.1", READY), ("10.0.0.2", READY), ("10.0.0.3", "image_loading"), ("client", READY)):
        told = roll.answer(StartReport(name, stage), ["10.0.0.1", "10.0.0.2", "10.0.0.3"], 0.0)
    assert told.ready == 3
    told = roll.answer(StartReport("10.0.0.1", READY), ["10.0.0.1", "10.0.0.9"], 1.0)
    assert told == Readiness(2, {"10.0.0.3": ("image_loading", 1.0), "10.0.0.9": ("", 0.0)})


def test_of_many_nodes_a_few_are_named() -> None:
    roll = RollCall()
    for number in range(1000):
        told = roll.answer(StartReport(f"n{number:04}", "begin"), [], 0.0)
    assert (told.ready, len(told.others)) == (0, 20)
    assert told.missing(1000).endswith("n0019 (begin), 980 more")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"ready": 1}',
        b'{"ready": 1, "others": [1]}',
        b'{"ready": 1, "others": {"a": 2}}',
        b'{"ready": Infinity, "others": {}}',
        b'{"ready": 1, "others": {"\xff": ["begin", 1]}}',
        b"[" * (1 << 14),
    ],
)
def test_a_damaged_file_of_the_nodes_readiness_says_that_none_is_ready(tmp_path: Path, body: bytes) -> None:
    job = JobPeers.create(tmp_path / "peers", bytes(SECRET_BYTES))
    (job.folder / "start.json").write_bytes(body)
    assert job.readiness() == Readiness(0, {})


@pytest.mark.parametrize("stage", ["a b", "", "x" * 101])
def test_a_malformed_report_is_refused(stage: str) -> None:
    with pytest.raises(CorruptError):
        Signer(bytes(32)).verify(Signer(bytes(32)).sign(StartReport("a", stage)))


def test_all_of_a_report_is_signed() -> None:
    signed = Signer(bytes(32)).sign(StartReport("a", READY))
    assert Signer(bytes(32)).verify(signed) == StartReport("a", READY)
    other = signed.message.replace(b"ready", b"begin")
    assert Signer(bytes(32)).verify(Signed(signed.number, signed.mac, other)) is None
    assert Signer(bytes(32)).verify(Signed(signed.number + 1, signed.mac, signed.message)) is None
