"""The gate: which snapshot may be used on which node, with codes that stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.keys import gate

NODE: dict[str, Any] = {
    "format": gate.FORMAT,
    "architecture": "x86_64",
    "cpu": "x86-64-v3",
    "libc": "glibc 2.36",
    "python": "cpython-3.11.7.cpython-311-x86_64-linux-gnu.so",
    "prefix": "/usr",
    "gpus": ["8.0", "9.0"],
    "driver": "550.54.15",
    "cuda": "12.4",
    "base": "host abc",
}


def test_a_snapshot_of_the_same_platform_passes() -> None:
    assert gate.check(NODE, NODE) is None


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("format", {"format": 2}),
        ("format", {"format": None}),
        ("architecture", {"architecture": "aarch64"}),
        ("cpu", {"cpu": "x86-64-v4"}),
        ("libc", {"libc": "glibc 2.39"}),
        ("libc", {"libc": "musl 1.2"}),
        ("python", {"python": "cpython-3.11.8.cpython-311-x86_64-linux-gnu.so"}),
        ("prefix", {"prefix": "/opt/conda"}),
        ("gpu", {"gpus": ["8.0"]}),
        ("gpu", {"gpus": []}),
        ("driver", {"driver": "560.1"}),
        ("driver", {"driver": "550.54.16"}),
        ("driver", {"driver": "new"}),
        ("cuda", {"cuda": "12.6"}),
        ("base", {"base": "host abd"}),
    ],
)
def test_a_snapshot_of_another_platform_is_refused_by_its_code(code: str, wanted: dict[str, Any]) -> None:
    refusal = gate.check(NODE | wanted, NODE)
    assert refusal is not None
    assert refusal.code == code
    assert "\n" not in refusal.message


@pytest.mark.parametrize(
    "wanted",
    [
        {"driver": "550.40.07"},
        {"driver": "550.54.15"},
        {"driver": ""},
        {"python": None, "prefix": None, "libc": None},
        {"uid_ranges": [[0, 1]]},
    ],
)
def test_a_newer_driver_and_missing_facts_are_accepted(wanted: dict[str, Any]) -> None:
    assert gate.check(NODE | wanted, NODE) is None


def test_a_snapshot_for_a_gpu_is_refused_where_there_is_none() -> None:
    refusal = gate.check(NODE, NODE | {"gpus": [], "driver": "", "cuda": ""})
    assert refusal is not None
    assert refusal.code == "gpu"


def test_the_message_cannot_forge_lines() -> None:
    refusal = gate.check(NODE | {"prefix": "/x\nbootseer: all is well" + "y" * 500}, NODE)
    assert refusal is not None
    assert "\n" not in refusal.message
    assert len(refusal.message) < 250


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NODE, _VALUES)))
def test_a_forged_platform_never_raises(wanted: dict[str, Any]) -> None:
    gate.check(wanted, NODE)
    gate.check({"format": gate.FORMAT, **wanted}, NODE)
