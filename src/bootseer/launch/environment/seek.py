"""Find out what is to be done about the environment: ask the store, be elected or wait for the builder.

All of it happens in a child (`background`): clients of stores may have threads, and the run must be able to fork later.
The child that holds the lease stays, shows that the builder lives, and gives the lease back when the last process that
builds has ended, however it ended. Called by `environment_stage`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bootseer.env.document import EnvironmentDocument
from bootseer.env.keys import gate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.request_key import Ask, Base
from bootseer.env.life import lease as leases
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import Action, Decision, Lookup, decide, elected, waited
from bootseer.env.life.lease import Held, Lease, NoLease
from bootseer.env.life.local import Local
from bootseer.env.life.quarantine import Quarantine
from bootseer.errors import BootseerError, TransientError
from bootseer.launch.background import Background, Tell, start_background
from bootseer.launch.environment.task import EnvironmentWanted, Task
from bootseer.launch.supervise import say
from bootseer.store.open import open_store

if TYPE_CHECKING:
    from bootseer.image.mounting.request import Request


HOST = Base("host", "", {})


def ask_for(
    setup: str | None,
    requirements: Sequence[str],
    wanted: EnvironmentWanted,
    env: Mapping[str, str],
    *,
    base: Base | None = None,
) -> Ask:
    """The question; `base` None: the environment is on this machine."""
    return Ask(
        setup=setup,
        requirements=tuple(requirements),
        cwd=os.getcwd(),  # noqa: PTH109 - a name
        env=env,
        base=base or HOST,
        inputs=wanted.inputs,
        tenant=wanted.tenant,
        kept=(*(f"left out {path}" for path in wanted.leave_out), *(f"kept {path}" for path in wanted.keep)),
        variables=wanted.variables,
        salt=wanted.place,
    )


def base_of_image(request: Request) -> Base:
    """The image that a setup runs in. Raises what its registry or store raises."""
    from bootseer.image.sources.source import open_source

    with closing(open_source(request.reference, platform=request.platform, plain_http=request.plain_http)) as source:
        return Base("image", source.digest, source.config)


_LOOK_S = 60.0
"""More than all the child's own deadlines until it answers for the first time."""
_SLACK_S = 90.0
_RELEASE_S = 10.0


