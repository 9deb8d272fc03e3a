"""Decide what a start does about its environment, and why. Does no I/O.

A start decides up to four times:

    decide          after the lookup in the store: restore, install, or build?
    after_election  after asking for the lease: build, wait for the builder, or install without publishing?
    after_wait      after waiting: restore the builder's snapshot, build in its place, or install?
    fall_back       when the snapshot could not be used after all

All problems lead to `INSTALL`, which is slower and correct; only mode `require` turns it into `FAIL`, before anything
was installed. `REASONS` has the meaning of each code; codes are stable, as they appear in events and reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from bootseer.artifact import kind
from bootseer.env import Mode
from bootseer.env.document import EnvironmentDocument
from bootseer.errors import UsageError
from bootseer.units import format_seconds

Ended = Literal["published", "builder-died", "builder-gave-up", "waited-too-long", "no-lease"]
"""How a wait for the builder ends."""
_REFUSED = "refused:"
_NO_KEY = "a new one must be signed, and there is no key for that"


class Action(Enum):
    """What the start does next."""

    RESTORE = "restore"
    """Use the snapshot, skip the setup."""
    BUILD = "build"
    """Run the setup in a capture and publish; the result of `decide` first needs the lease (`after_election`)."""
    WAIT = "wait"
    """Another start builds it: wait for its document, until the deadline."""
    INSTALL = "install"
    """Run the setup without publishing."""
    FAIL = "fail"
    """Do not start: mode `require`."""


REASONS: Mapping[str, str] = {
    "hit": "the snapshot of this request key is used",
    "hit-on-node": "the store does not answer; the snapshot's copy on this node, from an earlier start, is used",
    "hit-after-wait": "another start built the snapshot while this one waited for it",
    "no-snapshot": "there is no snapshot of this environment yet",
    "expired": "the snapshot is older than its age limit: it is built anew",
    "unsigned": "signatures are required, and no trusted key has signed the snapshot",
    "no-key": "no snapshot can be used; a new one must be signed, and this start has no key for that",
    "broken": "what the store keeps as the snapshot's document cannot be one: it is built anew",
    "refresh": "a new snapshot was asked for",
    "builder-died": "the start that was building it stopped giving signs of life: this one took its place",
    "another-builds": "another start is building the snapshot: this one waits for it",
    "bypass": "no snapshot was wanted",
    "unkeyable": "something that the setup depends on cannot be put into a key, so that no snapshot can be trusted",
    "unsafe": "the setup does what a snapshot cannot repeat, as an earlier start found: no start waits for a builder",
    "refused:<code>": "the snapshot was built for another platform or another key; <code> is what differs",
    "other-version": "the snapshot was written by another version of BootSeer",
    "store-down": "the store does not answer or refuses, and this node does not know the snapshot",
    "no-lease": "the store does not let this start announce that it builds",
    "waited-too-long": "another start is still building the snapshot; the time to wait for it is over",
    "builder-gave-up": "the start that was building it ended without a snapshot",
    "conflict": "files on this node differ from what the snapshot would replace",
    "cannot-mount": "the snapshot can be neither mounted nor unpacked on this node",
    "damaged": "parts of the snapshot are missing in the store or are not what their digests say",
    "daemons": "processes that the setup left running could not be started again, or are not to be",
    "not-root": "the setup's changes could not be captured with the rights of this user",
    "failed": "an error of BootSeer",
}
"""Meaning of each code. `refused:<code>` stands for all codes of the gate (`keys.key.gate`)."""
FALLBACKS = ("unsafe", "conflict", "cannot-mount", "damaged", "store-down", "daemons", "not-root", "failed")
"""Codes for `fall_back`, besides those of `refused`."""


Lookup = kind.Lookup[EnvironmentDocument]
"""The result of a lookup."""


class Decision(Struct, frozen=True):
    """What to do, and why."""

    action: Action
    code: str
    """One of `REASONS`, or `refused:` and a code of the gate."""
    reason: str
    """The reason as text, one line."""
    document: EnvironmentDocument | None = None
    """With `RESTORE`: the snapshot to use."""
    replaces: EnvironmentDocument | None = None
    """With `BUILD` and `WAIT`: the existing, unusable snapshot that the new one replaces."""
    replace: bool = False
    """With `BUILD`: whether an existing document may be replaced, including an unreadable one."""
    mode: Mode = "auto"

    def check(self) -> None:
        """Raises `UsageError` (exit code 1) for `FAIL`."""
        if self.action is Action.FAIL:
            raise UsageError(
                f"no environment snapshot: {self.reason} ({self.code})",
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
    may_publish: bool = True,
) -> Decision:
    """The first decision of a start that looks for a snapshot: with `bypass` none does.

    `found` may be `Lookup("none")` with `problems`, which are the key's (`RequestKey.problems`); `refusal` is code and
    message of the gate for the document. Without `may_publish` signatures are required and this start has no key: its
    snapshot would be unusable, and would prevent others from publishing one.
    """
    decision = replace(next(_applicable(mode, found, now_s, problems, refusal)), mode=mode)
    if decision.action is Action.BUILD and not may_publish:
        unsigned = decision.code == "unsigned"
        words = decision.reason if unsigned else f"{decision.reason}; {_NO_KEY}"
        decision = Decision(Action.INSTALL, "unsigned" if unsigned else "no-key", words, mode=mode)
    return _with_required_mode(decision)


def after_election(decision: Decision, lease: Literal["ours", "held", "unavailable"], words: str = "") -> Decision:
    """The decision after `BUILD`, once the lease was requested; `words`: its holder, or why there is none."""
    if decision.action is not Action.BUILD or lease == "ours":
        return decision
    if lease == "held":
        return _follow_up(decision, Action.WAIT, "another-builds", words)
    return _follow_up(decision, Action.INSTALL, "no-lease", f"{REASONS['no-lease']}: {words}")


def after_wait(
    decision: Decision,
    ended: Ended,
    *,
    now_s: float,
    document: EnvironmentDocument | None = None,
    refusal: tuple[str, str] | None = None,
    ours: bool = False,
    words: str = "",
) -> Decision:
    """The decision after `WAIT`, with the result of the wait (`election.WaitResult`).

    `document` is what was published, `refusal` the gate's refusal of it; `ours`: whether this start now has the lease.
    """
    if ours:
        return _follow_up(decision, Action.BUILD, ended, words)
    if ended != "published":
        return _follow_up(decision, Action.INSTALL, ended, words)
    again = decide("auto", Lookup("found", document), now_s=now_s, refusal=refusal)
    if again.action is Action.RESTORE:
        return Decision(Action.RESTORE, "hit-after-wait", again.reason, document, mode=decision.mode)
    # It has just been built: a rebuild would give the same.
    return Decision(Action.INSTALL, again.code, again.reason, mode=decision.mode)


def fall_back(decision: Decision, code: str, words: str) -> Decision:
    """The decision after the snapshot could not be used, the setup not be captured, or when it is known to be not
    snapshot-safe (`unsafe`); `code` is one of `FALLBACKS`."""
    return _with_required_mode(_follow_up(decision, Action.INSTALL, code, words))


def _applicable(
    mode: Mode,
    found: Lookup,
    now_s: float,
    problems: tuple[str, ...],
    refusal: tuple[str, str] | None,
) -> Iterator[Decision]:
    """The decisions that apply: the first one counts."""
    document, state = found.document, found.kind
    if problems:
        yield Decision(Action.INSTALL, "unkeyable", "; ".join(problems))
    if state == "unreachable" and (document is None or mode == "refresh"):
        yield Decision(Action.INSTALL, "store-down", found.why or REASONS["store-down"])
    if state == "other-version":  # left for starts with that version: there is one snapshot for a key
        yield Decision(Action.INSTALL, state, found.why or REASONS[state])
    if mode == "refresh":
        yield Decision(Action.BUILD, mode, REASONS[mode], replaces=document, replace=True)
    if state in ("broken", "unsigned"):
        yield Decision(Action.BUILD, state, found.why or REASONS[state], replace=True)
    if document is None:
        yield Decision(Action.BUILD, "no-snapshot", REASONS["no-snapshot"])
        return
    if refusal is not None:
        # A rebuild would be refused where this one is used, and the two platforms would replace it in turns.
        yield Decision(Action.INSTALL, _REFUSED + refusal[0], refusal[1])
    if document.expired(now_s):
        age_s, builder = now_s - document.built_s, document.builder
        age, limit = format_seconds(abs(age_s)), format_seconds(document.max_age_s or 0)
        words = f"built {age} ago, may be {limit} old"
        if age_s < 0:
            words = f"built {age} in the future by this node's clock: it or that of {builder} is wrong"
        if state == "unreachable":  # a new one could not be published now
            yield Decision(Action.INSTALL, "expired", words)
        yield Decision(Action.BUILD, "expired", words, replaces=document, replace=True)
    if state == "unreachable":
        words = REASONS["hit-on-node"] + (f": {found.why}" if found.why else "")
        yield Decision(Action.RESTORE, "hit-on-node", words, document)
    yield Decision(Action.RESTORE, "hit", REASONS["hit"], document)


def _with_required_mode(decision: Decision) -> Decision:
    if decision.mode != "require" or decision.action is Action.RESTORE:
        return decision
    return Decision(Action.FAIL, decision.code, decision.reason, mode=decision.mode)


def _follow_up(decision: Decision, action: Action, code: str, words: str) -> Decision:
    building = action in (Action.BUILD, Action.WAIT)
    return Decision(
        action,
        code,
        words or REASONS.get(code, code),
        replaces=decision.replaces if building else None,
        replace=decision.replace and building,
        mode=decision.mode,
    )
