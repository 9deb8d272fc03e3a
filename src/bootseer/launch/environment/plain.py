"""The files of a setup (a script, requirement files, or both), and the command of its script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.errors import UsageError, os_errors_as
from bootseer.launch.supervise import say

if TYPE_CHECKING:
    from bootseer.env.capturing.exports import ExportDiff
    from bootseer.env.keys.requirement import FileKind

STAGE = "environment_setup"


def check_files(script: str | None, requirements: Sequence[str]) -> None:
    """Raises `UsageError` for files that do not exist, are unreadable, or cannot be installed."""
    for path in ([script] if script else []) + list(requirements):
        if not os.path.isfile(path):  # noqa: PTH113 - pathlib raises for a folder that may not be searched
            raise UsageError(f"{path}: no such file", hint="give --setup and --requirements a file that exists")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{path}: may not be read", hint="make it readable for the user that runs the job")
    if requirements:
        groups_of(requirements)


def groups_of(requirements: Sequence[str]) -> list[tuple[FileKind, list[str]]]:
    """The files of `--requirements` in groups that are installed together. Raises `UsageError`."""
    from bootseer.env.keys.requirement import MAX_BYTES, grouped

    found = []
    for path in requirements:
        with os_errors_as(UsageError, path, hint="give a file that can be read"), open(path, "rb") as file:  # noqa: PTH123
            found.append((path, file.read(MAX_BYTES)))
    return grouped(found)


def script_command(script: str) -> list[str]:
    """The command for a setup script: the script itself if it is executable, else a shell."""
    return [str(Path(script).absolute())] if os.access(script, os.X_OK) else [shutil.which("bash") or "sh", script]


class ScriptRun(Struct, frozen=True):
    """The command of a setup script, with a hook that records its exports."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The script's whole environment."""
    folder: Path | None
    """Where exports are recorded; None: they are not."""

    def exports(self, node: str) -> ExportDiff:
        """The exports, once the script has ended. `node` is the name of this machine."""
        from bootseer.env.capturing import exports

        if self.folder is None:
            return exports.ExportDiff((), ("its exports are not known",))
        return exports.read_exports(self.folder, self.env, node_words=[node])


def prepare_script(script: str, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> ScriptRun:
    """The script with a hook in `folder`; without one (`argv` as it is) if the folder is not writable."""
    from bootseer.env.capturing import exports

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        words, more = exports.capture_command(script, folder, env)
    except OSError as error:
        say(f"exports of {script} do not reach the command: {folder}: {error.strerror}")
        return ScriptRun(argv, env, None)
    return ScriptRun(words, {**env, **more}, folder)


def say_failed(label: str, code: int) -> None:
    say(f"the environment setup failed ({label}, exit code {code}); the command was not started")
