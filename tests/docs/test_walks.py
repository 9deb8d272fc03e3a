"""The three walks that ARCHITECTURE.md describes, traced through the running product.

All modules that the document names must be passed, and not many others.

Each file of a walk is one more to read for whoever follows it. A change that needs another one raises the limit.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from call_trace import CallTrace
from environment_place import made_place
from hdfs_cluster import HdfsCluster, needs_hdfs
from image_node import Node, have_converted

ROOT = Path(__file__).parents[2]
MODULES = {str(path.relative_to(ROOT / "src/bootseer")) for path in (ROOT / "src/bootseer").rglob("*.py")}
MAX_FILES_OF_A_BLOCK = 24
MAX_FILES_OF_A_RESTORE = 114
MAX_FILES_OF_A_TENSOR = 60
NUM_ELEMENTS = 2 << 20

_BLOCK = 4096


@pytest.fixture
def trace(tmp_path: Path) -> CallTrace:
    folder = tmp_path / "trace"
    folder.mkdir()
    return CallTrace(folder)


@pytest.fixture(scope="session")
def cluster(shared_hdfs: HdfsCluster) -> Iterator[HdfsCluster]:
    yield shared_hdfs


def described(begin: str) -> set[str]:
    """The modules, and packages as `mounts/`, that the paragraph with this begin and its list name."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n**{begin}")
    assert found, begin
    names = {name.replace(".", "/") for name in re.findall(r"`([a-z_.]+)`", rest.partition("\n**")[0])}
    paths = {f"{name}.py" for name in names} | {f"{name}/" for name in names}
    return {path for path in paths if any(f"/{path}" in f"/{module}" for module in MODULES)}


def check(trace: CallTrace, begin: str, max_files: int, not_passed: set[str]) -> None:
    """`not_passed`: what the document names for other walks of the kind."""
    calls = trace.calls()
    files = sorted({call.module for call in calls})
    numbers = f"{begin} {len(files)} files, {len(set(calls))} functions, {len(calls)} calls"
    print(numbers, *files, sep="\n    ")
    expected = described(begin) - not_passed
    missing = {path for path in expected if not any(f"/{path}" in f"/{file}" for file in files)}
    assert not missing, f"{numbers}; ARCHITECTURE.md also names {missing}"
    assert len(files) <= max_files, f"{numbers}: {files}"


@pytest.mark.root
@pytest.mark.fuse
def test_a_missing_block_of_an_image(node: Node, trace: CallTrace) -> None:
    """The first one of a mount that comes from the registry after its metadata, with a record of the start."""
    have_converted(node)
    target = node.folder / "mounted"
    words = ("image", "mount", node.reference, str(target), "--loading", "lazy", "--workload", "job")
    subprocess.run([*trace.bootseer, *words], env={**os.environ, **node.env}, check=True, timeout=600)
    with (target / "cold").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads nothing ahead
        before = len(node.requests("/blobs/"))
        with trace.recording():
            read = os.pread(file.fileno(), _BLOCK, 4 << 20)
    assert read == (node.folder / "tree" / "cold").read_bytes()[4 << 20 :][:_BLOCK]
    assert len(node.requests("/blobs/")) == before + 1
    check(trace, "One missing block,", MAX_FILES_OF_A_BLOCK, {"peers/origins.py"})


@pytest.mark.root
def test_a_restored_environment(trace: CallTrace) -> None:
    """On a node that does not have it yet."""
    with made_place() as place:
        setup = place.alpha_script(f"echo loose > {place.venv}/loose")
        words = ("run", "-q", "--setup", setup, "--", "python", "-c", "import alpha")
        place.run(*words[2:])
        assert place.published()["published"] is True
        (place.venv / "loose").unlink()  # the capturing start wrote it to its path
        place.cache = "other"
        with trace.recording():
            subprocess.run([*trace.bootseer, *words], env=place.env, cwd=place.project, check=True, timeout=600)
        assert place.start()["mode"] == "restored"
    check(trace, "One restored environment,", MAX_FILES_OF_A_RESTORE, {"mounts/trees.py"})


@pytest.mark.torch
@needs_hdfs[0]
@needs_hdfs[1]
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_of_a_checkpoint(
    cluster: HdfsCluster, trace: CallTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dcp.load` of one tensor of 8 MiB in two parts, without parity, by a new process without a cache."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    from bootseer.checkpoint.dcp import StripedWriter

    monkeypatch.setenv("BOOTSEER_CACHE", str(tmp_path / "cache"))
    uri = f"{cluster.uri}/walk/step-1"
    state = {"weight": torch.arange(NUM_ELEMENTS, dtype=torch.float32)}
    dcp.save(state, storage_writer=StripedWriter(uri))
    script = Path(__file__).parents[1] / "traced_load.py"
    words = [trace.folder, uri, NUM_ELEMENTS]
    (ran,) = warm.run(script, [str(word) for word in words], folder=tmp_path / "ran")
    assert ran.returncode == 0, ran.stderr
    check(trace, "From a DataNode to a tensor.", MAX_FILES_OF_A_TENSOR, {"reading/row.py"})
