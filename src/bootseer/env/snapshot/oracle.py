"""The oracle: compare a restored snapshot with a fresh installation, path by path.

The installation runs in a capture, which leaves the machine unchanged. Unpinned requirements are pinned to the
snapshot's versions, so that every difference is relevant. Differences that are ignored: those of `snapshot.canonical`,
and bytecode that only one side has, as it is random which modules an installer imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bootseer.env.capturing.capture_base import Capture
from bootseer.env.capturing.walk import same_bytes
from bootseer.env.changes import Change, nearest
from bootseer.env.snapshot.canonical import canonical, ignored_reason
from bootseer.env.snapshot.manifest import Entry, path_bytes
from bootseer.env.snapshot.verify import MAX_DIFFERENCES, Comparison, Difference, verify
from bootseer.errors import PermanentError

_MAX_CANONICAL_BYTES = 256 << 20


def compare(entries: Sequence[Entry], tree: str, changes: Iterable[Change], root: str) -> Comparison:
    """Compare the snapshot's entries, whose files lie in `tree`, with a fresh installation, whose view can be read at
    `root`; `changes` are those of the installation."""
    known = {entry.path for entry in entries}
    more = {change.path for change in changes} - known - {"/"}
    differences = [
        Difference(path, "only in the fresh installation")
        for path in more
        if not ignored_reason(path) and not _is_bytecode(path)
    ]
    compared = [
        entry
        for entry in entries
        if not ignored_reason(entry.path)
        and not (_is_bytecode(entry.path) and not os.path.lexists(f"{root}{entry.path}"))
    ]
    found = verify(root, compared, "full", layer=False, same_content=partial(_same_content, tree, root))
    differences += [Difference(one.path, f"in the fresh installation: {one.words}") for one in found]
    differences.sort(key=lambda difference: path_bytes(difference.path))
    return Comparison(tuple(differences[:MAX_DIFFERENCES]), len(compared))


def _is_bytecode(path: str) -> bool:
    """Whether it is a `__pycache__` folder, or lies in one."""
    return path.endswith("/__pycache__") or "/__pycache__/" in path


def _same_content(tree: str, root: str, path: str) -> bool:
    restored, installed = Path(f"{tree}{path}"), Path(f"{root}{path}")
    if same_bytes(str(restored), str(installed)):
        return True
    if max(restored.stat().st_size, installed.stat().st_size) > _MAX_CANONICAL_BYTES:
        return False
    return canonical(path, restored.read_bytes()) == canonical(path, installed.read_bytes())


_PINS = "pins.txt"
_CONSTRAINTS = ("PIP_CONSTRAINT", "UV_CONSTRAINT")


def fresh_install_differs(
    packages: Iterable[str],
    entries: Sequence[Entry],
    tree: Path,
    view: Capture,
    install: Callable[[Mapping[str, str]], int],
    *,
    folder: Path,
    env: Mapping[str, str],
    left_out: Collection[str] = (),
) -> Comparison:
    """Run a fresh installation and compare.

    `packages` are those of the snapshot's document, `entries` its manifest, `tree` is where its files can be read.
    `install` runs the setup in the open capture `view` with an environment, bytecode included, and returns its exit
    code; `env` is the environment besides the pins, which are kept in `folder`. `left_out` are files and folders that
    the setup writes and the snapshot does not have. The snapshot must not be mounted in this process's namespace.
    Raises `PermanentError` if the setup fails.
    """
    pins = folder / _PINS
    pins.write_text(pinned(packages), encoding="utf-8")
    # For pip and uv wherever the setup calls them, in addition to the user's constraints.
    pinning = {name: " ".join(filter(None, (env.get(name), str(pins)))) for name in _CONSTRAINTS}
    if code := install({**env, **pinning}):
        raise PermanentError(f"the fresh installation failed with exit code {code}; there is nothing to compare with")
    changes = (change for change in view.changes() if not nearest(change.path, left_out))
    return compare(entries, str(tree), changes, str(view.root))


def pinned(packages: Iterable[str]) -> str:
    """A constraint file for exactly these versions, without system packages."""
    return "".join(f"{package}\n" for package in packages if not package.startswith("deb:"))
