"""Trees are deleted at any depth, with read-only folders, and as far as possible."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.io.files import delete_tree
from bootseer.mounts import kernel
from deep_trees import make_deep

_USER = 64321
_DUMPABLE = 4


def _make_tree(folder: Path, depth: int = 3, name: str = "d") -> None:
    (folder / "top").mkdir(parents=True)
    make_deep(folder / "top", depth, name)


@pytest.mark.parametrize(("depth", "name"), [(3, "d"), (1200, "d"), (500, "n" * 200)])
def test_a_tree_of_any_depth_is_deleted(tmp_path: Path, depth: int, name: str) -> None:
    """Deeper than Python's recursion limit, the usual limit of open files, or PATH_MAX."""
    _make_tree(tmp_path / "tree", depth, name)
    delete_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []
    delete_tree(tmp_path / "tree")  # it does not exist any more


@pytest.mark.root
def test_folders_that_their_owner_may_not_change_are_deleted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    _make_tree(tree)
    tmp_path.chmod(0o777)
    for path in (tree, *tree.rglob("*")):
        os.chown(path, _USER, _USER, follow_symlinks=False)
    for name, mode in (("top/d/d", 0o555), ("top/d", 0), ("top", 0o500), ("", 0o555)):
        (tree / name).chmod(mode)
    assert _as_user(tmp_path, lambda: delete_tree(Path("tree"))) == 0
    assert not tree.exists()


def _as_user(folder: Path, call: Callable[[], None]) -> int:
    """The exit code of a child that calls in this folder, as a user without rights."""
    if (child := os.fork()) == 0:
        try:
            os.chdir(folder)
            os.setresuid(_USER, _USER, _USER)
            ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # as after an exec; else /proc/self belongs to root
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.root
def test_the_rest_is_deleted_where_something_cannot_be(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    _make_tree(tree)
    busy = tree / "top" / "d" / "file"
    kernel.attach(kernel.clone_mount(busy), busy)
    try:
        with pytest.raises(OSError, match=r"top/d/file.*busy") as failed:
            delete_tree(tree)
        assert failed.value.filename == str(tree)
        assert [path for path in tree.rglob("*") if not path.is_dir()] == [busy]
    finally:
        kernel.unmount(busy)
    delete_tree(tree)
    assert not tree.exists()
