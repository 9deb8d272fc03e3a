"""`bootseer report`: each input results in a report or in one clear line, with the right exit code."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bootseer.report.render.html import render as render_html
from conftest_launch import BOOTSEER
from fleet import Fleet

pytestmark = pytest.mark.slow

LINES = Fleet(3, job="moe").lines()
LOG = b"".join(LINES)
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def log(tmp_path):
    def write(content: bytes = LOG, name: str = "job.log") -> str:
        (tmp_path / name).write_bytes(content)
        return name

    return write


def one_line(result, code: int) -> str:
    """The error, after checks that apply to all errors."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("bootseer: ")
    assert all(line.startswith("hint: ") for line in rest)
    assert len(rest) <= 1
    assert all(char.isprintable() for char in first)
    return first


def test_a_log_gives_a_report(run, log):
    result = run("report", log())
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Startup took ")
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 lines"),
        (os.urandom(5 << 20).replace(b"@", b"a"), "no events, and no lines that BootSeer recognises"),
        (b"all is well\n" * 9, "9 lines: no events"),
        (b"@bootseer1 {broken}\n", "not json"),
        (LOG.replace(b"@bootseer1", b"@bootseer9"), "newer BootSeer"),
        (gzip.compress(LOG)[:30], "1 archive cut"),
    ],
    ids=["empty", "binary", "other", "broken", "future", "cut"],
)
def test_nothing_to_report_is_an_error(run, log, content, words):
    assert words in one_line(run("report", log(content)), 1)


def test_invalid_places(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    assert "no such file" in one_line(run("report", "nowhere"), 2)
    assert "no such file" in one_line(run("report", "n" * 5000), 2)
    assert "no such file" in one_line(run("report", "circle"), 2)
    assert "no files" in one_line(run("report", "empty"), 1)
    assert "0 lines" in one_line(run("report", os.devnull), 1)
    assert "0 lines" in one_line(run("report", "-", stdin=subprocess.DEVNULL), 1)
    assert "no job has run" in one_line(run("report"), 2)


def test_a_folder_named_like_a_job_does_not_hide_it(run, env, log, tmp_path):
    """Projects and jobs often have the same name."""
    spool = Path(env["BOOTSEER_SPOOL"], "moe", "attempt-0")
    spool.mkdir(parents=True)
    (spool / "n.1.1.events").write_bytes(LOG)
    (tmp_path / "moe").mkdir()
    log(b"import torch\n", "moe/train.py")
    assert run("report", "moe").stdout.startswith("Startup took ")
    assert run("report", "--follow", "moe").stdout.startswith("3 of 3 nodes began training\n")
    assert run("diff", "moe@0", "moe@0").returncode == 0
    assert "no events" in one_line(run("report", "moe/"), 1)


@pytest.mark.parametrize(
    "words",
    [
        ("report", "https://me:pw@h"),
        ("report", "https://me:p/pw@h"),
        ("diff", "x", "https://me:pw@h"),
        ("report", "--price", "https://me:pw@h"),
        ("https://me:pw@h",),
        ("ckpt", "get", "https://me:pw@h", "x"),
        ("run", "--requirements", "https://me:pw@h/r.txt", "--", "true"),
    ],
)
def test_no_login_of_an_address_is_echoed(run, log, words):
    log(name="x")
    result = run(*words)
    assert result.returncode == 2
    assert "pw" not in result.stderr
    assert "h" in result.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("reprot",), "did you mean `bootseer report`?"),
        (("ckpt", "lst"), "did you mean `bootseer ckpt list`"),
        (("convert", "x"), "did you mean `bootseer image convert`?"),
    ],
)
def test_an_unknown_command_suggests_the_closest_one(run, words, meant):
    result = run(*words)
    assert result.returncode == 2
    assert meant in result.stderr


def test_money_has_one_currency_and_hours_no_exponent(run, log, tmp_path):
    name = log(b"".join(Fleet(4, gpus_per_node=65_000, work_of={(1, "first_step"): 60.0}).lines()))
    told = run("report", name, "--price", "2", "--currency", "EUR", "--html", "page.html").stdout
    assert "e+0" not in told
    assert " EUR, waiting " in told
    page = (tmp_path / "page.html").read_text()
    for text in (told, page):
        assert "$" not in text.partition("<script")[0]
    assert "EUR" in page
    assert "$" in run("report", name, "--price", "2").stdout
    assert " CHF" in run("report", name, "--price", "2", more={"BOOTSEER_CURRENCY": "CHF"}).stdout


