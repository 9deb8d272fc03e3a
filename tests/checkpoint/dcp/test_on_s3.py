"""All adapters, and the mount's daemon, with a bucket of a real S3 server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
fsspec = pytest.importorskip("fsspec")
library = pytest.importorskip("safetensors.torch")

from torch.distributed import checkpoint as dcp  # noqa: E402

from bootseer.checkpoint.dcp import StripedReader, StripedWriter  # noqa: E402
from bootseer.checkpoint.fsspec import S3FileSystem  # noqa: E402
from bootseer.checkpoint.locations import resolve  # noqa: E402
from bootseer.checkpoint.safetensors import load_file  # noqa: E402
from checkpoint_process import close_all  # noqa: E402
from dcp_states import assert_same, empty, full  # noqa: E402
from s3_server import S3Server  # noqa: E402
from waiting import until  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def job(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a job's folder."""
    fsspec.register_implementation("bootseer+s3", S3FileSystem, clobber=True)
    s3_server.make_bucket("loaders")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield "s3://loaders/moe"
    close_all()
    S3FileSystem.clear_instance_cache()


@pytest.mark.fuse
def test_all_adapters_and_the_mount_read_each_others_files(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {**full(), "layer": torch.randn(3000, 1000)}
    dcp.save(state, storage_writer=StripedWriter(f"{job}/step-1", move_latest=True))
    assert resolve(f"{job}/step-1").system.files.stat("moe/step-1/__0_0.distcp").is_striped
    target = {**empty(), "layer": torch.zeros(3000, 1000)}
    dcp.load(target, storage_reader=StripedReader(f"{job}/latest"))
    assert_same(state, target)
    tensors = {"w": torch.randn(1000, 1000)}
    library.save_file(tensors, tmp_path / "w.safetensors")
    with (
        (tmp_path / "w.safetensors").open("rb") as file,
        fsspec.open(f"bootseer+{job}/model/w.safetensors", "wb", auto_mkdir=True) as there,
    ):
        shutil.copyfileobj(file, there)
    assert torch.equal(load_file(f"{job}/model/w.safetensors")["w"], tensors["w"])
    # Mounting forks the daemon, which must not happen in this process because of obstore's threads.
    (mount := tmp_path / "mount").mkdir()
    monkeypatch.setenv("BOOTSEER_RUNTIME", str(tmp_path / "run"))
    ckpt = [sys.executable, "-m", "bootseer", "ckpt"]
    subprocess.run([*ckpt, "mount", job, mount], check=True)
    try:
        assert torch.equal(library.load_file(mount / "model" / "w.safetensors")["w"], tensors["w"])
        (mount / "model").rename(mount / "other")
        (mount / "other" / "note").write_text("whole")
        (mount / "other" / "note").write_text("again")
    finally:
        subprocess.run([*ckpt, "umount", mount], check=True)
    with fsspec.open(f"bootseer+{job}/other/note") as file:
        assert file.read() == b"again"
    files, gone = fsspec.url_to_fs(f"bootseer+{job}/model/w.safetensors")
    # This process has just read it, and caches the location of its folder for 2 s.
    until(lambda: not files.exists(gone), "the old name is gone")
    with pytest.raises(FileNotFoundError), files.open(gone):
        pass
