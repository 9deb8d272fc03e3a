"""Show a setup the machine's own file tree, with overlays that catch what it changes.

With all rights (`build_root`): a new root, an overlay over `/` and one over each further writable disk; every other
mount, temporary folders, logs and package caches are the machine's own. In a user namespace (`build_user`) only a
folder that belongs to the user can have an overlay, because the kernel copies a file's owner with it and has no name
for others: the user's topmost folders get one each, in place, and all else on disks is read-only there. So a setup
that writes elsewhere fails and is not captured by half.

What is mounted here runs in the helper child of a `Namespace`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.syscalls import number_of
from bootseer.mounts import kernel, user_namespace
from bootseer.mounts.kernel import Mount, depth, is_below, mount_table, visible
from bootseer.mounts.layers import copy_attributes, short_names
from bootseer.mounts.namespace import Built

_DISKS = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "reiserfs", "tmpfs", "xfs", "zfs",
}  # fmt: skip
_MAX_SPLIT = 200
"""Overlays that a user namespace may need where mounts lie between the user's folders."""


def takes_overlay(mount: Mount) -> bool:
    """Whether it is a folder on a disk of this machine that can be written to, and reached by this user."""
    return mount.kind in _DISKS and not mount.read_only and os.path.isdir(mount.path)  # noqa: PTH112


def steps(mounts: Sequence[Mount], real: Sequence[str]) -> Iterator[tuple[str, Mount | None]]:
    """What to attach below the new root, upper places first: mounts, and real folders (None). A copy that takes all
    mounts below it with it comes once."""
    taken: list[str] = []
    steps: list[tuple[str, Mount | None]] = [(row.path, row) for row in mounts]
    steps += [(path, None) for path in real]
    for path, mount in sorted(steps, key=lambda step: (depth(step[0]), step[0], step[1] is not None)):
        if not within(path, taken):
            if mount is None or not takes_overlay(mount):
                taken.append(path)
            yield path, mount


def existing(paths: Iterable[str]) -> list[str]:
    """By their real names; what is not there, or is not a folder or file, cannot be shown."""
    found = []
    for path in paths:
        real = os.path.realpath(path)
        if real != "/" and (os.path.isdir(real) or (real == path and os.path.isfile(real))):  # noqa: PTH112, PTH113
            found.append(real)
    return topmost(found)


def topmost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: (depth(path), path)):
        if not within(path, kept):
            kept.append(path)
    return kept


def within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or is_below(path, folder) for folder in folders)


def holder(path: str, rows: Sequence[Mount]) -> Mount:
    """The mount that a path lies in."""
    return next(row for row in reversed(rows) if row.path == path or is_below(path, row.path))


def user_points(candidates: Iterable[str], rows: Sequence[Mount], real: Sequence[str]) -> list[str]:
    """The topmost folders of the user above the candidates, cut where something is mounted below them: the kernel
    takes no folder as a lower layer from which another mount would have to be left out."""
    tops = []
    for candidate in candidates:
        path = os.path.realpath(candidate)
        owned = [above for above in _upwards(path) if _is_ours(above)]
        if owned:
            tops.append(owned[-1])
    points: list[str] = []
    waiting = list(reversed(topmost(tops)))
    inside = [row.path for row in rows]
    while waiting and len(points) < _MAX_SPLIT:
        path = waiting.pop()
        if within(path, real) or not takes_overlay(holder(path, rows)):
            continue
        if not any(is_below(mount, path) for mount in inside):
            points.append(path)
            continue
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            waiting += [name for name in reversed(names) if _is_ours(name)]
    return points


def _upwards(path: str) -> Iterator[str]:
    """The folder itself, then each above it, as long as they can be seen."""
    while True:
        yield path
        if path == "/":
            return
        path = os.path.dirname(path)  # noqa: PTH120


def _is_ours(path: str) -> bool:
    """Whether owner and group of a folder have a name in this user namespace: any, or those of its user."""
    try:
        state = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return False
    ours = user_namespace.num_owners() > 1 or (state.st_uid, state.st_gid) == (os.geteuid(), os.getegid())
    return stat.S_ISDIR(state.st_mode) and ours


_ATTRIBUTES = {"nosuid": 2, "nodev": 4, "noexec": 8}
TREE, EMPTY, UPPERS, WORKS = "tree", "empty", "uppers", "works"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to show."""

    folder: Path
    """The capture's own, on the file system for the upper layers; the setup finds the folder above it empty."""
    real: tuple[str, ...]
    """Folders and files that are shown as they are."""
    inside: tuple[str, ...] = ()
    """Folders in them that are captured all the same: a project or an environment that lies in a scratch folder."""
    userxattr: bool = False
    """Whether overlays keep their marks in `user.` attributes: in all user namespaces."""
    candidates: tuple[str, ...] = ()
    """For `build_user`: folders whose topmost ancestors of the same owner get an overlay."""
    memory_bytes: int = 0
    """Upper layers in a tmpfs of at most so many bytes; 0 for the capture's folder."""


@dataclass(slots=True)
class _Work:
    """What the helper has done so far."""

    plan: Plan
    place: Path
    points: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folders: dict[str, int] = field(default_factory=dict)

    def overlay(self, point: str, attributes: int = 0) -> int:
        """An overlay over `point` that is attached nowhere."""
        number = str(len(self.points))
        upper, work = self.place / UPPERS / number, self.place / WORKS / number
        for made in (upper, work):
            made.mkdir(parents=True, exist_ok=True)
        copy_attributes(point, upper)
        made_mount = _overlay(point, upper, work, attributes, userxattr=self.plan.userxattr)
        self.points.append(point)
        return made_mount

    def built(self) -> Built:
        return Built({"points": self.points, "notes": self.notes}, self.folders)


