"""Policies: which files are striped, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy, encode_policy, parse_policy
from bootseer.errors import BootseerError, CorruptError, PermanentError, UsageError

_MIB = 1 << 20


@given(st.integers(1, 4 << 30), st.integers(1, 9), st.sampled_from([1, 4, 64]))
def test_a_segment_has_no_more_stripes_than_chunks_and_fits_into_its_parts(size: int, stripes: int, part: int) -> None:
    policy = Policy(stripes=stripes, part_bytes=part * _MIB)
    length = min(size, policy.segment_bytes)
    used = policy.stripes_for(length)
    assert length <= used * policy.part_bytes
    assert 1 <= used <= min(stripes, -(-length // _MIB))


@pytest.mark.parametrize(
    ("size_bytes", "stripes"), [(1, 1), (7 * _MIB, 1), (8 * _MIB, 2), (16 * _MIB, 4), (1 << 40, 4)]
)
def test_a_small_file_has_fewer_stripes(size_bytes: int, stripes: int) -> None:
    assert Policy().stripes_for(size_bytes) == stripes


def test_files_without_a_benefit_are_not_striped() -> None:
    assert not Policy().is_striped(0)
    assert not Policy().is_striped(7 * _MIB)
    assert Policy().is_striped(8 * _MIB)
    assert not Policy(stripes=1).is_striped(1 << 40)
    assert Policy(parity=True).is_striped(2 * _MIB)
    assert not Policy(parity=True).is_striped(_MIB)


def test_a_policy_survives_a_round_trip() -> None:
    policy = Policy(stripes=8, parity=True, replication=2, part_bytes=128 * _MIB, min_bytes_per_stripe=_MIB)
    assert parse_policy(encode_policy(policy)) == policy
    assert parse_policy(encode_policy(Policy())) == Policy()


@pytest.mark.parametrize(
    "values",
    [
        {"stripes": 1}, {"stripes": 64}, {"part_bytes": _MIB}, {"part_bytes": 1 << 40}, {"replication": 1},
        {"replication": 32}, {"min_bytes_per_stripe": _MIB},
    ],
)  # fmt: skip
def test_the_limits_themselves_are_valid(values: dict[str, int]) -> None:
    policy = Policy(**values)  # type: ignore[arg-type]
    assert parse_policy(encode_policy(policy)) == policy


def test_a_segment_has_256_mib_by_default() -> None:
    assert Policy().segment_bytes == 256 * _MIB


@pytest.mark.parametrize(
    "values",
    [
        {"stripes": 0}, {"stripes": 65}, {"part_bytes": 5}, {"part_bytes": _MIB + 1}, {"part_bytes": 1 << 50},
        {"part_bytes": (1 << 40) + _MIB}, {"replication": 0}, {"replication": 33}, {"min_bytes_per_stripe": 1},
        {"min_bytes_per_stripe": _MIB - 1},
    ],
)  # fmt: skip
def test_invalid_values_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(UsageError) as caught:
        Policy(**values)  # type: ignore[arg-type]
    assert caught.value.hint
    with pytest.raises(CorruptError):
        parse_policy(json.dumps({"schema": "bootseer.stripes/1", **values}).encode())


def test_a_stored_policy_has_at_most_64_kib(files: Files, job: Path) -> None:
    policy = Policy(stripes=2)
    files.set_policy("", policy)
    path = job / ".stripes" / "policy.json"
    stored = path.read_bytes()
    path.write_bytes(stored.ljust(1 << 16))
    assert Files(files.place).policy("") == policy
    path.write_bytes(stored.ljust((1 << 16) + 1))
    with pytest.raises(BootseerError):
        Files(files.place).policy("")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        b'{"schema": "x"}',
        b'{"schema": "bootseer.stripes/1", "stripes": "4"}',
        b'{"schema": "bootseer.stripes/1", "parity": 1}',
        b'{"schema": "bootseer.stripes/1", "stripes": true}',
    ],
)
def test_invalid_policies_are_refused(text: bytes) -> None:
    with pytest.raises(BootseerError):
        parse_policy(text)


def test_a_later_schema_is_reported_as_such() -> None:
    with pytest.raises(PermanentError, match="stripes/2"):
        parse_policy(b'{"schema": "bootseer.stripes/2"}')
