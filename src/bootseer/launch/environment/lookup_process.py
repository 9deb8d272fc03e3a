"""The child process of `lookup`: computes the request key, asks the store, and holds the builder's lease."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from bootseer.artifact.lease import Held, Lease, NoLease
from bootseer.env.document import EnvironmentDocument
from bootseer.env.keys.key import RequestKey, gate
from bootseer.env.keys.request_key import KeyRequest, facts_folder_of, request_key
from bootseer.env.life import election, unsafe
from bootseer.env.life.catalog import Catalog, NodeCatalog
from bootseer.env.life.decide import Action, Decision, Lookup, after_election, after_wait, decide, fall_back
from bootseer.errors import BootseerError
from bootseer.launch.background import Send
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.mounts.process import readable
from bootseer.store.store import Store


def key_request(
    setup: str | None,
    requirements: Sequence[str],
    options: EnvironmentOptions,
    env: Mapping[str, str],
    *,
    image: str = "",
) -> KeyRequest:
    """The input of the request key; `image` is that of `KeyRequest`."""
    return KeyRequest(
        setup=setup,
        requirements=tuple(requirements),
        cwd=os.getcwd(),  # noqa: PTH109 - a name
        env=env,
        image=image,
        inputs=options.inputs,
        tenant=options.tenant,
        kept=(*(f"left out {path}" for path in options.leave_out), *(f"kept {path}" for path in options.keep)),
        variables=options.variables,
        place=options.place,
    )


def key_request_of(task: Task, image: str) -> KeyRequest:
    """The input of the request key of a start."""
    env = task.env if task.own_env is None else task.own_env
    return key_request(task.setup, task.requirements, task.options, env, image=image)


class LookupProcess:
    """The work of the child process."""

    _key: RequestKey
    """Set before the first decision."""

    def __init__(self, task: Task, image: str, send: Send, read_end: int, write_end: int) -> None:
        os.close(write_end)  # this process does not build
        self._task = task
        self._image = image
        self._send = send
        self._read_end = read_end

    def run(self) -> None:
        """Send the key and the decision, a second one after waiting for a builder; then hold the lease, if any."""
        task = self._task
        self._key = request_key(key_request_of(task, self._image), facts_folder=facts_folder_of(task.options.cache))
        self._send(msgspec.to_builtins(self._key))
        with contextlib.closing(task.open_store()) as store:
            catalog = Catalog(store, signatures=task.signatures)
            decision = self._first_decision(catalog)
            lease: Lease | None = None
            if decision.action is Action.BUILD:
                decision, lease = self._ask_for_lease(catalog, decision)
            try:
                self._send(msgspec.to_builtins(decision))
                if decision.action is Action.WAIT:
                    decision, lease = self._wait_for_builder(catalog, decision)
                    self._send(msgspec.to_builtins(decision))
                if lease is not None and decision.action is Action.BUILD:
                    self._hold(lease, store)
            finally:
                if lease is not None:
                    lease.release()

    def _first_decision(self, catalog: Catalog) -> Decision:
        task, key = self._task, self._key
        mode = task.options.mode
        if key.problems:
            return decide(mode, Lookup("none"), now_s=time.time(), problems=key.problems)
        node_catalog = NodeCatalog(task.options.cache, self._say, task.signatures)
        found = node_catalog.look_up(catalog, key.digest)
        document = found.document
        if document is not None:
            document = self._with_age_limit(document)
            found = dataclasses.replace(found, document=document)
        decision = decide(
            mode,
            found,
            now_s=time.time(),
            refusal=self._refusal(document),
            may_publish=task.signatures.may_publish,
        )
        builds = decision.action is Action.BUILD and mode != "refresh"
        return self._unless_unsafe(catalog, decision) if builds else decision

    def _unless_unsafe(self, catalog: Catalog, decision: Decision) -> Decision:
        """The decision, or to run the setup at once if it is known to be not snapshot-safe."""
        accepts = self._task.options.conflicts == "accept"
        reason = unsafe.reason(catalog.store, self._key.digest, time.time(), accepts_conflicts=accepts)
        return fall_back(decision, "unsafe", reason) if reason else decision

    def _say(self, line: str) -> None:
        self._send({"say": line})

    def _with_age_limit(self, document: EnvironmentDocument) -> EnvironmentDocument:
        """With this start's own age limit, if that is stricter."""
        own = self._task.options.max_age_s
        if own is None or own == math.inf or (document.max_age_s is not None and document.max_age_s <= own):
            return document
        return replace(document, max_age_s=own)

    def _refusal(self, document: EnvironmentDocument | None) -> tuple[str, str] | None:
        return None if document is None else gate(document.components, document.platform, self._key)

    def _ask_for_lease(self, catalog: Catalog, decision: Decision) -> tuple[Decision, Lease | None]:
        asked = election.elect(catalog, self._key.digest, self._task.node, replaces=decision.replaces)
        if isinstance(asked, Lease):
            return after_election(decision, "ours"), asked
        if isinstance(asked, Held):
            return after_election(decision, "held", asked.words), None
        if isinstance(asked, NoLease):
            return after_election(decision, "unavailable", asked.why), None
        refusal = self._refusal(asked)
        return after_wait(decision, "published", now_s=time.time(), document=asked, refusal=refusal), None

    def _wait_for_builder(self, catalog: Catalog, decision: Decision) -> tuple[Decision, Lease | None]:
        key, options = self._key.digest, self._task.options
        ended = election.wait(catalog, key, self._task.node, timeout_s=options.wait_s, replaces=decision.replaces)
        decided = after_wait(
            decision,
            ended.ended,
            now_s=time.time(),
            document=ended.document,
            refusal=self._refusal(ended.document),
            words=ended.words,
            ours=ended.lease is not None,
        )
        if ended.ended == "builder-gave-up":
            decided = self._unless_unsafe(catalog, decided)
        if ended.lease is not None and decided.action is not Action.BUILD:
            ended.lease.release()
            return decided, None
        return decided, ended.lease

    def _hold(self, lease: Lease, store: Store) -> None:
        """Send heartbeats until all building processes have closed their end of the pipe. What comes through it is why
        the setup is not snapshot-safe."""
        reason = b""
        while True:
            if not readable([self._read_end], lease.interval_s):
                if not lease.beat():
                    return
            elif piece := os.read(self._read_end, 4096):
                reason += piece
            else:
                break
        if reason:
            with contextlib.suppress(BootseerError):
                self._mark(store, reason)

    def _mark(self, store: Store, reason: bytes) -> None:
        from bootseer.env.capturing.exclude import Exclusions  # needed by few starts
        from bootseer.env.capturing.walk import LeftOut

        check = self._task.secret_check(LeftOut(Exclusions()))
        mark = unsafe.Mark(self._key.digest, reason.decode("utf-8", "replace"), self._task.node, time.time())
        unsafe.write_mark(store, mark, check)
