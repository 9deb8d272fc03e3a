"""Times at the start of lines, and durations."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.report.foreign.times import EARLIEST_NS, LATEST_NS, line_time, parse_duration

NS = 10**9
BASE = int(datetime(2026, 11, 20, 17, 54, 26, tzinfo=UTC).timestamp()) * NS
REFERENCE_NS = BASE + 3600 * NS


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("2026-11-20T17:54:26.123456789Z stdout F hello", 123_456_789),
        ("2026-11-20T18:54:26.1+01:00 stderr P part", 100_000_000),
        ("2026-11-20T17:54:26Z stdout F ", 0),
        ("2026-11-20 17:54:26,123 - trainer - INFO - go", 123_000_000),
        ("2026-11-20T12:54:26-0500 node-1 slurmd[1]: x", 0),
        ("2026/11/20 17:54:26 from Go", 0),
        ("2026-11-20_17:54:26", 0),
        ("[2026-11-20T17:54:26.123] slurmctld: x", 123_000_000),
        ("[2026-11-20 17:54:26] node-0:1:2 [0] NCCL WARN x", 0),
        ("<34>1 2026-11-20T17:54:26.5Z host app - - - x", 500_000_000),
        ("W1120 17:54:26.123000 12345 torch/distributed/run.py:1] x", 123_000_000),
        ("I1120 17:54:26.123456    1234 kubelet.go:123] x", 123_456_000),
        ("I20261120 17:54:26.123456 1234 server.cc:1] x", 123_456_000),
        ("[rank3]:[E1120 17:54:26.404409069 ProcessGroupGloo.cpp:67] x", 404_409_069),
        ('time="2026-11-20T17:54:26.173864691Z" level=info', 173_864_691),
        ("Nov 20 17:54:26 node-1 sshd[12]: x", 0),
        ("<13>Nov 20 17:54:26 node-1 app: x", 0),
        ("Nov 20 17:54:26 node-1 k3s[9]: I1120 17:54:26.25    1 event.go:1] x", 250_000_000),
        ('Nov 20 17:54:26 n containerd[7]: time="2026-11-20T17:54:26.75Z" level=x', 750_000_000),
    ],
)
def test_known_forms(text: str, nanos: int) -> None:
    assert line_time(text, reference_ns=REFERENCE_NS) == BASE + nanos


@pytest.mark.parametrize(
    "label",
    [
        "[rank0]: ",
        "Train:  20%|##        | 2/10 [00:01<00:05,  1.50it/s]",
        "\r  0%|          | 0/3 [00:00<?, ?it/s]\r 33%|###       | 1/3 [00:01<00:02]\r                  \r",
        "[default12]:",
        "0: ",
        " 15: ",
        "[1,0]<stdout>:",
        "[pod/moe-0/train] ",
        "(RayWorkerWrapper pid=927) ",
        "\x1b[36m",
        "INFO ",
        "[INFO|trainer.py:2128] ",
        "\x1b[1;32m[rank0]:\x1b[0m WARNING: ",
    ],
)
def test_labels_before_the_time_are_passed_over(label: str) -> None:
    assert line_time(label + "2026-11-20T17:54:26Z x", reference_ns=REFERENCE_NS) == BASE


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-30T10:00:00Z",
        "2026-13-01T10:00:00Z",
        "2026-11-20T25:00:00Z",
        "2026-11-20T10:61:00Z",
        "2026-11-20T10:00:00+99:00",
        "2026-11-20T10:00:00+01:75",
        "9999-12-31T23:59:59-10:00",
        "0001-01-01T00:00:00+10:00",
        "1970-01-01T00:00:00Z",
        "W1331 17:54:26.123000 1 x",
        "Feb 30 17:54:26 host x: y",
        "17:54:26 no date",
        "loss 2026-11-20T17:54:26Z is not a prefix",
        "",
    ],
)
def test_impossible_or_absent_times_are_none(text: str) -> None:
    assert line_time(text, reference_ns=REFERENCE_NS) is None


def test_naive_times_are_of_the_machines_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        naive = ("2026-11-20 18:54:26,000 x", "W1120 18:54:26.000000 1 x", "Nov 20 18:54:26 host x: y")
        times = [line_time(text, reference_ns=REFERENCE_NS) for text in naive]
        times += [line_time(text, reference_ns=0) for text in ("2026-11-20 17:54:26 +0000 x", "2026-11-20T17:54:26Z x")]
    time.tzset()
    assert times == [BASE] * 5


@pytest.mark.parametrize(
    ("text", "reference", "year"),
    [
        ("W1231 23:59:59.900000 1 x", datetime(2026, 1, 1, tzinfo=UTC), 2025),
        ("Jan  1 00:00:01 host x: y", datetime(2026, 12, 31, 23, tzinfo=UTC), 2027),
        ("W0229 12:00:00.000000 1 x", datetime(2026, 4, 1, tzinfo=UTC), 2028),
        ("W0229 12:00:00.000000 1 x", datetime(2025, 3, 1, tzinfo=UTC), 2024),
    ],
)
def test_a_missing_year_is_the_nearest(text: str, reference: datetime, year: int) -> None:
    wall_ns = line_time(text, reference_ns=int(reference.timestamp()) * NS)
    assert wall_ns is not None
    assert datetime.fromtimestamp(wall_ns // NS, UTC).year == year


def test_a_missing_year_needs_a_reference() -> None:
    assert line_time("W1120 17:54:26.123000 1 x", reference_ns=0) is None


@given(st.datetimes(datetime(2000, 1, 2), datetime(2099, 12, 30)), st.integers(0, 999_999_999))
def test_iso_times_come_back_to_the_nanosecond(moment: datetime, nanos: int) -> None:
    text = f"{moment:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z x"
    seconds = int(moment.replace(microsecond=0, tzinfo=UTC).timestamp())
    assert line_time(text, reference_ns=0) == seconds * NS + nanos


@given(st.text(), st.integers(-(2**70), 2**70))
def test_any_text_gives_a_plausible_time_or_none(text: str, reference_ns: int) -> None:
    wall_ns = line_time(text, reference_ns=reference_ns)
    assert wall_ns is None or EARLIEST_NS <= wall_ns < LATEST_NS


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("796ms", 796 * 10**6),
        ("1m2.3s", 62_300_000_000),
        ("1h2m3s", 3_723 * NS),
        ("1.041015996s", 1_041_015_996),
        ("1.5µs", 1_500),
        ("0.58ms", 580_000),
        ("1m 02s", 62 * NS),
        ("0s", 0),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "12", "s", "1x", "-1s", "1s!", "x1s", "999999h", "1s-2s"])
def test_what_is_no_plausible_duration_is_none(text: str) -> None:
    assert parse_duration(text) is None
