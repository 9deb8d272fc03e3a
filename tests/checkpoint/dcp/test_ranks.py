"""Several ranks save and load together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import warm

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"),
]

RANK = Path(__file__).parents[2] / "dcp_rank.py"


def run(ranks: int, what: str, uri: Path, folder: Path) -> list[dict[str, Any]]:
    meet = str(folder / "meet")
    commands = [(str(rank), str(ranks), meet, what, str(uri)) for rank in range(ranks)]
    # The timeout of a collective is longer than this waits, so ranks that hang in one fail the test.
    results = warm.run(RANK, *commands, folder=folder)
    assert all(result.stdout for result in results), [result.stderr for result in results]
    return [json.loads(result.stdout) for result in results]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks saved a state, once with our writer and once with PyTorch's."""
    folder = tmp_path_factory.mktemp("saved")
    told = run(2, "save", folder, tmp_path_factory.mktemp("ranks"))
    assert not [one for one in told if "error" in one]
    return folder


def test_three_ranks_load_what_two_saved_and_all_readers_agree(saved: Path, tmp_path: Path) -> None:
    for one in run(3, "load-all", saved, tmp_path):
        assert one.get("message") is None
        assert (one["ours, plainly"], one["plain"], one["ours"]) == ([], [], [])


def test_all_ranks_fail_when_one_cannot_read(saved: Path, tmp_path: Path) -> None:
    # Only the second rank reads this file if as many ranks load as saved.
    damaged = saved / "ours" / "__1_0.distcp"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100])
    try:
        told = run(2, "load", saved, tmp_path)
    finally:
        damaged.write_bytes(content)
    assert [one["error"] for one in told] == ["CheckpointException"] * 2
    for one in told:
        assert "(RANK 1)" in one["message"]
        assert "(RANK 0)" not in one["message"]
        assert "__1_0.distcp has 100 bytes" in one["message"]
