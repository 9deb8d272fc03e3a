"""The sender, with a real service and with failing ones: nothing is lost, and only events are sent."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.service import schema
from bootseer.trace import ship
from bootseer.trace.event import decode
from bootseer.trace.ship import Link, Shipper, Spools, target
from conftest_launch import BOOTSEER
from fleet import Fleet
from otlp_collector import collector
from running_service import RunningService, running_service

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "data") as running:
        yield running


@pytest.fixture
def link(request: pytest.FixtureRequest) -> Callable[..., Link]:
    def made(url: str, token: str = "") -> Link:
        one = Link(target(url, {"BOOTSEER_SERVICE_TOKEN": token}), timeout_s=5)
        request.addfinalizer(one.close)
        return one

    return made


def spool(root: Path, job: str = "moe", num_nodes: int = 3) -> tuple[Path, list[bytes]]:
    """An attempt's folder with a file for each node, and all of its lines."""
    folder = root / job / "attempt-0"
    folder.mkdir(parents=True)
    lines = b"".join(Fleet(num_nodes, job=job).lines()).splitlines(keepends=True)
    for line in lines:
        node = json.loads(line.partition(b" ")[2])["node"]
        with (folder / f"{node}.7.9.events").open("ab") as file:
            file.write(line)
    return folder, sorted(line.rstrip() for line in lines)


