"""`bootseer run --setup`, `--requirements`: the environment as a measured stage, and the command in it.

    environment_setup             from the request key until the command can start
    environment_setup.key         what the setup depends on
    environment_setup.lookup      is there a snapshot, and may it be used?
    environment_setup.wait        another start makes it
    environment_setup.restore     it is mounted
    environment_setup.capture     a view is made in which the setup's changes are caught; they are shown to the command
    environment_setup.script      the setup itself, as without snapshots
    environment_setup.install
    environment_setup.compile     bytecode, once
    environment_start             the moment when training began (or the command ended): how the environment came

Whatever goes wrong with snapshots, the setup runs for real, privately to the command where that is possible, and the
report says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, Interrupted
from bootseer.launch.command import Options, run_command
from bootseer.launch.environment.plain import run_after_setup
from bootseer.launch.environment.task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import ENDED, StartEnd, harmless
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.env import Mode
    from bootseer.env.keys.key import RequestKey
    from bootseer.env.keys.request_key import Base
    from bootseer.env.life.decide import Decision
    from bootseer.launch.environment.publish import Publishing
    from bootseer.launch.environment.seek import Election
    from bootseer.launch.environment.view import Shown

EVENT = "environment_start"
_SIGNALLED = 128
_log = logger(__name__)


def run_in_environment(
    command: Sequence[str],
    options: Options,
    env: dict[str, str],
    session: Session | None,
    *,
    own_env: Mapping[str, str],
    own_group: bool,
) -> int:
    """Run the command in the environment that the setup makes; returns the exit code. Signals must be blocked.

    `env` is what the command gets, `own_env` the same without what we add.
    Raises `UsageError` before anything was started, where a snapshot is required and there is none.
    """
    wanted = options.environment
    assert wanted is not None  # noqa: S101 - for the type checker: `launch.run` looked
    try:
        task = Task(
            options.setup,
            options.requirements,
            wanted,
            env,
            own_env=own_env,
            session=session,
            own_group=own_group,
            show=options.show,
        )
    except BootseerError as error:
        came = _without_cache(wanted.mode, str(error))
        return run_after_setup(command, options, env, session, own_group=own_group, came=came)
    start = EnvironmentStart(task, command)
    code = 1
    try:
        code = start.prepare()
        if not code:
            code = start.run(options)
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted} while the environment was made ready")
        code = interrupted.exit_code
    finally:
        start.end(code)
        start.close()
    return code


def _without_cache(mode: Mode, reason: str) -> Mapping[str, object]:
    """What the report says where nothing can be kept on this node. Raises `UsageError` where a snapshot is required."""
    from bootseer.env.life.decide import Action, Decision, fell_back

    decision = fell_back(Decision(Action.INSTALL, "failed", reason, mode=mode), "failed", reason)
    decision.check()
    say(f"the environment is set up without a snapshot: {reason}")
    return {"mode": "installed", "code": decision.code, "reason": decision.words, "until": "setup"}


class EnvironmentStart:
    """One environment start on this node. `tell` may come from a thread; all else runs in the main one."""

    def __init__(self, task: Task, command: Sequence[str]) -> None:
        self.task = task
        self.command = tuple(command)
        self.shown: Shown | None = None
        self._election: Election | None = None
        self.publishing: Publishing | None = None
        self.seconds = 0.0
        """What bringing the environment took."""
        self._over = StartEnd(task.session, self._record)

    def prepare(self) -> int:
        """Bring the environment, one way or another. Returns the setup's exit code: 0 when the command can start."""
        began_s = time.monotonic()
        with self.task.stage() as facts:
            code = self._prepare()
            if self.shown is not None:
                facts.update(mode=self.shown.mode, code=self.shown.decision.code)
            if code:
                facts["error"] = f"exit code {code}"
        self.seconds = time.monotonic() - began_s
        return code

    def _prepare(self) -> int:
        # Its imports take longer than all else where the environment is here, and belong to the stage.
        from bootseer.env.life.decide import Action

        key, decision = self.bring()
        if self.shown is not None:
            return 0
        from bootseer.launch.environment.capture import set_up_here, set_up_privately
        from bootseer.launch.environment.view import given_up

        if decision.action is Action.BUILD and key is not None:
            say(f"environment {key.digest[:12]} is set up now: {decision.words}")
            try:
                return self._capture(key, decision)
            except Exception as error:  # whatever is wrong with us, the job starts
                _log.warning("the setup is not captured", exc_info=True)
                decision = given_up(decision, error)
                say(f"the environment is set up without a snapshot: {decision.words}")
        else:
            decision.check()
            say(f"the environment is set up without a snapshot: {decision.words}")
            try:
                code, self.shown = set_up_privately(self.task, decision)
                return code
            except Exception as error:  # see above
                _log.warning("the setup has no private view", exc_info=True)
                say(f"the setup runs on this machine itself: {error}")
        code, self.shown = set_up_here(self.task, decision)
        return code

    def bring(self, base: Callable[[], Base] | None = None) -> tuple[RequestKey | None, Decision]:
        """Show the snapshot, if there is one that can be shown (`shown`); otherwise what is to be done.

        `base` tells of an image: then only the snapshot's own tree is mounted, for the image to have it on top.
        """
        from bootseer.env.life.decide import Action

        key, decision = self.look(base)
        if decision.action is Action.RESTORE:
            decision = self._restore(decision, on_host=base is None)
            if decision.code == "damaged":
                decision = self._look_again(base, decision)
        return key, decision

    def look(self, base: Callable[[], Base] | None = None) -> tuple[RequestKey | None, Decision]:
        """The key, and what it leads to. Whatever fails here makes the setup run. `base` tells of an image."""
        from bootseer.env.life.decide import Action, Decision
        from bootseer.launch.environment.seek import seek

        mode = self.task.wanted.mode
        try:
            with interruptible():
                self._election = seek(self.task, base)
                return self._election.key, self._election.decision
        except Exception as error:  # whatever is wrong with us, the job starts
            _log.warning("no snapshot can be looked for", exc_info=True)
            return None, Decision(Action.FAIL if mode == "require" else Action.INSTALL, "failed", str(error), mode=mode)

    def _restore(self, decision: Decision, *, on_host: bool) -> Decision:
        """Show the snapshot; the same decision, or what follows when it cannot be shown."""
        from bootseer.launch.environment.restore import restore
        from bootseer.launch.environment.view import given_up

        try:
            with interruptible():
                self.shown = restore(self.task, decision, self.command, on_host=on_host)
        except Exception as error:  # whatever is wrong with us, the job starts
            _log.warning("the snapshot cannot be shown", exc_info=True)
            return given_up(decision, error)
        return decision

    def _look_again(self, base: Callable[[], Base] | None, decision: Decision) -> Decision:
        """The snapshot is damaged in the store, and stays so until it is made anew: by this start, or another."""
        from bootseer.env.life.decide import Action
        from bootseer.launch.environment.seek import seek

        try:
            with interruptible():
                if self._election is not None:
                    self._election.close()
                self._election = seek(self.task, base, damaged=decision.words)
        except Exception as error:  # whatever is wrong with us, the job starts
            say(f"the environment is not made anew: {error}")
            return decision
        again = self._election.decision
        if again.action is Action.RESTORE:  # another start made it meanwhile
            return self._restore(again, on_host=base is None)
        return replace(again, code=decision.code, words=decision.words)

    def _capture(self, key: RequestKey, decision: Decision) -> int:
        """The setup's exit code."""
        from bootseer.launch.environment.capture import capture

        try:
            captured = capture(self.task, key, decision, self.command)
        finally:
            self.release()
        self.shown, self.publishing = captured.shown, captured.publishing
        return captured.code

    def run(self, options: Options) -> int:
        """Run the command in it; returns its exit code."""
        shown, session = self.shown, self.task.session
        assert shown is not None  # noqa: S101 - for the type checker: `prepare` returned 0
        if session is not None:
            session.also_beside(self._over.watch)
        began_s = time.monotonic()
        code = run_command(self.command, options, shown.env, session, own_group=self.task.own_group, enter=shown.enter)
        self.ended(code, time.monotonic() - began_s)
        return code

    def ended(self, code: int, seconds: float) -> None:
        """The command is over, after so many seconds: what was not reported yet is reported now."""
        self.tell(ENDED)
        shown = self.shown
        if shown is None:
            return
        with harmless("problems of the environment are not known"):
            if shown.layer is not None:
                shown.layer.report_problems()
        with harmless("whether the environment is at fault is not known"):
            if shown.mode == "restored" and code and shown.decision.document is not None:
                from bootseer.launch.environment.restore import suspect

                suspect(self.task, shown.decision.document, code, seconds)

    def tell(self, until: str) -> None:
        """The start is over, by this: keep its record, once."""
        self._over.tell(until)

    def _record(self, until: str) -> None:
        """Say how the environment came and what that cost, and keep its record."""
        shown, session = self.shown, self.task.session
        if shown is None:
            return
        if session is not None and session.warm is not None:
            session.warm.record(until)
        numbers = shown.layer.end_startup() if shown.layer is not None else {}
        if session is not None:
            facts = {
                "mode": "bypassed" if shown.decision.code == "bypass" else shown.mode,
                "code": shown.decision.code,
                "reason": shown.decision.words,
                "what": self.task.what,
                "seconds": round(self.seconds, 3),
                "until": until,
                **shown.facts,
                **numbers,
            }
            session.tracer.emit(EVENT, INSTANT, parent=session.span, attrs=facts)
        if shown.layer is not None:
            shown.layer.wait_for_record()

    def release(self) -> None:
        """Nothing is built by this process any more; the one that publishes keeps the lease as long as it works."""
        if self._election is not None:
            self._election.release()

    def end(self, code: int) -> None:
        """The command has ended so: wait for the snapshot that is being kept, unless the command was killed."""
        with harmless("what became of the environment's snapshot is not known"):
            self.release()
            if self.publishing is not None:
                self.finish(self.publishing, given_up=code >= _SIGNALLED)

    def close(self) -> None:
        """Take everything away."""
        with harmless("the environment was not taken away"):
            if self.shown is not None:
                self.shown.undo.close()
        with harmless("the lease of the environment was not given back"):
            if self._election is not None:
                self._election.close()
        self.task.folder.remove()

    def finish(self, publishing: Publishing, *, given_up: bool = False) -> None:
        """Wait until the snapshot is kept; Ctrl-C gives it up."""
        if given_up:  # a job that is killed is to end
            publishing.stop()
            return
        try:
            with interruptible():
                publishing.finish()
        except Interrupted:
            publishing.stop()
