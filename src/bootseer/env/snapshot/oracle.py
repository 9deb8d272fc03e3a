"""The oracle: compare a restored snapshot with a fresh installation, path by path.

The installation runs in a capture, which leaves the machine unchanged. Unpinned requirements are pinned to the
snapshot's versions, so that every difference is relevant. Differences that are ignored: those of `snapshot.canonical`,
and bytecode that only one side has, as it is random which modules an installer imports.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.env.capturing.capture import Say, open_capture
from bootseer.env.capturing.capture_base import Capture
from bootseer.env.capturing.walk import same_bytes
from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.canonical import canonical, ignored_reason
from bootseer.env.snapshot.contents import Item, inspect_changes
from bootseer.env.snapshot.manifest import Entry, path_bytes
from bootseer.env.snapshot.verify import MAX_DIFFERENCES, Comparison, Difference
from bootseer.errors import PermanentError
from bootseer.io.tasks import Tasks

_MAX_CANONICAL_BYTES = 256 << 20
_MAX_THREADS = 8


def compare(entries: Sequence[Entry], tree: str, changes: Iterable[Change], root: str) -> Comparison:
    """Compare the snapshot's entries, whose files lie in `tree`, with the changes of a fresh installation.

    `root` is where the installation's view can be read: files that it found and did not change are compared, too.
    Raises `PermanentError` for unreadable files of the installation.
    """
    found = {change.path: change for change in changes}
    for path in (entry.path for entry in entries):
        source = f"{root.rstrip('/')}{path}"
        if path not in found and os.path.lexists(source):  # not changed by the installation
            found[path] = Change(path, Action.MODIFIED, source)
    items, _ = inspect_changes(found.values(), None)
    fresh = {item.change.path: item for item in items}
    pairs: list[tuple[Entry, Item | None]] = []
    for entry in entries:
        item = fresh.pop(entry.path, None)
        if not ignored_reason(entry.path) and (item is not None or not _is_bytecode(entry.path)):
            pairs.append((entry, item))
    more = [path for path in fresh if not ignored_reason(path) and not _is_bytecode(path)]
    differences = [Difference(path, "only in the fresh installation") for path in more]
    with Tasks("bootseer-compare", min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as pool:
        words = pool.map(lambda pair: "; ".join(_differences(pair[0], pair[1], tree)), pairs)
        differences += [Difference(entry.path, text) for (entry, _), text in zip(pairs, words, strict=True) if text]
    differences.sort(key=lambda difference: path_bytes(difference.path))
    return Comparison(tuple(differences[:MAX_DIFFERENCES]), len(pairs))


def _is_bytecode(path: str) -> bool:
    """Whether it is a `__pycache__` folder, or lies in one."""
    return path.endswith("/__pycache__") or "/__pycache__/" in path


def _differences(entry: Entry, item: Item | None, tree: str) -> Iterator[str]:
    if item is None or item.kind == "deleted":
        if entry.kind != "deleted":
            yield "deleted by the fresh installation" if item is not None else "only in the snapshot"
        return
    if entry.kind != item.kind:
        restored_data = "deleted" if entry.kind == "deleted" else f"a {entry.kind}"
        yield f"a {item.kind} in the fresh installation, {restored_data} in the snapshot"
        return
    if item.kind != "symlink" and stat.S_IMODE(item.mode) != entry.mode:
        yield f"mode {entry.mode:04o}, {stat.S_IMODE(item.mode):04o} in the fresh installation"
    if (item.uid, item.gid) != (entry.uid, entry.gid):
        yield f"owner {entry.uid}:{entry.gid}, {item.uid}:{item.gid} in the fresh installation"
    if item.kind == "symlink" and os.fsdecode(item.target) != entry.target:
        yield f"points to {entry.target!r}, to {os.fsdecode(item.target)!r} in the fresh installation"
    if {os.fsdecode(name): value for name, value in item.xattrs.items()} != dict(entry.xattrs):
        yield "other extended attributes"
    if item.kind == "file":
        yield from _content_differs(entry.path, f"{tree.rstrip('/')}{entry.path}", item)


def _content_differs(path: str, restored: str, item: Item) -> Iterator[str]:
    try:
        if same_bytes(restored, item.change.source):
            return
        if max(item.size, os.path.getsize(restored)) > _MAX_CANONICAL_BYTES:  # noqa: PTH202
            yield "other content"
            return
        restored_data, installed_data = Path(restored).read_bytes(), Path(item.change.source).read_bytes()
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
        return
    if canonical(path, restored_data) != canonical(path, installed_data):
        yield "other content"


Install = Callable[[Capture, Mapping[str, str]], int]
"""Run the setup in this capture with this environment, bytecode included; its exit code."""

_PINS = "pins.txt"
_CONSTRAINTS = ("PIP_CONSTRAINT", "UV_CONSTRAINT")


def fresh_install_differs(
    packages: Iterable[str],
    entries: Sequence[Entry],
    tree: Path,
    install: Install,
    *,
    folder: Path,
    env: Mapping[str, str],
    own: Iterable[Path | str] = (),
    folders: Iterable[Path | str] = (),
    say: Say = lambda line: None,
) -> Comparison:
    """Run a fresh installation and compare.

    `packages` are those of the snapshot's document, `entries` its manifest, `tree` is where its files can be read.
    `folder` lies on a disk with room for another installation; the other arguments are `open_capture`'s. The snapshot
    must not be mounted in this process's namespace. Raises `PermanentError` if the setup fails, or cannot be captured
    without changing this machine.
    """
    pins = folder / _PINS
    pins.write_text(pinned(packages), encoding="utf-8")
    with open_capture(folder / "capture", say=say, env=env, own=own, folders=folders) as view:
        if view.way == "scan":
            reason = "; ".join(view.rejected.values())
            raise PermanentError(
                f"a fresh installation would change this machine itself, as no overlay can be mounted: {reason}"
            )
        # For pip and uv wherever the setup calls them, in addition to the user's constraints.
        pinning = {name: " ".join(filter(None, (env.get(name), str(pins)))) for name in _CONSTRAINTS}
        code = install(view, {**env, **pinning})
        if code:
            raise PermanentError(
                f"the fresh installation failed with exit code {code}; there is nothing to compare with"
            )
        return compare(entries, str(tree), view.changes(), str(view.root))


def pinned(packages: Iterable[str]) -> str:
    """A constraint file for exactly these versions, without system packages."""
    return "".join(f"{package}\n" for package in packages if not package.startswith("deb:"))