def until_sent(shipper: Shipper) -> None:
    until = time.monotonic() + 20
    while not shipper.all_sent():
        shipper.step()
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_spool_arrives_once_while_it_grows_and_the_folders_time_stays(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool")
    os.utime(folder, (1, 1))
    shipper = Shipper(str(folder), link(service.url))
    until_sent(shipper)
    assert folder.stat().st_mtime == 1  # it identifies the latest attempt
    path = next(folder.glob("*.events"))
    more = lines[0].replace(b'"span":"', b'"span":"f')
    with path.open("ab") as file:
        file.write(more[:30])
        file.flush()
        shipper.step()
        file.write(more[30:] + b"\n")
    until_sent(shipper)
    shipper.close()
    assert service.raw_lines() == sorted([*lines, more])
    assert len(service.batches(2)) == 2


def test_only_events_leave_the_node(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool", num_nodes=1)
    secret = tmp_path / "secret"
    secret.write_text("@bootseer1 password=hunter2\n")
    (folder / "linked.1.1.events").symlink_to(secret)
    os.mkfifo(folder / "pipe.1.1.events")
    (folder / "other.1.1.events").write_bytes(b"token=hunter2\n" + b"x" * (3 << 20) + b"\n" + secret.read_bytes())
    shipper = Shipper(str(folder), link(service.url))
    until_sent(shipper)
    shipper.close()
    assert service.raw_lines() == lines


def test_a_file_that_cannot_be_opened_for_a_moment_is_sent_later(service, tmp_path, monkeypatch, link):
    """No descriptor is left, or a file server is restarted."""
    folder, lines = spool(tmp_path / "spool", num_nodes=1)
    shipper, opened, turns = Shipper(str(folder), link(service.url)), os.open, itertools.count()

    def open_sometimes(path, *more, **named):
        if str(path).endswith(".events") and next(turns) < 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", open_sometimes)
    assert not shipper.step()
    assert not shipper.all_sent()
    until_sent(shipper)
    shipper.close()
    assert service.raw_lines() == lines


def test_a_file_that_can_never_be_read_keeps_no_other_file_back(service, tmp_path, monkeypatch, link):
    """As on a damaged disk."""
    folder, _ = spool(tmp_path / "spool", num_nodes=3)
    damaged, *others = sorted(folder.glob("*.events"))
    shipper, opened = Shipper(str(folder), link(service.url)), os.open

    def open_others(path, *more, **named):
        if str(path) == str(damaged):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", open_others)
    assert shipper.step()
    assert not shipper.all_sent()
    shipper.close()
    assert service.raw_lines() == sorted(line for path in others for line in path.read_bytes().splitlines())


def test_killed_at_any_point_nothing_is_lost_or_counted_twice(service, tmp_path, monkeypatch, link):
    """A crash before or after each step of a batch: another sender continues from the files on the disk."""
    folder, lines = spool(tmp_path / "spool", num_nodes=6)
    rng = random.Random(3)

    class Killed(BaseException):
        pass

    def at_times(method):
        def call(*args):
            if rng.random() < 0.15:
                raise Killed
            done = method(*args)
            if rng.random() < 0.15:
                raise Killed
            return done

        return call

    monkeypatch.setattr(Shipper, "_save", at_times(Shipper._save))
    monkeypatch.setattr(Link, "send", at_times(Link.send))
    kills = 0
    while True:
        monkeypatch.setattr(ship, "BATCH_BYTES", rng.randrange(1500, 2500))  # the files may have grown meanwhile
        shipper = Shipper(str(folder), link(service.url))
        try:
            until_sent(shipper)
            break
        except Killed:
            kills += 1
        finally:
            shipper.close()
    assert kills > 5
    came = service.raw_lines()
    assert sorted(set(came)) == lines
    assert len(came) > len(lines)
    until = time.monotonic() + 60
    while True:
        reports = [json.loads(zstandard.decompress(row.json)) for row in service.rows(schema.start_report, 1)]
        if reports[0]["input"]["events"] == len(came):
            break
        assert time.monotonic() < until
        time.sleep(0.1)
    once = analyse(map(decode, lines), Options()).to_json()
    assert reports[0]["input"]["duplicates"] == len(came) - len(lines)
    assert {**reports[0], "input": None} == {**once, "input": None}


def test_one_sends_and_the_next_goes_on(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool")
    first, second = (Shipper(str(folder), link(service.url)) for _ in range(2))
    assert first.step()
    assert not second.step()
    assert not second.all_sent()
    first.close()
    assert second.all_sent()
    assert service.raw_lines() == lines
    second.close()


def test_another_service_gets_all_events(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool")
    with running_service(tmp_path / "other") as other:
        for url in (service.url, other.url):
            shipper = Shipper(str(folder), link(url))
            until_sent(shipper)
            shipper.close()
        assert other.raw_lines() == lines
    assert service.raw_lines() == lines


def test_a_damaged_position_or_a_folder_without_any_costs_nothing_but_work(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool")
    state = '{"version": %d, "files": %s}'
    inodes = {entry.name: [entry.inode(), -(10**30)] for entry in os.scandir(folder)}
    forged = [
        (state % (ship._VERSION, text)).encode() for text in ('{"n": [1, Infinity]}', "[]", "7", json.dumps(inodes))
    ]
    for content in (b"", b"[1", b"\xff", b"[" * 100_000, *forged):
        (folder / ".shipped").write_bytes(content)
        shipper = Shipper(str(folder), link(service.url))
        until_sent(shipper)
        shipper.close()
    (folder / ".shipped").unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / ".shipped").hardlink_to(victim)  # put into a user's folder, for an agent that runs as root
    shipper = Shipper(str(folder), link(service.url))
    until_sent(shipper)
    shipper.close()
    assert victim.read_text() == "precious"
    assert set(service.raw_lines()) == set(lines)


def test_answers_decide_when_the_next_request_comes(tmp_path, link):
    folder, _ = spool(tmp_path / "spool", num_nodes=1)
    answers = [
        (503, {"Retry-After": "7"}, b""),
        (429, {}, b""),
        (401, {}, b'{"error":"a token is needed"}'),
        (202, {}, b"{}"),
    ]
    with collector(lambda number: answers[number]) as server:
        sender = link(server.url, "bst_x")
        shipper = Shipper(str(folder), sender)
        waits = []
        for _ in answers:
            shipper.step()
            assert not shipper.step()  # no request before its time
            waits.append(sender.not_before - time.monotonic())
            refused, sender.not_before = sender.is_refused, 0.0
            assert refused == (len(waits) == 3)
        assert [5 < waits[0] < 9, 0 < waits[1] < 3, 40 < waits[2] < 80] == [True] * 3
        assert sender.problem == ""
        headers = [headers for _, headers, _ in server.requests]
        assert {header["authorization"] for header in headers} == {"Bearer bst_x"}
        assert len({body for _, _, body in server.requests}) == 1
        shipper.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, {}, b"<html>Welcome"), "HTTP 200: not the answer of a BootSeer service"),
        ((308, {"Location": "https://h/v1/lines?key=x"}, b""), "HTTP 308: redirects to 'https://h/v1/lines'"),
    ],
)
def test_a_page_of_another_server_is_not_taken_for_the_answer_of_a_service(answer, said, tmp_path, link):
    """Otherwise the events would be marked as sent, and lost for the service."""
    folder, _ = spool(tmp_path / "spool", num_nodes=1)
    with collector(lambda _: answer) as server:
        sender = link(server.url)
        shipper = Shipper(str(folder), sender)
        assert not shipper.step()
        assert (shipper.all_sent(), sender.is_refused, sender.problem) == (False, True, said)
        shipper.close()


