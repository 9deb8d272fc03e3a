"""What the request key of a setup in an image depends on besides the image: the container's variables and mounts.

A mount that the setup names, by its place in the container, in its files or its variables, is an input by content. One
that it does not name is none: data sets and checkpoints are not what an environment is made of. Files of the machine
that the container does not show are no inputs either. Called by `image_stage` and `image_environment`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

from bootseer.env.keys.files import Facts, NodeFiles
from bootseer.env.keys.script import gather
from bootseer.errors import BootseerError
from bootseer.image.containers.process import passed_on
from bootseer.image.containers.runtime_config import Bind

_SETTINGS = ("PIP_", "UV_")
_PLACE = re.compile(r"(^|[\s=,])(/|~|file:)")


def passed_settings(env: Mapping[str, str], declared: Sequence[str]) -> tuple[str, ...]:
    """Names of this machine's variables that a setup gets in a container besides those that every program gets.

    Settings of installers, but none that names a place: the image has other files there. And what the user declares.
    """
    settings = (name for name, value in env.items() if name.startswith(_SETTINGS) and not _PLACE.search(value))
    return tuple(dict.fromkeys([*settings, *(name for name in declared if name in env)]))


def variables_of(words: Sequence[str], env: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """What a setup finds in its environment on top of the image's own variables, which belong to the image's digest.

    `words` are the user's, `NAME=VALUE` or `NAME`.
    """
    found = passed_on(env) | {name: env[name] for name in passed_settings(env, declared)}
    for word in words:
        name, sign, value = word.partition("=")
        if sign or name in env:
            found[name] = value if sign else env[name]
    return found


def named_mounts(
    setup: str | None,
    requirements: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    binds: Sequence[Bind],
    declared: Sequence[str] = (),
) -> tuple[Bind, ...]:
    """The mounts that the setup names. Left out are those of which the user has declared a part: that is what counts.

    `env` is the setup's environment in the container.
    """
    parts = [posixpath.normpath(posixpath.join(cwd, path)) for path in declared]
    left = [bind for bind in binds if not any(is_below(part, bind.source) for part in parts)]
    if not left:
        return ()
    texts = list(_texts(setup, requirements, cwd, env))
    return tuple(bind for bind in left if any(_names(text, bind.target) for text in texts))


def is_below(path: str, folder: str) -> bool:
    """Whether the path is the folder or in it; both absolute and normal."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _texts(setup: str | None, requirements: Sequence[str], cwd: str, env: Mapping[str, str]) -> Iterator[str]:
    """All that says what the setup does."""
    yield from env.values()
    files = NodeFiles(Facts(None))
    inputs = gather(setup, requirements, cwd, env, files)
    for path in dict.fromkeys([*inputs.files, *inputs.requirement_files, *inputs.requirements.files]):
        try:
            yield files.read(path).decode("utf-8", "replace")
        except BootseerError:
            continue  # the key says what is wrong with it


def _names(text: str, place: str) -> bool:
    place = place.rstrip("/")
    return bool(place) and re.search(rf"(?<![\w-]){re.escape(place)}(?![\w-])", text) is not None
