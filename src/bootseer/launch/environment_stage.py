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

Whatever goes wrong with snapshots, the setup runs for real on this machine, and the report says why. Imported by
`launch.run` only when there is a setup and snapshots are wanted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.bring.places import environments_folder
from bootseer.errors import BootseerError, Interrupted
from bootseer.launch.environment_task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.run import Options, run_command
from bootseer.launch.run_folder import RunFolder
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.trace.event import INSTANT
from bootseer.trace.otlp_tail import SpoolTail
from bootseer.trace.tracer import TRAINING_BEGAN

if TYPE_CHECKING:
    from bootseer.env.keys.key import RequestKey
    from bootseer.env.keys.request_key import Base
    from bootseer.env.life.decide import Decision
    from bootseer.launch.environment_publish import Publishing
    from bootseer.launch.environment_seek import Sought
    from bootseer.launch.environment_shown import Shown

EVENT = "environment_start"
_LOOK_EVERY_S = 1.0
_SIGNALLED = 128


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
    task = Task(
        setup=options.setup,
        requirements=tuple(options.requirements),
        wanted=wanted,
        env=env,
        own_env=own_env,
        session=session,
        own_group=own_group,
        folder=RunFolder.made(environments_folder(wanted.cache) / "runs"),
    )
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
        try:
            start.end(code)
        finally:
            start.close()
    return code


class EnvironmentStart:
    """One environment start on this node. `watch` runs in a thread; all else in the main one, before or after it."""

    def __init__(self, task: Task, command: Sequence[str]) -> None:
        self.task = task
        self.command = tuple(command)
        self.shown: Shown | None = None
        self._sought: Sought | None = None
        self.publishing: Publishing | None = None
        self.seconds = 0.0
        """What bringing the environment took."""
        self._told = threading.Lock()  # held by whoever tells of the start: it is told once

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
        from bootseer.env.life.decide import REASONS, Action, fell_back
        from bootseer.launch.environment_shown import NotShown

        key, decision = self.look()
        try:
            if decision.action is Action.RESTORE:
                self._restore(decision)
                return 0
            if decision.action is Action.BUILD and key is not None:
                return self._capture(key, decision)
        except NotShown as error:
            decision = fell_back(decision, error.code, str(error))
        except Exception as error:  # whatever is wrong with us, the job starts
            decision = fell_back(decision, "failed", f"{REASONS['failed']}: {type(error).__name__}: {error}")
        decision.check()
        return self._install(decision)

    def look(self, base: Callable[[], Base] | None = None) -> tuple[RequestKey | None, Decision]:
        """The key, and what it leads to. Whatever fails here makes the setup run. `base` tells of an image."""
        from bootseer.env.keys.request_key import facts_folder_of, request_key
        from bootseer.env.life.decide import Action, Decision
        from bootseer.launch.environment_ask import ask_for
        from bootseer.launch.environment_seek import seek

        task = self.task
        mode = task.wanted.mode
        try:
            with interruptible():
                with task.stage("key") as facts:
                    key = request_key(
                        ask_for(task.setup, task.requirements, task.wanted, task.own_env, base=base and base()),
                        facts_folder=facts_folder_of(task.wanted.cache),
                    )
                    facts["key"] = key.digest
                self._sought = seek(task, key)
                return key, self._sought.decision
        except (BootseerError, OSError, ValueError) as error:
            return None, Decision(Action.FAIL if mode == "require" else Action.INSTALL, "failed", str(error), mode=mode)

    def _restore(self, decision: Decision) -> None:
        from bootseer.launch.environment_restore import restore

        with interruptible():
            self.shown = restore(self.task, decision, self.command)

    def _capture(self, key: RequestKey, decision: Decision) -> int:
        """The setup's exit code."""
        from bootseer.launch.environment_capture import capture

        try:
            captured = capture(self.task, key, decision, self.command)
        finally:
            self.release()
        self.shown, self.publishing = captured.shown, captured.publishing
        return captured.code

    def _install(self, decision: Decision) -> int:
        """The setup on this machine itself, as without snapshots."""
        from bootseer.env.capturing import exports
        from bootseer.launch.environment_install import say_failed, set_up
        from bootseer.launch.environment_shown import Shown

        say(f"the environment is set up without a snapshot: {decision.words}")
        done = set_up(self.task)
        if done.code:
            say_failed(done)
        else:
            self.shown = Shown("installed", decision, exports.apply(done.exports, self.task.env))
        return done.code

    def run(self, options: Options) -> int:
        """Run the command in it; returns its exit code."""
        shown, session = self.shown, self.task.session
        assert shown is not None  # noqa: S101 - for the type checker: `prepare` returned 0
        if session is not None:
            session.also_beside(self.watch)
        began_s = time.monotonic()
        code = run_command(self.command, options, shown.env, session, own_group=self.task.own_group, enter=shown.enter)
        self.ended(code, time.monotonic() - began_s)
        return code

    def ended(self, code: int, seconds: float) -> None:
        """The command is over, after so many seconds: what nobody told yet is told now."""
        self.tell("end")
        shown = self.shown
        if shown is not None and shown.layer is not None:
            shown.layer.tell_problems()
        if shown is not None and shown.mode == "restored" and code:
            self.suspect(code, seconds)

    def watch(self, ended: threading.Event) -> None:
        """Look for the hook's word that training has begun, until the command has ended."""
        session = self.task.session
        if session is None:
            return
        tail = SpoolTail(session.folder)
        while not ended.wait(_LOOK_EVERY_S):
            if any(event.stage == TRAINING_BEGAN and session.owns(event) for event in tail.poll()):
                self.tell(TRAINING_BEGAN)
                return

    def tell(self, until: str) -> None:
        """The start is over: say how the environment came and what that cost, and keep its record."""
        shown, session = self.shown, self.task.session
        if shown is None or not self._told.acquire(blocking=False):
            return
        numbers = shown.layer.began() if shown.layer is not None else {}
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
            shown.layer.keep_record()

    def suspect(self, code: int, seconds: float) -> None:
        """The command died right behind a restore: the snapshot may be why."""
        from bootseer.launch.environment_suspect import suspect

        if self.shown is not None and self.shown.decision.document is not None:
            suspect(self.task, self.shown.decision.document, code, seconds)

    def release(self) -> None:
        """Nothing is built by this process any more; the one that publishes keeps the lease as long as it works."""
        if self._sought is not None:
            self._sought.release()

    def end(self, code: int) -> None:
        """The command has ended so: wait for the snapshot that is being kept, unless the command was killed."""
        self.release()
        if self.publishing is not None:
            self.finish(self.publishing, given_up=code >= _SIGNALLED)

    def close(self) -> None:
        """Take everything away."""
        self.release()
        try:
            if self.shown is not None:
                self.shown.undo.close()
        except BootseerError as error:
            say(f"the environment was not taken away: {error}")
        finally:
            if self._sought is not None:
                self._sought.close()
            self.task.folder.remove()

    def finish(self, publishing: Publishing, *, given_up: bool = False) -> None:
        """Wait until the snapshot is kept; Ctrl-C gives it up."""
        if given_up:  # who kills a job wants its end
            publishing.stop()
            return
        try:
            with interruptible():
                publishing.finish()
        except Interrupted:
            publishing.stop()
