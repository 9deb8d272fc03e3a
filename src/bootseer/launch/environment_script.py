"""Run a setup script so that it tells what it leaves in its environment; as it is where no disk takes the files for it.

Called by `environment_setup` and `environment_install`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.capturing import exports
from bootseer.env.capturing.exports import Left
from bootseer.launch.supervise import say


@dataclass(frozen=True, slots=True)
class Telling:
    """How to run the script."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The script's whole environment."""
    folder: Path | None
    """Where it tells; None: it cannot."""

    def left(self, node: str) -> Left:
        """What the script left behind, once it has ended. `node` is what this machine is called."""
        if self.folder is None:
            return Left((), ("what it exports is not known",))
        return exports.read(self.folder, self.env, node_words=[node])


def telling(script: str, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Telling:
    """The script with `env`. `argv` runs it as it is; `folder` is made if it is not there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        words, more = exports.command(script, folder, env)
    except OSError as error:
        say(f"what {script} exports does not reach the command: {folder}: {error.strerror}")
        return Telling(argv, env, None)
    return Telling(words, {**env, **more}, folder)
