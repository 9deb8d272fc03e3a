"""Folders that nobody else may look into."""

from __future__ import annotations

import stat
from pathlib import Path

from bootseer.bring.places import environments_folder
from bootseer.bring.private_folder import make_private
from bootseer.env.life.local import Local


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_closed_and_an_open_one_gets_closed(tmp_path: Path) -> None:
    assert mode(make_private(tmp_path / "a" / "b")) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert mode(make_private(tmp_path / "open")) == 0o700


def test_a_place_that_cannot_be_made_is_for_others_to_tell(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_private(tmp_path / "file" / "folder")


def test_what_the_node_knows_of_environments_is_closed(tmp_path: Path) -> None:
    Local(tmp_path, lambda line: None)
    assert mode(environments_folder(tmp_path)) == 0o700
