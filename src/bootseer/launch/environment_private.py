"""Run the setup where no snapshot will come of it: in a private view of the machine all the same, if that is possible.

The command sees what it would see after a first start, and the machine's own Python stays what it was. A setup on the
machine itself would change that, and with it the request key: no later start on this node would find a snapshot.
Called by `environment_stage`.
"""

from __future__ import annotations

import contextlib

from bootseer.env.capturing import exports
from bootseer.env.life.decide import Decision
from bootseer.launch.environment_install import say_failed, set_up
from bootseer.launch.environment_shown import Shown
from bootseer.launch.environment_task import Task
from bootseer.launch.environment_view import check_ended, divided, enter_of, open_view, show
from bootseer.launch.interrupt import interruptible


def set_up_privately(task: Task, decision: Decision) -> tuple[int, Shown | None]:
    """The setup's exit code, and what the command needs. Signals must be blocked.

    Raises `NotShown` where there is no such view, with nothing left behind.
    """
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=False)
            facts["way"] = view.way
        done = set_up(task, enter=enter_of(view), root=str(view.root))
        check_ended(view, done)
        if done.code:
            return done.code, None
        shown = Shown("installed", decision, exports.apply(done.exports, task.env), facts={"way": view.way})
        with interruptible(), task.stage("capture") as facts:
            changes = view.changes()
            division = divided(view, changes)
            facts.update(changes=len(changes), roots=len(division.roots), loose=len(division.loose))
            shown.undo.push(opened.pop_all())  # from here on the command needs what was opened
            show(task, view, changes, division, shown)
    return 0, shown


def set_up_here(task: Task, decision: Decision) -> tuple[int, Shown | None]:
    """The same on this machine itself, as without BootSeer."""
    done = set_up(task)
    if done.code:
        say_failed(done)
        return done.code, None
    return 0, Shown("installed", decision, exports.apply(done.exports, task.env))
