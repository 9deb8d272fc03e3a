"""Make a snapshot without a job: `bootseer env capture`. Called by `cli.env_capture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bootseer.env.life.decide import Action
from bootseer.errors import Interrupted
from bootseer.launch import supervise
from bootseer.launch.environment_capture import capture
from bootseer.launch.environment_shown import NotShown
from bootseer.launch.environment_stage import EnvironmentStart
from bootseer.launch.environment_task import Task
from bootseer.launch.environment_wanted import EnvironmentWanted
from bootseer.launch.supervise import say


@dataclass(frozen=True, slots=True)
class Made:
    """What became of it."""

    key: str
    published: bool
    was_there: bool
    """A snapshot that can be used was there already."""
    code: int = 0
    """Of the setup; 130 and the like when it was interrupted."""
    why_not: str = ""
    seconds: float = 0.0
    """Of the setup, and of keeping its snapshot."""
    num_files: int = 0
    size_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        return asdict(self)


def make_snapshot(
    setup: str | None, requirements: Sequence[str], wanted: EnvironmentWanted, env: Mapping[str, str]
) -> Made:
    """Run the setup in a capture and keep what it did; nothing happens when there is a snapshot."""
    supervise.block_signals()
    task = Task.made(setup, requirements, wanted, env)
    start = EnvironmentStart(task, ())
    code = 1
    try:
        made = _make(task, start)
        code = made.code
        return made
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted}; no snapshot was kept")
        return Made("", published=False, was_there=False, code=interrupted.exit_code, why_not="interrupted")
    finally:
        start.end(code)
        start.close()
        supervise.unblock_signals()


def _make(task: Task, start: EnvironmentStart) -> Made:
    key, decision = start.look()
    digest = key.digest if key is not None else ""
    if decision.action is Action.RESTORE:
        return Made(digest, published=False, was_there=True, why_not=f"nothing was done: {decision.words}")
    if decision.action is not Action.BUILD or key is None:
        return Made(digest, published=False, was_there=False, why_not=decision.words)
    try:
        captured = capture(task, key, decision, ())
    except NotShown as error:
        return Made(digest, published=False, was_there=False, why_not=str(error))
    start.shown = captured.shown
    if captured.publishing is not None:
        start.finish(captured.publishing)
    outcome = task.outcome
    return Made(
        digest,
        published=bool(outcome.get("published")),
        was_there=False,
        code=captured.code,
        why_not=str(outcome.get("why_not") or ("the setup failed" if captured.code else "")),
        seconds=float(outcome.get("seconds", 0.0)) + captured.setup_s,
        num_files=int(outcome.get("num_files", 0)),
        size_bytes=int(outcome.get("size_bytes", 0)),
    )
