"""The hook in real training processes: its marks, that nothing of it remains, and that it fails open."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import warm
from conftest_launch import stages
from hook.jobs import (
    COMPILED,
    DIES_IN_FIRST_STEP,
    FORKS_RANKS,
    HOOKED_BY_OTHERS,
    INITIALIZES_OPTIMIZER,
    KEEPS_THE_READER,
    MARKED,
    RENDEZVOUS_AGAIN,
    SPARE_LAUNCHER,
    START,
    STEPS_BEFORE,
    TRAIN,
    TWELVE_STEPS,
    TWO_LAUNCHERS,
)

TORCHRUN = shutil.which("torchrun", path=str(Path(sys.executable).parent))
STAGE = "model_initialization."


needs_torch = [pytest.mark.torch, pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")]
pytestmark = needs_torch


def _write(folder: Path, source: str) -> str:
    (folder / "job.py").write_text(source)
    return str(folder / "job.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A real distributed job with two ranks: its finished process and its events."""
    from bootseer.report.inputs import sources
    from bootseer.report.log_scan import scan

    folder = tmp_path_factory.mktemp("trained")
    env = {**os.environ, "BOOTSEER_SPOOL": str(folder / "spool")}
    words = [sys.executable, "-m", "bootseer", "run", "--job", "hooked", "--", TORCHRUN, "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, _write(folder, TRAIN), str(folder)], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done, scan(sources([str(folder / "spool")])).events


def test_every_stage_is_marked_on_every_rank(trained):
    _, events = trained
    for rank in (0, 1):
        mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.mono_ns)
        assert [stage for stage in stages(mine) if not stage.startswith(STAGE + "import.")] == [
            STAGE + "interpreter",
            STAGE + "import_torch",
            STAGE + "process_group",
            STAGE + "first_collective",
            STAGE + "checkpoint_read",
            STAGE + "checkpoint_read",
            STAGE + "checkpoint_read",
            "first_step",
        ]
        assert sorted(stages(mine)) == sorted(stages(mine, "end"))
        assert all(event.outcome == "ok" for event in mine if event.phase == "end")
        instants = ["store_connected", "rank_known", "ranks_connected", "training_began"]
        assert stages(mine, "instant")[: len(instants)] == instants


def test_the_launcher_is_distinguished(trained):
    _, events = trained
    launcher = [event for event in events if event.stage == STAGE + "launcher_rendezvous"]
    assert [event.phase for event in launcher] == ["begin", "end"]
    assert launcher[0].attrs["barrier"] == "launcher_rendezvous:0"
    assert launcher[0].rank == -1


def test_each_rendezvous_begins_a_restart_on_all_nodes(hooked, events):
    """torchrun counts only the failures of a node's own workers, and the others' restarts would lack that node."""
    done = hooked(RENDEZVOUS_AGAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "2"], "for the workers"
    found = [event for event in events() if event.stage == STAGE + "launcher_rendezvous" and event.phase == "begin"]
    expected = [(0, "full"), (1, "restart"), (2, "restart")]
    assert sorted((event.restart, event.kind) for event in found) == expected


def test_reads_are_reported_with_api_and_bytes(trained):
    _, events = trained
    reads = [e for e in events if e.stage == STAGE + "checkpoint_read" and e.phase == "begin" and e.rank == 0]
    assert [read.attrs["api"] for read in reads] == [
        "torch.distributed.checkpoint.load",
        "torch.load",
        "safetensors.torch.load_file",
    ]
    assert all(read.attrs["bytes"] > 8000 for read in reads)


def test_reads_by_bootseers_own_loader_are_reported(hooked, events, tmp_path):
    job = (
        "from bootseer.checkpoint import safetensors as ours\n"
        "import torch\nfrom safetensors.torch import save_file\n"
        f"save_file({{'w': torch.zeros(4000)}}, {str(tmp_path / 'model.safetensors')!r})\n"
        f"ours.load_file({str(tmp_path / 'model.safetensors')!r})\n"
        f"ours.load_sharded({str(tmp_path)!r})\n"
    )
    done = hooked(job)
    assert done.returncode == 0, done.stderr
    reads = [e.attrs for e in events() if e.stage == STAGE + "checkpoint_read" and e.phase == "begin"]
    assert [read["api"].rpartition(".")[2] for read in reads] == ["load_file", "load_sharded"]
    assert all(read["bytes"] > 16000 for read in reads)


def test_evaluation_is_not_the_first_step(trained):
    _, events = trained
    first = next(e for e in events if e.stage == "first_step" and e.rank == 0)
    reads = [e for e in events if e.stage == STAGE + "checkpoint_read" and e.rank == 0]
    assert first.mono_ns > max(read.mono_ns for read in reads)


def test_one_trace_and_true_parents(trained):
    _, events = trained
    assert len({event.trace for event in events}) == 1
    spans = {event.span for event in events}
    assert all(event.parent in spans for event in events if event.stage != "run")


