"""`bootseer report --follow`: the nodes missing at the barrier now, from growing files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.analysis.live import Live
from bootseer.report.inputs import sources
from bootseer.report.log_scan import Growing
from bootseer.trace.event import Event, encode
from conftest_launch import BOOTSEER
from fleet import EPOCH_NS, INSTALL, NS, Fleet
from running_service import running_service
from startups import EPOCH_S, began, span

pytestmark = pytest.mark.slow

SLOW = 3


def started(**more: object) -> list[Event]:
    """A start in which node 3 has been installing until now, while the others wait for it."""
    fleet = Fleet(8, work_of={(SLOW, INSTALL): 100.0}, begin_s=(time.time_ns() - EPOCH_NS) / NS - 130, **more)  # type: ignore[arg-type]
    return sorted(fleet.events(), key=lambda event: event.wall_ns)


def written(events: list[Event], path: Path) -> None:
    with path.open("ab") as file:
        file.writelines(encode(event) for event in events)


def split(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """The events before node 3 has installed, and the others."""
    at = next(i for i, e in enumerate(events) if e.node == "node-0003" and e.stage == INSTALL and e.phase == "end")
    return events[:at], events[at:]


@pytest.fixture
def follow(env, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    def start(*words: str, **more: object) -> subprocess.Popen[str]:
        words = (*BOOTSEER, "report", "--follow", *words)
        return subprocess.Popen(
            words,
            env=env,
            cwd=tmp_path,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},  # type: ignore[call-overload]
        )

    return start


def test_the_missing_node_is_named_and_the_report_follows(follow, tmp_path, alarm):
    before, after = split(started())
    log = tmp_path / "job.log"
    written(before, log)
    with follow("job.log") as process:
        line = process.stdout.readline()
        assert re.fullmatch(
            r"7 of 8 nodes at process_group; missing: node-0003 \(environment_setup.install, \d\d\.\d s\)\n", line
        )
        written(after, log)
        out, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert out.startswith("8 of 8 nodes began training\nStartup took ")


def test_watch_of_a_folder_ends_when_training_has_begun(env, tmp_path, alarm):
    (tmp_path / "spool").mkdir()
    events = started()
    written(events, tmp_path / "spool" / "job.jsonl")
    words = [*BOOTSEER, "watch", events[0].job, "spool", "--json"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["over"] is True


def test_json_lines_and_an_interrupt(follow, tmp_path, alarm):
    written(split(started(silent=frozenset({5})))[0], tmp_path / "job.log")
    with follow("job.log", "--json") as process:
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().strip() == "bootseer: interrupted"
    assert process.returncode == 130
    for line in lines:
        assert line["schema"] == "bootseer.follow/1"
        assert (line["arrived"], line["expected"], line["nodes_heard"], line["over"]) == (6, 8, 7, False)
        assert [one["node"] for one in line["missing"]] == ["node-0003"]
    assert lines[1]["missing"][0]["seconds"] > lines[0]["missing"][0]["seconds"]


def test_a_terminal_shows_it_in_place_and_is_left_as_it_was(follow, tmp_path, alarm):
    written(split(started())[0], tmp_path / "job.log")
    above, below = pty.openpty()
    with follow("job.log", stdout=below, stderr=below) as process:
        os.close(below)
        seen = b""
        while seen.count(b"node-0003") < 2:
            seen += os.read(above, 4096)
        process.send_signal(signal.SIGINT)
        while b"interrupted" not in seen:
            seen += os.read(above, 4096)
    os.close(above)
    assert process.returncode == 130
    assert b"\x1b[2K" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


def test_a_job_that_begins_later_and_standard_input(follow, env, tmp_path, alarm):
    events = started()
    with follow("--wait", "moe") as process:
        assert process.stdout.readline() == "no node seen yet\n"
        folder = Path(env["BOOTSEER_SPOOL"], "moe", "attempt-0")
        folder.mkdir(parents=True)
        written(events, folder / "n.1.1.events")
        assert "Startup took" in process.communicate()[0]
    with follow("-", stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "no node seen yet\n"
        text = b"".join(encode(event) for event in split(events)[0]).decode()
        assert "missing: node-0003" in process.communicate(text)[0]
    assert process.returncode == 0


def test_a_log_that_is_away_while_it_is_rotated(follow, tmp_path, alarm):
    early, late = split(started())
    path = tmp_path / "n.log"
    written(early, path)
    with follow(str(path)) as process:
        assert "missing: node-0003" in process.stdout.readline()
        path.rename(tmp_path / "n.log.1")
        time.sleep(2.5)  # files are checked every second
        written(late, path)
        assert "Startup took" in process.communicate()[0]


def test_a_name_that_no_job_has_is_an_error_at_once(follow, env, alarm):
    for words, said in (
        (("moe",), "moe: no such file"),
        ((), "no job has run under `bootseer run` on this machine yet"),
    ):
        with follow(*words) as process:
            out, errors = process.communicate()
        assert (process.returncode, out) == (2, "")
        assert said in errors
    for job in ("moe", "dense"):
        Path(env["BOOTSEER_SPOOL"], job, "attempt-0").mkdir(parents=True)
    for word, near in (("meo", "moe, ...; "), ("xyz", "dense, moe; ")):
        with follow(word) as process:
            out, errors = process.communicate()
        assert (process.returncode, out) == (2, "")
        assert f"hint: jobs here: {near}`bootseer report --follow --wait` waits for one" in errors


def test_a_real_job_whose_rank_comes_late(follow, run, tmp_path, alarm):
    (tmp_path / "late.py").write_text(
        "import gc, os, time, torch.distributed as dist\n"
        "time.sleep(6 * int(os.environ['RANK']))\n"
        "dist.init_process_group('gloo')\n"
        "import bootseer; bootseer.training_began()\n"
        "gc.freeze()\n"  # otherwise garbage collection of PyTorch's objects at exit takes 0.6 s of CPU time
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "late.py"]
    with follow("--wait", "late") as process:
        assert run("run", "-q", "--job", "late", "--", *torchrun).returncode == 0
        out, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert re.search(r"^1 of 2 ranks at process_group; missing: \S+ rank 1 \(after model_\S+, [\d.]+ s\)$", out, re.M)
    assert "2 of 2 ranks began training\nStartup took " in out


def test_each_byte_is_read_once(tmp_path):
    events = started()
    log = tmp_path / "job.log"
    growing = Growing()
    log.write_bytes(b"")
    found = []
    for place in range(0, len(events), 10):
        text = b"".join(encode(event) for event in events[place : place + 10])
        for half in (text[:100], text[100:]):
            with log.open("ab") as file:
                file.write(half)
            found += growing.look(sources([str(log)]))
    assert found == events
    assert growing.result.bytes == log.stat().st_size
    log.unlink()
    written(events[:1], log)  # rotated
    assert growing.look(sources([str(log)])) == events[:1]
    (tmp_path / "old.gz").write_bytes(gzip.compress(encode(events[0])))
    assert [len(growing.look(sources([str(tmp_path / "old.gz")]))) for _ in range(2)] == [1, 0]


def test_restarts_attempts_and_ends_replace_what_was_before():
    def said(*batches: list[Event]) -> str:
        live = Live(None, None, None)
        for batch in batches:
            live.feed(batch)
        return live.moment(time.time_ns()).text()

    before, after = split(started())
    again = [event._replace(attempt=1) for event in before]
    assert said(before, after, again).startswith("7 of 8 nodes at process_group; missing: node-0003 (")
    assert said(again, after).startswith("7 of 8 nodes at process_group")
    ranks = [event._replace(restart=1) for event in before if event.stage.startswith("model_") and event.rank != 4]
    assert said(before, after, ranks).startswith("6 of 8 nodes at process_group; missing: node-0003")
    assert said(before, ranks, before).startswith("7 of 8 nodes at process_group"), "the attempt was restarted"
    run = next(event for event in before if event.stage == "run" and event.node == "node-0003")
    ended = run._replace(phase="end", outcome="failed", attrs={"exit_code": 7})
    assert "node-0003 (ended with exit code 7" in said(before, [ended])
    assert "40 more: 40 in image_loading" in said(
        [e for e in Fleet(44).events() if e.stage in ("run", "image_loading") and e.phase == "begin"]
    )


@pytest.mark.parametrize("new", ["c", "b"])
def test_a_replaced_node_counts_from_the_restart_that_it_joins(new):
    """The launcher of a new or rebooted node counts restarts from 0; the node that it replaced sends no more events."""
    two = {"attrs": {"num_nodes": 2}}
    first = [e for node in "ab" for e in (*span(0, None, "run", node=node, **two), *began(60, node=node, rank=0))]
    again = span(3700, None, "model_initialization", node="a", rank=0, restart=1)
    joined = [*span(3710, None, "run", node=new, **two), *span(3711, None, INSTALL, node=new)]
    live = Live(None, None, None)
    live.feed(first + again + joined)
    assert live.moment((EPOCH_S + 3721) * NS).text() == (
        "2 of 2 nodes seen; slowest: a rank 0 (model_initialization, 21.0 s), "
        f"{new} (environment_setup.install, 10.0 s)"
    )
    live.feed(began(3760, node="a", rank=0, restart=1))
    assert live.moment((EPOCH_S + 3761) * NS).text().startswith(f"1 of 2 nodes began training; missing: {new} (env")
    live.feed(began(3760, node=new, rank=1))
    assert live.moment((EPOCH_S + 3761) * NS).over
    live.feed(span(7200, None, "model_initialization", node=new, rank=1, restart=1))
    live.feed(span(7200, None, "model_initialization", node="a", rank=0, restart=2))
    assert (live.moment(0).restart, live.moment(0).text()[:15]) == (2, "2 of 2 nodes se")
    elastic = Live(None, None, None)
    elastic.feed([e for node in "abc" for e in began(60, node=node, rank=0)])
    elastic.feed(
        [*span(90, None, "model_initialization", node="a", rank=0, restart=1), *began(99, node="b", restart=1)]
    )
    assert not elastic.moment(0).over
    elastic.feed(began(99, node="a", rank=0, restart=1))
    assert elastic.moment(0).over


def test_hostile_events_neither_end_it_nor_reach_the_terminal(follow, tmp_path, alarm):
    event = started()[0]._replace(job="j\x1b[2J", node="n\x1b]0;x\x07", phase="begin", stage="run", span="a" * 16)
    odd = {"barrier": "\x1b[31mx#y", "world_size": 2**30, "num_nodes": True}
    wait = event._replace(stage="model_initialization.x", span="b" * 16, rank=0, attrs=odd)
    later = wait._replace(span="c" * 16, rank=1, wall_ns=-5, attrs={"barrier": 7})
    ended = event._replace(phase="end", node="q", attrs={"exit_code": "\x1b[2J"})
    written([event, wait, later, ended], tmp_path / "job.log")
    with follow("job.log") as process:
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate()[1]
    assert " at \ufffd[31mx#y; missing: " in line
    assert line.rstrip("\n").isprintable()


def test_a_service_is_watched_until_training_began_everywhere(env, tmp_path, alarm):
    before, after = split(started())
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    watch = [*BOOTSEER, "watch", before[0].job, "--wait", "--service"]
    with running_service(tmp_path / "data") as service:

        def send(events: list[Event]) -> None:
            headers = {"x_bootseer_sender": "rack", "x_bootseer_sequence": str(len(events))}
            assert service.post("/v1/lines", b"".join(map(encode, events)), **headers).status_code == 202

        send(before[:9])
        above, below = pty.openpty()
        seen = b""
        with (
            subprocess.Popen([*watch, service.url], env=env, stdout=below, stderr=below) as shown,
            subprocess.Popen([*watch, service.url, "--json"], env=env, stdout=subprocess.PIPE, text=True) as told,
            subprocess.Popen([*watch, service.url], env=env, **quiet) as asked,
        ):
            os.close(below)
            told.stdout.readline()
            send(before[9:])
            while b"7 of 8 nodes at process_group; missing: node-0003" not in seen:
                seen += os.read(above, 4096)
            asked.send_signal(signal.SIGINT)
            assert asked.communicate()[1].strip() == "bootseer: interrupted"
            assert asked.returncode == 130
            lines = [json.loads(told.stdout.readline())]
            while not lines[-1]["moment"]["missing"]:
                lines.append(json.loads(told.stdout.readline()))
            send(after)
            with contextlib.suppress(OSError):  # the other end is closed
                while more := os.read(above, 4096):
                    seen += more
            lines += [json.loads(line) for line in told.stdout]
        os.close(above)
    assert shown.returncode == told.returncode == 0
    assert b"8 of 8 nodes began training" in seen
    assert re.search(rb"training began after [^\r]+\r\n$", seen), seen[-300:]
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert {line["schema"] for line in lines} == {"bootseer.watch/1"}
    assert lines[-1]["line"] == "8 of 8 began training"
    assert [one["node"] for line in lines for one in line["moment"]["missing"]][:1] == ["node-0003"]