@dataclass(slots=True)
class Sought:
    """What was decided, and who keeps the lease."""

    decision: Decision
    keeper: Background | None = None
    """Holds the lease until `release`, or the end of everybody who has `held`."""
    held: int = -1

    def release(self) -> None:
        """Give the lease back, as far as we have it: other processes may still have it."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        """Wait until the lease is given back: the next start would have to wait for it."""
        self.release()
        if self.keeper is not None and not self.keeper.ended(_RELEASE_S):
            self.keeper.stop()


def seek(task: Task, key: RequestKey, *, damaged: str = "") -> Sought:
    """Decide what is done. Nothing that goes wrong with the store is an error: then the setup runs.

    `damaged` says what is wrong with the snapshot that was found before: it is to be made anew.
    """
    stay, held = os.pipe2(os.O_CLOEXEC)
    try:
        keeper = start_background(
            lambda tell: _Seeker(task, key, tell, stay, held, damaged).seek(),
            name="bootseer-lease",
            log=task.folder.path / "seek.log",
        )
    except BootseerError:
        os.close(held)
        raise
    finally:
        os.close(stay)
    sought = Sought(Decision(Action.INSTALL, "failed", ""), keeper, held)
    try:
        with task.stage("lookup") as facts:
            said = _answer(keeper, _LOOK_S)
            facts["code"] = said["code"]
        if said["action"] == Action.WAIT.value:
            say(f"{said['words']}; waiting for it, {task.wanted.wait_s:g} s at most (--env-wait)")
            with task.stage("wait") as facts:
                facts["for"] = said["words"]
                said = _answer(keeper, task.wanted.wait_s + _SLACK_S)
                facts["code"] = said["code"]
    except TransientError as error:
        keeper.stop()
        sought.release()
        return Sought(_required(Decision(Action.INSTALL, "failed", str(error), mode=task.wanted.mode)))
    except BaseException:
        keeper.stop()
        sought.release()
        raise
    sought.decision = _decision(said)
    if sought.decision.action is not Action.BUILD:
        sought.release()
    return sought


def _required(decision: Decision) -> Decision:
    return replace(decision, action=Action.FAIL) if decision.mode == "require" else decision


def _answer(keeper: Background, timeout_s: float) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    said = keeper.answer(timeout_s)
    while "say" in said:
        say(said["say"])
        said = keeper.answer(until - time.monotonic())
    if "error" in said:
        raise TransientError(said["error"])
    return said


def _said(decision: Decision) -> dict[str, Any]:
    return {
        "action": decision.action.value,
        "code": decision.code,
        "words": decision.words,
        "replace": decision.replace,
        "mode": decision.mode,
        "document": _text(decision.document),
        "replaces": _text(decision.replaces),
    }


def _text(document: EnvironmentDocument | None) -> str | None:
    return None if document is None else document.encode().decode()


def _document(text: str | None) -> EnvironmentDocument | None:
    return None if text is None else EnvironmentDocument.parse(text.encode())


def _decision(said: Mapping[str, Any]) -> Decision:
    return Decision(
        Action(said["action"]),
        said["code"],
        said["words"],
        document=_document(said["document"]),
        replaces=_document(said["replaces"]),
        replace=said["replace"],
        mode=said["mode"],
    )


class _Seeker:
    """In the child."""

    def __init__(self, task: Task, key: RequestKey, tell: Tell, stay: int, held: int, damaged: str) -> None:
        os.close(held)  # of those that hold the lease we are none
        self._task = task
        self._key = key
        self._tell = tell
        self._stay = stay
        self._damaged = damaged

    def seek(self) -> None:
        """Answer once, twice if there was somebody to wait for; then keep the lease, if there is one."""
        task = self._task
        with contextlib.closing(open_store(task.store_uri, plain_http=task.wanted.plain_http)) as store:
            catalog = Catalog(store, signatures=task.signatures)
            decision = self._first(catalog)
            lease: Lease | None = None
            if decision.action is Action.BUILD:
                decision, lease = self._elected(catalog, decision)
            try:
                self._tell(_said(decision))
                if decision.action is Action.WAIT:
                    decision, lease = self._waited(catalog, decision)
                    self._tell(_said(decision))
                if lease is not None and decision.action is Action.BUILD:
                    self._keep(lease)
            finally:
                if lease is not None:
                    lease.release()

    def _first(self, catalog: Catalog) -> Decision:
        task, key = self._task, self._key
        mode = task.wanted.mode
        if key.problems:
            return decide(mode, Lookup("none"), now_s=time.time(), problems=key.problems)
        local = Local(task.wanted.cache, self._say, task.signatures)
        found = local.look(catalog, key.digest)
        document = found.document
        if document is not None:
            document = self._limited(document)
            found = replace(found, document=document)
        return decide(
            mode,
            found,
            now_s=time.time(),
            refusal=self._refusal(document),
            quarantined=self._damaged or self._suspicion(catalog, local, document),
            may_publish=task.signatures.may_publish,
        )

    def _suspicion(self, catalog: Catalog, local: Local, document: EnvironmentDocument | None) -> str:
        return "" if document is None else Quarantine(catalog.store, local.store, self._say).why(document)

    def _say(self, line: str) -> None:
        self._tell({"say": line})

    def _limited(self, document: EnvironmentDocument) -> EnvironmentDocument:
        """As old as the one who starts allows, too."""
        own = self._task.wanted.max_age_s
        if own is None or own == math.inf or (document.max_age_s is not None and document.max_age_s <= own):
            return document
        return replace(document, max_age_s=own)

    def _refusal(self, document: EnvironmentDocument | None) -> tuple[str, str] | None:
        refusal = None if document is None else gate.check(document.platform, self._key.platform)
        return None if refusal is None else (refusal.code, refusal.message)

    def _elected(self, catalog: Catalog, decision: Decision) -> tuple[Decision, Lease | None]:
        asked = leases.elect(catalog, self._key.digest, self._task.node, replaces=decision.replaces)
        if isinstance(asked, Lease):
            return elected(decision, "ours"), asked
        if isinstance(asked, Held):
            return elected(decision, "held", asked.words), None
        if isinstance(asked, NoLease):
            return elected(decision, "unavailable", asked.why), None
        refusal = self._refusal(asked)
        return waited(decision, "published", now_s=time.time(), document=asked, refusal=refusal), None

    def _waited(self, catalog: Catalog, decision: Decision) -> tuple[Decision, Lease | None]:
        key, wanted = self._key.digest, self._task.wanted
        ended = leases.wait(catalog, key, self._task.node, timeout_s=wanted.wait_s, replaces=decision.replaces)
        decided = waited(
            decision,
            ended.ended,
            now_s=time.time(),
            document=ended.document,
            refusal=self._refusal(ended.document),
            words=ended.words,
            ours=ended.lease is not None,
        )
        return decided, ended.lease

    def _keep(self, lease: Lease) -> None:
        """Beat until nobody builds any more."""
        while not select.select([self._stay], [], [], lease.interval_s)[0]:
            if not lease.beat():
                return
