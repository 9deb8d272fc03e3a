"""Run a setup so that all its file system changes are known afterwards.

Three ways, from best to worst:

- `overlay`: needs the right to mount. The setup sees the machine's tree under an overlay; its changes go to the upper
  layer, on a disk or in memory, and the machine stays unchanged.
- `user`: in a user namespace, for folders that belong to the user.
- `scan`: the setup changes the machine itself, and two walks over the disks find the changes. The previous content of
  changed files is not known, so a restore cannot tell it from changes by other programs.

A capture belongs to the process that opened it, which must have one thread at that time. If that process is killed,
its mounts vanish with their namespace, and the next capture deletes its files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.artifact.progress import Say
from bootseer.env.capturing import overlay
from bootseer.env.capturing.capture_base import Capture, Way
from bootseer.env.capturing.exclude import OWN, PASSTHROUGH_FILES, Exclusions, caches_of, credentials_of
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.env.capturing.scan import ScanCapture
from bootseer.env.capturing.walk import Layer, LeftOut, Walk
from bootseer.env.changes import Change, nearest
from bootseer.errors import BootseerError, PermanentError
from bootseer.logs import logger
from bootseer.mounts import user_namespace
from bootseer.mounts.kernel import is_below
from bootseer.mounts.namespace import Namespace

WAYS: tuple[Way, ...] = ("overlay", "user", "scan")
_NEARLY_FULL_BYTES = 16 << 20
_SHARE_OF_MEMORY = 2
_log = logger(__name__)


class OverlayCapture(Capture):
    """A capture whose changes are in upper layers of overlays."""

    def __init__(
        self,
        way: Way,
        namespace: Namespace,
        folder: OwnedFolder,
        plan: overlay.Plan,
        exclusions: Exclusions,
    ) -> None:
        super().__init__(exclusions)
        self.way = way
        self.points = tuple(namespace.facts["points"])
        self.notes = tuple(namespace.facts["notes"])
        self.passthrough = _with_real(plan.passthrough)
        self._namespace = namespace
        self._folder = folder
        self._in_memory = plan.memory_bytes > 0
        place = namespace.folder("memory") if self._in_memory else folder.path
        self.uppers = tuple(
            Layer(point, str(place / overlay.UPPERS / str(number)), point, str(place / overlay.WORKS / str(number)))
            for number, point in enumerate(self.points)
        )
        """The upper layers, in the order of `points`."""

    @property
    def root(self) -> Path:
        return self._namespace.root

    def enter(self) -> None:
        self._namespace.enter()

    def changes(self, *, always_changed: Collection[str] = ()) -> list[Change]:
        walk = Walk(self._exclusions, always_changed=always_changed)
        for layer in self.uppers:
            walk.layer(layer)
        self.left_out = walk.left_out
        return walk.changes()

    def source_of(self, path: str) -> Path:
        layers = {layer.point.rstrip("/"): layer for layer in self.uppers}
        layer = layers.get(nearest(path, layers))
        return Path(path) if layer is None else Path(layer.upper, os.path.relpath(path, layer.point))

    def failure_hint(self) -> str:
        state = os.statvfs(self.uppers[0].upper)
        if state.f_bavail * state.f_frsize > _NEARLY_FULL_BYTES and (state.f_files == 0 or state.f_favail > 0):
            return ""
        where = "the memory set aside" if self._in_memory else f"the disk of {self._folder.path.parent}"
        return f"{where} for what the setup writes is full"

    def close(self) -> None:
        self._namespace.close()
        self._folder.remove()


def open_overlay(
    way: Way,
    folder: Path,
    exclusions: Exclusions,
    env: Mapping[str, str],
    homes: Sequence[str],
    folders: Iterable[Path | str],
) -> OverlayCapture:
    """Open an overlay capture, with the first usable place for upper layers. Raises `PermanentError`."""
    user = way == "user"
    if not user and not user_namespace.may_mount():
        raise PermanentError("mounting needs root (CAP_SYS_ADMIN)")
    _make_caches(homes, env)
    passthrough = (*exclusions.places(lambda rule: rule.passthrough), *PASSTHROUGH_FILES)
    problems: list[str] = []
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for memory_bytes in (0, free_bytes // _SHARE_OF_MEMORY):  # on the folder's disk, or in memory
        try:
            own = OwnedFolder.made(folder, "capture-")
        except BootseerError as error:
            problems.append(str(error))
            continue
        plan = overlay.Plan(
            own.path,
            passthrough,
            captured_inside=tuple(_in_scratch(exclusions, env, folders)),
            userxattr=user or not user_namespace.is_host(),
            candidates=tuple(_candidates(env, homes, folders)) if user else (),
            memory_bytes=memory_bytes,
        )
        try:
            build = functools.partial(overlay.build_user if user else overlay.build_root, plan)
            namespace = Namespace.create(build, user=user)
            return OverlayCapture(way, namespace, own, plan, exclusions)
        except BootseerError as error:
            own.remove()
            problems.append(f"{'in memory' if memory_bytes else folder}: {error}")
    raise PermanentError("; ".join(dict.fromkeys(problems)))


def _in_scratch(exclusions: Exclusions, env: Mapping[str, str], folders: Iterable[Path | str]) -> Iterator[str]:
    """Folders below scratch folders that must be captured: projects, homes and environments of this start."""
    named = [*folders, *(env[name] for name in ("HOME", "VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name))]
    for folder in env.get("PATH", "").split(":"):
        prefix = os.path.dirname(folder)  # noqa: PTH120
        if any(os.path.exists(f"{prefix}/{mark}") for mark in ("pyvenv.cfg", "conda-meta")):  # noqa: PTH110
            named.append(prefix)
    scratch = _with_real(SCRATCH)
    for path in dict.fromkeys(os.path.realpath(path) for path in named):
        is_own = exclusions.rule_on_path(path, kind="directory") is OWN
        if any(is_below(path, folder) for folder in scratch) and os.path.isdir(path) and not is_own:  # noqa: PTH112
            yield path


def _make_caches(homes: Sequence[str], env: Mapping[str, str]) -> None:
    """Create the installers' caches, to be mounted as passthrough folders: only folders that exist can be, and one that
    the setup makes would go into the upper layer and be lost."""
    caches = [*(f"{home}/.cache/{name}" for home in homes[:1] for name in ("pip", "uv")), *caches_of(env)]
    for path in map(Path, caches):
        with contextlib.suppress(OSError):  # of `exists` too, for a folder that may not be searched
            above = next(folder for folder in (path, *path.parents) if folder.exists())
            if above.stat().st_uid == os.geteuid():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _candidates(env: Mapping[str, str], homes: Sequence[str], folders: Iterable[Path | str]) -> list[str]:
    """Folders where a user without root may have environments."""
    names = [env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONUSERBASE", "UV_PROJECT") if env.get(name)]
    programs = [os.path.dirname(path) for path in env.get("PATH", "").split(":") if path.startswith("/")]  # noqa: PTH120
    return [path for path in (*homes, str(Path.cwd()), *map(str, folders), *names, *programs) if path.startswith("/")]


def open_capture(
    folder: Path,
    ways: Sequence[Way] = WAYS,
    *,
    say: Say = lambda line: None,
    env: Mapping[str, str] | None = None,
    own: Iterable[Path | str] = (),
    folders: Iterable[Path | str] = (),
    leave_out: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> Capture:
    """Open a capture in the first of `ways` that works; run the setup with `enter` next, then call `changes`.

    `folder` is for upper layers, on a disk with room. `env` is the setup's environment, which names the user's home and
    the caches of installers. `own` are BootSeer's own folders (cache, spool, runtime): passthrough, never captured.
    `folders` are captured without root, too, besides home, working folder and environments. `leave_out` and `keep` are
    patterns of the owner (`Exclusions`). `say` gets the capture's notes.
    Raises `PermanentError` if no way works.
    """
    settings = os.environ if env is None else env
    homes = _homes(settings)
    all_homes = _with_real([*homes, settings.get("HOME", "")])
    known = Exclusions(homes=all_homes, credentials=credentials_of(settings))
    exclusions = Exclusions(
        homes=all_homes,
        own=[os.path.realpath(path) for path in (*own, folder)],
        caches=_with_real(caches_of(settings)),
        # A setup may write them through links, such as one from ~/.aws to a folder of all settings.
        credentials=_with_real(known.places(lambda rule: rule.secret)),
        leave_out=leave_out,
        keep=keep,
    )
    rejected: dict[str, str] = {}
    for way in ways:
        try:
            if way == "scan":
                capture: Capture = ScanCapture(exclusions)
            else:
                capture = open_overlay(way, folder, exclusions, settings, homes, folders)
        except (BootseerError, OSError) as error:
            rejected[way] = str(error)
            continue
        capture.rejected = rejected
        _log.info("capture by %s of %s; not by %s", way, ", ".join(capture.points), rejected or "-")
        for note in capture.notes:
            say(note)
        return capture
    raise PermanentError("; ".join(rejected.values()))


def container_changes(
    upper: Path, *, exclusions: Exclusions, mounted: Collection[str] = ()
) -> tuple[list[Change], LeftOut]:
    """The changes of a setup in a container, from the upper layer of its overlay; see `Capture.changes`.

    They are not compared with the image: unchanged folders and files in the layer count as changed, which makes the
    snapshot larger and not wrong. `mounted` are the mount points in the container, which the runtime creates.
    """
    walk = Walk(exclusions, record_before=False, mounted=mounted)
    walk.layer(Layer("/", str(upper), None))
    return walk.changes(), walk.left_out


def _with_real(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths, and what they are without symbolic links, as changes and reads are named."""
    return (*paths, *(os.path.realpath(path) for path in paths if path.startswith("/")))


def _homes(env: Mapping[str, str]) -> list[str]:
    found = [env.get("HOME", "")]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return list(dict.fromkeys(home.rstrip("/") for home in found if home.startswith("/") and home.strip("/")))
