"""The gate: which snapshot may be used for which key and on which node, with stable codes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.keys.key import FORMAT, RequestKey, gate

COMPONENTS = {
    "python": "cpython-3.11.7.cpython-311-x86_64-linux-gnu.so",
    "system": "sha256:" + "a" * 64,
    "architecture": "x86_64",
    "cpu": "x86-64-v3",
    "libc": "glibc 2.36",
    "gpus": "8.0, 9.0",
    "driver": "550",
    "requirements reqs.txt": "sha256:" + "b" * 64 + " 3 lines",
}
PLATFORM: dict[str, Any] = {"format": FORMAT, "architecture": "x86_64", "driver": "550.54.15"}
KEY = RequestKey("0" * 64, COMPONENTS, {}, {}, (), (), PLATFORM)


def test_a_snapshot_of_the_same_key_and_platform_passes() -> None:
    assert gate(COMPONENTS, PLATFORM, KEY) is None


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_snapshot_whose_components_are_not_those_of_the_key_is_refused_by_the_name(name: str) -> None:
    for components in (COMPONENTS | {name: "x"}, {other: COMPONENTS[other] for other in COMPONENTS if other != name}):
        refusal = gate(components, PLATFORM, KEY)
        assert refusal is not None
        assert refusal.code == name.partition(" ")[0]
        assert name in refusal.message


def test_a_component_that_the_key_has_not_is_refused() -> None:
    refusal = gate(COMPONENTS | {"tenant": "other"}, PLATFORM, KEY)
    assert refusal is not None
    assert refusal.code == "tenant"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("format", {"format": 2}),
        ("format", {"format": None}),
        ("driver", {"driver": "550.60.1"}),
        ("driver", {"driver": "550.54.16"}),
        ("driver", {"driver": "new"}),
    ],
)
def test_a_snapshot_of_another_format_or_a_newer_driver_is_refused_by_its_code(
    code: str, wanted: dict[str, Any]
) -> None:
    refusal = gate(COMPONENTS, PLATFORM | wanted, KEY)
    assert refusal is not None
    assert refusal.code == code
    assert "\n" not in refusal.message


@pytest.mark.parametrize("driver", ["550.40.07", "550.54.15", "", None])
def test_a_node_takes_what_was_built_with_an_older_driver_or_none(driver: str | None) -> None:
    assert gate(COMPONENTS, PLATFORM | {"driver": driver}, KEY) is None


def test_a_snapshot_of_a_node_with_a_driver_is_refused_where_there_is_none() -> None:
    refusal = gate(COMPONENTS, PLATFORM, RequestKey("0" * 64, COMPONENTS, {}, {}, (), (), {"driver": ""}))
    assert refusal is not None
    assert refusal.code == "driver"


def test_the_message_cannot_forge_lines() -> None:
    for components in (
        COMPONENTS | {"python": "/x\nbootseer: all is well" + "y" * 500},
        COMPONENTS | {"x\nbootseer: all is well" + "y" * 500: "1"},
    ):
        refusal = gate(components, PLATFORM, KEY)
        assert refusal is not None
        assert "\n" not in refusal.code + refusal.message
        assert len(refusal.message) < 400


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
    st.dictionaries(st.sampled_from(["format", "driver"]), _VALUES),
)
def test_a_forged_document_never_raises(components: dict[str, str], platform: dict[str, Any]) -> None:
    gate(components, platform, KEY)
    gate(COMPONENTS, {"format": FORMAT, **platform}, KEY)
