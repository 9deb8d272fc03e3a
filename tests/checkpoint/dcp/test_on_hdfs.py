"""All adapters on a real HDFS, also without one of its DataNodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
fsspec = pytest.importorskip("fsspec")
library = pytest.importorskip("safetensors.torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from bootseer.checkpoint.dcp import StripedReader, StripedWriter  # noqa: E402
from bootseer.checkpoint.fsspec import HdfsFileSystem  # noqa: E402
from bootseer.checkpoint.locations import resolve  # noqa: E402
from bootseer.checkpoint.safetensors import load_file  # noqa: E402
from dcp_states import assert_same, empty, full  # noqa: E402
from hdfs_cluster import HdfsCluster, needs_hdfs  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    *needs_hdfs,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="session")
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    """A cluster with one replica of each block."""
    return shared_hdfs


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the file system in fsspec, in case the package is not installed."""
    fsspec.register_implementation("bootseer+hdfs", HdfsFileSystem, clobber=True)
    yield
    HdfsFileSystem.clear_instance_cache()


def large_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {f"layer.{number}": torch.randn(1000, 550, generator=generator) for number in range(8)}


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def test_striped_checkpoints_are_saved_and_loaded(cluster: HdfsCluster) -> None:
    uri = f"{cluster.uri}/dcp/job/step-1"
    state = {**full(), **large_state()}
    dcp.save(state, storage_writer=StripedWriter(uri, move_latest=True))
    facts = resolve(uri).system.files.stat("dcp/job/step-1/__0_0.distcp")
    assert facts.is_striped
    for name in (uri, f"{cluster.uri}/dcp/job/latest"):
        target = {**empty(), **zeros(large_state())}
        dcp.load(target, storage_reader=StripedReader(name))
        assert_same(state, target)


def test_metadata_of_some_megabytes_is_striped_so_that_nodes_can_share_it(cluster: HdfsCluster) -> None:
    state = {f"{number:04}" * 1500: torch.full((2,), float(number)) for number in range(500)}
    dcp.save(state, storage_writer=StripedWriter(f"{cluster.uri}/dcp/job/names"))
    facts = resolve(f"{cluster.uri}/dcp/job/names").system.files.stat("dcp/job/names/.metadata")
    assert facts.size_bytes < 8 << 20
    assert facts.is_striped
    target = zeros(state)
    dcp.load(target, storage_reader=StripedReader(f"{cluster.uri}/dcp/job/names"))
    assert_same(state, target)


def test_pytorch_reads_a_striped_checkpoint_through_fsspec(cluster: HdfsCluster) -> None:
    state = large_state()
    dcp.save(state, storage_writer=StripedWriter(f"{cluster.uri}/dcp/for-fsspec"))
    target = zeros(state)
    dcp.load(target, storage_reader=FsspecReader(f"bootseer+{cluster.uri}/dcp/for-fsspec"))
    assert_same(state, target)


def test_safetensors_are_loaded(cluster: HdfsCluster) -> None:
    state = large_state()
    with fsspec.open(f"bootseer+{cluster.uri}/dcp/model.safetensors", "wb") as file:
        file.write(library.save(state))
    assert_same(state, load_file(f"{cluster.uri}/dcp/model.safetensors"))
    rows = load_file(f"{cluster.uri}/dcp/model.safetensors", names=["layer.3"])
    assert_same({"layer.3": state["layer.3"]}, rows)


def test_parts_of_a_file_are_read_by_fsspec(cluster: HdfsCluster) -> None:
    system, root = fsspec.url_to_fs(f"bootseer+{cluster.uri}/dcp/parts")
    data = os.urandom(20 << 20)
    system.makedirs(root, exist_ok=True)
    system.pipe(f"{root}/file", data)
    starts = [0, 19 << 20, 5_000_000]
    assert system.cat_ranges([f"{root}/file"] * 3, starts, [start + 1000 for start in starts]) == [
        data[start : start + 1000] for start in starts
    ]


def test_a_name_that_hdfs_refuses_is_an_error_of_the_open(cluster: HdfsCluster) -> None:
    fs, folder = fsspec.url_to_fs(f"bootseer+{cluster.uri}/names")
    with pytest.raises(OSError, match="colon in names") as caught:
        fs.open(f"{folder}/a:b", "wb")
    assert caught.value.errno == errno.EINVAL
    assert not fs.exists(folder)


def test_a_load_whose_data_is_unavailable_fails_and_names_the_checkpoint(cluster: HdfsCluster) -> None:
    uri = f"{cluster.uri}/dcp/lost"
    state = large_state()
    dcp.save(state, storage_writer=StripedWriter(uri))
    head = resolve(uri).system.files.head("dcp/lost/__0_0.distcp")
    assert head is not None
    lost = cluster.nodes.index(head.segments[0].parts[0].nodes[0])
    cluster.kill(lost)
    try:
        with pytest.raises(CheckpointException, match=r"TransientError: .*lost"):
            dcp.load(zeros(state), storage_reader=StripedReader(uri))
    finally:
        cluster.restart(lost)
    target = zeros(state)
    dcp.load(target, storage_reader=StripedReader(uri))
    assert_same(state, target)