def test_a_next_request_at_no_time_is_ignored(tmp_path, link):
    folder, _ = spool(tmp_path / "spool", num_nodes=1)
    with collector(lambda _: (202, {"X-Bootseer-Next": "nan"}, b"{}")) as server:
        sender = link(server.url)
        shipper = Shipper(str(folder), sender)
        assert shipper.step()
        assert sender.next_s == 2.0
        shipper.close()


def test_a_token_that_is_replaced_in_its_file_is_read_again(tmp_path, monkeypatch):
    """An agent runs for months, and must still send after its first token was revoked."""
    path = tmp_path / "token"
    path.write_text("bst_old")
    path.chmod(0o600)
    answers = [(401, {}, b"{}"), (202, {}, b"{}")]
    with collector(lambda number: answers[number]) as server:
        monkeypatch.setenv("BOOTSEER_SERVICE_TOKEN_FILE", str(path))
        link = Link(target(server.url, os.environ))
        path.write_text("bst_new")
        assert [link.send(b"x", "s", 0) for _ in answers] == [False, True]
        link.close()
        tokens = [headers["authorization"] for _, headers, _ in server.requests]
    assert tokens == ["Bearer bst_old", "Bearer bst_new"]


def test_spools_of_many_jobs_are_sent_and_gone_ones_forgotten(service, tmp_path, link):
    lines = [line for job in ("a", "b", "c") for line in spool(tmp_path / "spool", job)[1]]
    sender = Spools([str(tmp_path / "spool")], link(service.url))
    assert sender.waiting() == 3
    sender.step()
    assert sender.waiting() == 0
    assert service.raw_lines() == sorted(lines)
    shutil.rmtree(tmp_path / "spool" / "a")
    sender.step()
    assert sender.waiting() == 0
    assert len(sender._changed) == 2  # an agent runs for months
    sender.close()


def test_a_line_that_comes_after_a_poll_is_sent_at_the_next_step(service, tmp_path, link):
    folder, lines = spool(tmp_path / "spool")
    sender = Spools([str(tmp_path / "spool")], link(service.url))
    sender._changed[str(folder)] = (-ship._IDLE_S, time.monotonic())  # idle, and polled just now
    with next(folder.glob("*.events")).open("ab") as file:
        file.write(lines[0] + b"\n")
    assert sender.waiting() == 1
    sender.step()
    assert sender.waiting() == 0


def test_more_folders_than_a_process_may_have_open_are_sent_once(service, env, tmp_path):
    lines = [line for number in range(60) for line in spool(tmp_path / "spool", f"job-{number}", num_nodes=1)[1]]
    words = ["bash", "-c", 'ulimit -n 48; exec "$@"', "-", *BOOTSEER, "ship", "--json", "--to", service.url]
    for batches in (60, 0):
        done = subprocess.run([*words, str(tmp_path / "spool")], env=env, check=True, capture_output=True)
        assert json.loads(done.stdout)["batches"] == batches
    assert service.raw_lines() == sorted(lines)


def test_many_folders_that_take_no_position_are_sent_once(service, run, tmp_path):
    """For example folders of a read-only archive."""
    for number in range(ship._MOST_OPEN + 3):
        (spool(tmp_path / "spool", f"job-{number}", num_nodes=1)[0] / ".shipped").mkdir()
    done = run("ship", "--json", "--to", service.url, "--within", "5", str(tmp_path / "spool"))
    assert (done.returncode, json.loads(done.stdout)["batches"]) == (0, ship._MOST_OPEN + 3)


