"""What a job can observe of the hook: stored functions, import loaders, tracebacks and warnings."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from conftest_launch import stages
from registry import free_port


def _torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


needs_torch = pytest.mark.skipif(not _torch(), reason="PyTorch is not installed")

COMPILED_COLLECTIVE = """
import gc, sys, torch, torch.distributed as dist
original = dist.all_reduce
dist.init_process_group("gloo")
assert dist.all_reduce is original
from torch.distributed import all_reduce
import torch._dynamo  # creates its table of collectives, by identity

@torch.compile(backend="eager", fullgraph=True)
def double(batch):
    both = batch * 2
    all_reduce(both)
    dist.all_reduce(both)
    return both

dist.barrier()
result = double(torch.ones(2)).tolist()
sys.stdout.write(f"{result} {torch._dynamo.utils.counters['stats']['unique_graphs']}\\n")
sys.stdout.flush()
inner = [cell.cell_contents.__code__.co_filename for cell in dist.all_reduce.__closure__]
assert not [name for name in inner if "bootseer" in name]
dist.destroy_process_group()
gc.freeze()  # see `jobs.TRAIN`
"""

ASKS_THE_LOADER = """
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.loader.get_filename("torch"), spec.loader.is_package("torch"), len(spec.loader.get_source("torch")))
"""


@needs_torch
@pytest.mark.torch
def test_collectives_compile_as_without_us(run, events, tmp_path):
    """Dynamo may collect the collectives while our wrapper waits for the first one: they must be the real functions."""
    (tmp_path / "job.py").write_text(COMPILED_COLLECTIVE)
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = 'RANK=1 "$0" job.py & RANK=0 "$0" job.py && wait $!'  # without torchrun, which takes as long as a rank
    done = run("run", "-q", "--", "sh", "-c", both, sys.executable, more=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[8.0, 8.0] 1") == 2
    assert stages(events(), "end").count("model_initialization.first_collective") == 2


@needs_torch
@pytest.mark.torch
def test_the_loader_answers_like_the_real_one(run, tmp_path):
    (tmp_path / "job.py").write_text(ASKS_THE_LOADER)
    plain = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = run("run", "-q", "--", sys.executable, "job.py")
    assert (done.returncode, done.stdout) == (0, plain.stdout)


@pytest.mark.parametrize(
    "source",
    [
        "import no_such_module\n",
        "import warnings\nwarnings.warn('half', UserWarning, stacklevel=2)\nraise RuntimeError('half')\n",
        "",
    ],
    ids=["broken", "warns", "stub"],
)
def test_a_package_torch_that_is_not_pytorch_runs_as_without_us(run, env, tmp_path, source):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    (tmp_path / "job.py").write_text("import torch\nprint(torch.__file__)\n")
    job = [sys.executable, "-B", "job.py"]
    plain = subprocess.run(job, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    done = run("run", "-q", "--", *job)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_program_may_ask_the_finders_itself(run, tmp_path):
    asks = "for finder in sys.meta_path:\n    finder.find_spec('colorsys', None)\nprint('asked')\n"
    (tmp_path / "job.py").write_text(f"import safetensors, sys\n{asks}")
    done = run("run", "--", sys.executable, "job.py")
    assert done.stdout == "asked\n", done.stderr


def test_a_checkpoint_of_very_many_files_is_not_measured_file_by_file(tmp_path):
    from bootseer.hook.marks import _describe_read

    describe = partial(_describe_read, "torch.distributed.checkpoint.load")
    for number in range(64):
        (tmp_path / f"__{number}_0.distcp").write_bytes(b"1234")
    assert describe((), {"checkpoint_id": tmp_path})["bytes"] == 256
    (tmp_path / "__64_0.distcp").write_bytes(b"1234")
    assert "bytes" not in describe((), {"checkpoint_id": tmp_path})
