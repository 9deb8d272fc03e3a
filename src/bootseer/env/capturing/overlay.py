"""Build a setup's view: the machine's file tree under overlays that catch its changes.

As root (`build_root`): a new root with an overlay over `/` and one over each further writable disk; all other mounts,
and passthrough folders (temporary folders, logs, package caches), are the machine's own.

In a user namespace (`build_user`) only folders of the user can have an overlay: copy-up keeps a file's owner, and other
owners have no id in the namespace. The user's topmost folders get an overlay each, in place, and the rest of the disks
is read-only there: a setup that writes elsewhere fails instead of being captured in part.

These functions run in the helper child of a `Namespace`.
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
from bootseer.fuse.syscalls import MS_RDONLY, number_of
from bootseer.mounts import kernel, user_namespace
from bootseer.mounts.kernel import Mount, depth, is_below, mount_table, visible
from bootseer.mounts.layers import WHOLE_FILES, copy_attributes, short_names
from bootseer.mounts.namespace import Built

_DISKS = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "reiserfs", "tmpfs", "xfs", "zfs",
}  # fmt: skip
_MAX_SPLIT = 200
"""Maximum number of overlays in a user namespace, where mounts between the user's folders require several."""


def takes_overlay(mount: Mount) -> bool:
    """Whether it is a writable folder on a disk of this machine that this user can reach."""
    return mount.kind in _DISKS and "ro" not in mount.options and os.path.isdir(mount.path)  # noqa: PTH112


def attach_order(mounts: Sequence[Mount], passthrough: Sequence[str]) -> Iterator[tuple[str, Mount | None]]:
    """What to attach below the new root, parents first: mounts, and passthrough folders (None). A recursive copy
    contains all mounts below it, so these are left out."""
    taken: list[str] = []
    steps: list[tuple[str, Mount | None]] = [(row.path, row) for row in mounts]
    steps += [(path, None) for path in passthrough]
    for path, mount in sorted(steps, key=lambda step: (depth(step[0]), step[0], step[1] is not None)):
        if not is_within(path, taken):
            if mount is None or not takes_overlay(mount):
                taken.append(path)
            yield path, mount


def existing_paths(paths: Iterable[str]) -> list[str]:
    """The existing folders and files among the paths, by their real paths."""
    found = []
    for path in paths:
        real = os.path.realpath(path)
        if real != "/" and (os.path.isdir(real) or (real == path and os.path.isfile(real))):  # noqa: PTH112, PTH113
            found.append(real)
    return topmost(found)


def topmost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: (depth(path), path)):
        if not is_within(path, kept):
            kept.append(path)
    return kept


def is_within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or is_below(path, folder) for folder in folders)


def mount_of(path: str, rows: Sequence[Mount]) -> Mount:
    return next(row for row in reversed(rows) if row.path == path or is_below(path, row.path))


def user_overlay_points(candidates: Iterable[str], rows: Sequence[Mount], passthrough: Sequence[str]) -> list[str]:
    """The topmost folders of the user above the candidates, split where something is mounted below them: in a user
    namespace the kernel accepts no lower layer without the mounts that cover parts of it, as that would reveal what
    they hide."""
    tops = []
    for candidate in candidates:
        path = os.path.realpath(candidate)
        owned = [above for above in (path, *map(str, Path(path).parents)) if _is_owned(above)]
        if owned:
            tops.append(owned[-1])
    points: list[str] = []
    waiting = list(reversed(topmost(tops)))
    inside = [row.path for row in rows]
    while waiting and len(points) < _MAX_SPLIT:
        path = waiting.pop()
        if is_within(path, passthrough) or not takes_overlay(mount_of(path, rows)):
            continue
        if not any(is_below(mount, path) for mount in inside):
            points.append(path)
            continue
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            waiting += [name for name in reversed(names) if _is_owned(name)]
    return points


def _is_owned(path: str) -> bool:
    """Whether owner and group of a folder have an id in this user namespace, which maps all ids or only its user's."""
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
    """The view to build."""

    folder: Path
    """The capture's folder, on the file system for the upper layers. Its parent is empty in the setup's view."""
    passthrough: tuple[str, ...]
    """Folders and files of the machine that are not captured."""
    captured_inside: tuple[str, ...] = ()
    """Folders inside passthrough folders that are captured: a project or an environment in a scratch folder."""
    userxattr: bool = False
    """Whether overlays keep their marks in `user.` attributes, as required in user namespaces."""
    candidates: tuple[str, ...] = ()
    """For `build_user`: folders whose topmost parents of the same owner get an overlay."""
    memory_bytes: int = 0
    """Size limit of a tmpfs for the upper layers; 0: they are in the capture's folder."""


@dataclass(slots=True)
class _Builder:
    """The state of building a view."""

    plan: Plan
    place: Path
    points: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folders: dict[str, int] = field(default_factory=dict)

    def overlay(self, point: str, attributes: int = 0) -> int:
        """A detached overlay mount over `point`."""
        number = str(len(self.points))
        upper, work = self.place / UPPERS / number, self.place / WORKS / number
        for made in (upper, work):
            made.mkdir(parents=True, exist_ok=True)
            copy_attributes(point, made)  # to `work` for the comparison at the end (`Layer.root`)
        made_mount = _overlay(point, upper, work, attributes, userxattr=self.plan.userxattr)
        self.points.append(point)
        return made_mount

    def built(self) -> Built:
        return Built({"points": self.points, "notes": self.notes}, self.folders)


