"""The table of decisions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.env import MODES, Mode
from bootseer.env.life.decide import (
    FALLBACKS,
    REASONS,
    Action,
    Decision,
    Lookup,
    after_election,
    after_wait,
    decide,
    fall_back,
)
from bootseer.errors import UsageError
from env.life.samples import BUILT_S, document

NOW_S = BUILT_S + 1000
FOUND = document()
OLD = document(max_age_s=10.0)
NONE = Lookup("none")
DOWN = Lookup("unreachable", why="no answer")
HERE = Lookup("unreachable", FOUND, "no answer")
BROKEN = Lookup("broken", why="not JSON")
FORGED = Lookup("unsigned", why="not signed")
NO_KEY = {"may_publish": False}
NEWER = Lookup("other-version", why="another version")
REFUSAL = ("cpu", "built for x86-64-v4")

TABLE: list[tuple[Mode, Lookup, dict[str, Any], Action, str]] = [
    ("auto", Lookup("found", FOUND), {}, Action.RESTORE, "hit"),
    ("auto", Lookup("found", document(trust="unobserved")), {}, Action.RESTORE, "hit"),
    ("auto", HERE, {}, Action.RESTORE, "hit-on-node"),
    ("auto", NONE, {}, Action.BUILD, "no-snapshot"),
    ("auto", BROKEN, {}, Action.BUILD, "broken"),
    ("auto", NEWER, {}, Action.INSTALL, "other-version"),
    ("auto", DOWN, {}, Action.INSTALL, "store-down"),
    ("auto", Lookup("found", OLD), {}, Action.BUILD, "expired"),
    ("auto", Lookup("unreachable", OLD), {}, Action.INSTALL, "expired"),
    ("auto", Lookup("found", FOUND), {"refusal": REFUSAL}, Action.INSTALL, "refused:cpu"),
    ("auto", Lookup("found", OLD), {"refusal": REFUSAL}, Action.INSTALL, "refused:cpu"),
    ("auto", HERE, {"refusal": REFUSAL}, Action.INSTALL, "refused:cpu"),
    ("auto", Lookup("none"), {"problems": ("cannot read x",)}, Action.INSTALL, "unkeyable"),
    ("refresh", Lookup("none"), {"problems": ("cannot read x",)}, Action.INSTALL, "unkeyable"),
    ("refresh", Lookup("found", FOUND), {}, Action.BUILD, "refresh"),
    ("refresh", Lookup("found", FOUND), {"refusal": REFUSAL}, Action.BUILD, "refresh"),
    ("refresh", NONE, {}, Action.BUILD, "refresh"),
    ("refresh", BROKEN, {}, Action.BUILD, "refresh"),
    ("refresh", NEWER, {}, Action.INSTALL, "other-version"),
    ("refresh", HERE, {}, Action.INSTALL, "store-down"),
    ("auto", FORGED, {}, Action.BUILD, "unsigned"),
    ("auto", FORGED, NO_KEY, Action.INSTALL, "unsigned"),
    ("auto", NONE, NO_KEY, Action.INSTALL, "no-key"),
    ("auto", Lookup("found", OLD), NO_KEY, Action.INSTALL, "no-key"),
    ("auto", Lookup("found", FOUND), NO_KEY, Action.RESTORE, "hit"),
    ("refresh", FORGED, {}, Action.BUILD, "refresh"),
    ("refresh", Lookup("found", FOUND), NO_KEY, Action.INSTALL, "no-key"),
    ("require", FORGED, {}, Action.FAIL, "unsigned"),
    ("require", NONE, NO_KEY, Action.FAIL, "no-key"),
    ("require", Lookup("found", FOUND), {}, Action.RESTORE, "hit"),
    ("require", HERE, {}, Action.RESTORE, "hit-on-node"),
    ("require", NONE, {}, Action.FAIL, "no-snapshot"),
    ("require", DOWN, {}, Action.FAIL, "store-down"),
    ("require", Lookup("found", OLD), {}, Action.FAIL, "expired"),
    ("require", Lookup("found", FOUND), {"refusal": REFUSAL}, Action.FAIL, "refused:cpu"),
    ("require", Lookup("none"), {"problems": ("cannot read x",)}, Action.FAIL, "unkeyable"),
]


@pytest.mark.parametrize(("mode", "found", "more", "action", "code"), TABLE)
def test_what_was_found_and_asked_for_decides(
    mode: Mode, found: Lookup, more: dict[str, Any], action: Action, code: str
) -> None:
    decision = decide(mode, found, now_s=NOW_S, **more)
    assert (decision.action, decision.code, decision.mode) == (action, code, mode)
    assert decision.reason
    assert (action is Action.RESTORE) == (decision.document is not None)


@pytest.mark.parametrize(
    ("mode", "kind", "has_copy"),
    [("auto", "unreachable", False), ("refresh", "unreachable", True), ("auto", "other-version", False),
     ("auto", "broken", False), ("auto", "unsigned", False)],
)  # fmt: skip
def test_the_reason_is_what_the_lookup_found_or_else_the_meaning_of_the_code(
    mode: Mode, kind: Any, has_copy: bool
) -> None:
    copy = FOUND if has_copy else None
    assert decide(mode, Lookup(kind, copy, "no answer"), now_s=NOW_S).reason == "no answer"
    decision = decide(mode, Lookup(kind, copy), now_s=NOW_S)
    assert decision.reason == REASONS[decision.code]


def test_a_copy_on_this_node_is_used_with_the_reason_why_the_store_is_not() -> None:
    assert decide("auto", HERE, now_s=NOW_S).reason == f"{REASONS['hit-on-node']}: no answer"
    assert decide("auto", Lookup("unreachable", FOUND), now_s=NOW_S).reason == REASONS["hit-on-node"]


def test_a_start_without_a_key_names_it_unless_the_missing_signature_is_the_reason() -> None:
    assert decide("auto", FORGED, now_s=NOW_S, may_publish=False).reason == "not signed"
    words = decide("auto", NONE, now_s=NOW_S, may_publish=False).reason
    assert words == f"{REASONS['no-snapshot']}; a new one must be signed, and there is no key for that"


def test_a_snapshot_from_the_future_names_the_clocks() -> None:
    decision = decide("auto", Lookup("found", document(max_age_s=86400.0)), now_s=BUILT_S - 7200)
    assert (decision.action, decision.code) == (Action.BUILD, "expired")
    assert decision.reason == "built 2 h 00 min in the future by this node's clock: it or that of node-1 is wrong"


def test_every_combination_has_an_outcome_whose_code_is_explained() -> None:
    lookups = [NONE, DOWN, HERE, BROKEN, NEWER, FORGED, *(Lookup("found", each) for each in (FOUND, OLD))]
    modes = [mode for mode in MODES if mode != "bypass"]
    cases = itertools.product(modes, lookups, [None, REFUSAL], [(), ("cannot read x",)], [True, False])
    for mode, found, refusal, problems, may_publish in cases:
        decision = decide(
            mode,
            found,
            now_s=NOW_S,
            refusal=refusal,
            problems=problems,
            may_publish=may_publish,
        )
        assert may_publish or decision.action is not Action.BUILD
        assert decision.code in REASONS or decision.code.startswith("refused:")
        assert decision.action is not Action.WAIT
        # Suspicious snapshots are never used, and `require` never installs.
        if decision.action is Action.RESTORE:
            assert refusal is None
            assert not problems
            assert decision.document == FOUND
        if mode == "require":
            assert decision.action in (Action.RESTORE, Action.FAIL)


@pytest.mark.parametrize(
    ("found", "more", "replaces"),
    [
        (Lookup("found", OLD), {}, OLD),
        (BROKEN, {}, None),
        (FORGED, {}, None),
        (Lookup("found", FOUND), {"mode": "refresh"}, FOUND),
    ],
)
def test_what_is_no_answer_may_be_replaced(found: Lookup, more: dict[str, Any], replaces: object) -> None:
    decision = decide(**{"mode": "auto", "found": found, "now_s": NOW_S, **more})
    assert decision.replace
    assert decision.replaces == replaces
    assert not decide("auto", NONE, now_s=NOW_S).replace


def test_only_the_elected_one_builds() -> None:
    decision = decide("auto", Lookup("found", OLD), now_s=NOW_S)
    assert after_election(decision, "ours") == decision
    held = after_election(decision, "held", "node-3 builds")
    assert (held.action, held.code, held.reason, held.replaces) == (Action.WAIT, "another-builds", "node-3 builds", OLD)
    alone = after_election(decision, "unavailable", "read-only")
    assert (alone.action, alone.code, alone.replace) == (Action.INSTALL, "no-lease", False)
    assert alone.reason == "the store does not let this start announce that it builds: read-only"
    hit = decide("auto", Lookup("found", FOUND), now_s=NOW_S)
    assert after_election(hit, "held") == hit


def test_waiting_ends_with_a_snapshot_a_turn_or_an_installation() -> None:
    waiting = after_election(decide("auto", Lookup("found", OLD), now_s=NOW_S), "held", "node-3 builds")
    hit = after_wait(waiting, "published", now_s=NOW_S, document=FOUND)
    assert (hit.action, hit.code, hit.document) == (Action.RESTORE, "hit-after-wait", FOUND)
    refused = after_wait(waiting, "published", now_s=NOW_S, document=FOUND, refusal=REFUSAL)
    assert (refused.action, refused.code, refused.document) == (Action.INSTALL, "refused:cpu", None)
    turn = after_wait(waiting, "builder-died", now_s=NOW_S, ours=True)
    assert (turn.action, turn.code, turn.replaces, turn.replace) == (Action.BUILD, "builder-died", OLD, True)
    assert after_wait(waiting, "builder-gave-up", now_s=NOW_S, ours=True).action is Action.BUILD
    for ended in ("builder-gave-up", "waited-too-long", "no-lease"):
        decision = after_wait(waiting, ended, now_s=NOW_S)  # type: ignore[arg-type]
        assert (decision.action, decision.code, decision.reason) == (Action.INSTALL, ended, REASONS[ended])


@pytest.mark.parametrize("code", [*FALLBACKS, "refused:driver"])
def test_a_snapshot_that_cannot_be_used_becomes_an_installation_unless_it_is_required(code: str) -> None:
    for mode, action in (("auto", Action.INSTALL), ("require", Action.FAIL)):
        decision = fall_back(Decision(Action.RESTORE, "hit", "", FOUND, mode=mode), code, "why")  # type: ignore[arg-type]
        assert (decision.action, decision.code, decision.reason, decision.document) == (action, code, "why", None)


def test_a_start_without_its_required_snapshot_fails_with_exit_code_1() -> None:
    with pytest.raises(
        UsageError, match=r"no environment snapshot: .*there is no snapshot.* \(no-snapshot\)"
    ) as caught:
        decide("require", NONE, now_s=NOW_S).check()
    assert caught.value.exit_code == 1
    decide("require", Lookup("found", FOUND), now_s=NOW_S).check()


def test_the_words_name_the_age() -> None:
    old = replace(FOUND, max_age_s=86400.0 * 2)
    words = decide("auto", Lookup("found", old), now_s=BUILT_S + 3 * 86400).reason
    assert words == "built 72 h 00 min ago, may be 48 h 00 min old"