def test_data_loaders_and_forks_write_nothing(trained):
    _, events = trained
    assert Counter(event.pid for event in events).keys() == {
        event.pid for event in events if event.stage in ("run", STAGE + "interpreter")
    }
    assert len({event.pid for event in events}) == 4  # run, torchrun, two ranks


def test_nothing_is_left_behind(trained):
    done, _ = trained
    assert done.stdout.count("left behind [] [0, 0, 0] path [] SourceFileLoader") == 2, done.stdout


def test_long_imports_are_stages_without_visible_effects(run, events, tmp_path):
    (tmp_path / "slow_module.py").write_text("import time, json.tool\ntime.sleep(0.3)\nvalue = 7\n")
    source = (
        "import importlib.util, safetensors\n"  # imports are watched from this one on, as with torch
        "print(type(importlib.util.find_spec('slow_module').loader).__name__)\n"
        "import slow_module\n"
        "print(type(slow_module.__loader__).__name__, type(slow_module.__spec__.loader).__name__, slow_module.value)\n"
    )
    done = run("run", "-q", "--", sys.executable, _write(tmp_path, source))
    assert done.stdout == "SourceFileLoader\nSourceFileLoader SourceFileLoader 7\n"
    found = [event for event in events() if event.stage == STAGE + "import.slow_module"]
    assert [event.phase for event in found] == ["begin", "end"]
    assert 0.3e9 <= found[1].mono_ns - found[0].mono_ns < 100e9


@pytest.fixture
def hooked(env, tmp_path, monkeypatch):
    """`hooked(source, ...)`: run this job with these arguments in a copy of a process that has imported PyTorch.

    The hook marks it like a copy of a warm parent. `test_warm_torch` and the tests with `run` check that the marks are
    the same in programs started by exec.
    """
    monkeypatch.setenv("BOOTSEER_TRACE", f"spool:{env['BOOTSEER_SPOOL']}")

    def call(source: str, *words: str) -> subprocess.CompletedProcess[str]:
        (done,) = warm.run(Path(_write(tmp_path, START + source)), words, folder=tmp_path / "output", parent=MARKED)
        return done

    return call


def test_making_optimizer_state_is_no_step(hooked, events):
    """get_state_dict() steps with a learning rate of 0. The first step of a warm-up does, too, and is a step."""
    done = hooked(INITIALIZES_OPTIMIZER)
    assert done.returncode == 0, done.stderr
    initialized_ns, first_ns, *_ = map(int, done.stdout.split())
    found = [event for event in events() if event.stage in ("first_step", "training_began")]
    assert [event.phase for event in found] == ["begin", "end", "instant"]
    assert initialized_ns < found[0].mono_ns < found[2].mono_ns < first_ns  # the first of the three


