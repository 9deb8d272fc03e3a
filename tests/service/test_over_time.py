"""Slower starts, nodes that are last too often, and late nodes, equally from a service and from a folder."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm
from bootseer.cli.fleet import _from_service
from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.service.deadlines import Deadlines
from bootseer.service.histogram import CLASSES, class_of
from bootseer.service.over_time import band, exported, now, since_day
from bootseer.service.rows import DAY_NS
from bootseer.service.schema import CLOSED, OPEN, batch, live, start
from bootseer.service.upkeep import roll_up
from conftest_launch import BOOTSEER
from fleet import EPOCH_NS, INSTALL, Fleet
from running_service import running_service

HOSTILE = "x;reboot"


def fleets(*names: str) -> list[Fleet]:
    """Eight starts of a job, the last of which is slower; one node is always last. `names` of the nodes have the
    start's number at `{}`."""
    first_s = time.time() - EPOCH_NS / 1e9 - 8 * 3600
    return [
        Fleet(6, job="moe", attempt=number, seed=number, begin_s=first_s + number * 3600,
              names=[name.format(number) for name in names],
              work_of={(2, INSTALL): 250.0 if number == 7 else 100.0})
        for number in range(8)
    ]  # fmt: skip


def told(*words: str, **env: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER")}
    done = warm.bootseer([*words, "--json"], cwd=Path.cwd(), env={**kept, **env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_service_and_folder_tell_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    with running_service(tmp_path / "data") as service:
        for fleet in fleets():
            data = b"".join(fleet.lines())
            (folder / f"{fleet.attempt}.events").write_bytes(data)
            assert (
                service.post(
                    "/v1/lines", data, x_bootseer_sender="n", x_bootseer_sequence=str(fleet.attempt)
                ).status_code
                == 202
            )
        service.rows(start, 8)
        until = time.monotonic() + 30
        while not all(row.done for row in service.rows(batch)) and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.1)
        with service.service.database.write() as connection:  # as if half a minute later
            connection.execute(start.update().values(state=CLOSED))
        for day in {row.day for row in service.rows(start)}:  # type: ignore[attr-defined]
            roll_up(service.service.database, day)
        asked = {"BOOTSEER_SERVICE": service.url}
        answers = [(told("fleet", **asked), told("history", "moe", **asked))]
        missing = subprocess.run(
            [*BOOTSEER, "watch", "never", "--service", service.url], capture_output=True, text=True, check=False
        )
        assert (missing.returncode, "--wait" in missing.stderr) == (1, True)
    answers.append((told("fleet", str(folder)), told("history", "moe", str(folder))))
    for fleet_, history in answers:
        assert [row["node"] for row in fleet_["lemons"]] == ["node-0002"]
        assert [row["attempt"] for row in history["starts"] if row["slower"]] == [7]
        worst = history["changed"]["stages"][0]
        assert worst["max_s"] - worst["before_s"] == pytest.approx(150, abs=2)
        assert worst["stage"].startswith("environment_setup")
    for name in ("teams", "buckets", "stages", "lemons", "failures"):
        assert answers[0][0][name] == answers[1][0][name]


def test_a_name_that_lines_shorten_finds_its_starts(tmp_path: Path) -> None:
    name = "moe" * 100
    (tmp_path / "0.events").write_bytes(b"".join(Fleet(2, job=name, begin_s=time.time() - EPOCH_NS / 1e9).lines()))
    found = told("history", name, str(tmp_path))
    assert [row["job"][:240] for row in found["starts"]] == [name[:240]]


def test_pods_of_several_starts_are_nodes_of_one_name(tmp_path: Path) -> None:
    """Unless pods of one start share their machine: then it is unknown which of them is slow because of it."""
    for machines, expected in ((6, ["gpu-2"]), (3, [])):
        folder = tmp_path / str(machines)
        folder.mkdir()
        pods = [f"gpu-{node % machines}/0000000{node}-0000-4000-8000-00000000000{{}}" for node in range(6)]
        for fleet in fleets(*pods):
            (folder / f"{fleet.attempt}.events").write_bytes(b"".join(fleet.lines()))
        found = told("fleet", str(folder))["lemons"]
        assert [row["node"] for row in found] == expected
        assert exported(found, "kubernetes").count("kubectl label node gpu-2 ") == len(expected)


def test_a_start_in_progress_is_open_in_the_history(tmp_path: Path) -> None:
    """Not "truncated", like a start that was killed."""
    fleet = Fleet(3, job="moe", begin_s=time.time() - EPOCH_NS / 1e9 - 60, killed_in={1: INSTALL})
    (tmp_path / "0.events").write_bytes(b"".join(fleet.lines()))
    env = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER")}
    shown = warm.bootseer(["history", "moe", str(tmp_path)], cwd=Path.cwd(), env=env).stdout
    assert ("open" in shown, "truncated" in shown) == (True, False)
    unknown = b"".join(fleet.lines()).replace(b'"gpus"', b'"other"')  # not 0.0 GPU-hours
    (tmp_path / "0.events").write_bytes(unknown)
    told_by_team = warm.bootseer(["fleet", str(tmp_path)], cwd=Path.cwd(), env=env).stdout
    assert "; 1 of the starts without a GPU count" in told_by_team
    assert re.search(r"^- +1 +- +- *$", told_by_team, re.MULTILINE), told_by_team


def test_late_nodes_of_open_starts_are_reported(tmp_path: Path) -> None:
    with running_service(tmp_path / "data") as service:
        data = b"".join(Fleet(4, job="moe", killed_in={1: INSTALL}).lines())
        assert service.post("/v1/lines", data, x_bootseer_sender="n", x_bootseer_sequence="0").status_code == 202
        (row,) = service.rows(start, 1)
        hist = [0] * CLASSES
        hist[class_of(60.0)] = 20
        missing = {"node": "node-0001", "rank": -1, "stage": INSTALL, "seconds": 101.0, "pid": 0, "stack": ""}
        moment = {"barrier": "process_group", "arrived": 3, "expected": 4, "missing": [missing]}
        with service.service.database.write() as connection:
            connection.execute(start.update().values(state=OPEN))
            connection.execute(live.update().values(moment=json.dumps(moment)))
        known = Deadlines([(row.bucket, row.kind, row.cache_state, INSTALL, hist)])  # type: ignore[attr-defined]
        # What it has cached is not known yet: it may be one of the cold starts, not one without techniques.
        without, cold = [0] * CLASSES, [0] * CLASSES
        without[class_of(2.0)] = cold[class_of(200.0)] = 20
        hists = (("off", without), ("miss", cold))
        mixed = Deadlines([(row.bucket, row.kind, state, INSTALL, one) for state, one in hists])  # type: ignore[attr-defined]
        with service.service.database.read() as connection:
            assert now(connection, mixed, "moe")[0]["late"] == []
            (open_start,) = now(connection, known, "moe")
            assert now(connection, known, "other") == []
    assert open_start["line"].startswith("3 of 4 at process_group; missing: node-0001 (environment_setup.install, ")
    assert [late["node"] for late in open_start["late"]] == ["node-0001"]


@given(st.lists(st.floats(1, 1e4), min_size=5, max_size=20))
def test_usual_values_are_within_the_band(values: list[float]) -> None:
    middle, limit = band(values)
    assert min(values) <= middle <= max(values)
    assert limit >= middle * 1.1 * (1 - 1e-9)


@pytest.mark.parametrize("num", [5, 20])
@pytest.mark.parametrize("varies", [0.05, 0.15])
def test_a_start_like_those_before_it_is_seldom_slower(num: int, varies: float) -> None:
    """With three deviations for any number, 8 % of the starts after five and 2 % of those after twenty were slower."""
    rng = random.Random(1)
    durations = [[rng.lognormvariate(4, varies) for _ in range(num + 1)] for _ in range(4000)]
    assert sum(newest > band(before)[1] for newest, *before in durations) / len(durations) < 0.018


def test_an_answer_of_another_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PermanentError, match="is not a BootSeer service"):
            _from_service("fleet", {}, f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["http://starts..example:8765", "http://127.0.0.1:1/\u00e9"])
def test_an_address_that_cannot_be_encoded_is_one_line(address: str) -> None:
    with pytest.raises(TransientError, match=r"does not answer: .*(codec|label empty or too long)"):
        _from_service("fleet", {}, address)


def test_names_that_are_no_hosts_are_not_exported() -> None:
    rows = [{"node": name, "last": 5, "starts": 8} for name in ("node-1", HOSTILE, "-x", "a b", "node.2", "n\n3")]
    assert exported(rows, "slurm") == "--exclude=node-1,node.2"
    assert exported(rows, "kubernetes").count("kubectl") == 2
    assert exported(rows, "drain").splitlines() == [
        f"scontrol update NodeName={name} State=DRAIN Reason='bootseer: last in 5 of 8 starts'"
        for name in ("node-1", "node.2")
    ]
    assert exported([{"node": HOSTILE}], "slurm") == ""


def test_since() -> None:
    assert since_day("7d", 20 * DAY_NS + 1) == 14
    assert since_day("12h", 20 * DAY_NS + 1) == 19, "yesterday's evening"
    assert since_day("1970-01-03", 0) == 2
    for wrong in ("", "7", "d7", "1970-13-01", "7d; x"):
        with pytest.raises(UsageError, match="7d, 4w, 12h or 2026-11-01"):  # the service answers with this line
            since_day(wrong, 0)
