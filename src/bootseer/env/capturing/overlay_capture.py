"""Captures by overlays: open one where it can be, with its upper layers on a disk or in memory.

Called by `capture`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.env.capturing import overlay
from bootseer.env.capturing.any_capture import Capture, Way, may_be_somebodys
from bootseer.env.capturing.exclude import OWN, REAL_FILES, Exclusions, caches_of
from bootseer.env.capturing.folder import CaptureFolder
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.env.capturing.walk import Layer, Walk
from bootseer.env.changes import Change
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts import user_namespace
from bootseer.mounts.kernel import is_below
from bootseer.mounts.namespace import Namespace

_NEARLY_FULL_BYTES = 16 << 20
_SHARE_OF_MEMORY = 2


class OverlayCapture(Capture):
    """The setup's changes are in upper layers."""

    def __init__(
        self,
        way: Way,
        namespace: Namespace,
        folder: CaptureFolder,
        plan: overlay.Plan,
        exclusions: Exclusions,
        made: Sequence[Path],
    ) -> None:
        super().__init__(exclusions)
        self.way = way
        self.points = tuple(namespace.facts["points"])
        self.notes = tuple(namespace.facts["notes"])
        self.real = plan.real
        self._namespace = namespace
        self._folder = folder
        self._in_memory = plan.memory_bytes > 0
        self._made = made
        place = namespace.folder("memory") if self._in_memory else folder.path
        self.uppers = tuple(
            Layer(point, str(place / overlay.UPPERS / str(number)), point) for number, point in enumerate(self.points)
        )
        """The upper layers, in the order of `points`."""

    @property
    def root(self) -> Path:
        return self._namespace.root

    def enter(self) -> None:
        self._namespace.enter()

    def changes(
        self, *, wants_before: Callable[[str], bool] = may_be_somebodys, again: Collection[str] = ()
    ) -> list[Change]:
        walk = Walk(self._exclusions, wants_before=wants_before, again=again)
        for layer in self.uppers:
            walk.layer(layer)
        self.left_out = walk.left_out
        return walk.changes()

    def source_of(self, path: str) -> Path:
        holding = [layer for layer in self.uppers if path == layer.point or is_below(path, layer.point)]
        if not holding:
            return Path(path)
        layer = max(holding, key=lambda layer: len(layer.point))
        return Path(layer.upper, os.path.relpath(path, layer.point))

    def trouble(self) -> str:
        state = os.statvfs(self.uppers[0].upper)
        if state.f_bavail * state.f_frsize > _NEARLY_FULL_BYTES and (state.f_files == 0 or state.f_favail > 0):
            return ""
        where = "the memory set aside" if self._in_memory else f"the disk of {self._folder.path.parent}"
        return f"{where} for what the setup writes is full"

    def close(self, *, keep: bool = False) -> None:
        self._namespace.close()
        self._folder.close(keep=keep)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # used meanwhile, or not ours any more
                folder.rmdir()


def open_overlay(
    way: Way,
    folder: Path,
    exclusions: Exclusions,
    env: Mapping[str, str],
    homes: Sequence[str],
    folders: Iterable[Path | str],
) -> OverlayCapture:
    """Open one, with the first place for upper layers that works. Raises `PermanentError` where none does."""
    user = way == "user"
    if not user and not user_namespace.may_mount():
        raise PermanentError("mounting needs root (CAP_SYS_ADMIN)")
    made = _make_caches(homes, env)
    real = (*exclusions.real_folders, *REAL_FILES)
    problems: list[str] = []
    for place, memory_bytes in _places(folder):
        try:
            own = CaptureFolder.made(place)
        except BootseerError as error:
            problems.append(str(error))
            continue
        plan = overlay.Plan(
            own.path,
            real,
            inside=tuple(_in_scratch(exclusions, env, folders)),
            userxattr=user or not user_namespace.is_host(),
            candidates=tuple(_candidates(env, homes, folders)) if user else (),
            memory_bytes=memory_bytes,
        )
        try:
            build = functools.partial(overlay.build_user if user else overlay.build_root, plan)
            namespace = Namespace.made(build, user=user)
            return OverlayCapture(way, namespace, own, plan, exclusions, made)
        except BootseerError as error:
            own.close()
            problems.append(f"{'in memory' if memory_bytes else place}: {error}")
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()
    raise PermanentError("; ".join(dict.fromkeys(problems)))


def _in_scratch(exclusions: Exclusions, env: Mapping[str, str], folders: Iterable[Path | str]) -> Iterator[str]:
    """Scratch folders that this start names: projects, homes and environments are no rubbish wherever they are."""
    named = [*folders, *(env[name] for name in ("HOME", "VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name))]
    for folder in env.get("PATH", "").split(":"):
        prefix = os.path.dirname(folder)  # noqa: PTH120
        if any(os.path.exists(f"{prefix}/{mark}") for mark in ("pyvenv.cfg", "conda-meta")):  # noqa: PTH110
            named.append(prefix)
    for path in dict.fromkeys(os.path.realpath(path) for path in named):
        if any(is_below(path, scratch) for scratch in SCRATCH) and os.path.isdir(path):  # noqa: PTH112
            rule = exclusions.why(path, kind="directory")
            if rule is not None and rule is not OWN:
                yield path


def _places(folder: Path) -> list[tuple[Path, int]]:
    """Where upper layers may be, the best first; with a bound in bytes: in memory."""
    places = [(folder, 0)]
    other = Path("/var/tmp")  # noqa: S108 - a folder of ours in it
    with contextlib.suppress(OSError):
        there = next(above for above in (folder, *folder.absolute().parents) if above.exists())
        if other.stat().st_dev != there.stat().st_dev:
            places.append((other / f"bootseer-{os.geteuid()}", 0))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SHARE_OF_MEMORY
    return [*places, *((place, memory) for place, _ in places)]


def _make_caches(homes: Sequence[str], env: Mapping[str, str]) -> list[Path]:
    """The caches that installers would make, so that the real ones can be shown; the new folders, outermost first."""
    made: list[Path] = []
    for path in [*(f"{home}/.cache/{name}" for home in homes[:1] for name in ("pip", "uv")), *caches_of(env)]:
        with contextlib.suppress(OSError):  # `exists` as well: a folder may be closed to us
            missing = [above for above in (Path(path), *Path(path).parents) if not above.exists()]
            if not missing or missing[-1].parent.stat().st_uid != os.geteuid():
                continue
            for folder in reversed(missing):
                folder.mkdir(mode=0o700)
                made.append(folder)
    return made


def _candidates(env: Mapping[str, str], homes: Sequence[str], folders: Iterable[Path | str]) -> list[str]:
    """Where a user without root may have environments."""
    names = [env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONUSERBASE", "UV_PROJECT") if env.get(name)]
    programs = [os.path.dirname(path) for path in env.get("PATH", "").split(":") if path.startswith("/")]  # noqa: PTH120
    return [path for path in (*homes, str(Path.cwd()), *map(str, folders), *names, *programs) if path.startswith("/")]