def test_ranks_that_are_forks_are_marked(hooked, events, tmp_path):
    """Started like by accelerate's notebook_launcher and Lightning's ddp_fork."""
    done = hooked(FORKS_RANKS, str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    began = [event for event in events() if event.stage == "training_began"]
    assert sorted(event.rank for event in began) == [0, 1]
    assert len({event.pid for event in began}) == 2


def test_launchers_of_few_nodes_ask_often_whether_all_have_joined(hooked):
    """PyTorch's own launchers sleep for 1 s between two requests."""
    done = hooked(TWO_LAUNCHERS)
    assert done.returncode == 0, done.stderr
    requests, longest_s, *restored = done.stdout.split()
    assert int(requests) > 3
    assert float(longest_s) == pytest.approx(2 / 100)
    assert restored == ["True", "1"]


def test_a_spare_launcher_asks_as_seldom_as_without_us(hooked):
    """It waits while the others train."""
    done = hooked(SPARE_LAUNCHER)
    assert done.returncode == 0, done.stderr
    assert {float(slept_s) for slept_s in done.stdout.split()} == {1.0}


@pytest.mark.parametrize("how", ["no_gradients", "zero_gradients", "closure"])
def test_a_step_counts_after_a_backward_that_gave_it_gradients(hooked, events, how):
    done = hooked(STEPS_BEFORE, how)
    before_ns, first_ns, second_ns, _ = map(int, done.stdout.split())
    found = [event for event in events() if event.stage in ("first_step", "training_began")]
    assert [event.phase for event in found] == ["begin", "end", "instant"]
    assert before_ns < found[0].mono_ns < found[1].mono_ns <= first_ns < second_ns


def test_a_program_that_never_trains_is_not_marked_without_end(hooked, events, tmp_path):
    source = """
import sys, torch
layers, batch = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(10))).eval(), torch.ones(1)
torch.save(batch, sys.argv[1])
with torch.no_grad():
    for _ in range(1100):
        layers(torch.load(sys.argv[1]))
print(len(sys.modules["bootseer.hook.state"].active().undo))
"""
    done = hooked(source, str(tmp_path / "sample.pt"))
    assert int(done.stdout) < 100
    assert stages(events(), "begin").count(STAGE + "checkpoint_read") == 1000


def test_the_first_use_of_cuda_is_marked_once(hooked, events):
    """With and without a GPU: without one, the end event has the outcome of a failure."""
    source = """
import torch
for _ in range(2):
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError):
        pass
print(torch.cuda.is_initialized(), torch.cuda._lazy_init.__module__)
"""
    initialized, module = hooked(source).stdout.split()
    (end,) = [event for event in events() if event.stage == STAGE + "cuda_init" and event.phase == "end"]
    assert end.outcome == ("ok" if initialized == "True" else "failed")
    assert module == "torch.cuda"


def test_death_in_the_first_step_leaves_it_open(hooked, events):
    assert hooked(DIES_IN_FIRST_STEP).returncode == -signal.SIGKILL
    found = events()
    assert "first_step" in stages(found)
    assert "first_step" not in stages(found, "end")


@pytest.fixture(scope="module")
def compiled_without_us(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The compiler's statistics for the same job without the hook."""
    ways = ("plain_step", "compiled_step")
    folder = tmp_path_factory.mktemp("compiled")
    (done,) = warm.run(Path(_write(folder, COMPILED)), ways, folder=folder)
    assert done.returncode == 0, done.stderr
    return dict(zip(ways, done.stdout.splitlines(keepends=True), strict=True))


@pytest.mark.parametrize("how", ["plain_step", "compiled_step"])
def test_compiled_code_is_compiled_as_without_us(hooked, events, compiled_without_us, how):
    """No additional graphs or graph breaks: hooks must neither be traced nor be added or removed in between."""
    done = hooked(COMPILED, how)
    assert done.returncode == 0, done.stderr
    assert done.stdout == compiled_without_us[how]
    found = events()
    assert "first_step.compile" in stages(found, "end")
    if how == "plain_step":
        assert "training_began" in stages(found, "instant")


def test_compiled_and_exported_modules_do_not_meet_our_hook(hooked, events):
    exported = """
import torch
print(len(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),), strict=True).graph.nodes) > 0)
"""
    done = hooked(exported)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    source = """
import warnings, torch
warnings.filterwarnings("error", message="Using .torch.compile")
model = torch.compile(torch.nn.Linear(8, 8), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
    done = hooked(source)
    assert done.returncode == 0, done.stderr
    begins = [event.attrs["from"] for event in events() if (event.stage, event.phase) == ("first_step", "begin")]
    assert begins == ["compile"]


def test_it_can_be_switched_off(run, events, tmp_path):
    (tmp_path / "torch.py").touch()  # imports of this name are marked
    job = ("--", sys.executable, "-c", "import torch")
    marked = {}
    for how in ("on", "option", "variable"):
        flags, more = {"on": ((), {}), "option": (("--no-hook",), {}), "variable": ((), {"BOOTSEER_HOOK": "0"})}[how]
        ran = run("run", "--job", how, *flags, *job, more=more)
        assert ran.returncode == 0, ran.stderr
        marked[how] = stages([event for event in events() if event.job == how])
    assert STAGE + "import_torch" in marked["on"]
    assert marked["option"] == marked["variable"] == ["run", "command"]


def test_a_single_process_needs_no_launcher_and_its_python_no_bootseer(run, events, tmp_path):
    """The job's interpreter has torch on its path, but not BootSeer. The job's optimizer hooks run in every step,
    although our hook removes itself from torch's dict of hooks while torch iterates over it."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    site = next((bare / "lib").glob("python3*/site-packages"))
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (site / "torch-only.pth").write_text(str(Path(torch.origin).parents[1]) + "\n")
    python = str(bare / "bin" / "python")
    probe = subprocess.run([python, "-S", "-c", "import bootseer"], capture_output=True, check=False)
    assert probe.returncode != 0
    done = run("run", "--", python, _write(tmp_path, HOOKED_BY_OTHERS))
    assert (done.returncode, done.stdout) == (0, "[12, 12]\n"), done.stderr
    found = events()
    assert "first_step" in stages(found, "end")
    assert stages(found, "instant")[0] == "training_began"
    assert "steady_step" in stages(found, "instant")


def test_an_error_in_the_hook_does_not_reach_the_job(hooked, events):
    broken = "import torch\nimport bootseer.hook.state as s\ns._state.tracer.identity = None\n"
    done = hooked(broken + TWELVE_STEPS)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    found = events()
    assert STAGE + "interpreter" in stages(found)
    assert "training_began" not in stages(found, "instant")


def test_a_kept_reader_can_be_sent_to_workers_after_the_marking(hooked, tmp_path):
    done = hooked(KEEPS_THE_READER, str(tmp_path / "kept.pt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True True\ntensor([1.]) torch.serialization load\n"
