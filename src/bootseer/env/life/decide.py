"""What a start does about its environment, and why: the table of all outcomes. Decides and touches nothing.

A start asks up to four times, and goes on with what the last answer says:

    decide      after the look into the store: mount it, do not use any, or build it?
    elected     after it asked for the lease: build, wait for the builder, or install without sharing?
    waited      after it waited: the builder's snapshot, the builder's place, or its own installation
    fell_back   when a snapshot could not be used after all

Whatever goes wrong here ends as `INSTALL`: the start is slower and right. Only `require` turns it into `FAIL`, before
anything was installed. `REASONS` says what each code means; codes are stable and stand in events and reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

from bootseer.artifact import kind
from bootseer.env import Mode
from bootseer.env.document import EnvironmentDocument
from bootseer.errors import UsageError

Ended = Literal["published", "builder-died", "builder-gave-up", "waited-too-long", "no-lease"]
"""How waiting ends."""
_REFUSED = "refused:"
_MAX_PATHS = 3
_NO_KEY = "a new one must be signed, and there is no key for that"


class Action(Enum):
    """What the start does next."""

    RESTORE = "restore"
    """Use the snapshot, skip the setup."""
    BUILD = "build"
    """Run the setup inside a capture and publish; before that, ask for the lease if `elected` was not asked yet."""
    WAIT = "wait"
    """Another one builds it: wait for the document, until the deadline."""
    INSTALL = "install"
    """Run the setup as if there were no BootSeer."""
    FAIL = "fail"
    """Do not start: `require` was asked for."""


REASONS: Mapping[str, str] = MappingProxyType(
    {
        "hit": "the snapshot of this request key is used",
        "hit-on-node": "the store does not answer; the snapshot is used as this node knows it from an earlier start",
        "hit-after-wait": "another start built the snapshot while this one waited for it",
        "no-snapshot": "there is no snapshot of this environment yet",
        "expired": "the snapshot is older than its age limit: it is built anew",
        "quarantined": "a job died while it imported, right after it got this snapshot: it is built anew, once",
        "unsigned": "signatures are required, and no trusted key has signed the snapshot",
        "no-key": "no snapshot can be used; a new one must be signed, and this start has no key for that",
        "broken": "what the store keeps as the snapshot's document cannot be one: it is built anew",
        "refresh": "a new snapshot was asked for",
        "builder-died": "the start that was building it stopped giving signs of life: this one took its place",
        "another-builds": "another start is building the snapshot: this one waits for it",
        "bypass": "no snapshot was wanted",
        "unkeyable": "something that the setup depends on cannot be put into a key, so that no snapshot can be trusted",
        "untrusted": "when the snapshot was built, the setup read files that the key does not know; declare them",
        "refused:<code>": "the snapshot was built for another platform; <code> is what differs",
        "other-version": "the snapshot was written by another version of BootSeer",
        "store-down": "the store does not answer or refuses, and this node does not know the snapshot",
        "no-lease": "the store does not let this start announce that it builds",
        "waited-too-long": "another start is still building the snapshot; the time to wait for it is over",
        "builder-gave-up": "the start that was building it ended without a snapshot",
        "conflict": "files on this node differ from what the snapshot would replace",
        "cannot-mount": "the snapshot can be neither mounted nor unpacked on this node",
        "damaged": "parts of the snapshot are missing in the store or are not what their digests say",
        "not-safe": "the setup does more than writing files, which no snapshot can repeat",
        "daemons": "processes that the setup left running could not be started again, or are not to be",
        "not-root": "the setup's changes could not be captured with the rights of this user",
        "failed": "an error of BootSeer",
    }
)
"""What each code means, for people. `refused:<code>` stands for all codes of the gate (`keys.gate`)."""
FALLBACKS = ("conflict", "cannot-mount", "damaged", "store-down", "not-safe", "daemons", "not-root", "failed")
"""Codes that `fell_back` takes, besides those of `refused`."""


Lookup = kind.Lookup[EnvironmentDocument]
"""What a look for the snapshot found."""
NOT_LOOKED = Lookup("none")
"""The store was not asked, because nothing that could be found would be used."""


DOCUMENTS = ("document", "replaces")
"""Fields of a decision that are documents."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer."""

    action: Action
    code: str
    """One of `REASONS`, or `refused:` and a code of the gate."""
    words: str
    """The reason for people, one line."""
    document: EnvironmentDocument | None = None
    """The snapshot to use, with `RESTORE`."""
    replaces: EnvironmentDocument | None = None
    """With `BUILD` and `WAIT`: the snapshot that is there and cannot be used; the new one takes its place."""
    replace: bool = False
    """With `BUILD`: whether a document that is there may be replaced (also one that could not be read)."""
    mode: Mode = "auto"

    def check(self) -> None:
        """Raises `UsageError` (exit code 1) for `FAIL`."""
        if self.action is Action.FAIL:
            raise UsageError(
                f"no environment snapshot: {self.words} ({self.code})",
                hint="start it once without --env require, or look at bootseer env key",
                exit_code=1,
            )


def decide(
    mode: Mode,
    found: Lookup,
    *,
    now_s: float,
    problems: tuple[str, ...] = (),
    refusal: tuple[str, str] | None = None,
    quarantined: str = "",
    may_publish: bool = True,
) -> Decision:
    """The first answer.

    `found` may be `NOT_LOOKED` with `bypass` and where there are problems; `problems` are the key's
    (`RequestKey.problems`), `refusal` is code and message of the gate for the document that was found, `quarantined`
    says why the document is suspected (`quarantine.Quarantine.why`), empty when it is not. Without `may_publish`
    signatures are required and there is no key: what is built could not be used, and would be in the way of others.
    """
    decision = _first(mode, found, now_s, problems, refusal, quarantined)
    if decision.action is Action.BUILD and not may_publish:
        if decision.code == "unsigned":
            decision = Decision(Action.INSTALL, decision.code, decision.words, mode=mode)
        else:
            decision = Decision(Action.INSTALL, "no-key", f"{decision.words}; {_NO_KEY}", mode=mode)
    return _required(decision, mode)