def test_a_folder_with_a_huge_file_does_not_hold_up_the_others(service, tmp_path, link):
    huge = tmp_path / "spool" / "a" / "attempt-0"
    huge.mkdir(parents=True)
    with (huge / "a.7.9.events").open("wb") as file:
        file.truncate(2 * ship._MOST_BATCHES * ship.BATCH_BYTES)  # a hole
    _, lines = spool(tmp_path / "spool")
    sender = Spools([str(tmp_path / "spool")], link(service.url))
    sender.step()
    assert sorted(b"".join(service.raw().values()).splitlines()) == lines
    assert sender.waiting() == 1


def test_a_run_arrives_with_its_end_and_the_command_sees_no_token(service, run, tmp_path):
    _, token = service.service.tokens.add("ingest", team="llm")
    more = {"BOOTSEER_SERVICE_TOKEN": token, "BOOTSEER_SERVICE": service.url}
    script = "env; echo 'raise SystemExit' > bootseer.py"  # the sender must import nothing from the working folder
    done = run("run", "--job", "moe", "--trace-to", "service", "--", "sh", "-c", script, more=more)
    assert done.returncode == 0
    assert token not in done.stdout
    until = time.monotonic() + 300
    while not any(b'"run"' in line and b'"end"' in line for line in service.raw_lines()):
        assert time.monotonic() < until
        time.sleep(0.1)
    (start,) = service.rows(schema.start, 1)
    assert (start.job, start.team) == ("moe", "llm")


def test_what_a_short_command_of_a_slurm_step_did_has_arrived_at_its_end(service, run):
    """Slurm ends all processes of a step with it: a sender that continues would be killed."""
    more = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "moe"}
    assert run("run", "--trace-to", f"service={service.url}", "--", "true", more=more).returncode == 0
    assert any(b'"command"' in line and b'"end"' in line for line in service.raw_lines())


