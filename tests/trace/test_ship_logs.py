"""Growing logs reach the service completely, in order and once: despite rotation, truncation, kills and restarts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bootseer.cli.pattern import of_stages
from bootseer.errors import UsageError
from bootseer.service import schema
from bootseer.service.raw import parse_name
from bootseer.trace.event import decode
from bootseer.trace.ship import Link, event_lines, target
from bootseer.trace.ship_logs import Logs
from conftest_launch import BOOTSEER
from fleet import Fleet
from running_service import RunningService, running_service

pytestmark = pytest.mark.slow

OWN = """
# Output of our loader.
model_initialization.corpus=(?P<begin>corpus: reading)|(?P<end>corpus: ready)

model_initialization.vocabulary=vocabulary of (?P<key>\\S+) took (?P<s>[0-9.]+) s
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "own.patterns").write_text(OWN)
    with running_service(folder, patterns=tuple(of_stages([f"@{folder / 'own.patterns'}"]))) as running:
        yield running


class Killed(BaseException):
    """Simulates SIGKILL: nothing is done after it."""


class Mortal(Link):
    """A link whose process is killed occasionally, before or after the service has received a batch."""

    chance = random.Random()

    def send(self, *batch: Any) -> bool:
        moment = self.chance.random()
        if moment < 0.15:
            raise Killed
        sent = super().send(*batch)
        if moment < 0.3:
            raise Killed
        return sent


