"""The oracle: install once more, for real, and hold the restored snapshot against it.

The installation runs in a capture of its own, which leaves the machine as it is. What the requirements leave open is
pinned to the versions that the snapshot has: both come from the same lock, and every difference is one that a job could
meet. Called by `cli.env` for `env verify --oracle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.capture import Say, open_capture
from bootseer.env.snapshot.entry import Entry
from bootseer.env.verifying.compare import Comparison, compare
from bootseer.errors import PermanentError

Install = Callable[[Capture, Mapping[str, str]], int]
"""Run the setup in this capture with this environment, bytecode included; its exit code."""

_PINS = "pins.txt"
_CONSTRAINTS = ("PIP_CONSTRAINT", "UV_CONSTRAINT")


def fresh_install_differs(
    packages: Iterable[str],
    entries: Sequence[Entry],
    tree: Path,
    install: Install,
    *,
    folder: Path,
    env: Mapping[str, str],
    own: Iterable[Path | str] = (),
    folders: Iterable[Path | str] = (),
    say: Say = lambda line: None,
) -> Comparison:
    """Install afresh and compare.

    `packages` are those of the snapshot's document, `entries` its manifest, `tree` is where its files can be read.
    `folder` is one on a disk with room for another installation; the other arguments are `open_capture`'s. The
    snapshot must not be shown where this process runs. Raises `PermanentError` when the setup fails now, or when it
    could not be captured without changing this machine, and what the capture raises.
    """
    pins = folder / _PINS
    pins.write_text(pinned(packages), encoding="utf-8")
    with open_capture(folder / "capture", say=say, env=env, own=own, folders=folders) as view:
        if view.way == "scan":
            why = "; ".join(view.refused.values())
            raise PermanentError(
                f"a fresh installation would change this machine itself, as nothing can be laid over: {why}"
            )
        code = install(view, {**env, **_constrained(env, pins)})
        if code:
            raise PermanentError(
                f"the fresh installation failed with exit code {code}; there is nothing to compare with"
            )
        return compare(entries, str(tree), view.changes(), str(view.root))


def pinned(packages: Iterable[str]) -> str:
    """The text of a constraint file that allows exactly these versions; packages of the system are not pip's."""
    return "".join(f"{package}\n" for package in packages if not package.startswith("deb:"))


def _constrained(env: Mapping[str, str], pins: Path) -> dict[str, str]:
    """Variables that pip and uv obey wherever the setup calls them, with the user's own constraints."""
    return {name: " ".join(filter(None, (env.get(name), str(pins)))) for name in _CONSTRAINTS}
