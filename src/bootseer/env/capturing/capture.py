"""Run a setup so that everything it changes in the file system is known afterwards.

Three ways, the best one that works here is taken:

- `overlay`: with the right to mount. The setup sees the machine's own tree under an overlay; its changes stay in the
  upper layer, on a disk or in memory, and the machine is not changed.
- `user`: without that right, in a user namespace, for the folders of the user.
- `scan`: where neither is possible. The setup changes the machine itself, and two walks tell what. What a changed file
  held before is lost, so that a restore cannot tell it from a change of another program.

A capture belongs to the process that opened it, which must have one thread then. If it is killed, nothing stays
mounted, and the next capture deletes its files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.env.capturing import overlay
from bootseer.env.capturing.any_capture import Capture, Way
from bootseer.env.capturing.exclude import OWN, REAL_FILES, Exclusions, caches_of, credentials_of
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.env.capturing.scan import ScanCapture
from bootseer.env.capturing.walk import Layer, LeftOut, Walk
from bootseer.env.changes import Change
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.logs import logger
from bootseer.mounts import user_namespace
from bootseer.mounts.kernel import is_below
from bootseer.mounts.namespace import Namespace

__all__ = ["Capture", "container_changes", "open_capture"]

Say = Callable[[str], None]
_BETTER: tuple[Way, ...] = ("overlay", "user")
_NEARLY_FULL_BYTES = 16 << 20
_SHARE_OF_MEMORY = 2
_log = logger(__name__)


class OverlayCapture(Capture):
    """The setup's changes are in upper layers."""

    def __init__(
        self,
        way: Way,
        namespace: Namespace,
        folder: OwnedFolder,
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

    def changes(self, *, again: Collection[str] = ()) -> list[Change]:
        walk = Walk(self._exclusions, again=again)
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

    def close(self) -> None:
        self._namespace.close()
        self._folder.remove()
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
            own = OwnedFolder.made(place, "capture-")
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
            namespace = Namespace.create(build, user=user)
            return OverlayCapture(way, namespace, own, plan, exclusions, made)
        except BootseerError as error:
            own.remove()
            problems.append(f"{'in memory' if memory_bytes else place}: {error}")
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()
    raise PermanentError("; ".join(dict.fromkeys(problems)))


def _in_scratch(exclusions: Exclusions, env: Mapping[str, str], folders: Iterable[Path | str]) -> Iterator[str]:
    """Scratch folders that this start names: projects, homes and environments are not rubbish wherever they are."""
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
        existing = next(above for above in (folder, *folder.absolute().parents) if above.exists())
        if other.stat().st_dev != existing.stat().st_dev:
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


def open_capture(
    folder: Path,
    *,
    say: Say = lambda line: None,
    way: Literal["auto"] | Way = "auto",
    env: Mapping[str, str] | None = None,
    own: Iterable[Path | str] = (),
    folders: Iterable[Path | str] = (),
    leave_out: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> Capture:
    """Begin to capture; run the setup with `enter` next, then ask for `changes`.

    `folder` is where captures keep upper layers, on a disk with room. `env` is the setup's environment, which names the
    user's home and the caches of installers. `own` are BootSeer's own folders (cache, spool, runtime): real in the
    setup's view and never captured. `folders` are further ones that are worth capturing without root, besides home,
    working folder and environments. `leave_out` and `keep` are patterns of the owner (`Exclusions`). `way` forces one
    way; `auto` says in a line why a better one was not taken.
    Raises `BootseerError` when no way is left.
    """
    if way not in ("auto", *get_args(Way)):
        raise UsageError(f"there is no capture {way!r}", hint="auto, overlay, user or scan")
    settings = os.environ if env is None else env
    homes = _homes(settings)
    exclusions = Exclusions(
        homes=[*homes, settings.get("HOME", "")],
        own=[os.path.realpath(path) for path in (*own, folder)],
        caches=caches_of(settings),
        credentials=credentials_of(settings),
        leave_out=leave_out,
        keep=keep,
    )
    refused: dict[str, str] = {}
    for one in (better for better in _BETTER if way in ("auto", better)):
        try:
            capture: Capture = open_overlay(one, folder, exclusions, settings, homes, folders)
        except BootseerError as error:
            refused[one] = str(error)
            continue
        break
    else:
        if way in _BETTER:
            raise PermanentError(f"the setup cannot be captured by {way}: {refused[way]}")
        capture = ScanCapture(exclusions)
    capture.refused = refused
    _log.info("capture by %s of %s; not by %s", capture.way, ", ".join(capture.points), refused or "-")
    for refused_way, reason in refused.items():
        say(f"the setup cannot be captured by {refused_way}: {reason}")
    for note in capture.notes:
        say(note)
    return capture


def container_changes(
    upper: Path, *, exclusions: Exclusions, mounted: Collection[str] = ()
) -> tuple[list[Change], LeftOut]:
    """What a setup changed in a container, from the upper layer of the container's own overlay; see `Capture.changes`.

    The image's files are not looked at: folders and files that are what they were are taken for changed, the snapshot
    is larger, and shows the same. `mounted` are the places of mounts in the container, for which the runtime makes
    files and folders.
    """
    walk = Walk(exclusions, tell_before=False, mounted=mounted)
    walk.layer(Layer("/", str(upper), None))
    return walk.changes(), walk.left_out


def _homes(env: Mapping[str, str]) -> list[str]:
    found = [env.get("HOME", "")]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return list(dict.fromkeys(home.rstrip("/") for home in found if home.startswith("/") and home.strip("/")))
