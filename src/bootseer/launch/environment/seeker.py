"""In the child of `seek`: the request key, the store's answer, and the lease of the one that builds."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from bootseer.artifact.lease import Held, Lease, NoLease
from bootseer.env.document import EnvironmentDocument
from bootseer.env.keys import gate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.request_key import Ask, Base, facts_folder_of, request_key
from bootseer.env.life import election
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import DOCUMENTS, Action, Decision, Lookup, decide, elected, waited
from bootseer.env.life.local import Local
from bootseer.env.life.quarantine import Quarantine
from bootseer.launch.background import Tell
from bootseer.launch.environment.task import EnvironmentWanted, Task
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
    from bootseer.image.sources.open import open_source

    with contextlib.closing(
        open_source(request.reference, platform=request.platform, plain_http=request.plain_http)
    ) as source:
        return Base("image", source.digest, source.config)


class Seeker:
    """Answers `seek`."""

    _key: RequestKey
    """There from the first answer on."""

    def __init__(
        self, task: Task, base: Callable[[], Base] | None, tell: Tell, stay: int, held: int, damaged: str
    ) -> None:
        os.close(held)  # this process does not build
        self._task = task
        self._base = base
        self._tell = tell
        self._stay = stay
        self._damaged = damaged

    def seek(self) -> None:
        """Tell the key and answer once, twice if there was a builder to wait for; then keep the lease, if any."""
        task = self._task
        env = task.env if task.own_env is None else task.own_env
        ask = ask_for(task.setup, task.requirements, task.wanted, env, base=self._base and self._base())
        self._key = request_key(ask, facts_folder=facts_folder_of(task.wanted.cache))
        self._tell(msgspec.to_builtins(self._key))
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


def _encoded(decision: Decision) -> dict[str, Any]:
    """The decision as a message of the child."""
    message = {field.name: getattr(decision, field.name) for field in fields(decision)}
    documents = {name: message[name].encode().decode() for name in DOCUMENTS if message[name] is not None}
    return {**message, **documents, "action": decision.action.value}
