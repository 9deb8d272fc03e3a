"""Where files of a snapshot lead."""

from __future__ import annotations

from pathlib import Path

from bootseer.env.capturing.effects import mentions
from bootseer.env.changes import Action, Change


def test_links_into_scratch_folders_and_import_paths_are_told(tmp_path: Path) -> None:
    (tmp_path / "app.pth").write_text("/tmp/repository/src\n")
    (tmp_path / "__editable___app_finder.py").write_text("MAPPING = {'app': '/tmp/app'}\n")
    (tmp_path / "notes.txt").write_text("/tmp/notes\n")
    (tmp_path / "link").symlink_to("/var/tmp/data")
    (tmp_path / "other").symlink_to("/opt/data")
    names = ["app.pth", "__editable___app_finder.py", "notes.txt", "link", "other", "missing.pth"]
    changes = [Change(f"/opt/{name}", Action.ADDED, str(tmp_path / name)) for name in names]
    assert mentions([*changes, Change("/opt/gone.pth", Action.DELETED)]) == [
        "/tmp/repository/src\n",
        "MAPPING = {'app': '/tmp/app'}\n",
        "/var/tmp/data",
    ]
