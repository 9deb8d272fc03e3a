"""Events are found in logs changed by any log collector, and damage costs only the damaged event."""

from __future__ import annotations

import json
import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.report import inputs
from bootseer.report import log_scan as scanning
from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.foreign.program_tables import parsers, search
from bootseer.report.log_scan import scan
from bootseer.trace.event import decode, encode
from fleet import Fleet
from startups import EPOCH_S, began, span

LINES = Fleet(2).lines()
EVENTS = [decode(line) for line in LINES]
ONE = LINES[3]


def docker(line: bytes) -> bytes:
    record = {"log": line.decode(), "stream": "stderr", "time": "2026-11-20T10:00:00.123456789Z"}
    return json.dumps(record).encode() + b"\n"


def journal(line: bytes) -> bytes:
    return json.dumps({"_PID": "7", "MESSAGE": line.decode().rstrip(), "PRIORITY": "6"}).encode() + b"\n"


WRAPPED = {
    "plain": lambda line: line,
    "crlf": lambda line: line.rstrip() + b"\r\n",
    "rank": lambda line: b"[rank0]: " + line,
    "srun": lambda line: b"0: " + line,
    "torchrun": lambda line: b"[default0]:" + line,
    "kubectl": lambda line: b"[pod/moe-0/train] " + line,
    "syslog": lambda line: b"Nov 20 10:00:00 gpu-1 slurmstepd[77]: " + line,
    "cri": lambda line: b"2026-11-20T10:00:00.123456789Z stderr F " + line,
    "cri tags": lambda line: b"2026-11-20T10:00:00.123456789Z stderr F:x " + line,
    "docker": docker,
    "journal": journal,
    "tqdm": lambda line: b"\r 10%|#   | 1/10\r 20%|##  | 2/10" + line,
    "colour": lambda line: b"\x1b[32m" + line.rstrip() + b"\x1b[0m\n",
    "nul": lambda line: b"\0\0" + line,
    "not utf-8": lambda line: b"\xff\xfe " + line,
    "json not utf-8": lambda line: journal(line).replace(b'"7"', b'"\xe9"'),
    "behind json": lambda line: b'{"not": "ours"} ' + line,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_collectors_do_no_harm(found, wrap):
    result = found(b"".join(wrap(line) for line in LINES))
    assert result.events == EVENTS
    assert not result.skipped
    assert result.lines == len(LINES)


def test_the_last_line_needs_no_newline(found):
    result = found(b"".join(LINES).rstrip())
    assert (result.events, result.lines) == (EVENTS, len(LINES))


@pytest.mark.parametrize("stream", [b"stdout", b"stderr"])
def test_cri_parts_are_joined_wherever_the_line_is_split(found, stream):
    """At each place of the event, even within its tag, and with lines of the other stream in between."""
    head, other = (
        b"2026-11-20T10:00:00Z " + stream,
        b"2026-11-20T10:00:00Z " + (b"stderr" if stream == b"stdout" else b"stdout"),
    )
    line = b"words before " + ONE.rstrip()
    for place in range(1, len(line)):
        log = head + b" P " + line[:place] + b"\n" + other + b" F noise\n" + head + b" F " + line[place:] + b"\n"
        assert found(log).events == [EVENTS[3]], place


def test_no_block_border_loses_an_event(found, monkeypatch):
    """Every offset of the border within an event, plain and in three CRI parts."""
    head = b"2026-11-20T10:00:00Z stdout "
    cri = head + b"P " + ONE[:40] + b"\n" + head + b"P " + ONE[40:90] + b"\n" + head + b"F " + ONE[90:]
    other = b"2026-11-20T10:00:00Z stderr F noise\n"
    mixed = head + b"P " + ONE[:40] + b"\n" + other + head + b"F " + ONE[40:]
    error = head.replace(b"stdout", b"stderr")
    crossed = error + b"P " + LINES[4][:40] + b"\n" + mixed.replace(other, error + b"F " + LINES[4][40:])
    for log in (b"x\n" + ONE + b"y\n", b"2026-11-20T10:00:00Z stdout F x\n" + cri + mixed + other + crossed):
        whole = found(log)
        for size in range(4, len(log) + 1, 3):
            monkeypatch.setattr(inputs, "_READ_BYTES", size)
            result = found(log)
            assert result.events == whole.events, size
            assert (result.lines, result.skipped) == (whole.lines, whole.skipped)


def test_a_line_without_end_keeps_its_events(found, monkeypatch):
    """A day of progress bars in one line, with events in it, wherever the reader has to split it."""
    bar = b"\r 42%|####      | 420/1000 [00:42<00:58]"
    log = b"".join(bar * 700 + line.rstrip() for line in LINES) + bar * 30_000
    assert found(log).events == EVENTS
    monkeypatch.setattr(inputs, "_READ_BYTES", 100_003)
    assert found(log).events == EVENTS


def test_events_of_interleaved_writers_in_one_line(found):
    torn = ONE[:50] + LINES[4].rstrip() + ONE[50:]
    result = found(torn + LINES[5])
    assert result.events == [EVENTS[4], EVENTS[5]]
    assert sum(result.skipped.values()) == 1


@pytest.mark.slow
def test_stems_and_open_events_without_end_take_linear_time(found):
    """Quadratic reading would take minutes here."""
    result = found(b"@bootseer" * 400_000 + b'@bootseer1 {"a' * 100_000 + b"\n" + ONE)
    assert result.events == [EVENTS[3]]
    assert sum(result.skipped.values()) == 100_000


def test_other_versions_are_counted(found):
    others = ONE.replace(b"@bootseer1 ", b"@bootseer7 ") + ONE.replace(b"@bootseer1 ", b"@bootseer0 ")
    assert found(others + ONE).skipped == {"version": 2}


def test_an_event_of_ten_megabytes_is_counted_and_costs_no_other(found):
    huge = ONE.rstrip()[:-1] + b',"x":"' + b"y" * 10_000_000 + b'"}\n'
    result = found(huge + ONE)
    assert (result.events, result.skipped) == ([EVENTS[3]], {"oversized": 1})


def test_a_pattern_takes_precedence_over_the_hook(found):
    """The user's `--began-pattern` has precedence; the hook's mark in the spool must not hide it."""
    spool = b"".join(line for line in Fleet(1).lines())
    own = [event for event in (decode(line) for line in Fleet(1).lines()) if event.stage == "training_began"]
    log = b"%s iteration 1 done\n" % datetime.fromtimestamp(own[0].wall_ns // 10**9, UTC).isoformat().encode()
    result = found(spool + log, patterns=[("training_began", re.compile(rb"iteration 1\b"))])
    marks = [event for event in result.events if event.stage == "training_began"]
    assert [mark.attrs["by"] for mark in marks] == ["optimizer_step", "pattern"]
    assert {(mark.job, mark.node) for mark in marks} == {(own[0].job, own[0].node)}


def test_of_lines_that_end_the_startup_the_first_counts_and_needs_a_time(found):
    pattern = [("training_began", re.compile(b"iteration"))]
    result = found(b"2026-09-21T14:30:00Z iteration 1\n2026-09-21T14:30:09Z iteration 2\n", patterns=pattern)
    assert [event.attrs["line"][-1] for event in result.events] == ["1"]
    result = found(b"iteration 1\n2026-09-21T14:30:09Z iteration 2\n", patterns=pattern)
    assert not result.events
    assert [fact.text for fact in result.facts] == ["the line that ends the first step has no time"]


def test_ordinary_words_trigger_no_parser():
    """Each was a word that the scan stopped at: 8 MB/s on lines that hold one, where others are read at 360."""
    words = (b"Successfully saved shard 3", b"12 packages left", b" nranks 8 ", b"Collecting garbage", b"elastic.net")
    words += (
        b"PullImage later",
        b"the image \\ mask",
        b"torch/distributed/ folder",
        b"Installed it",
        b"Init of rank 3",
    )
    searching, _ = search()
    assert list(searching.hits(b"".join(b"2026-03-01 08:00:00,123 " + word + b" of rank 7\n" for word in words))) == []


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "1", "1 in gpu on ", ' "x"', '"a",', "{", "2026-01-01"])
def test_lines_of_nothing_but_one_clue_take_linear_time(found, more):
    """Quadratic matching would take minutes here."""
    clues = {clue.literal + more.encode() for parser in parsers() for clue in parser.clues}
    assert found(b"".join(clue * (200_000 // len(clue)) + b"\n" for clue in clues)).lines == len(clues)


def test_a_pattern_that_backtracks_without_end_is_an_error(found, monkeypatch):
    monkeypatch.setattr(scanning, "_SLOW_S", 0.1)
    endless = re.compile(rb"(?P<begin>(?:a+)+$)")
    with pytest.raises(UsageError, match=r"took more than 0 s for 1 MB of log"):
        found(b"a" * 60 + b"b\n", patterns=[("queue", endless)])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(("job", "is_known"), [("moe", False), ("moe-8", True)])
def test_of_a_schedulers_log_the_jobs_own_lines_are_kept(found, job, is_known):
    """A log of one job is about it. In a log of several, its lines are known if its name ends with Slurm's number."""
    own = [decode(line)._replace(job=job) for line in Fleet(1).lines()]
    own = [event for event in own if event.stage != "queue"]  # observed times have precedence
    spool, node = b"".join(map(encode, own)), own[0].node
    lines = (
        "[2026-09-21T14:29:0{second}.000] _slurm_rpc_submit_batch_job: JobId={job} InitPrio=1 usec=3\n"
        "[2026-09-21T14:29:3{second}.000] sched: Allocate JobId={job} NodeList={node}[01-04] #CPUs=8 Partition=gpu\n"
    )
    other = lines.format(second=1, job=7, node=node)
    both = other + lines.format(second=2, job=8, node=node)
    for text, second, others in ((other, 1, 0), (both, 2, 2) if is_known else (both, None, 4)):
        result = found(spool + text.replace("[01-04]", "").encode())
        told = [event for event in result.events if event.attrs.get("parsed_from") == "slurm"]
        assert [event.wall_ns // 10**9 % 10 for event in told] == ([second] * 2 if second else [])
        assert {(event.job, event.node) for event in told} <= {(job, node)}
        assert result.skipped["other_job"] == others


AGENT = "I1120 17:54:0{}.000000 {} torch/distributed/elastic/agent/server/api.py:707] [default] {}\n"
COMM = "[2026-11-20 17:54:{}] {}:70{}:70 [0] NCCL INFO Rank comm 0x3{} rank {} nranks {} commId 0x9 - Init {}\n"
STEP = "[2026-11-20 17:55:{}] iteration {}/ 500 | consumed samples: {}56 | elapsed time per iteration (ms): 5570.0 |\n"


def a_start(*hosts: tuple[str, int], ranks: int) -> bytes:
    """The log of nodes from 17:54:01 to the end of the first step at 17:55:40. `hosts`: with their ranks."""
    lines = [AGENT.format(1, host, "Rendezvous'ing worker group") for _, host in hosts]
    lines += [AGENT.format(5, host, "Rendezvous complete for workers. Result:") for _, host in hosts]
    for at, mark in ((20, "START"), (30, "COMPLETE")):
        lines += [COMM.format(at, name, rank, rank, rank, ranks, mark) for name, rank in hosts]
    return "".join([*lines, STEP.format(40, 1, 1), STEP.format(46, 2, 2)]).encode()


SUBMITTED = (
    "[2026-11-20T17:50:00.000] _slurm_rpc_submit_batch_job: JobId={job} InitPrio=42 usec=3\n"
    "[2026-11-20T17:53:51.000] sched: Allocate JobId={job} NodeList={nodes} #CPUs=2 Partition=gpu\n"
)
BOUND = b"".join(  # the job was created again, and its pod has the same name as the earlier one
    b"""{"involvedObject": {"kind": "Pod", "name": "moe-0"}, "eventTime": "2026-11-20T%s", "message": "%s"}\n""" % told
    for told in (
        (b"16:53:59", b"Successfully assigned train/moe-0 to gpu-1"),
        (b"16:54:00", rb"Pulling image \"moe:1\""),
        (b"16:55:00", rb"Successfully pulled image \"moe:1\" in 1m0s (1m0s including waiting)"),
        (b"17:53:59", b"Successfully assigned train/moe-0 to gpu-1"),
    )
)


CREATED = b"".join(
    b"""{"involvedObject": {"kind": "Job"}, "eventTime": "2026-11-20T17:53:%s", "message": "Created pod: %s"}\n""" % on
    for on in ((b"40", b"moe-0"), (b"41", b"moe-1"))  # the second one gets no machine
)
CONDITIONS = Path("tests/golden/kubeflow/described.log").read_bytes().replace(b"17:55:08", b"17:53:58")


def containerd(day: int, begin: str, end: str, image: str) -> bytes:
    line = 'time="2026-11-{:02d}T{}Z" level=info msg="{}"\n'
    whole = line.format(day, begin, f'PullImage \\"{image}\\"')
    return (whole + line.format(day, end, f'Pulled image \\"{image}\\" with image id \\"x\\"')).encode()


BOTH = a_start(("gpu-1", 1), ("gpu-2", 2), ranks=3)
WITHOUT_NCCL = b"".join(line for line in BOTH.splitlines(keepends=True) if b"NCCL" not in line)
PULLED = containerd(7, "08:00:00", "08:01:00", "other:1") + containerd(20, "16:54:00", "16:55:00", "moe:1")
RUN_ID = b"I1120 17:54:00.000000 1 torch/distributed/launcher/api.py:195]   run_id           : moe\n"
LAUNCHED = b"[2026-11-20T17:53:55.000] launch task StepId=42.0 request from UID:1000 GID:1000 HOST:10.0.0.1 PORT:1\n"
PARTS = b"".join(BOTH.splitlines(keepends=True)[:8]), b"".join(BOTH.splitlines(keepends=True)[8:])


@pytest.mark.parametrize(
    ("files", "node_seconds"),
    [
        ({"train.log": a_start(("gpu-1", 1), ranks=2)}, {"gpu-1": 99}),
        ({"slurm-42.out": BOTH}, {"gpu-1": 99, "gpu-2": 80}),
        ({"train.log.1": PARTS[0], "train.log": PARTS[1]}, {"gpu-1": 99, "gpu-2": 80}),
        ({f"{n}/train.log": a_start((f"gpu-{n}", n), ranks=3) for n in (1, 2)}, {"gpu-1": 99, "gpu-2": 99}),
        ({f"rank{n}.log": a_start(("gpu-1", n), ranks=3) for n in (1, 2)}, {"gpu-1": 99}),
        ({"slurm-42.out": WITHOUT_NCCL, "slurmctld.log": SUBMITTED.format(job=42, nodes="gpu-[1-2]").encode()},
         {"gpu-1": 99, "gpu-2": 109}),
        ({"slurm-42.out": RUN_ID + WITHOUT_NCCL,
          "slurmctld.log": SUBMITTED.format(job=42, nodes="gpu-[1-2]").encode()}, {"gpu-1": 99, "gpu-2": 109}),
        ({"slurm-42.out": WITHOUT_NCCL, "slurmctld.log": SUBMITTED.format(job=42, nodes="gpu-1").encode(),
          "slurmd.log": LAUNCHED}, {"gpu-1": 105}),
        ({"slurm-42.out": WITHOUT_NCCL, "slurmctld.log": SUBMITTED.format(job=42, nodes="gpu-[1-2]").encode(),
          "slurmd.gpu-2.log": LAUNCHED}, {"gpu-1": 99, "gpu-2": 105}),
        ({"slurm-42.out": BOTH, "slurmctld.log": (SUBMITTED.format(job=42, nodes="gpu-[1-2]")
                                                  + SUBMITTED.format(job=43, nodes="gpu-3")).encode()},
         {"gpu-1": 99, "gpu-2": 80}),
        ({"stdin": b"".join(b"[pod/moe-%d/train] " % n + line for line in WITHOUT_NCCL.splitlines(keepends=True)
                            for n in (0, 1))}, {"moe-0": 99, "moe-1": 99}),
        ({"train.log": a_start(("gpu-1", 1), ranks=2), "events.json": BOUND}, {"moe-0": 101}),
        ({"train.log": a_start(("ip-1", 1), ranks=2), "events.json": BOUND.replace(b"gpu-1", b"ip-1.ec2.internal")},
         {"moe-0": 101}),
        ({"train.log": a_start(("gpu-1", 1), ranks=2), "events.json": BOUND, "containerd.gpu-1.log": PULLED},
         {"moe-0": 101}),
        ({"train.log": a_start(("gpu-1", 1), ranks=2), "events.json": BOUND + CREATED}, {"moe-0": 101, "moe-1": 0}),
        ({"train.log": a_start(("gpu-1", 1), ranks=2), "job.yaml": CONDITIONS}, {"gpu-1": 99}),
        ({"slurm-42.out": BOTH, "slurmctld.log": SUBMITTED.format(job=42, nodes="").partition("\n")[0].encode()},
         {"gpu-1": 99, "gpu-2": 80}),
    ],
    ids=["one", "merged", "rotated", "folders", "by rank", "scheduler", "run id", "slurmd", "slurmd of a node",
         "several jobs", "pods", "host network", "domain", "earlier pod", "waiting pod", "kubeflow", "submitted"],
)  # fmt: skip
def test_a_machine_is_billed_once_whatever_names_its_lines(tmp_path, files, node_seconds):
    """NCCL's lines contain the host, those of torchrun and Megatron do not, and the file name is arbitrary."""
    for name, log in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(log)
    job = "42" if "slurmctld.log" in files and RUN_ID not in files["slurm-42.out"] else None
    found = scan(inputs.sources([str(tmp_path)]), job=job)
    report = analyse(found.events, Options(job=job, gpus_per_node=8), read=found.input())
    assert {node.node: node.end_s - node.start_s for node in report.nodes} == node_seconds
    assert report.overhead.gpu_hours == pytest.approx(8 * sum(node_seconds.values()) / 3600)
    assert report.startup.num_gpus == 8 * sum(map(bool, node_seconds.values()))


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(
    ("name", "log", "seconds"),
    [("job.yaml", CONDITIONS, 462), ("slurmctld.log", SUBMITTED.partition("\n")[0].format(job=42).encode(), 241)],
    ids=["kubeflow", "rotated slurmctld"],
)
def test_a_job_waits_in_the_queue_until_its_first_stage(tmp_path, name, log, seconds, has_own):
    """Lines about the job name no node, and the end of the wait may be in another log."""
    (tmp_path / name).write_bytes(log)
    begin_s = 1_795_197_241 - EPOCH_S  # 17:54:01 UTC
    own = [one for node in ("gpu-1", "gpu-2") for one in span(begin_s, begin_s + 99, "run", node=node)]
    (tmp_path / "slurm-42.out").write_bytes(b"".join(map(encode, own)) if has_own else BOTH)
    found = scan(inputs.sources([str(tmp_path)]))
    report = analyse(found.events, Options(), read=found.input())
    assert [(one.stage, one.end_s - one.start_s) for one in report.scheduler] == [("queue", seconds)]
    assert [node.node for node in report.nodes] == ["gpu-1", "gpu-2"]
    assert not found.skipped


@pytest.mark.parametrize("num", [1, 2])
def test_events_of_kubernetes_find_the_nodes_that_are_named_by_machine_and_uid(found, num):
    """As in the documented manifest: the events name the pod. Those of other pods are left out."""
    begin_s, log = 1_795_197_241 - EPOCH_S, b""
    for pod, uid in [*[("moe-0", "u-0"), ("moe-1", "u-1")][:num], ("dense-0", "u-2")]:
        about = {"involvedObject": {"kind": "Pod", "name": pod, "uid": uid}, "eventTime": "2026-11-20T17:53:51Z"}
        log += json.dumps(about | {"message": f"Successfully assigned train/{pod} to gpu-7"}).encode() + b"\n"
    nodes = ["gpu-7/u-0", "gpu-7/u-1"][:num]
    for node in nodes:
        own = [*span(begin_s, begin_s + 60, "run"), *began(begin_s + 30)]
        log += b"".join(encode(event._replace(node=node)) for event in own)
    result = found(log)
    bound = {event.node for event in result.events if event.stage == "bound"}
    assert (bound, result.skipped) == (set(nodes), {"other_node": 1})
    report = analyse(result.events, Options())
    assert [node.end_s for node in report.nodes] == [40] * num  # 10 of them before `bootseer run`
    assert not any("uid" in fact for node in report.nodes for fact in node.attrs)


def test_the_domain_of_a_node_is_missing_in_nccls_lines_and_in_the_names_of_files(tmp_path):
    begin_s, nodes = 1_795_197_241 - EPOCH_S, {"gpu-1.example.org", "gpu-2.example.org"}
    own = [one for node in nodes for one in span(begin_s, begin_s + 99, "run", node=node)]
    (tmp_path / "own").write_bytes(b"".join(map(encode, own)))
    (tmp_path / "nccl").write_bytes(b"".join(line for line in BOTH.splitlines(keepends=True) if b"NCCL" in line))
    (tmp_path / "gpu-2.example.org.log").write_bytes(WITHOUT_NCCL)
    result = scan(inputs.sources([str(tmp_path)]))
    of_nccl = {event.node for event in result.events if event.attrs.get("parsed_from") == "nccl"}
    assert ({event.node for event in result.events}, of_nccl, result.skipped) == (nodes, nodes, {})


def test_a_log_of_several_launchers_tells_how_many_nodes_are_missing(found):
    """Without NCCL's lines, the output of `srun torchrun` looks like the log of one node."""
    result = found(Path("tests/golden/torchelastic/restart.log").read_bytes().replace(b"size=1\n", b"size=8\n"))
    report = analyse(result.events, Options(restart=0), read=result.input())
    assert report.coverage.nodes_expected == 8
    assert report.headlines[0].startswith("Only 1 of 8 nodes were seen")


@pytest.mark.parametrize("has_own", [True, False])
def test_what_a_machine_did_for_other_jobs_is_not_billed(tmp_path, has_own):
    """containerd's log covers weeks: with the pulls of other jobs, a start of a minute would seem to take days."""
    pulls = containerd(17, "08:23:38", "08:24:39", "other:1") + containerd(20, "17:40:00", "17:41:00", "base:1")
    pulls += containerd(20, "17:52:00", "17:53:00", "moe:1") + containerd(21, "09:00:00", "09:01:00", "other:2")
    pulls = b"".join(containerd(20, f"17:{m}:00", f"17:{m + 1}:00", f"cron:{m}") for m in (10, 20, 30)) + pulls
    (tmp_path / "containerd.gpu-1.log").write_bytes(pulls)
    begin_s = 1_795_197_241 - EPOCH_S  # 17:54:01 UTC
    own = [*span(begin_s - 9999, begin_s - 5, "queue"), *began(begin_s + 99)]
    own += [one for stage in ("run", "command") for one in span(begin_s, begin_s + 7000, stage)]
    log = b"".join(encode(event._replace(node="gpu-1")) for event in own)
    if not has_own:
        first, last = AGENT.format(1, 7, "Rendezvous'ing worker group"), STEP.format(40, 1, 1)
        log = f"2026-11-20T17:54:01Z {first}2026-11-20T17:55:40Z {last}".encode()
    (tmp_path / "gpu-1.log").write_bytes(log)
    found = scan(inputs.sources([str(tmp_path)]))
    report = analyse(found.events, Options(gpus_per_node=8), read=found.input())
    assert found.skipped["other_run"] == 5
    assert any("5 stages of other programs ignored" in line for line in report.headlines)
    assert report.overhead.node_level_max_s == pytest.approx(15 * 60 + 40, abs=1)  # from 17:40:00
    alone = scan(inputs.sources([str(tmp_path / "containerd.gpu-1.log")]))
    assert analyse(alone.events, Options(), read=alone.input()).overhead.startup_s == pytest.approx(60)


def test_a_pattern_may_name_the_machine_of_a_pod_in_full(found):
    log = BOUND.replace(b"gpu-1", b"ip-1.ec2.internal") + b"2026-11-20T17:54:30Z warmed up on ip-1.ec2.internal\n"
    patterns = [("environment_setup.warm", re.compile(rb"warmed up on (?P<host>\S+)"))]
    assert {event.node for event in found(log, patterns=patterns).events} == {"moe-0"}


def test_lines_that_a_collector_repeats_count_once(found):
    once = a_start(("gpu-1", 1), ranks=2)
    lines = once.splitlines(keepends=True)
    for log in (b"".join(line + line for line in lines), b"".join(lines[:3] + lines), b"\0" * 3000 + once):
        again = analyse(found(log).events, Options())
        assert again.stages == analyse(found(once).events, Options()).stages
        assert not any(stage.num_truncated for stage in again.stages)


def test_docker_lines_give_foreign_logs_their_time(found):
    lines = Path("tests/golden/uv/plain.log").read_bytes().splitlines(keepends=True)
    plain, stamped = found(b"".join(lines)), found(b"".join(docker(line) for line in lines))
    assert not plain.events
    assert {event.stage for event in stamped.events} == {fact.stage for fact in plain.facts}
    assert all(event.wall_ns // 10**9 in range(1_795_168_700, 1_795_168_801) for event in stamped.events)


def test_quoted_events_stay_one_event(found):
    event = EVENTS[3]._replace(attrs={"text": ONE.decode()})
    assert found(encode(event)).events == [event]


@pytest.mark.parametrize("unit", [10**3, 10**6, 10**9], ids=["us", "ms", "s"])
@pytest.mark.parametrize("uptime", [True, False])
def test_times_in_another_unit_are_refused_and_not_taken_for_1970(found, unit, uptime):
    """Writers with time.time() * 1e6, or with a `date` without %N; with a monotonic clock or without one."""
    strange = [
        e._replace(wall_ns=e.wall_ns // unit, mono_ns=(e.mono_ns if uptime else e.wall_ns) // unit) for e in EVENTS
    ]
    result = found(b"".join(map(encode, strange)) + ONE)
    assert (len(result.events), result.skipped) == (1, {"unit": len(EVENTS)})
    unset = [e._replace(wall_ns=e.mono_ns + 3_000_000) for e in EVENTS]  # 1970: the clock is the uptime
    assert not found(b"".join(map(encode, unset))).skipped


def test_a_log_of_another_unit_alone_says_so(found):
    result = found(encode(EVENTS[0]._replace(wall_ns=EVENTS[0].wall_ns // 1000, mono_ns=EVENTS[0].wall_ns // 1000)))
    with pytest.raises(UsageError) as refused:
        analyse(result.events, Options(), read=result.input())
    assert "in s, ms or µs" in refused.value.hint


@pytest.mark.parametrize(
    ("zone", "trains", "seconds"),
    [("UTC", True, 150), ("Europe/Berlin", True, 150), ("America/Chicago", False, 200)],
)
def test_times_of_another_zone_are_reported_and_not_billed(found, monkeypatch, zone, trains, seconds):
    """Megatron prints times without a zone: here of a pod, read on a machine in another zone."""
    begin_s = 1_795_197_225 - EPOCH_S  # 17:53:45 UTC, before the first of its lines
    own = [one for stage in ("run", "command") for one in span(begin_s, begin_s + 200, stage, outcome="failed")]
    own += began(begin_s + 150) if trains else []
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        result = found(b"".join(map(encode, own)) + Path("tests/golden/megatron/setup.log").read_bytes())
    finally:
        monkeypatch.undo()
        time.tzset()
    report = analyse(result.events, Options(), read=result.input())
    assert report.overhead.startup_s == seconds
    is_right = zone == "UTC"
    assert ("model_initialization.megatron_init" in {stage.stage for stage in report.stages}) == is_right
    assert any("time zone" in line for line in report.headlines) != is_right
