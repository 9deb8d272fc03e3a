"""Large files are read without their holes, and refused when they change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.contents import inspect_changes, read_pieces
from bootseer.errors import PermanentError


def test_holes_are_reported_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        for at in (8 << 20, 32 << 20):
            file.seek(at)
            file.write(b"island" * 1000)
    (item,), _ = inspect_changes([Change("/file", Action.ADDED, str(path))], None)
    pieces: list[bytes] = []
    digest = read_pieces(item, pieces.append, lambda count: pieces.append(bytes(count)))
    content = path.read_bytes()
    assert b"".join(pieces) == content
    assert digest == f"blake3:{blake3(content).hexdigest()}"
    read: list[bytes] = []
    read_pieces(item, read.append, lambda _count: None)
    assert sum(map(len, read)) < 1 << 20


def test_a_change_in_the_middle_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (4 << 20))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    (item,), _ = inspect_changes([Change("/file", Action.ADDED, str(path))], None)
    pieces = 0

    def change(_piece: bytes) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 2:
            with path.open("r+b") as file:
                file.write(b"other bytes of the same length")

    with pytest.raises(PermanentError, match="/file was changed"):
        read_pieces(item, change, lambda _count: None)
    assert pieces == 4
