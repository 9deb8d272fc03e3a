"""What kind of environment a real folder is."""

from __future__ import annotations

from pathlib import Path

from bootseer.env.restoring.safe_tree import TreeFolders


def test_environments_are_recognized_by_what_is_in_them(tmp_path: Path) -> None:
    for name in ("conda/conda-meta", "python/lib/python3.12", "threads/lib/python3.13t", "debian/lib/python3"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("venv/pyvenv.cfg", "file/lib/python3.12"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "conda" / "pyvenv.cfg").touch()
    (tmp_path / "link").symlink_to("conda")
    (tmp_path / "linked" / "lib").mkdir(parents=True)
    (tmp_path / "linked" / "lib" / "python3.11").symlink_to("/usr/lib/python3.11")
    folders = TreeFolders(str(tmp_path))
    found = {path.name: folders.environment(f"/{path.name}") for path in tmp_path.iterdir() if not path.is_symlink()}
    assert found == {
        "conda": "conda",
        "python": "python",
        "threads": "python",
        "venv": "venv",
        "debian": "",
        "file": "",
        "linked": "",
    }
    assert folders.is_folder("/conda")
    assert not folders.is_folder("/link")
    assert not folders.is_folder("/nowhere")
