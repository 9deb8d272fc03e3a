"""Findings of the parsers in single lines: other versions, bad values, secrets. Whole logs: test_foreign_golden.py."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import UsageError
from bootseer.report.analysis import prepare
from bootseer.report.analysis.compose import analyse
from bootseer.report.foreign.parser import Line, image_reference
from bootseer.report.foreign.program_tables import parsers
from bootseer.report.foreign.rules import Site
from bootseer.trace.event import decode, encode
from startups import span

AT = "2026-11-20T17:54:26.500000000Z stderr F "
AGENT = "I1120 17:54:2{second}.000000 {pid} torch/distributed/elastic/agent/server/api.py:707] "


def _events(found: dict[str, Any], source: str) -> list[tuple[str, str]]:
    return [(event["phase"], event["stage"]) for event in found[source]["events"]]


def test_the_clues_are_patterns_without_groups_and_each_parser_is_fresh() -> None:
    first, second = parsers(), parsers()
    clues = [clue for parser in first for clue in parser.clues]
    assert {re.compile(clue.pattern).groups for clue in clues} == {0}
    assert min(len(clue.pattern) for clue in clues) >= 8
    assert not set(map(id, first)) & set(map(id, second))
    assert len({parser.name for parser in first}) == len(first)


def test_a_long_line_takes_no_time_that_grows_with_its_square() -> None:
    for parser in parsers():
        for number, clue in enumerate(parser.clues):
            for rest in ("0" * 60_000, "a" * 60_000, " " * 60_000, "{" + " " * 60_000 + "x"):
                began_s = time.process_time()
                parser.feed(Line(clue.literal.decode() + rest, "job.log", number, 10**18, "n"))
                assert time.process_time() - began_s < 1, (parser.name, clue.literal, rest[:2])


def test_events_survive_the_event_format() -> None:
    parser = parsers()[1]
    parser.feed(Line("node-0:1:2 [0] NCCL INFO Init timings: rank 0 nranks 8 total 1.5 (x)", "a b.log", 7, 10**18, "n"))
    events = parser.finish().events
    assert [decode(encode(event)) for event in events] == events
    assert {event.span for event in events} == {events[0].span}


def test_reading_twice_gives_the_same_spans_and_other_lines_give_others(read: Any) -> None:
    line = AT + "node-0:1:2 [0] NCCL INFO Init timings: rank 0 nranks 8 total 1.50 (kernels 0.10)"
    once, again, twice = read(line), read(line), read(f"{line}\n{line}")
    assert once == again
    assert len({event["span"] for event in twice["nccl"]["events"]}) == 2


# torchelastic ---------------------------------------------------------------------------------------------------------


def test_a_rendezvous_that_never_completes_stays_open(read: Any) -> None:
    found = read(AGENT.format(second=1, pid=7) + "[default] Rendezvous'ing worker group")
    assert _events(found, "torchelastic") == [("begin", "model_initialization.launcher_rendezvous")]


@pytest.mark.parametrize(
    "prefix",
    [
        "W0724 02:13:08.958000 140694527051584 torch/distributed/",  # 2.3, 2.4
        "W0321 23:22:48.944000 1 site-packages/torch/distributed/",
        "W0731 10:49:55.044000 3247964 /opt/conda/envs/gpt/lib/python3.10/site-packages/torch/distributed/",
    ],
)
def test_each_form_of_torchs_prefix_is_read(read: Any, prefix: str) -> None:
    found = read(
        f"{prefix}run.py:792] Setting OMP_NUM_THREADS\n"
        f"{prefix}elastic/multiprocessing/api.py:833] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
    )
    assert [stage for _, stage in _events(found, "torchelastic")] == ["launcher_start", "worker_failed"]


def test_agents_that_srun_merged_are_kept_apart(read: Any) -> None:
    begin, end = "[default] Rendezvous'ing worker group", "[default] Rendezvous complete for workers. Result:"
    lines = [
        "0: " + AGENT.format(second=1, pid=7) + begin,
        "1: " + AGENT.format(second=2, pid=7) + begin,
        "1: " + AGENT.format(second=3, pid=7) + end,
        "0: " + AGENT.format(second=4, pid=7) + end,
    ]
    events = read("\n".join(lines))["torchelastic"]["events"]
    assert [(events[i + 1]["wall_ns"] - events[i]["wall_ns"]) / 1e9 for i in (0, 2)] == [3.0, 1.0]


def test_an_announced_restart_counts_before_its_rendezvous_completes(read: Any) -> None:
    lines = [
        AGENT.format(second=1, pid=7) + "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
        AGENT.format(second=2, pid=7) + "[default] Rendezvous'ing worker group",
    ]
    assert read("\n".join(lines))["torchelastic"]["events"][0]["restart"] == 1


def test_a_restart_for_another_nodes_failure_counts_although_torch_does_not_count_it(read: Any) -> None:
    """As PyTorch 2.13 writes it on a node whose workers still run."""
    said = [
        "[default] Rendezvous'ing worker group",
        "[default] Rendezvous complete for workers. Result:",
        "  restart_count=0",
        "[default] Starting worker group",
        "[default] Detected 1 new nodes from group_rank=0; will restart worker group",
        "[default] Rendezvous'ing worker group",
        "[default] Rendezvous complete for workers. Result:",
        "  restart_count=0",
        "[default] Starting worker group",
        "[default] Worker group FAILED. 2/2 attempts left; will restart worker group",
        "[default] Rendezvous'ing worker group",
        "[default] Rendezvous complete for workers. Result:",
        "  restart_count=1",
    ]
    lines = [AGENT.format(second=number // 2, pid=7) + text for number, text in enumerate(said)]
    events = read("\n".join(lines))["torchelastic"]["events"]
    begins = [event for event in events if event["phase"] == "begin"]
    assert [event.get("restart", 0) for event in begins] == [0, 1, 2]
    assert [event["attrs"]["barrier"] for event in begins] == [f"launcher_rendezvous:{number}" for number in range(3)]


@pytest.mark.parametrize("run_id", ["none", "0127649f-4eb9-4c0f-82f0-e554a9f7c3e8"])
def test_a_generated_run_id_names_no_job(read: Any, run_id: str) -> None:
    line = "W1120 17:54:26.000000 1 torch/distributed/launcher/api.py:254]   run_id                   : " + run_id
    assert read(line)["torchelastic"]["events"][0]["job"] == "(unknown)"
    assert read(line.replace(run_id, "moe"))["torchelastic"]["events"][0]["job"] == "moe"


# nccl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "Init timings: rank 8 nranks 8 total 1.00 (x)",
        "Init timings: rank 0 nranks 99999999 total 1.00 (x)",
        "Init timings: rank 0 nranks 8 total 99999999.00 (x)",
        "Init timings: rank 0 nranks 8 total -1.00 (x)",
        "Init timings: rank 0 nranks 8 total nan (x)",
        "Init timings: rank 0 nranks ",
        "comm 0x1 rank 9 nranks 8 cudaDev 0 - Init COMPLETE",
    ],
)
def test_absurd_nccl_lines_are_dropped(read: Any, said: str) -> None:
    assert read(f"{AT}node-0:1:2 [0] NCCL INFO {said}") == {}


def test_a_rank_of_a_small_communicator_is_not_the_jobs(read: Any) -> None:
    line = "{at}node-0:{pid}:2 [0] NCCL INFO Init timings - ncclCommSplit: rank {rank} nranks {size} total 1.00"
    text = "\n".join(
        line.format(at=AT, pid=pid, rank=rank, size=size) for pid, rank, size in [(1, 5, 16), (1, 0, 2), (2, 1, 2)]
    )
    events = [event for event in read(text)["nccl"]["events"] if event["phase"] == "end"]
    assert [(event["pid"], event["rank"], event["attrs"]["comm_rank"]) for event in events] == [
        (1, 5, 5),
        (1, 5, 0),
        (2, -1, 1),
    ]


# kubernetes, containerd -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nginx", "nginx"),
        ("registry.example:5000/a/b:1.0", "registry.example:5000/a/b:1.0"),
        ("a/b@sha256:" + "0" * 64, "a/b@sha256:" + "0" * 64),
        ("https://user:pa/ss@registry.example/a:1?token=x", "registry.example/a:1"),
        ("user:p@ss@registry.example/a@sha256:" + "f" * 64, "registry.example/a@sha256:" + "f" * 64),
        ("user:pass@", ""),
        ("a b", ""),
        ("", ""),
    ],
)
def test_image_references_lose_their_credentials(text: str, expected: str) -> None:
    assert image_reference(text) == expected


def test_no_credential_reaches_the_findings(read: Any) -> None:
    image = "user:hunter2@registry.example/a:1?token=hunter2"
    lines = [
        f'{AT}level=info msg="PullImage \\"{image}\\""',
        f'{AT}level=info msg="PullImage \\"{image}\\" failed" error="http://user:hunter2@registry.example"',
        f'pod/a Successfully pulled image "{image}" in 3s',
        f'{AT}Successfully pulled image "{image}" in 3s',
        f"{AT}Collecting git+https://user:hunter2@registry.example/x (from -r requirements.txt (line 1))",
        f"{AT}Successfully installed x-1.0",
        f'{AT}Creating runtime env: {{"env_vars": {{"TOKEN": "hunter2"}}}} with timeout 600 seconds.',
        f'{AT}Successfully created runtime env: {{"env_vars": {{"TOKEN": "hunter2"}}}}, the context: {{"hunter2": 1}}',
        f"{AT}pyxis: imported docker image: user:hunter2@registry.example#a:1",
    ]
    found = read("\n".join(lines))
    assert set(found) == {"containerd", "kubelet", "pip", "pyxis", "ray"}
    assert "hunter2" not in json.dumps(found)


def test_an_image_asked_for_by_its_short_name_is_one_pull(read: Any) -> None:
    lines = [
        'time="2026-11-20T17:54:26Z" level=info msg="PullImage \\"busybox:1\\""',
        'time="2026-11-20T17:54:29Z" level=info msg="Pulled image \\"docker.io/library/busybox:1\\" with image id '
        '\\"sha256:1\\", size \\"42\\" in 2.9s"',
    ]
    events = read("\n".join(lines))["containerd"]["events"]
    assert [event["phase"] for event in events] == ["begin", "end"]
    assert (events[1]["wall_ns"] - events[0]["wall_ns"]) / 1e9 == 2.9


def test_events_of_the_newer_api_have_other_names(read: Any) -> None:
    """Of the group events.k8s.io, as `kubectl get events.v1.events.k8s.io -o json` prints them."""
    text = Path("tests/golden/kubernetes/events.log").read_text()
    newer = {"message": "note", "involvedObject": "regarding", "source": "deprecatedSource"}
    newer |= {"firstTimestamp": "deprecatedFirstTimestamp", "lastTimestamp": "deprecatedLastTimestamp"}
    renamed = re.sub(r'"(\w+)":', lambda key: f'"{newer.get(key[1], key[1])}":', text)
    assert read(renamed) == read(text)


def test_neither_a_deleted_pod_nor_a_line_without_time_hides_the_next_begin(read: Any) -> None:
    """A job was deleted in the queue and submitted again with its name, after output of `kubectl describe job`."""
    event = '{{"involvedObject":{{"kind":"Pod","name":"moe-0"}},"message":"{}","lastTimestamp":"2026-11-20T{}Z"}}'
    pulling, pulled = 'Pulling image \\"a/b:1\\"', 'Successfully pulled image \\"a/b:1\\"'
    lines = [
        "  Normal  SuccessfulCreate  9m  job-controller  Created pod: moe-0",
        '9m  Normal  Pulling  pod/moe-0  Pulling image "a/b:1"',
        event.format("Created pod: moe-0", "09:00:00"),
        event.format("Created pod: moe-0", "10:00:00"),
        event.format("Successfully assigned train/moe-0 to gpu-17", "10:00:30"),
        event.format(pulling, "10:00:31"),
        event.format(pulled, "10:01:31"),
    ]
    found = {}
    for one in read("\n".join(lines))["kubelet"]["events"]:
        found[one["stage"], one["phase"]] = one["wall_ns"] // 10**9 % 3600
    assert (found["queue", "begin"], found["queue", "end"]) == (0, 30)
    assert (found["image_loading.pull", "begin"], found["image_loading.pull", "end"]) == (31, 91)


@pytest.mark.parametrize(
    "message",
    [
        "Successfully assigned device to cuda",
        "Successfully pulled image",
        'Back-off pulling image \\"a\\"',
    ],
)
def test_other_words_bind_and_pull_nothing(read: Any, message: str) -> None:
    assert read(AT + message) == {}


# tables ---------------------------------------------------------------------------------------------------------------


def test_a_program_that_was_started_again_has_its_own_times(read: Any) -> None:
    lines = [
        f"{said}{second}"
        for second in ("26", "46")
        for said in (
            "time to initialize megatron (seconds): 1.",
            "[after megatron is initialized] datetime: 2026-11-20 17:54:",
        )
    ]
    events = read("\n".join(lines))["megatron"]["events"]
    assert [(event["phase"], event["wall_ns"] % 60_000_000_000 / 1e9) for event in events] == [
        ("begin", 24.74),
        ("end", 26.0),
        ("begin", 44.54),
        ("end", 46.0),
    ]


def test_numbers_of_thousands_of_digits_are_dropped(read: Any) -> None:
    digits = "1" * 5000
    lines = [
        f"time to initialize megatron (seconds): {digits}.{digits}",
        f"    load-checkpoint ....: ({digits}.0, {digits}.0)",
        f"Loading weights: 100%|#| 1/1 [{digits}:00:01<00:00]",
    ]
    assert read("\n".join(lines)) == {}
    site = Site("queue", re.compile(rb"took (?P<s>\S+) (?P<clock>\S+)?"))
    for number, text in enumerate((f"took {digits} s", "took x y:z", "took 1.5 x")):
        site.feed(Line(text, "job.log", number, None, "n"))
    assert [fact.duration_s for fact in site.finish().facts] == [1.5]


# pip, uv --------------------------------------------------------------------------------------------------------------


def test_two_bursts_of_pip_are_two_spans(read: Any) -> None:
    lines = [
        f"2026-11-20T17:54:2{second}Z {said}"
        for second, said in enumerate(
            ["Collecting a", "Successfully installed a-1.0", "Collecting b", "Successfully installed b-1.0 c-2.0"]
        )
    ]
    events = read("\n".join(lines))["pip"]["events"]
    assert [(event["phase"], event["attrs"]["packages"]) for event in events] == [
        ("begin", 1),
        ("end", 1),
        ("begin", 2),
        ("end", 2),
    ]


def test_an_install_that_was_killed_stays_open_and_the_next_is_its_own(read: Any) -> None:
    lines = ["Collecting a", "Installing collected packages: a", "Collecting a", "Successfully installed a-1.0"]
    events = read("\n".join(f"2026-11-20T17:54:2{i}Z {said}" for i, said in enumerate(lines)))["pip"]["events"]
    assert [event["phase"] for event in events] == ["begin", "begin", "end"]
    assert len({event["span"] for event in events}) == 2


@pytest.mark.parametrize(
    "said",
    [
        "Collecting environment information...",
        "Collecting metrics",
        "Successfully installed the new driver",
        "Resolved 3 packages in no time",
        "Installed 3 packages in 99999999h",
    ],
)
def test_other_programs_words_install_nothing(read: Any, said: str) -> None:
    assert read(AT + said) == {}


def test_progress_bars_and_colours_do_no_harm(read: Any) -> None:
    text = "Downloading 10%\rDownloading 100%\r\x1b[2mInstalled \x1b[1m3 packages\x1b[0m \x1b[2min 1.50s\x1b[0m"
    assert [(fact["text"], fact["duration_s"]) for fact in read(text)["uv"]["facts"]] == [
        ("uv installed packages: 3", 1.5)
    ]


def test_a_word_of_another_program_does_not_begin_the_install(read: Any) -> None:
    lines = [
        "2026-11-20T10:00:00Z INFO: Collecting metrics",
        "2026-11-20T17:54:20Z Collecting a",
        "2026-11-20T17:54:30Z Successfully installed a-1.0",
    ]
    events = read("\n".join(lines))["pip"]["events"]
    assert [event["phase"] for event in events] == ["begin", "end"]
    assert events[1]["wall_ns"] - events[0]["wall_ns"] == 10 * 10**9


def test_each_phase_of_uv_is_a_span(read: Any) -> None:
    lines = ["2026-11-20T10:00:00Z Resolved 3 packages in 1.00s", "2026-11-20T11:00:00Z Installed 3 packages in 2.00s"]
    events = read("\n".join(lines))["uv"]["events"]
    assert [events[i + 1]["wall_ns"] - events[i]["wall_ns"] for i in (0, 2)] == [10**9, 2 * 10**9]


def test_two_pods_that_pull_one_image_at_once(read: Any) -> None:
    pull = 'time="2026-11-20T17:54:{second}Z" level=info msg="{said}"'
    lines = [
        pull.format(second=20, said='PullImage \\"a/b:1\\"'),
        pull.format(second=25, said='PullImage \\"a/b:1\\"'),
        pull.format(second=30, said='Pulled image \\"a/b:1\\" with image id \\"x\\", size \\"42\\" in 10s'),
        pull.format(second=30, said='PullImage \\"a/b:1\\" returns image reference \\"sha256:1\\"'),
    ]
    events = read("\n".join(lines))["containerd"]["events"]
    assert [event["phase"] for event in events] == ["begin", "end"]
    assert events[1]["wall_ns"] - events[0]["wall_ns"] == 10 * 10**9


def test_a_pull_that_a_reboot_interrupted_does_not_begin_the_next_one(read: Any) -> None:
    pull = 'time="2026-11-20T1{}Z" level=info msg="PullImage \\"a/b:1\\"{}"'
    lines = [
        pull.format("0:00:00", ""),
        pull.format("7:54:20", ""),
        pull.format("7:55:20", ' returns image reference \\"sha256:1\\"'),
    ]
    events = read("\n".join(lines))["containerd"]["events"]
    assert [event["phase"] for event in events] == ["begin", "end"]
    assert events[1]["wall_ns"] - events[0]["wall_ns"] == 60 * 10**9


def test_phases_of_uv_without_times_are_facts(read: Any) -> None:
    facts = read("Resolved 3 packages in 1.00s\nResolved 4 packages in 2.00s\nInstalled 4 packages in 1ms")["uv"][
        "facts"
    ]
    assert [fact["duration_s"] for fact in facts] == [1.0, 2.0, 0.001]


def test_an_install_of_more_than_a_week_is_no_span(read: Any) -> None:
    lines = [
        "2026-11-01T00:00:00Z Collecting a",
        "2026-11-01T00:00:01Z Collecting b",
        "2026-11-20T00:00:00Z Successfully installed a-1.0 b-1.0",
    ]
    found = read("\n".join(lines))["pip"]
    assert found["events"] == []
    assert [(fact["text"], fact["duration_s"]) for fact in found["facts"]] == [("pip installed 2 packages", None)]


def test_each_task_of_a_job_array_is_configured_by_itself(read: Any) -> None:
    lines = [
        "[2026-11-20T17:54:10] sched: Allocate JobId=42_1(42) NodeList=n1 #CPUs=1 Partition=p",
        "[2026-11-20T17:54:11] sched: Allocate JobId=42_2(43) NodeList=n2 #CPUs=1 Partition=p",
        "[2026-11-20T17:54:41] job_time_limit: Configuration for JobId=42_1(42) is complete",
        "[2026-11-20T17:55:51] job_time_limit: Configuration for JobId=42_2(43) is complete",
    ]
    events = read("\n".join(lines))["slurm"]["events"]
    ends = [(one["job"], one["node"], one["wall_ns"] // 10**9 % 1000) for one in events if one["phase"] == "end"]
    assert ends == [("42_1", "n1", 281), ("42_2", "n2", 351)]


def test_events_that_name_many_nodes_are_repeated_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_MAX_REPEATED", 2_500)
    begin, _ = span(0, 10, "queue", attrs={"nodes": "n[1-999]", "parsed_from": "slurm"})
    events = [begin._replace(mono_ns=number) for number in range(9)]
    repeated, num_cut = prepare.of_one_job(events, prepare.Options())
    assert (len(repeated), num_cut) == (2_500, 7)
    assert analyse(events, prepare.Options()).input.skipped == {"many_nodes": 7}
    malformed = begin._replace(attrs={"nodes": "n[1-", "parsed_from": "slurm"})
    assert prepare.of_one_job([malformed], prepare.Options()) == ([], 1)
    with pytest.raises(UsageError, match="no events") as error:
        analyse([malformed], prepare.Options())
    assert "lists of nodes are malformed" in error.value.hint
    absurd = begin._replace(attrs={"nodes": 5, "parsed_from": "slurm"})
    assert prepare.of_one_job([absurd], prepare.Options()) == ([absurd], 0)


def megatron(step: int, ms: float, batch: int = 256) -> str:
    return (
        f" iteration {step:8}/  9000 | consumed samples: {step * batch:12} | elapsed time per iteration (ms): {ms} | a"
    )


@pytest.mark.parametrize(
    ("lines", "second"),
    [
        ((megatron(100, 1200.0), megatron(200, 1000.0)), 1),
        ((megatron(5001, 30000.0), megatron(5002, 99900.0)), 100),
        ((megatron(1, 30000.0), megatron(1, 30000.0)), 100),
        ((megatron(200, 1000.0), megatron(100, 1000.0)), 100),
        (("[INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.1]",), 100),
        (("[Rank 0] step=10, skipped=0, lr=[0.1]", "[Rank 0] step=20, skipped=0, lr=[0.1]"), 10),
        (("completed step: 0, seconds: 30.1, TFLOP/s/device: 3.2", "completed step: 1, seconds: 1.1, TFLOP"), 100),
        (("[titan] - root - INFO - step:  1  loss:  8.1  memory:  9.00GiB(9.9%)",), 100),
    ],
)
def test_the_first_line_about_steps_ends_the_startup(read: Any, lines: tuple[str, ...], second: int) -> None:
    """Lines 100 s apart; the first step of a group of steps ended long before the group's line."""
    stamped = [
        f"2026-11-20T10:{(i + 1) * 100 // 60:02}:{(i + 1) * 100 % 60:02}Z {line}" for i, line in enumerate(lines)
    ]
    events = read("\n".join(stamped))["steps"]["events"]
    ten = 1_795_168_800
    assert [(event["stage"], event["wall_ns"] // 10**9 - ten) for event in events] == [("training_began", second)]
