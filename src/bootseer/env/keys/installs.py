"""The command line of `pip install`, and of `uv pip install`: which requirements, files and settings it names.

Decides and touches nothing; words come as the script has them. Called by `script`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bootseer.env.keys.requirements import installer_options

ACTIONS = ("install", "download", "wheel", "sync", "compile")
_FILES = ("-r", "--requirement", "-c", "--constraint")
_EDITABLE = ("-e", "--editable")
_PLACES = ("-t", "--target", "--prefix", "--root", "--src")
_OVERRIDES = ("--override", "--overrides", "-b", "--build-constraint", "--build-constraints")
_UV_SETTINGS = (
    "--index",
    "--default-index",
    "--exclude-newer",
    "--extra",
    "--torch-backend",
    "--resolution",
    "--prerelease",
)
_VALUE_OPTIONS = frozenset(
    """
    -r --requirement -c --constraint -e --editable -i --index-url --extra-index-url -f --find-links -t -d -C -b -w
    -p -P --target --prefix --root --src --dest --wheel-dir --python --cache-dir --upgrade-strategy --platform
    --python-version --implementation --abi --progress-bar --log --proxy --retries --timeout --cert --client-cert
    --exists-action --global-option --config-settings --config-setting --report --torch-backend --resolution
    --prerelease --exclude-newer --index --default-index --extra --group --index-strategy --keyring-provider
    --link-mode --python-platform --root-user-action --use-feature --no-binary --only-binary --trusted-host --hash
    --reinstall-package --refresh-package --upgrade-package --override --overrides --build-constraint
    --build-constraints
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)


@dataclass(slots=True)
class Install:
    """What one command asks for."""

    action: str
    no_deps: bool
    files: list[tuple[str, bool]] = field(default_factory=list)
    """Requirement files, with whether they only constrain."""
    wanted: list[tuple[str, bool]] = field(default_factory=list)
    """Requirements, with whether they are installed in place."""
    settings: list[tuple[str, str]] = field(default_factory=list)
    """Options and values, in order."""
    places: list[str] = field(default_factory=list)
    """Folders that it installs into."""


def read(words: Sequence[str]) -> Install | None:
    """Read the words behind `pip`; None for what installs nothing."""
    found = _positional(words)
    action = next(found, "")
    if action not in ACTIONS:
        return None
    install = Install(action, "--no-deps" in words)
    for option, value in installer_options(words):
        if option in ("--requirement", "--constraint"):
            install.files.append((value, option == "--constraint"))
        else:
            install.settings.append((option, value))
    install.settings += [("", value) for value in option_values(words, _UV_SETTINGS)]
    install.files += [(value, True) for value in option_values(words, _OVERRIDES)]
    install.places += option_values(words, _PLACES)
    install.wanted += [(value, True) for value in option_values(words, _EDITABLE)]
    install.wanted += [(word[2:], True) for word in words if re.fullmatch(r"-e[^=-].*", word)]
    if action in ("sync", "compile"):
        install.files += [(word, False) for word in found]
    else:
        install.wanted += [(word, False) for word in found]
    return install


def option_values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Values of these options, as `--option value` and `--option=value`."""
    for index, word in enumerate(words):
        if word in names:
            yield from words[index + 1 : index + 2]
        else:
            option, equals, value = word.partition("=")
            if equals and option in names:
                yield value


def _positional(words: Sequence[str]) -> Iterator[str]:
    """The words that are neither options nor their values."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in _VALUE_OPTIONS:
            skip = True
        elif not word.startswith("-"):
            yield word