def build_root(plan: Plan) -> Built:
    """Make the overlay over `/` and all that belongs to it, and move the namespace's root there."""
    rows = visible(mount_table())
    if not rows:
        raise PermanentError("the root is not a mount: this process lives in a plain chroot")
    work = _begin(plan)
    root = work.overlay("/")
    # All copies are taken before the first is attached: none may hold what is built here.
    attach: list[tuple[str, int]] = []
    for path, mount in steps(rows[1:], existing(plan.real)):
        try:
            if mount is not None and takes_overlay(mount):
                try:
                    attach.append((path, work.overlay(path, _attributes(mount))))
                    continue
                except BootseerError as error:
                    work.notes.append(f"{path} is not captured: {error}")
            attach.append((path, kernel.clone_mount(Path(path), recursive=mount is None or not takes_overlay(mount))))
        except BootseerError as error:
            work.notes.append(f"{path} is not shown: {error}")
    attach += _inside(work, rows)
    tree = plan.folder / TREE
    kernel.attach(root, tree)
    _attach(work, attach, str(tree))
    _hide(plan, str(tree))
    kernel.change_root(tree)
    return work.built()


def build_user(plan: Plan) -> Built:
    """In a new user namespace: overlays over the user's folders, everything else on disks read-only."""
    rows = visible(mount_table())
    work = _begin(plan)
    real = existing(plan.real)
    others = {row.path for row in rows if not takes_overlay(row)}
    attach = [(path, kernel.clone_mount(Path(path), recursive=True)) for path in real if path not in others]
    made: list[tuple[str, int]] = []
    for point in user_points(plan.candidates, rows, real):
        try:
            made.append((point, work.overlay(point, _attributes(holder(point, rows)))))
        except BootseerError as error:
            work.notes.append(f"{point} is not captured: {error}")
    made += _inside(work, rows)
    if not made:
        raise PermanentError("no folder of this user can have an overlay" + "".join(f"; {note}" for note in work.notes))
    for row in rows:
        if takes_overlay(row) and not within(row.path, real):
            kernel.make_read_only(Path(row.path))
    _attach(work, sorted(made + attach, key=lambda item: (depth(item[0]), item[0])), "")
    _hide(plan, "")
    return work.built()


def _inside(work: _Work, rows: Sequence[Mount]) -> list[tuple[str, int]]:
    """Overlays over the folders that are captured inside of real ones, and what is real or mounted in them again."""
    attach: list[tuple[str, int]] = []
    for point in topmost(os.path.realpath(path) for path in work.plan.inside):
        mount = holder(point, rows)
        if not takes_overlay(mount):
            work.notes.append(f"{point} is not captured: it lies on {mount.kind}, or cannot be written to")
            continue
        try:
            attach.append((point, work.overlay(point, _attributes(mount))))
            again = [*(row.path for row in rows), *map(os.path.realpath, work.plan.real)]
            below = topmost(path for path in again if is_below(path, point) and os.path.exists(path))  # noqa: PTH110
            attach += [(path, kernel.clone_mount(Path(path), recursive=True)) for path in below]
        except BootseerError as error:
            work.notes.append(f"{point} is not captured: {error}")
    return attach


def _begin(plan: Plan) -> _Work:
    """The place of the upper layers: the capture's folder, or memory that only descriptors reach."""
    (plan.folder / TREE).mkdir(exist_ok=True)
    (plan.folder / EMPTY).mkdir(exist_ok=True)
    if not plan.memory_bytes:
        return _Work(plan, plan.folder)
    options = [("source", "bootseer"), ("size", str(plan.memory_bytes)), ("mode", "0700")]
    place = plan.folder / TREE
    held = kernel.create_mount("tmpfs", options)
    kept = os.dup(held)
    kernel.attach(held, place)
    return _Work(plan, place, folders={"memory": kept})


def _overlay(lower: str, upper: Path, work: Path, attributes: int, *, userxattr: bool) -> int:
    """Deletions, copies of whole files and nothing else: marks that only the kernel could read later are off."""
    with short_names([Path(lower), upper, work]) as names:
        options: list[tuple[str, str | None]] = [
            ("source", "bootseer"),
            ("lowerdir", names[0]),
            ("upperdir", names[1]),
            ("workdir", names[2]),
            ("redirect_dir", "nofollow"),
            ("metacopy", "off"),
            ("index", "off"),
        ]
        if userxattr:
            options.append(("userxattr", None))
        try:
            # A capture that the machine does not survive is of no use: nothing needs to reach the disk.
            return kernel.create_mount("overlay", [*options, ("volatile", None)], attributes=attributes)
        except BootseerError as error:
            if number_of(error) != errno.EINVAL:
                raise
            return kernel.create_mount("overlay", options, attributes=attributes)


def _attributes(mount: Mount) -> int:
    return sum(bit for word, bit in _ATTRIBUTES.items() if word in mount.options)


def _attach(work: _Work, mounts: Sequence[tuple[str, int]], below: str) -> None:
    for path, mount in mounts:
        try:
            kernel.attach(mount, Path(below + path))
        except BootseerError as error:
            work.notes.append(f"{path} is not shown: {error}")


def _hide(plan: Plan, below: str) -> None:
    """No process inside may reach upper layers, of this capture and others: changing them has no defined result."""
    empty = kernel.clone_mount(plan.folder / EMPTY)
    place = Path(below + os.path.realpath(plan.folder.parent))
    kernel.attach(empty, place)
    kernel.make_read_only(place)