def build_root(plan: Plan) -> Built:
    """Build the overlay over `/` with everything below it, and change the namespace's root to it."""
    rows = visible(mount_table())
    if not rows:
        raise PermanentError("the root is not a mount: this process lives in a plain chroot")
    builder = _prepare(plan)
    root = builder.overlay("/")
    # All mounts are cloned before the first one is attached: otherwise recursive clones would contain the new tree.
    attach: list[tuple[str, int]] = []
    for path, mount in attach_order(rows[1:], existing_paths(plan.passthrough)):
        try:
            if mount is not None and takes_overlay(mount):
                try:
                    attach.append((path, builder.overlay(path, _attributes(mount))))
                    continue
                except BootseerError as error:
                    builder.notes.append(f"{path} is not captured: {error}")
            attach.append((path, kernel.clone_mount(Path(path), recursive=mount is None or not takes_overlay(mount))))
        except BootseerError as error:
            if number_of(error) == errno.EMFILE:  # all others would be missing too
                raise
            builder.notes.append(f"{path} is not shown: {error}")
    attach += _captured_inside(builder, rows)
    tree = plan.folder / TREE
    kernel.attach(root, tree)
    _attach(builder, attach, str(tree))
    _hide_upper_layers(plan, str(tree))
    kernel.change_root(tree)
    return builder.built()


def build_user(plan: Plan) -> Built:
    """In a new user namespace: build overlays over the user's folders, and make the rest of the disks read-only."""
    rows = visible(mount_table())
    builder = _prepare(plan)
    passthrough = existing_paths(plan.passthrough)
    others = {row.path for row in rows if not takes_overlay(row)}
    attach = [(path, kernel.clone_mount(Path(path), recursive=True)) for path in passthrough if path not in others]
    made: list[tuple[str, int]] = []
    for point in user_overlay_points(plan.candidates, rows, passthrough):
        try:
            made.append((point, builder.overlay(point, _attributes(mount_of(point, rows)))))
        except BootseerError as error:
            builder.notes.append(f"{point} is not captured: {error}")
    made += _captured_inside(builder, rows)
    if not made:
        raise PermanentError(
            "no folder of this user can have an overlay" + "".join(f"; {note}" for note in builder.notes)
        )
    for row in rows:
        if takes_overlay(row) and not is_within(row.path, passthrough):
            kernel.restrict(Path(row.path), MS_RDONLY)
    _attach(builder, sorted(made + attach, key=lambda item: (depth(item[0]), item[0])), "")
    _hide_upper_layers(plan, "")
    return builder.built()


def _captured_inside(builder: _Builder, rows: Sequence[Mount]) -> list[tuple[str, int]]:
    """Overlays over captured folders in passthrough folders; clones of passthrough folders and mounts in those."""
    attach: list[tuple[str, int]] = []
    for point in topmost(os.path.realpath(path) for path in builder.plan.captured_inside):
        mount = mount_of(point, rows)
        if not takes_overlay(mount):
            builder.notes.append(f"{point} is not captured: it lies on {mount.kind}, or cannot be written to")
            continue
        try:
            attach.append((point, builder.overlay(point, _attributes(mount))))
            again = [*(row.path for row in rows), *map(os.path.realpath, builder.plan.passthrough)]
            below = topmost(path for path in again if is_below(path, point) and os.path.exists(path))  # noqa: PTH110
            attach += [(path, kernel.clone_mount(Path(path), recursive=True)) for path in below]
        except BootseerError as error:
            builder.notes.append(f"{point} is not captured: {error}")
    return attach


def _prepare(plan: Plan) -> _Builder:
    """Choose the place of the upper layers: the capture's folder, or a tmpfs that is reached only by a descriptor."""
    (plan.folder / TREE).mkdir(exist_ok=True)
    (plan.folder / EMPTY).mkdir(exist_ok=True)
    if not plan.memory_bytes:
        return _Builder(plan, plan.folder)
    options = [("source", "bootseer"), ("size", str(plan.memory_bytes)), ("mode", "0700")]
    place = plan.folder / TREE
    held = kernel.create_mount("tmpfs", options)
    kept = os.dup(held)
    kernel.attach(held, place)
    return _Builder(plan, place, folders={"memory": kept})


def _overlay(lower: str, upper: Path, work: Path, attributes: int, *, userxattr: bool) -> int:
    """A detached overlay whose upper layer holds only whole files and whiteouts."""
    with short_names([Path(lower), upper, work]) as names:
        options: list[tuple[str, str | None]] = [
            ("source", "bootseer"),
            ("lowerdir", names[0]),
            ("upperdir", names[1]),
            ("workdir", names[2]),
            *WHOLE_FILES,
            ("volatile", None),  # no syncs: a capture is useless after a crash of the machine anyway
        ]
        if userxattr:
            options.append(("userxattr", None))
        return kernel.create_mount("overlay", options, attributes=attributes)


def _attributes(mount: Mount) -> int:
    return sum(bit for word, bit in _ATTRIBUTES.items() if word in mount.options)


def _attach(builder: _Builder, mounts: Sequence[tuple[str, int]], below: str) -> None:
    for path, mount in mounts:
        try:
            kernel.attach(mount, Path(below + path))
        except BootseerError as error:
            builder.notes.append(f"{path} is not shown: {error}")


def _hide_upper_layers(plan: Plan, below: str) -> None:
    """Cover the folder of all captures with an empty one: changing an upper layer while it is mounted is undefined."""
    empty = kernel.clone_mount(plan.folder / EMPTY)
    place = Path(below + os.path.realpath(plan.folder.parent))
    kernel.attach(empty, place)
    kernel.restrict(place, MS_RDONLY)