def test_a_rank_that_two_nodes_claim_is_a_headline(run, log):
    lines = [line.replace(b'"rank":2,', b'"rank":1,') for line in LINES]
    assert "Rank 1 is claimed by 2 nodes (node-0001, node-0002)" in " ".join(
        run("report", log(b"".join(lines))).stdout.split()
    )


def test_standard_input_and_fifos(run, log, tmp_path):
    name = log()
    with (tmp_path / name).open("rb") as file:
        assert run("report", "-", stdin=file).stdout.startswith("Startup took ")
    os.mkfifo(tmp_path / "fifo")
    writer = subprocess.Popen(["sh", "-c", f"cat {name} > fifo"], cwd=tmp_path)
    assert run("report", "fifo").stdout.startswith("Startup took ")
    assert writer.wait(120) == 0


def test_several_jobs_ask_for_a_choice_without_driving_the_terminal(run, log):
    evil = "".join(chr(i) for i in range(1, 32)) + "\x7f\x9b2J\u202e it's"
    name = log(LOG + b"".join(Fleet(1, job=evil).lines()))
    text = one_line(run("report", name), 2)
    assert "2 jobs" in text
    for words in (("report", name), ("diff", name, name)):  # diff has no such option
        assert "give the logs of one job; `bootseer report` can choose one: --job " in run(*words).stderr
    assert run("report", name, "--job", "moe").returncode == 0
    assert run("report", name, "--job", evil).returncode == 0
    assert "no job 'x'" in one_line(run("report", name, "--job", "x"), 2)
    many = log(b"".join(Fleet(1, job=f"job{n}").lines()[0] for n in range(300)), "many.log")
    assert "300 jobs" in one_line(run("report", many), 2)


def test_the_log_has_the_inputs_and_the_chosen_startup(run, log):
    told = run("--debug", "report", log()).stderr
    assert "report.log_scan [" in told
    assert "read 1 files, " in told
    assert " 0 facts; skipped: nothing" in told
    assert "job 'moe', attempt 0, restart 0, of 1 startups in the input: training_began, " in told


def test_no_control_character_of_a_log_reaches_any_output(run, log, tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J<script>\r\n"
    for key in (b"node-0001", b"image_loading"):
        content = LOG.replace(b'"node":"node-0001"', b'"node":' + json.dumps(evil + "1").encode())
        result = run("report", log(content), "--html", "page.html")
        assert result.returncode == 0, key
        page = (tmp_path / "page.html").read_text()
        for text in (result.stdout, page):
            assert all(char.isprintable() or char == "\n" for char in text)
        assert "<script>\ufffd" not in page


def test_logs_of_facts_without_time_are_a_report(run, tmp_path):
    source = str(GOLDEN / "uv" / "plain.log")
    result = run("report", source, "--html", "page.html", "--perfetto", "trace.json")
    assert result.returncode == 0
    assert "no startup can be measured" in result.stdout
    assert "uv resolved packages: 7" in result.stdout
    assert "unobserved: queue" in result.stdout
    assert "1970" not in result.stdout
    assert "uv resolved packages: 7" in (tmp_path / "page.html").read_text()
    json.loads((tmp_path / "trace.json").read_text())
    told = json.loads(run("report", source, "--json").stdout)
    assert (told["nodes"], told["overhead"]["startup_s"], told["startup"]["outcome"]) == ([], None, "unobserved")
    assert len(told["facts"]) == 8


@pytest.mark.parametrize("name", [path.name for path in sorted((GOLDEN / "torchelastic").glob("*.log"))])
def test_torchrun_logs_without_bootseer(run, name):
    """The launcher's output is reported, and so is that no begin of training was found."""
    result = run("report", str(GOLDEN / "torchelastic" / name))
    assert result.returncode == 0
    assert "training did not begin" in result.stdout
    # In-place restarts do not repeat these stages, so they are not listed as unobserved.
    missing = "unobserved: queue, allocation, image_loading, environment_setup"
    assert (missing in result.stdout.replace("\n", " ")) != ("\nRestarts\n" in result.stdout)


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        (1, ["node1", "node2", "node3", "node4"]),
        (2, ["gpu001", "gpu002", "node1", "node2", "node3", "node4", "node7"]),
        (5, ["gpu001", "node7"]),
        (4, ["gpu001"]),
    ],
)
def test_each_node_of_a_slurm_job_is_reported(run, job, nodes):
    result = run("report", str(GOLDEN / "slurm" / "node_lists.log"), "--job", str(job), "--json")
    told = json.loads(result.stdout)
    assert [node["node"] for node in told["nodes"]] == nodes
    assert told["coverage"]["nodes_heard"] == len(nodes)
    assert told["critical_chain"] == []


