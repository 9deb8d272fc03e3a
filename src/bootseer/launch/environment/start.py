"""`bootseer run --setup`, `--requirements`: prepare the environment as a measured stage, and run the command in it.

The stages are listed in docs/formats/event.md. If anything is wrong with snapshots, the setup runs, in a private view
if possible, and the report has the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, Interrupted
from bootseer.launch.command import Options, run_command
from bootseer.launch.environment.task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import COMMAND_ENDED, StartReport, reporting_errors
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.env.keys.key import RequestKey
    from bootseer.env.life.decide import Decision
    from bootseer.launch.environment.lookup import LookupResult
    from bootseer.launch.environment.publish import Publishing
    from bootseer.launch.environment.view import PreparedEnvironment

EVENT = "environment_start"
_SIGNALLED = 128
_log = logger(__name__)


def run_in_environment(
    command: Sequence[str],
    options: Options,
    env: dict[str, str],
    session: Session,
    *,
    own_env: Mapping[str, str],
) -> int:
    """Prepare the environment and run the command in it; returns the exit code. Signals must be blocked.

    `env` is the command's environment, `own_env` the same without BootSeer's additions.
    Raises `UsageError`, before anything was started, if a snapshot is required and there is none.
    """
    environment = options.environment
    assert environment is not None  # noqa: S101 - for the type checker: `launch.run` looked
    task, start_attrs = None, {"mode": "bypassed", "code": "bypass"}
    try:
        if environment.mode != "bypass":
            task = Task(
                options.setup,
                options.requirements,
                environment,
                env,
                own_env=own_env,
                session=session,
                show=options.show,
            )
    except BootseerError as error:  # the cache is not usable
        from bootseer.env.life.decide import Action, Decision, fall_back

        reason = str(error)
        decision = fall_back(Decision(Action.INSTALL, "failed", reason, mode=environment.mode), "failed", reason)
        decision.check()
        say(f"the environment is set up without a snapshot: {reason}")
        start_attrs = {"mode": "installed", "code": decision.code, "reason": decision.reason, "until": "setup"}
    if task is None:
        from bootseer.launch.environment.setup import run_setup

        code, after = run_setup(options, env, session)
        if code:
            return code
        session.tracer.emit(EVENT, INSTANT, attrs=start_attrs)
        return run_command(command, options, dict(after), session)
    start = EnvironmentStart(task, command)
    code = 1
    try:
        code = start.prepare()
        if not code:
            code = start.run(options)
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted} while the environment was prepared")
        code = interrupted.exit_code
    finally:
        start.finish_publishing(code)
        start.close()
    return code


class EnvironmentStart:
    """One environment start on this node. `report` may be sent by another thread, all else in the main one."""

    def __init__(self, task: Task, command: Sequence[str]) -> None:
        self.task = task
        self.command = tuple(command)
        self.prepared: PreparedEnvironment | None = None
        self._lookup: LookupResult | None = None
        self.publishing: Publishing | None = None
        self.seconds = 0.0
        """Duration of preparing the environment."""
        self.report = StartReport(task.session, self._record)

    def prepare(self) -> int:
        """Restore, capture or set up the environment. Returns the setup's exit code: 0 if the command can start."""
        began_s = time.monotonic()
        with self.task.stage() as facts:
            code = self._prepare()
            if self.prepared is not None:
                facts.update(mode=self.prepared.mode, code=self.prepared.decision.code)
            if code:
                facts["error"] = f"exit code {code}"
        self.seconds = time.monotonic() - began_s
        return code

    def _prepare(self) -> int:
        # Imported here, so that the imports are part of the measured stage.
        from bootseer.env.life.decide import Action

        key, decision = self.restore()
        if self.prepared is not None:
            return 0
        from bootseer.launch.environment.capture import capture, set_up_in_view, set_up_on_host
        from bootseer.launch.environment.view import fallback_for

        if decision.action is Action.BUILD and key is not None:
            say(f"environment {key.digest[:12]} is set up now: {decision.reason}")
            try:
                try:
                    done, self.prepared, self.publishing = capture(self.task, key, decision, self.command)
                finally:
                    self.release_lease()
                return done.code
            except Exception as error:  # an error of BootSeer must not fail the job
                _log.warning("the setup is not captured", exc_info=True)
                decision = fallback_for(decision, error)
                say(f"the environment is set up without a snapshot: {decision.reason}")
        else:
            decision.check()
            say(f"the environment is set up without a snapshot: {decision.reason}")
            try:
                code, self.prepared = set_up_in_view(self.task, decision)
                return code
            except Exception as error:
                _log.warning("the setup has no private view", exc_info=True)
                say(f"the setup runs on this machine itself: {error}")
        code, self.prepared = set_up_on_host(self.task, decision)
        return code

    def restore(self, image: str = "") -> tuple[RequestKey | None, Decision]:
        """Look up the environment and restore its snapshot, if possible (`prepared` is set then); key and decision.

        `image` is the digest of the image to run in: then only the snapshot's tree is mounted, to become a layer of the
        image.
        """
        from bootseer.env.life.decide import Action

        key, decision = self.look_up(image)
        if decision.action is Action.RESTORE:
            decision = self._restore(decision, on_host=not image)
        return key, decision

    def look_up(self, image: str = "") -> tuple[RequestKey | None, Decision]:
        """Key and decision. Errors lead to running the setup. `image` is that of `lookup.look_up`."""
        from bootseer.env.life.decide import REASONS, Action, Decision
        from bootseer.launch.environment.lookup import look_up

        mode = self.task.options.mode
        if mode == "bypass":  # neither key nor store, whose servers may be why it is bypassed
            return None, Decision(Action.INSTALL, mode, REASONS[mode], mode=mode)
        try:
            with interruptible():
                self._lookup = look_up(self.task, image)
                return self._lookup.key, self._lookup.decision
        except Exception as error:  # an error of BootSeer must not fail the job
            _log.warning("the lookup failed", exc_info=True)
            return None, Decision(Action.FAIL if mode == "require" else Action.INSTALL, "failed", str(error), mode=mode)

    def _restore(self, decision: Decision, *, on_host: bool) -> Decision:
        from bootseer.launch.environment.restore import remove_snapshot, restore
        from bootseer.launch.environment.view import fallback_for

        try:
            with interruptible():
                self.prepared = restore(self.task, decision, self.command, on_host=on_host)
        except Exception as error:  # an error of BootSeer must not fail the job
            _log.warning("the snapshot cannot be restored", exc_info=True)
            fallback = fallback_for(decision, error)
            if fallback.code == "damaged" and decision.document is not None:
                with reporting_errors("the damaged snapshot was not removed"):
                    remove_snapshot(self.task, decision.document, fallback.reason)
            return fallback
        return decision

    def run(self, options: Options) -> int:
        """Run the command in the environment; returns its exit code."""
        prepared = self.prepared
        assert prepared is not None  # noqa: S101 - for the type checker: `prepare` returned 0
        began_s = time.monotonic()
        code = run_command(self.command, options, prepared.env, self.task.session, enter=prepared.enter)
        self.command_ended(code, time.monotonic() - began_s)
        return code

    def command_ended(self, code: int, seconds: float) -> None:
        """Report the start, if that is still to be done, and judge the snapshot by the command's exit code."""
        self.report.send(COMMAND_ENDED)
        prepared = self.prepared
        document = prepared.decision.document if prepared is not None else None
        if prepared is None or document is None:
            return
        from bootseer.launch.environment.restore import remove_snapshot, suspect_snapshot

        with reporting_errors("problems of the environment are not known"):
            damage = prepared.layer.report_problems() if prepared.layer is not None else ""
            if damage:
                remove_snapshot(self.task, document, damage)
                return
        with reporting_errors("whether the environment is at fault is not known"):
            if prepared.mode == "restored" and code:
                suspect_snapshot(self.task, document, code, seconds)

    def _record(self, until: str) -> None:
        prepared, session = self.prepared, self.task.session
        if prepared is None:
            return
        if session.warm is not None:
            session.warm.report.send(until)
        numbers = prepared.layer.end_startup() if prepared.layer is not None else {}
        document = prepared.decision.document
        facts = {
            "mode": "bypassed" if prepared.decision.code == "bypass" else prepared.mode,
            "code": prepared.decision.code,
            "reason": prepared.decision.reason,
            "what": self.task.what,
            "seconds": round(self.seconds, 3),
            "until": until,
            # Less than all of `seconds`: a start that waited for the builder saved little.
            **({"saved_s": round(document.setup_s - self.seconds, 3)} if document is not None else {}),
            **prepared.facts,
            **numbers,
        }
        session.tracer.emit(EVENT, INSTANT, parent=session.span, attrs=facts)
        if prepared.layer is not None:
            prepared.layer.wait_for_record()

    def release_lease(self) -> None:
        """Release the lease in this process; the publishing process holds it until it has ended."""
        if self._lookup is not None:
            self._lookup.release(self.task.unsafe)

    def finish_publishing(self, code: int) -> None:
        """Wait for the publication, unless the command was killed or asked to end by a signal; Ctrl-C cancels it."""
        publishing, self.publishing = self.publishing, None
        with reporting_errors("the outcome of the environment's snapshot is not known"):
            self.release_lease()
            if publishing is not None:
                with suppress(Interrupted):
                    if code < _SIGNALLED and not self.task.session.is_asked_to_end:
                        with interruptible():
                            publishing.finish()
                        return
                publishing.stop()

    def close(self) -> None:
        """Remove mounts, lease and folder of this start."""
        with reporting_errors("the environment was not removed"):
            if self.prepared is not None:
                self.prepared.undo.close()
        with reporting_errors("the lease of the environment was not released"):
            if self._lookup is not None:
                self._lookup.close()
        self.task.folder.remove()