@pytest.fixture
def hung() -> Iterator[str]:
    """Accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.parametrize("fault", ["hung", "gone", "wrong token", "no address"])
def test_a_service_that_fails_costs_the_job_nothing_and_the_spool_stays(fault, run, env, hung, tmp_path):
    """The end of the run does not wait for the service: its request timeout of 10 s would show in the comparison."""
    url = {"hung": hung, "gone": "http://127.0.0.1:9", "no address": "nonsense"}.get(fault, "")
    began = time.monotonic()
    run("run", "--job", "plain", "--", "true", more={"BOOTSEER_SPOOL": str(tmp_path / "plain")})
    plain_s = time.monotonic() - began
    command = {"gone": "sleep 0.1", "no address": ":", "wrong token": "until [ -e asked ]; do sleep 0.1; done; sleep 1"}

    def refuse(_: object) -> tuple[int, dict[str, str], bytes]:
        (tmp_path / "asked").touch()
        return 401, {}, b'{"error":"a token is needed"}'

    with collector(refuse) as server:
        began = time.monotonic()
        words = ["--job", "moe", "--trace-to", f"service={url or server.url}"]
        done = run("run", *words, "--", "sh", "-c", command.get(fault, "sleep 2"))
        took_s = time.monotonic() - began
    assert (done.returncode, done.stdout) == (0, "")
    assert took_s < 7 + 3 * plain_s
    said = {"wrong token": "a token is needed", "no address": "not the address"}.get(fault, "bootseer report moe")
    assert said in done.stderr
    assert len(list(Path(env["BOOTSEER_SPOOL"]).rglob("*.events"))) == 1


def test_the_verb_sends_what_is_left_and_says_what_it_cannot(service, run, env, tmp_path):
    _, lines = spool(Path(env["BOOTSEER_SPOOL"]))
    gone = run("ship", "--to", "http://127.0.0.1:9", "--within", "0.5")
    assert (gone.returncode, "completely to 127.0.0.1:9: Connection refused" in gone.stderr) == (1, True)
    quiet = run("ship", "--quiet", "--to", "http://127.0.0.1:9", "--within", "0.5")
    assert (quiet.returncode, quiet.stdout + quiet.stderr) == (1, ""), "a script may delete what was sent"
    done = run("ship", "--to", service.url, "--json")
    assert json.loads(done.stdout)["waiting"] == 0
    every = run("ship", "--to", service.url, "--job", "moe")  # all spools, as this job's log
    assert (every.returncode, "--job needs the files" in every.stderr) == (2, True)
    assert service.raw_lines() == lines
    assert run("ship", "--to", service.url, "nothing-here").returncode == 2
    (tmp_path / "job.log").write_bytes(b"hello\n" + b"\n".join(b"stderr F " + line for line in lines))
    for _ in range(2):
        assert run("ship", "--to", service.url, "job.log").returncode == 0
    assert len(service.raw()) == 2
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(b"\n".join(lines[:9]) + os.urandom(1000))[:-500])
    cut = run("ship", "--to", service.url, "--json", "cut.log.gz")
    assert (cut.returncode, json.loads(cut.stdout)["lines"], "truncated" in cut.stderr) == (1, 9, True)


def test_a_file_is_given_up_if_the_service_wants_it_only_after_the_time_is_over(run, tmp_path):
    """It must not sleep for the time in `Retry-After`."""
    (tmp_path / "job.log").write_bytes(b"".join(Fleet(1).lines()))
    with collector(lambda _: (503, {"Retry-After": "600"}, b"{}")) as server:
        done = run("ship", "--to", server.url, "--within", "5", "job.log")
    assert (done.returncode, "not sent completely: HTTP 503" in done.stderr) == (1, True)


def test_a_service_that_never_answers_holds_the_verb_no_longer_than_the_limit(run, env, hung):
    """Not for 10 s when the limit is shorter."""
    spool(Path(env["BOOTSEER_SPOOL"]), num_nodes=1)
    began = time.monotonic()
    done = run("ship", "--to", hung, "--within", "1")
    assert (done.returncode, "timed out" in done.stderr) == (1, True)
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("words", [["--job", "moe", "job.log"], ["jobs"]])
def test_all_is_tried_again_for_as_long_after_a_part_as_at_first(words, run, tmp_path):
    """A short failure of the service, minutes after the first batch, must not end the attempts."""
    (tmp_path / "job.log").write_bytes(b"x" * 79 + b"\n" + b"y" * (2 << 20) + b"\n")
    for job in ("a", "b"):
        spool(tmp_path / "jobs", job, num_nodes=1)

    def answer(number: int) -> tuple[int, dict[str, str], bytes]:
        time.sleep(0.7 * (number == 0))
        return 503 if number == 1 else 202, {"Retry-After": "0"}, b"{}"

    with collector(answer) as server:
        done = run("ship", "--to", server.url, "--within", "1", *words)
    assert done.returncode == 0, done.stderr


def test_the_log_of_a_job_without_bootseer_becomes_a_start(service, run, tmp_path):
    source = Path(__file__).parents[1] / "golden" / "megatron" / "setup.log"
    done = run("ship", "--to", service.url, "--job", "ungemessen/7", str(source))
    assert done.returncode == 0, done.stderr
    (start,) = service.rows(schema.start, 1)
    assert start.job == "ungemessen/7"
    (tmp_path / "bar.log").write_text("one line without an end")
    done = run("ship", "--to", service.url, "--json", "--job", "bar", "bar.log")
    assert (done.returncode, json.loads(done.stdout)["lines"]) == (0, 1), done.stderr


@pytest.mark.parametrize("also", [[], ["-"]])
def test_following_goes_on_until_a_signal(service, env, tmp_path, also):
    root = Path(env["BOOTSEER_SPOOL"])
    root.mkdir()
    command = [*BOOTSEER, "ship", "--follow", "--to", service.url, *also, str(root)]
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as sender:
        threading.Event().wait(3 if also else 1)
        _, lines = spool(root)
        until = time.monotonic() + 300
        while service.raw_lines() != lines and time.monotonic() < until:
            time.sleep(0.1)
        sender.terminate()
        assert sender.wait(30) == 0
    assert service.raw_lines() == lines
