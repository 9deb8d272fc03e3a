"""Find out what is to be done about the environment: ask the store, be elected or wait for the builder.

All of it happens in a child (`background`): clients of stores may have threads, and the run must be able to fork later.
The child that holds the lease stays, shows that the builder is alive, and gives the lease back when the last process
that builds has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from bootseer.artifact.lease import Held, Lease, NoLease
from bootseer.env.document import EnvironmentDocument
from bootseer.env.keys import gate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.request_key import Ask, Base
from bootseer.env.life import election
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import Action, Decision, Lookup, decide, elected, waited
from bootseer.env.life.local import Local
from bootseer.env.life.quarantine import Quarantine
from bootseer.errors import BootseerError, TransientError
from bootseer.launch.background import Background, Tell, start_background
from bootseer.launch.environment.task import EnvironmentWanted, Task
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.store.open import open_store

if TYPE_CHECKING:
    from bootseer.image.mounting.request import Request


_LOOK_S = 60.0
"""More than all the child's own deadlines until it answers for the first time."""
_SLACK_S = 90.0
_RELEASE_S = 10.0
_log = logger(__name__)
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
    from bootseer.image.sources.open import open_source

    with contextlib.closing(
        open_source(request.reference, platform=request.platform, plain_http=request.plain_http)
    ) as source:
        return Base("image", source.digest, source.config)


@dataclass(slots=True)
class Election:
    """What was decided, and the process that holds the lease."""

    decision: Decision
    helper: Background | None = None
    """Holds the lease until `release`, or the end of all processes that have `held`."""
    held: int = -1

    def release(self) -> None:
        """Give the lease back, as far as we have it: other processes may still have it."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        """Wait until the lease is given back: the next start would have to wait for it."""
        self.release()
        if self.helper is not None and not self.helper.ended(_RELEASE_S):
            self.helper.stop()


def seek(task: Task, key: RequestKey, *, damaged: str = "") -> Election:
    """Decide what is done. Nothing that goes wrong with the store is an error: then the setup runs.

    `damaged` says what is wrong with the snapshot that was found before: it is to be made anew.
    """
    stay, held = os.pipe2(os.O_CLOEXEC)
    try:
        helper = start_background(
            lambda tell: _Seeker(task, key, tell, stay, held, damaged).seek(),
            name="bootseer-lease",
            log=task.folder.path / "seek.log",
        )
    except BootseerError:
        os.close(held)
        raise
    finally:
        os.close(stay)
    election = Election(Decision(Action.INSTALL, "failed", ""), helper, held)
    mode = task.wanted.mode
    try:
        with task.stage("lookup") as facts:
            message = _answer(helper, _LOOK_S)
            facts["code"] = message["code"]
        if message["action"] == Action.WAIT.value:
            say(f"{message['words']}; waiting for it, {task.wanted.wait_s:g} s at most (--env-wait)")
            with task.stage("wait") as facts:
                facts["for"] = message["words"]
                message = _answer(helper, task.wanted.wait_s + _SLACK_S)
                facts["code"] = message["code"]
        decision = _decoded(message)
    except TransientError as error:
        helper.stop()
        decision = Decision(Action.FAIL if mode == "require" else Action.INSTALL, "failed", str(error), mode=mode)
    except BaseException:
        helper.stop()
        election.release()
        raise
    _log.info("environment %s: %s (%s: %s)", key.digest[:12], decision.action.value, decision.code, decision.words)
    election.decision = decision
    if decision.action is not Action.BUILD:
        election.release()
    return election


def _answer(helper: Background, timeout_s: float) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    message = helper.answer(timeout_s)
    while "say" in message:
        say(message["say"])
        message = helper.answer(until - time.monotonic())
    if "error" in message:
        raise TransientError(message["error"])
    return message


_DOCUMENTS = ("document", "replaces")


def _encoded(decision: Decision) -> dict[str, Any]:
    """The decision as a message of the child."""
    message = {field.name: getattr(decision, field.name) for field in fields(decision)}
    documents = {name: message[name].encode().decode() for name in _DOCUMENTS if message[name] is not None}
    return {**message, **documents, "action": decision.action.value}


def _decoded(message: Mapping[str, Any]) -> Decision:
    documents = {
        name: EnvironmentDocument.parse(message[name].encode()) for name in _DOCUMENTS if message[name] is not None
    }
    return Decision(**{**message, **documents, "action": Action(message["action"])})


class _Seeker:
    """In the child."""

    def __init__(self, task: Task, key: RequestKey, tell: Tell, stay: int, held: int, damaged: str) -> None:
        os.close(held)  # this process does not build
        self._task = task
        self._key = key
        self._tell = tell
        self._stay = stay
        self._damaged = damaged

    def seek(self) -> None:
        """Answer once, twice if there was a builder to wait for; then keep the lease, if there is one."""
        task = self._task
        with contextlib.closing(open_store(task.store_uri, plain_http=task.wanted.plain_http)) as store:
            catalog = Catalog(store, signatures=task.signatures)
            decision = self._first(catalog)
            lease: Lease | None = None
            if decision.action is Action.BUILD:
                decision, lease = self._elected(catalog, decision)
            try:
                self._tell(_encoded(decision))
                if decision.action is Action.WAIT:
                    decision, lease = self._waited(catalog, decision)
                    self._tell(_encoded(decision))
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
        document, suspicion = found.document, ""
        if document is not None:
            document = self._limited(document)
            found = replace(found, document=document)
            suspicion = Quarantine(catalog.store, local.store, self._say).why(document)
        return decide(
            mode,
            found,
            now_s=time.time(),
            refusal=self._refusal(document),
            quarantined=self._damaged or suspicion,
            may_publish=task.signatures.may_publish,
        )

    def _say(self, line: str) -> None:
        self._tell({"say": line})

    def _limited(self, document: EnvironmentDocument) -> EnvironmentDocument:
        """With this start's own limit of age, too."""
        own = self._task.wanted.max_age_s
        if own is None or own == math.inf or (document.max_age_s is not None and document.max_age_s <= own):
            return document
        return replace(document, max_age_s=own)

    def _refusal(self, document: EnvironmentDocument | None) -> tuple[str, str] | None:
        refusal = None if document is None else gate.check(document.platform, self._key.platform)
        return None if refusal is None else (refusal.code, refusal.message)

    def _elected(self, catalog: Catalog, decision: Decision) -> tuple[Decision, Lease | None]:
        asked = election.elect(catalog, self._key.digest, self._task.node, replaces=decision.replaces)
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
        ended = election.wait(catalog, key, self._task.node, timeout_s=wanted.wait_s, replaces=decision.replaces)
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
        """Heartbeats, until no process builds any more."""
        while not select.select([self._stay], [], [], lease.interval_s)[0]:
            if not lease.beat():
                return