def test_logs_of_daemons_are_of_the_node_in_their_name(run, tmp_path):
    (tmp_path / "slurmctld.log").write_bytes((GOLDEN / "slurm" / "node_lists.log").read_bytes())
    for node, lag in (("node1", 0), ("node2", 40)):
        line = (
            f"[2026-11-22T18:25:50.{390 + lag}] launch task StepId=1.0 request from UID:0 GID:0 HOST:127.0.0.1 PORT:1\n"
        )
        (tmp_path / f"slurmd.{node}.log").write_text(line)
    told = json.loads(run("report", str(tmp_path), "--job", "1", "--json").stdout)
    assert {node["node"]: node["start_s"] > 0.365 for node in told["nodes"]} == {
        "node1": True,
        "node2": True,
        "node3": False,
        "node4": False,
    }


def test_the_first_step_of_megatron_ends_its_start(run):
    told = json.loads(run("report", str(GOLDEN / "steps" / "megatron.log"), "--json").stdout)
    assert (told["startup"]["outcome"], told["startup"]["ended_by"]) == ("training_began", "first_step")
    assert told["nodes"][0]["end_s"] == 30.0


def test_a_failed_worker_is_a_headline(run):
    text = " ".join(run("report", str(GOLDEN / "torchelastic" / "failure.log")).stdout.split())
    assert "worker failed on failure at 2.0 s (exit code 3, local rank 1)" in text


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "60"}, {"COLUMNS": "x"}, {"COLUMNS": "0"}, {"TERM": "dumb"}])
def test_piped_output_fits_its_width(run, log, more):
    result = run("report", log(), more=more)
    assert result.returncode == 0
    width = 60 if more.get("COLUMNS") in ("60", "0") else 80
    assert max(len(line) for line in result.stdout.splitlines()) <= width


def test_colour_only_when_asked(run, log):
    assert "\x1b[" in run("report", log(), "--color", "always").stdout
    assert "\x1b[" not in run("report", log(), "--color", "auto").stdout
    assert "\x1b[" not in run("report", log(), "--color", "never", more={"FORCE_COLOR": "1"}).stdout


