"""The locations of BootSeer's files on a machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from bootseer.artifact.hotsets import hotset_name
from bootseer.artifact.places import blocks_folder, cache_root, folders_of, runtime_root
from bootseer.artifact.process_snapshots import process_name
from bootseer.env.document import document_name as environment_name
from bootseer.env.life.catalog import TRASH
from bootseer.errors import UsageError
from bootseer.image.catalog import _TRASH
from bootseer.image.conversion.layer_document import layer_name
from bootseer.image.document import document_name
from bootseer.peers.rendezvous import _Folder
from bootseer.store.file import FileStore


@pytest.mark.parametrize(
    ("environ", "uid", "root"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, 0, "/run/bootseer"),
        ({"XDG_RUNTIME_DIR": "/nowhere/5"}, 5, "/tmp/bootseer-5"),
        ({"XDG_RUNTIME_DIR": "relative"}, 5, "/tmp/bootseer-5"),
        ({"XDG_RUNTIME_DIR": "/run/user/5", "BOOTSEER_RUNTIME": "/elsewhere"}, 5, "/elsewhere"),
        ({}, 5, "/tmp/bootseer-5"),
    ],
)
def test_where_the_runtime_folder_is(environ: dict[str, str], uid: int, root: str) -> None:
    assert runtime_root(environ, uid) == Path(root)


def test_the_users_runtime_folder_is_used_where_it_exists_and_is_the_users(tmp_path: Path) -> None:
    """Slurm passes the folder of the login node, `su` the one of another user."""
    environ, owner = {"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path.stat().st_uid or 5
    if os.geteuid() == 0:
        os.chown(tmp_path, owner, owner)
    assert runtime_root(environ, owner) == tmp_path / "bootseer"
    assert runtime_root(environ, owner + 1) == Path(f"/tmp/bootseer-{owner + 1}")


def test_without_a_home_the_cache_is_in_that_of_the_user_database_or_nowhere() -> None:
    assert cache_root({}, 0) == Path("/var/cache/bootseer")
    assert cache_root({}, 1) == Path(pwd.getpwuid(1).pw_dir, ".cache", "bootseer")
    with pytest.raises(UsageError, match="user 64321 has no home folder"):
        cache_root({}, 64321)


def test_all_folders_of_a_store_are_known(tmp_path: Path) -> None:
    """Captures treat the rest of its folder as the machine's own."""
    digest = "sha256:" + "0" * 64
    store = FileStore(tmp_path)
    names = [
        environment_name("key"),
        hotset_name(digest, "job"),
        process_name(digest, "job"),
        layer_name("sha256:1", block_size=1, level=1),
        f"{TRASH}x",
    ]
    for name in (*names, document_name(digest), f"{_TRASH}x"):
        store.create(name, b"{}")
    store.upload().commit()
    _Folder(str(tmp_path), "job.0").create("secret", b"")
    known = folders_of(cache=Path("/cache"), stores=[str(tmp_path)])
    assert set(tmp_path.iterdir()) == {path for path in known if path.parent == tmp_path}
    assert blocks_folder(Path("/cache")) in known
