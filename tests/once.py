"""Folders that are created once in a run for all workers: `once("python", make)` returns a folder filled by `make`.

They must not be changed; tests that need to use a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_run: list[Path] = []
_GET_FLAGS, _SET_FLAGS, _TOP = 0x80086601, 0x40086602, 0x00020000


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Workers' temporary folders are in the temporary folder of the run.
    base = None if config.option.basetemp is None else Path(config.option.basetemp)
    if base is not None:
        _run[:] = [(base.parent if hasattr(config, "workerinput") else base).with_name("once")]


@pytest.fixture(scope="session", autouse=True)
def _spread_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    spread(tmp_path_factory.getbasetemp())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _run and not hasattr(session.config, "workerinput"):
        shutil.rmtree(_run[0], ignore_errors=True)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder with this name; `make` is called with a path that does not exist."""
    if not _run:
        _run.append(Path(tempfile.mkdtemp()))
    folder = _run[0] / name
    if not folder.parent.exists():
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        spread(folder.parent)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            make(new)
            new.rename(folder)
    return folder


def python_with_pip(folder: Path) -> None:
    """Create a virtual environment with only pip: setuptools, which `venv` of Python 3.11 installs, is a third of its
    files, and each start of Python runs some of them."""
    copy(_original_python(), folder)


def _original_python() -> Path:
    def make(new: Path) -> None:
        venv.create(new, with_pip=True)
        for site in new.glob("lib/python3*/site-packages"):
            for path in site.iterdir():
                if not path.name.startswith("pip"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    return once("python", make)


@contextmanager
def lent_python_with_pip(folder: Path) -> Iterator[None]:
    """The same for one test, reused by the next test of this process after that test's changes are undone: a copy takes
    0.3 s of processor time, most tests' changes are only in an overlay, and the others install little."""
    own = (_run[0] if _run else folder.parent) / f"python-{os.getpid()}"
    try:
        own.rename(folder)
    except OSError:  # it does not exist, or is on another disk
        python_with_pip(folder)
    before = python_state(folder)
    yield
    with contextlib.suppress(OSError):
        if not own.exists():
            undo_changes(folder, before)
            folder.rename(own)


def spread(folder: Path) -> None:
    """Let ext4 distribute the subfolders of this folder over the disk, like `chattr +T`.

    Without a journal, ext4 does not reuse inodes that were freed in the last minutes, and for each new file it checks
    all of those nearby: creating a file takes 0.4 ms where tests have deleted their folders, and 0.03 ms elsewhere.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(opened, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(opened, _SET_FLAGS, struct.pack("l", flags | _TOP))
    except OSError:
        pass  # another file system
    finally:
        os.close(opened)


State = dict[str, tuple[int, ...]]


def python_state(folder: Path) -> State:
    """The state of all files in a folder of `python_with_pip`, for `undo_changes`."""
    found = {}
    for parent, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = f"{parent}/{name}"
            one = os.lstat(path)
            size = one.st_size if not stat.S_ISDIR(one.st_mode) else 0
            found[os.path.relpath(path, folder)] = (
                *(one.st_ino, one.st_dev, one.st_mode, one.st_uid, one.st_gid, size, one.st_mtime_ns),
            )
    return found


def undo_changes(folder: Path, before: State) -> None:
    """Restore a folder of `python_with_pip`: new files are deleted, and changed or deleted ones copied again."""
    original, now = _original_python(), python_state(folder)
    new = now.keys() - before.keys()
    for name in new:
        path = folder / name
        if stat.S_ISDIR(now[name][2]):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    changed = [name for name in before if before[name] != now.get(name)]
    for name in changed:  # folders are before their content
        path = folder / name
        if stat.S_ISDIR(before[name][2]):
            path.mkdir(exist_ok=True)
        else:
            path.unlink(missing_ok=True)
            shutil.copy2(original / name, path, follow_symlinks=False)
        os.chown(path, *before[name][3:5], follow_symlinks=False)
    for name in {*changed, *(str(Path(name).parent) for name in (*new, *changed))}:
        if name == "." or (name in before and stat.S_ISDIR(before[name][2])):
            shutil.copystat(original / name, folder / name)
    after = python_state(folder)
    assert {name: row[2:] for name, row in after.items()} == {name: row[2:] for name, row in before.items()}


def _raise(error: OSError) -> None:
    raise error


def copy(tree: Path, folder: Path) -> None:
    """Copy a tree with times and permissions: for the 1,000 files of pip, shutil takes ten times as long as `cp`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", tree, folder], check=True)


def secret_rules() -> Path:
    """The folder of the compiled rules for secrets, shared by all starts: compiling takes 3 s of processor time."""
    return once("rules", Path.mkdir)


def compiled_secret_rules() -> Path:
    """The same, filled. Snapshots are written at a low priority: next to other tests, a start that compiled the rules
    would take minutes."""

    def compile_rules(done: Path) -> None:
        from bootseer.env.capturing.exclude import Exclusions
        from bootseer.env.snapshot.secret_check import SecretCheck

        SecretCheck(Exclusions(), cache=secret_rules())
        done.mkdir()

    once("rules-compiled", compile_rules)
    return secret_rules()