def elected(decision: Decision, lease: Literal["ours", "held", "unavailable"], words: str = "") -> Decision:
    """The answer to a `BUILD` once the lease was asked for; `words` name its holder, or say why it cannot be had."""
    if decision.action is not Action.BUILD or lease == "ours":
        return decision
    if lease == "held":
        return _of(decision, Action.WAIT, "another-builds", words)
    return _of(decision, Action.INSTALL, "no-lease", words)


def waited(
    decision: Decision,
    ended: Ended,
    *,
    now_s: float,
    document: EnvironmentDocument | None = None,
    refusal: tuple[str, str] | None = None,
    ours: bool = False,
    words: str = "",
) -> Decision:
    """The answer to a `WAIT` that has ended (`lease.Waited`).

    `document` is what was published, `refusal` the gate's opinion of it; `ours` tells that the lease is now this
    start's, so that it builds.
    """
    if ours:
        return _of(decision, Action.BUILD, ended, words)
    if ended != "published":
        return _of(decision, Action.INSTALL, ended, words)
    again = decide("auto", Lookup("found", document), now_s=now_s, refusal=refusal)
    if again.action is Action.RESTORE:
        return Decision(Action.RESTORE, "hit-after-wait", again.words, document, mode=decision.mode)
    # It has just been built: building it again would give the same.
    return Decision(Action.INSTALL, again.code, again.words, mode=decision.mode)


def fell_back(decision: Decision, code: str, words: str) -> Decision:
    """The answer when the snapshot could not be used, or the setup not be captured: one of `FALLBACKS`."""
    return _required(_of(decision, Action.INSTALL, code, words), decision.mode)


def _first(
    mode: Mode,
    found: Lookup,
    now_s: float,
    problems: tuple[str, ...],
    refusal: tuple[str, str] | None,
    quarantined: str,
) -> Decision:
    useless = _useless(mode, found, problems)
    if useless is not None:
        return Decision(Action.INSTALL, *useless, mode=mode)
    document = found.document
    if mode == "refresh":
        return Decision(Action.BUILD, mode, REASONS[mode], replaces=document, replace=True, mode=mode)
    if found.kind in ("broken", "unsigned"):
        return Decision(Action.BUILD, found.kind, found.why or REASONS[found.kind], replace=True, mode=mode)
    if document is None:
        return Decision(Action.BUILD, "no-snapshot", REASONS["no-snapshot"], mode=mode)
    return _judged(mode, document, found, now_s, refusal, quarantined)


def _useless(mode: Mode, found: Lookup, problems: tuple[str, ...]) -> tuple[str, str] | None:
    """Code and words where neither an old snapshot nor a new one can help."""
    if mode == "bypass":
        return mode, REASONS[mode]
    if problems:
        return "unkeyable", "; ".join(problems)
    if found.kind == "unreachable" and (found.document is None or mode == "refresh"):
        return "store-down", found.why or REASONS["store-down"]
    if found.kind == "other-version":
        # It may be what newer starts use: it is left alone, and nothing can be built beside it.
        return found.kind, found.why or REASONS[found.kind]
    return None


def _judged(
    mode: Mode,
    document: EnvironmentDocument,
    found: Lookup,
    now_s: float,
    refusal: tuple[str, str] | None,
    quarantined: str,
) -> Decision:
    if document.trust == "untrusted":
        paths = ", ".join(document.unaccounted[:_MAX_PATHS])
        words = f"{REASONS['untrusted']}: {paths}" if paths else REASONS["untrusted"]
        return Decision(Action.INSTALL, "untrusted", words, mode=mode)
    if refusal is not None:
        # Built here, it would be refused where it is used now, and so on in turns.
        return Decision(Action.INSTALL, _REFUSED + refusal[0], refusal[1], mode=mode)
    stale = "quarantined" if quarantined else "expired" if document.expired(now_s) else ""
    if not stale:
        if found.kind == "unreachable":
            words = f"{REASONS['hit-on-node']}: {found.why}" if found.why else REASONS["hit-on-node"]
            return Decision(Action.RESTORE, "hit-on-node", words, document, mode=mode)
        return Decision(Action.RESTORE, "hit", REASONS["hit"], document, mode=mode)
    words = quarantined or f"built {_age(now_s - document.built_s)} ago, may be {_age(document.max_age_s or 0)} old"
    if found.kind == "unreachable":
        return Decision(Action.INSTALL, stale, words, mode=mode)  # what is built now could not be published
    return Decision(Action.BUILD, stale, words, replaces=document, replace=True, mode=mode)


def _required(decision: Decision, mode: Mode) -> Decision:
    if mode != "require" or decision.action is Action.RESTORE:
        return decision
    return Decision(Action.FAIL, decision.code, decision.words, mode=mode)


def _of(decision: Decision, action: Action, code: str, words: str) -> Decision:
    building = action in (Action.BUILD, Action.WAIT)
    return Decision(
        action,
        code,
        words or REASONS.get(code, code),
        replaces=decision.replaces if building else None,
        replace=decision.replace and building,
        mode=decision.mode,
    )


def _age(seconds: float) -> str:
    if abs(seconds) >= 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if abs(seconds) >= 3600 else f"{seconds:.0f} s"