def arrived(service: RunningService, job: str) -> dict[str, list[bytes]]:
    """The lines of each log, in the order of its batches."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for name, data in service.raw().items():
        key = parse_name(name)
        if key is not None and key.folder == job:
            found.setdefault(key.sender.rpartition("-")[0], []).append((key.sequence, data))
    return {name: b"".join(data for _, data in sorted(parts)).splitlines() for name, parts in found.items()}


def test_events_in_the_records_of_docker_are_sent():
    lines = Fleet(1).lines()
    records = [json.dumps({"log": line.decode(), "stream": "stderr", "time": "2026-11-20T10:00:00Z"}) for line in lines]
    sent = event_lines("\n".join([*records, "[7]", '{"log": 7, "about": "@bootseer1 {"}', ""]).encode())
    assert [decode(line) for line in sent] == [decode(line) for line in lines]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_line_arrives_once_and_in_order(service, tmp_path, monkeypatch, seed):
    monkeypatch.setattr("bootseer.trace.ship.BATCH_BYTES", 300)
    monkeypatch.setattr("bootseer.trace.ship_logs._SETTLED_S", -1.0)
    chance, job = random.Random(seed), f"grows-{seed}"
    Mortal.chance = random.Random(seed)
    folder, state = tmp_path / "logs", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    where = target(service.url, {})
    links: list[Link] = []

    def started() -> Logs:
        links.append(Mortal(where))
        return Logs([str(folder)], job, links[-1], state)

    wanted: dict[str, list[bytes]] = {"a.log": [], "b.out": []}
    logs = started()
    for step in range(60):
        name = chance.choice(list(wanted))
        path = folder / name
        is_known = path.exists() and path.stat().st_size > 0
        for number in range(chance.randrange(6)):
            line = f"{name} line {step}.{number} {'x' * chance.randrange(60)}"
            with path.open("a") as file:
                file.write(line + "\n")
            wanted[name].append(line.encode())
        what = chance.randrange(5)
        if is_known and what < 3:  # rotated before its last lines were sent
            older = folder / f"{name}.1"
            older.unlink(missing_ok=True)
            if what:
                path.rename(older)
                if chance.random() < 0.5:
                    path.touch()
            else:
                shutil.copyfile(path, older)
                path.write_bytes(b"")
        else:
            with path.open("a") as file:
                file.write(f"half of line {step} ")
            wanted[name].append(f"half of line {step} and its end".encode())
            logs = looked(logs, started)
            with path.open("a") as file:
                file.write("and its end\n")
        logs = looked(logs, started)
    logs.close()
    for link in links:
        link.close()
    assert arrived(service, job) == {name: lines for name, lines in wanted.items() if lines}


@pytest.mark.parametrize("copied", [False, True], ids=["renamed", "copied"])
def test_what_was_rotated_several_times_between_two_looks_arrives_whole(service, tmp_path, monkeypatch, copied):
    monkeypatch.setattr("bootseer.trace.ship_logs._SETTLED_S", -1.0)
    (state := tmp_path / "state").mkdir()
    log, job = tmp_path / "app.log", f"rotated-{copied}"
    where = target(service.url, {})
    link = Link(where)
    logs = Logs([str(log)], job, link, state)
    log.write_text("0\n")
    logs.step()
    for number in range(1, 5):
        with log.open("a") as file:
            file.write(f"{number}\n")
        if number == 4:
            break
        for older in range(3, 1, -1):
            if (tmp_path / f"app.log.{older - 1}").exists():
                (tmp_path / f"app.log.{older - 1}").rename(tmp_path / f"app.log.{older}")
        if copied:
            shutil.copyfile(log, tmp_path / "app.log.1")
            log.write_bytes(b"")
        else:
            log.rename(tmp_path / "app.log.1")
        os.utime(tmp_path / "app.log.1", (number, number))
    for _ in range(5):
        logs.step()
    logs.close()
    link.close()
    assert arrived(service, job)["app.log"] == [b"%d" % number for number in range(5)]


def test_a_log_that_is_rotated_just_before_it_is_opened_arrives_whole(service, tmp_path, monkeypatch):
    (state := tmp_path / "state").mkdir()
    log, link = tmp_path / "app.log", Link(target(service.url, {}))
    logs = Logs([str(log)], "rotated-meanwhile", link, state)
    log.write_text("0\n")
    logs.step()
    log.write_text("0\n1\n")
    find = Logs._find_file

    def find_and_rotate(path, stream):
        place = find(path, stream)
        if log.exists():
            log.rename(tmp_path / "app.log.1")
        return place

    with monkeypatch.context() as patched:
        patched.setattr(Logs, "_find_file", staticmethod(find_and_rotate))
        logs.step()
    logs.step()
    logs.close()
    link.close()
    assert arrived(service, "rotated-meanwhile")["app.log"] == [b"0", b"1"]


def looked(logs: Logs, started: Callable[[], Logs]) -> Logs:
    """Calls `step` until nothing is new, and continues with the next process when one was killed."""
    while True:
        try:
            while logs.step():
                pass
        except Killed:
            logs.close()
            logs = started()
        else:
            return logs


def test_a_stage_of_a_sites_own_may_begin_in_one_batch_and_end_in_another(service, tmp_path):
    path, where = tmp_path / "node7.log", target(service.url, {})
    link = Link(where)
    logs = Logs([str(path)], "own/7", link, tmp_path)
    with pytest.raises(UsageError, match="another process"):
        Logs([str(path)], "own/7", link, tmp_path)
    told = (
        "corpus: reading",
        "step",
        "corpus: ready",
        "vocabulary of en took 2.5 s",
        "iteration 1/ 500 | consumed samples",
    )
    for second, line in enumerate(told):
        with path.open("a") as file:
            file.write(f"2026-11-20 10:00:{10 * second:02d},000 INFO {line}\n")
        assert logs.step()
    logs.close()
    link.close()
    until = time.monotonic() + 300
    while True:
        assert time.monotonic() < until
        rows = [row for row in service.rows(schema.start) if row.job == "own/7"]
        names = {row.id: row.name for row in service.rows(schema.stage)}
        took = {names[row.stage_id]: row.max_s for row in service.rows(schema.stage_start)
                if rows and row.start_id == rows[0].id}  # fmt: skip
        if took.get("model_initialization.vocabulary") == 2.5:
            break
        time.sleep(0.1)
    assert took["model_initialization.corpus"] == 20.0
    assert "node7" in {row.name for row in service.rows(schema.node)}


def test_a_log_that_cannot_be_read_is_reported_once(tmp_path, caplog):
    where = target("http://127.0.0.1:9", {})
    logs = Logs(["/proc/self/mem"], "moe", Link(where), tmp_path)
    for _ in range(2):
        assert not logs.step()
    logs.close()
    assert [line.getMessage() for line in caplog.records] == ["/proc/self/mem cannot be read: Input/output error"]


def test_a_sender_of_a_log_without_new_lines_is_not_forgotten(tmp_path):
    """After 30 days another sender deleted its position: once started again, it sent the whole log again."""
    link, month_ago_s = Link(target("http://127.0.0.1:9", {})), time.time() - 40 * 86_400
    state = tmp_path / "state"
    state.mkdir()
    silent = Logs([str(tmp_path / "silent.log")], "moe", link, state)
    (position,) = state.iterdir()
    (state / "of-an-ended-one.json").touch()
    for path in state.iterdir():
        os.utime(path, (month_ago_s, month_ago_s))
    silent.step()
    Logs([str(tmp_path / "other.log")], "moe", link, state).close()
    silent.close()
    assert position.exists()
    assert not (state / "of-an-ended-one.json").exists()


@pytest.mark.parametrize(("text", "said"), [("x", "line 1"), ("a.b=(", "line 1"), ("\n#\na.b=x", "line 3")])
def test_a_file_of_patterns_is_checked_line_by_line(text, said, tmp_path):
    (tmp_path / "patterns").write_text(text)
    with pytest.raises(UsageError, match=f"patterns, {said}"):
        of_stages([f"@{tmp_path / 'patterns'}"])
    with pytest.raises(UsageError, match="cannot be read"):
        of_stages([f"@{tmp_path / 'none'}"])


def test_following_a_log_and_a_pipe_until_ctrl_c(service, env, tmp_path):
    path = tmp_path / "train.log"
    path.write_text("one\n")
    env = {**env, "BOOTSEER_SHIP_STATE": str(tmp_path / "state")}
    command = [*BOOTSEER, "ship", "--follow", "--to", service.url, "--job", "ctrl-c"]

    def has(job: str, lines: dict[str, list[bytes]]) -> None:
        until = time.monotonic() + 300
        while {name.partition("-")[0]: said for name, said in arrived(service, job).items()} != lines:
            assert time.monotonic() < until, arrived(service, job)
            time.sleep(0.1)

    for text, number in (("two\n", signal.SIGKILL), ("three\n", signal.SIGINT)):
        with path.open("a") as file:
            file.write(text)
        with subprocess.Popen([*command, str(path)], env=env, stdout=subprocess.PIPE, text=True) as sender:
            has("ctrl-c", {"train.log": path.read_bytes().splitlines()})
            sender.send_signal(number)
            assert sender.wait(60) == (-number if number == signal.SIGKILL else 0)
            assert sender.stdout is not None
            assert ("the next call sends the rest" in sender.stdout.read()) == (number == signal.SIGINT)
    command[-1] = "piped"
    with subprocess.Popen([*command, "-"], env=env, stdin=subprocess.PIPE) as sender:
        assert sender.stdin is not None
        sender.stdin.write(b"first\n")
        sender.stdin.flush()
        has("piped", {"stdin": [b"first"]})
        sender.stdin.write(b"last, without an end")
        sender.stdin.close()
        assert sender.wait(60) == 0
    has("piped", {"stdin": [b"first", b"last, without an end"]})


@pytest.mark.parametrize(
    ("url", "env", "said"),
    [
        ("", {}, "no service is named"),
        ("ftp://x", {}, "not the address"),
        ("http://user:secret@host", {}, "not the address"),
        ("http://h", {"BOOTSEER_SERVICE_TOKEN_FILE": "/nonexistent"}, "cannot be read"),
        ("http://h", {"BOOTSEER_SERVICE_TOKEN": "a\nb"}, "has characters that a token cannot have"),
    ],
)
def test_an_address_or_token_that_cannot_be_used_is_reported(url, env, said):
    with pytest.raises(UsageError, match=said) as error:
        target(url, env)
    assert "secret" not in str(error.value)


def test_a_tokens_file_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "token"
    path.write_text("bst_x\n")
    path.chmod(0o640)
    env = {"BOOTSEER_SERVICE_TOKEN_FILE": str(path)}
    with pytest.raises(UsageError, match="read by others"):
        target("http://h", env)
    path.chmod(0o600)
    assert target("https://h/base/", env) == (True, "h", 443, "/base", "bst_x")