def test_an_output_that_cannot_show_blocks_gets_what_it_can(run, log):
    result = run("report", log(), more={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    assert result.stdout.isascii()


def test_json_is_json(run, log):
    told = json.loads(run("report", log(), "--json", more={"PYTHONIOENCODING": "utf-8:strict"}).stdout)
    assert told["schema"] == "bootseer.report/1"
    assert told["startup"]["num_nodes"] == 3


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_that_cannot_be_written(run, log, form):
    name = log()
    with Path("/dev/full").open("w") as full:
        result = run("report", name, *form, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (
        1,
        "bootseer: standard output: cannot be written: No space left on device\n",
    )
    closed = run("report", name, *form, preexec_fn=lambda: os.close(1), capture_output=False, stderr=subprocess.PIPE)
    assert (closed.returncode, closed.stderr.count("\n")) == (1, 1)
    assert "standard output is closed" in closed.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_causes_no_traceback(env, log, tmp_path, form):
    name = log(b"".join(Fleet(200).lines()))
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*BOOTSEER, "report", name, *form], cwd=tmp_path, env=env, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    _, errors = process.communicate(timeout=180)
    assert errors == b""
    assert process.returncode == 141  # not 1, which may be the result of a command


def test_control_c_while_it_reads(env, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen([*BOOTSEER, "report", "fifo"], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
    with (tmp_path / "fifo").open("wb") as file:  # blocks until the program has opened the other end
        file.write(LOG)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=180)
    assert errors.strip() == b"bootseer: interrupted"
    assert process.returncode == 130


def test_files_that_cannot_be_written_are_errors(run, log):
    result = run("report", log(), "--html", "no/such/folder.html")
    assert result.stderr == "bootseer: no/such/folder.html: cannot be written: No such file or directory\n"
    assert result.returncode == 1


def test_usage_errors(run, log):
    name = log()
    for words in (
        ["--began-pattern", "("],
        ["--began-pattern", "a{99999999999999999999}"],
        ["--pattern", "model_initialization.data"],
        ["--pattern", "no stage=(?P<s>1)"],
        ["--pattern", "model_initialization.data=("],
        ["--pattern", "model_initialization.data=Loaded in (.*) s"],
        ["--attempt", "-1"],
        ["--price", "-2"],
        ["--price", "nan"],
        ["--price", "inf"],
        ["--gpus-per-node", "9" * 40],
        ["--nodes", "0"],
        ["--nope"],
    ):
        result = run("report", name, *words)
        assert (result.returncode, result.stdout) == (2, ""), words
    assert "its attempts: 0" in run("report", name, "--attempt", "7").stderr
    assert "no such attempt or restart" in run("report", name, "--restart", "7").stderr
    assert run("report", name, "--began-pattern", os.fsdecode(b"\xff")).returncode == 0
    assert run("report", "nowhere", preexec_fn=lambda: os.close(2)).returncode == 2


def test_a_sites_own_lines_are_read_by_its_patterns(run, tmp_path):
    (tmp_path / "job.log").write_text(
        "2026-11-20T17:00:00Z Loading corpus a\n2026-11-20T17:00:01Z Loading corpus b\n"
        "2026-11-20T17:00:04Z Corpus b ready\n2026-11-20T17:00:09Z Corpus a ready\n"
        "2026-11-20T17:00:12Z tokenizer was built in 2.5 s\nwarmup: 1500 ms\n"
    )
    patterns = [
        "model_initialization.data=(?:(?P<begin>Loading corpus )|(?P<end>Corpus ))(?P<key>\\w)",
        "model_initialization.tokenizer=built in (?P<s>[0-9.]+) s",
        "model_initialization.warmup=warmup: (?P<ms>[0-9]+) ms",
    ]
    ran = run("report", "job.log", "--json", *(word for pattern in patterns for word in ("--pattern", pattern)))
    report = json.loads(ran.stdout)
    times = {row["stage"]: row["work_s"] for row in report["stages"]}
    assert times["model_initialization.data"] == 9.0
    assert times["model_initialization.tokenizer"] == 2.5
    assert [(fact["source"], fact["stage"], fact["duration_s"]) for fact in report["facts"]] == [
        ("pattern", "model_initialization.warmup", 1.5)
    ]


def test_local_times_have_the_offset_of_their_own_date(run, log):
    """Also if daylight saving time has begun or ended since the log was written."""
    name = log(b"2026-07-20 10:00:00,000 step 1 done\n2026-01-20 10:00:00,000 step 1 done\n")
    more = {"TZ": "Europe/Berlin"}
    words = ("report", name, "--json")
    summer, winter = (
        json.loads(run(*words, "--began-pattern", pattern, more=more).stdout)["startup"]["zero_ns"]
        for pattern in ("2026-07.* done", "2026-01.* done")
    )
    assert (summer, winter) == (1_784_534_400 * 10**9, 1_768_899_600 * 10**9)  # 08:00 and 09:00 UTC


def test_failed_restarts_have_times_since_the_launchers_start(run):
    """At torchrun's default log level the log has only its start and the failures: 1.2 s, 2.4 s and 3.0 s."""
    ran = run("report", str(GOLDEN / "torchelastic" / "restarts.log"))
    told = " ".join(ran.stdout.split())
    for words in (
        "worker failed on restarts at 1.2 s",
        "restart 1: worker failed on restarts at 2.4 s",
        "restart 2: worker failed on restarts at 3.0 s",
    ):
        assert words in told
    first = run("report", str(GOLDEN / "torchelastic" / "restarts.log"), "--restart", "0")
    assert "restart 1" not in first.stdout


def test_a_folder_with_a_locked_file_tells_the_rest(run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(LOG)
    (tmp_path / "logs" / "b.log").symlink_to("/proc/self/mem")  # unreadable even for root
    assert "1 file of the folder could not be read" in run("report", "logs").stdout
    assert "cannot be read" in one_line(run("report", "logs/b.log"), 1)


def test_a_thousand_small_files(run, tmp_path):
    (tmp_path / "logs").mkdir()
    for number in range(1000):
        (tmp_path / "logs" / f"{number}.log").write_bytes(LINES[number % len(LINES)])
    told = json.loads(run("report", "logs", "--json").stdout)
    assert (told["input"]["files"], told["startup"]["num_nodes"]) == (1000, 3)


def test_very_many_nodes_and_barriers_take_linear_time(run, log):
    """Quadratic analysis would take minutes for either."""
    line = b'@bootseer1 {"wall_ns":%d,"mono_ns":%d,"job":"j","node":"n%d","stage":"a","phase":"%s","span":"%x"%s}\n'
    nodes = [
        line % (1_790_000_000 * 10**9 + i + k * 10**9, 5 + i + k * 10**9, i, phase, i, b"")
        for i in range(20_000)
        for k, phase in enumerate((b"begin", b"end"))
    ]
    told = json.loads(run("report", log(b"".join(nodes)), "--json").stdout)
    assert told["startup"]["num_nodes"] == 20_000
    barriers = [
        line % (1_790_000_000 * 10**9 + i * 1000 + k, 5 + i * 1000 + k, n, phase, i, b',"attrs":{"barrier":"b%d"}' % i)
        for n in range(2)
        for i in range(5000)
        for k, phase in enumerate((b"begin", b"end"))
    ]
    result = run("report", log(b"".join(barriers)))
    assert "earlier barriers (--json shows all)" in result.stdout
    assert len(result.stdout.splitlines()) < 60


def test_the_page_of_a_report_without_nodes_is_complete():
    from bootseer.report.analysis.compose import untimed
    from bootseer.report.analysis.prepare import Options
    from bootseer.report.model import Fact, Input

    fact = Fact("uv", "environment_setup.install", "installed <b>7</b>", 0.3, "n", "a.log:3")
    page = render_html(untimed(Options(job="moe", price_per_gpu_hour=2.0), [fact], Input(1, 2, 3, 0, 0, {})))
    assert "&lt;b&gt;7" in page
    assert "1970-01-01" not in page


@pytest.mark.parametrize("words", [["fleet"], ["history", "moe"], ["watch", "moe"]])
def test_the_address_of_a_service_is_not_a_folder(run, words):
    result = run(*words, "http://starts.example:8765")
    assert result.returncode == 2
    assert result.stderr == (
        "bootseer: http://starts.example:8765 is not a folder\n"
        "hint: the address of a service: --service http://starts.example:8765\n"
    )


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (["fleet", "--service", "http://s", "."], "--service and FOLDER"),
        (["history", "moe", "--service", "http://s", "."], "--service and FOLDER"),
        (["watch", "moe", "--service", "http://s", "."], "--service and FOLDER"),
        (["image", "convert", "--watch", "--once", "--interval", "1m", "h:1/a", "s"], "--once polls once"),
        (["ckpt", "mount", "--read-only", "--spool", ".", "p", "m"], "--spool has no effect with --read-only"),
    ],
)
def test_options_that_exclude_each_other_are_refused(run, words, both):
    result = run(*words)
    assert (result.returncode, both in result.stderr) == (2, True), result.stderr


def test_folders_win_over_a_service_in_the_environment(run, tmp_path):
    result = run("fleet", "--json", str(tmp_path), more={"BOOTSEER_SERVICE": "http://127.0.0.1:1"})
    assert "127.0.0.1" not in result.stderr
