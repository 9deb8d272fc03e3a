"""The variables and folders of a setup in a container: what is passed to it from this machine, and by which paths.

    /run/bootseer/setup      the working folder of `bootseer run`, read-only: where setups find their files
    /run/bootseer/files-N    the folder of the script or of a requirements file that lies elsewhere, read-only

If the user has mounted the working folder into the container, the setup runs there, and may write there if that mount
is writable.

The request key of such a setup depends on the container's variables and mounts, too. A mount whose path in the
container is mentioned in the setup's files or variables is an input by content. Other mounts are not: data sets and
checkpoints do not belong to an environment.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.key_settings import is_irrelevant
from bootseer.env.keys.script import gather
from bootseer.errors import BootseerError
from bootseer.image.containers.process import passed_variables
from bootseer.image.containers.runtime_config import Bind

_SETUP = "/run/bootseer/setup"
_FILES = "/run/bootseer/files"
_SETTINGS = ("PIP_", "UV_")
_PLACE = re.compile(r"(^|[\s=,])(/|~|file:)")


def passed_settings(env: Mapping[str, str], declared: Sequence[str]) -> tuple[str, ...]:
    """Names of this machine's variables that are passed to a setup in a container, besides those for every program.

    These are settings of installers without paths, as the image has other files there, and variables that the user
    declares.
    """
    settings = (name for name, value in env.items() if name.startswith(_SETTINGS) and not _PLACE.search(value))
    return tuple(dict.fromkeys([*settings, *(name for name in declared if name in env)]))


def setup_variables(words: Sequence[str], env: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """Variables of a setup besides the image's own, which are covered by the image's digest.

    `words` are the user's, `NAME=VALUE` or `NAME`.
    """
    found = passed_variables(env) | {name: env[name] for name in passed_settings(env, declared)}
    for word in words:
        name, sign, value = word.partition("=")
        if sign or name in env:
            found[name] = value if sign else env[name]
    return found


def mounts_of_setup(
    setup: str | None,
    requirements: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    binds: Sequence[Bind],
    declared: Sequence[str] = (),
) -> tuple[Bind, ...]:
    """The mounts that the setup mentions, without those of which the user has declared a part as input.

    `env` is the setup's environment in the container.
    """
    parts = [posixpath.normpath(posixpath.join(cwd, path)) for path in declared]
    left = [bind for bind in binds if not any(is_below(part, bind.source) for part in parts)]
    if not left:
        return ()
    texts = list(_texts(setup, requirements, cwd, env))
    return tuple(bind for bind in left if any(_mentions(text, bind.target) for text in texts))


def is_below(path: str, folder: str) -> bool:
    """Whether a path is the folder or lies in it; both absolute and normalised."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _texts(setup: str | None, requirements: Sequence[str], cwd: str, env: Mapping[str, str]) -> Iterator[str]:
    # Without BOOTSEER_CHECKPOINT and the like, whose folders differ in each start.
    yield from (value for name, value in env.items() if not is_irrelevant(name))
    files = NodeFiles(FactCache(None))
    inputs = gather(setup, requirements, cwd, env, files)
    for path in dict.fromkeys([*inputs.files, *inputs.requirement_files, *inputs.requirements.files]):
        try:
            yield files.read(path).decode("utf-8", "replace")
        except BootseerError:
            continue  # reported with the key


def _mentions(text: str, place: str) -> bool:
    place = place.rstrip("/")
    return bool(place) and re.search(rf"(?<![\w-]){re.escape(place)}(?![\w-])", text) is not None


class SetupPaths(Struct, frozen=True):
    """The setup's folders in the container."""

    folder: str
    """Its working folder."""
    own: tuple[Bind, ...]
    """Additional mounts for the setup's files."""
    shown: tuple[Bind, ...]
    """All mounts of this machine's folders, with the user's."""

    def inside(self, path: str) -> str:
        """A path of this machine as the container's path; unchanged if it is not mounted."""
        return container_path(path, self.shown) or path

    def outside(self, path: str) -> str:
        """A path of the container as this machine's path; empty if it lies in no mount."""
        return _translate(path, [(bind.target, bind.source) for bind in self.shown])


def container_path(path: str, binds: Iterable[Bind]) -> str:
    """The container's path of a path of this machine, by the first mount that contains it; empty if none does."""
    return _translate(path, [(bind.source, bind.target) for bind in binds])


def _translate(path: str, folders: Sequence[tuple[str, str]]) -> str:
    for folder, other in folders:
        if is_below(path, folder):
            return posixpath.normpath(posixpath.join(other, posixpath.relpath(path, folder)))
    return ""


def setup_paths(cwd: str, files: Sequence[str], binds: Sequence[Bind]) -> SetupPaths:
    """The folders of a setup with these files (relative to `cwd`) in a container with the user's mounts."""
    folder = container_path(cwd, reversed(binds))
    own = [] if folder or cwd == "/" else [Bind(cwd, _SETUP, read_only=True)]
    folder = folder or (_SETUP if own else "/")
    shown = [*own, *reversed(binds)]
    for file in files:
        path = posixpath.normpath(posixpath.join(cwd, file))
        if not any(is_below(path, bind.source) for bind in shown):
            bind = Bind(posixpath.dirname(path), f"{_FILES}-{len(own)}", read_only=True)
            own.append(bind)
            shown.append(bind)
    return SetupPaths(folder, tuple(own), tuple(shown))
