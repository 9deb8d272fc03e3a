"""Ordinary programs on a mounted place, which work like on a disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import warm
from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import MIB, MountedPlace
from waiting import until

pytestmark = pytest.mark.fuse

LARGE = 8 * MIB + 12_345
DEADLINE_S = 120


def run(*argv: str | Path) -> str:
    """The output of a program, which must succeed."""
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


def needs(program: str) -> pytest.MarkDecorator:
    """Skip the test if a program is missing."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with files of different sizes."""
    folder = tmp_path / "tree"
    (folder / "deep/deeper").mkdir(parents=True)
    for number, size in enumerate((0, 1, 5000, MIB, LARGE)):
        (folder / "deep" / f"{number}.bin").write_bytes(os.urandom(size))
    (folder / "deep/deeper/script.sh").write_text("#!/bin/sh\necho here\n")
    (folder / "deep/deeper/script.sh").chmod(0o755)
    os.utime(folder / "deep/1.bin", ns=(0, 1_111_111_111_000_000_000))
    return folder


def content(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Digest, mode and modification time in whole seconds of all files of a tree."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns // 10**9,
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_cp(one: MountedPlace, mounts: Mounts, tree: Path) -> None:
    run("cp", "-a", tree, one.target / "copy")
    assert content(mounts().target / "copy") == content(tree)
    run("diff", "-r", tree, one.target / "copy")
    run("cp", "-a", one.target / "copy", one.target / "again")
    assert content(one.target / "again") == content(tree)
    assert run(one.target / "again/deep/deeper/script.sh") == "here\n"


@needs("rsync")
def test_rsync(one: MountedPlace, mounts: Mounts, tree: Path) -> None:
    run("rsync", "-a", f"{tree}/", one.target / "copy")
    assert content(mounts().target / "copy") == content(tree)
    (tree / "deep/4.bin").write_bytes(os.urandom(LARGE))
    os.utime(tree / "deep/4.bin", (1, 1))  # rsync compares whole seconds
    (tree / "deep/2.bin").unlink()
    changed = run("rsync", "-ai", "--delete", f"{tree}/", one.target / "copy").splitlines()
    assert sorted(line.split()[1] for line in changed if not line.endswith("/")) == ["deep/2.bin", "deep/4.bin"]
    assert content(one.target / "copy") == content(tree)
    run("rsync", "-a", "--inplace", "--no-whole-file", f"{tree}/deep/4.bin", one.target / "copy/deep/3.bin")
    assert (one.target / "copy/deep/3.bin").read_bytes() == (tree / "deep/4.bin").read_bytes()


def test_tar(one: MountedPlace, tree: Path) -> None:
    run("tar", "cf", one.target / "t.tar", "-C", tree, ".")
    (one.target / "out").mkdir()
    run("tar", "xf", one.target / "t.tar", "-C", one.target / "out")
    assert content(one.target / "out") == content(tree)
    run("tar", "df", one.target / "t.tar", "-C", one.target / "out")
    with tarfile.open(one.target / "t.tar") as archive:
        assert len(archive.getnames()) == len(list(tree.rglob("*"))) + 1


def test_dd_and_sha256sum(one: MountedPlace, tree: Path) -> None:
    source = tree / "deep/4.bin"
    run("dd", f"if={source}", f"of={one.target / 'f'}", "bs=64k", "conv=fsync")
    assert run("sha256sum", one.target / "f").split()[0] == hashlib.sha256(source.read_bytes()).hexdigest()
    run(
        "dd",
        f"if={one.target / 'f'}",
        f"of={one.target / 'g'}",
        "bs=1M",
        "iflag=direct",
        "oflag=direct,sync",
        "count=7",
    )
    run("cmp", "-n", str(7 * MIB), source, one.target / "g")
    run("dd", f"if={source}", f"of={one.target / 'g'}", "bs=1000", "skip=9", "seek=5", "count=3", "conv=notrunc")
    wanted = bytearray(source.read_bytes()[: 7 * MIB])
    wanted[5000:8000] = source.read_bytes()[9000:12000]
    assert (one.target / "g").read_bytes() == wanted


def test_shutil_and_pathlib(one: MountedPlace, tree: Path) -> None:
    shutil.copytree(tree, one.target / "copy")
    assert content(one.target / "copy") == content(tree)
    shutil.make_archive(str(one.target / "archive"), "zip", one.target / "copy")
    shutil.unpack_archive(one.target / "archive.zip", one.target / "unpacked")
    assert {name: digest for name, (digest, *_) in content(one.target / "unpacked").items()} == {
        name: digest for name, (digest, *_) in content(tree).items()
    }
    shutil.rmtree(one.target / "copy")
    shutil.rmtree(one.target / "unpacked")
    (one.target / "archive.zip").unlink()
    until(lambda: list(one.target.iterdir()) == [], "all gone")


@needs("git")
def test_git(one: MountedPlace, mounts: Mounts, tree: Path) -> None:
    settings = "-c user.name=n -c user.email=e -c init.defaultBranch=main -c protocol.file.allow=always"
    work = f"""
        set -e
        git() {{ command git {settings} "$@"; }}
        git init -q first && cp -r {tree}/. first && cd first
        git add . && git commit -qm one
        echo more >> deep/1.bin && git commit -qam two
        git checkout -q -b side HEAD~1 && echo side > new && git add new && git commit -qm three
        git merge -q -m merged main && git gc -q && git fsck --strict
        cd .. && git clone -q --no-local first second && cd second && git fsck --strict && git status --porcelain
    """
    said = subprocess.run(
        ["/bin/bash", "-c", work], cwd=one.target, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert said.stdout == ""
    second = mounts().target / "second"
    assert (second / "new").read_text() == "side\n"
    assert (second / "deep/4.bin").read_bytes() == (tree / "deep/4.bin").read_bytes()


@needs("zip")
@needs("unzip")
def test_archives_and_files_that_are_changed_in_place(one: MountedPlace, mounts: Mounts, tree: Path) -> None:
    work = f"""
        set -e
        cp -r {tree} tree
        zip -qr a.zip tree && echo more > tree/new && zip -qr a.zip tree && zip -q a.zip -d tree/deep/0.bin
        unzip -tqq a.zip && unzip -q a.zip -d out
        tar --sparse -cf a.tar tree && tar -rf a.tar a.zip && tar --delete -f a.tar tree/new
        mkdir o2 && tar -xf a.tar -C o2
        seq 200000 > lines && sed -i s/7/seven/ lines
        flock lock flock -n lock true || echo locked > locked
    """
    subprocess.run(["/bin/bash", "-c", work], cwd=one.target, capture_output=True, timeout=DEADLINE_S, check=True)
    root = mounts().target
    assert (root / "out/tree/deep/4.bin").read_bytes() == (tree / "deep/4.bin").read_bytes()
    assert not (root / "out/tree/deep/0.bin").exists()
    assert (root / "out/tree/new").read_text() == "more\n"
    assert (root / "o2/tree/deep/4.bin").read_bytes() == (tree / "deep/4.bin").read_bytes()
    assert not (root / "o2/tree/new").exists()
    assert (root / "lines").read_text().splitlines()[76] == "seven7"
    assert (root / "locked").read_text() == "locked\n"


def test_numpy_maps_files_and_writes_to_them(one: MountedPlace, mounts: Mounts) -> None:
    pytest.importorskip("numpy")
    code = """
import numpy as np, sys
new = np.memmap(sys.argv[1], dtype="i4", mode="w+", shape=(1500, 1000))
new[:] = np.arange(1000)
new.flush()
del new
there = np.memmap(sys.argv[1], dtype="i4", mode="r+", shape=(1500, 1000))
there[700] = 7
there.flush()
"""
    run(sys.executable, "-c", code, one.target / "array")
    check = """
import numpy as np, sys
wanted = np.tile(np.arange(1000, dtype="i4"), (1500, 1))
wanted[700] = 7
assert (np.memmap(sys.argv[1], dtype="i4", mode="r", shape=(1500, 1000)) == wanted).all()
"""
    run(sys.executable, "-c", check, mounts().target / "array")


def test_a_database_with_a_journal(one: MountedPlace, mounts: Mounts) -> None:
    code = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, data BLOB)")
    for number in range(int(sys.argv[2]), int(sys.argv[2]) + 40):
        database.execute("INSERT INTO t VALUES (?, ?)", (number, bytes([number % 256]) * 3000))
    database.execute("UPDATE t SET data = zeroblob(100) WHERE n % 3 = 0")
database.execute("VACUUM")
database.close()
"""
    for start in (0, 40):
        run(sys.executable, "-c", code, one.target / "db", str(start))
    with sqlite3.connect(mounts().target / "db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*), sum(length(data)) FROM t").fetchone() == (80, 27 * 100 + 53 * 3000)
    database.close()


_FIO: Sequence[Sequence[str]] = [
    ("--rw=write", "--bs=1m", "--fsync=8"),
    ("--rw=randwrite", "--bsrange=4k-300k"),
    ("--rw=randrw", "--bs=64k", "--rwmixread=30"),
    ("--rw=write", "--bs=256k", "--direct=1"),
    ("--rw=randwrite", "--bs=128k", "--end_fsync=1", "--numjobs=3"),
]


@needs("fio")
@pytest.mark.parametrize("options", _FIO, ids=lambda options: " ".join(options).replace("--", ""))
def test_fio_verifies_all_blocks(one: MountedPlace, options: Sequence[str]) -> None:
    verified = run(
        "fio", "--name=check", f"--directory={one.target}", "--size=12m", "--verify=crc32c", "--do_verify=1",
        "--verify_fatal=1", "--verify_state_save=0", "--fallocate=none", "--ioengine=psync", "--thread", *options,
    )  # fmt: skip
    assert "err= 0" in verified
    # Verify again from the place, when nothing is in memory any more.
    again = [option for option in options if not option.startswith(("--fsync", "--end_fsync"))]
    run(
        "fio", "--name=check", f"--directory={one.target}", "--size=12m", "--verify=crc32c", "--verify_only",
        "--verify_fatal=1", "--verify_state_save=0", "--fallocate=none", "--ioengine=psync", "--thread", *again,
    )  # fmt: skip
    assert one.said == []


@pytest.fixture
def torch_run(tmp_path: Path) -> Callable[..., None]:
    """Run code with PyTorch and `paths`, in another process than the server: it writes and maps with the GIL held."""
    pytest.importorskip("torch")

    def call(code: str, *paths: Path) -> None:
        script = tmp_path / "program.py"
        script.write_text(f"import sys, torch; torch.manual_seed(1); paths = sys.argv[1:]\n{textwrap.dedent(code)}")
        (ended,) = warm.run(script, [*map(str, paths)], folder=tmp_path / "program")
        assert ended.returncode == 0, ended.stderr

    return call


@pytest.mark.torch
def test_torch_saves_and_loads(one: MountedPlace, mounts: Mounts, torch_run: Callable[..., None]) -> None:
    torch_run(
        """
        state = {"weights": torch.randn(1500, 1100), "step": 7, "name": "x"}
        torch.save(state, paths[0])
        with open(paths[1], "wb") as file:
            torch.save(state, file)
        """,
        one.target / "model.pt",
        one.target / "stream.pt",
    )
    root = mounts().target
    torch_run(
        """
        weights = torch.randn(1500, 1100)
        for path in paths:
            for options in ({}, {"mmap": True}):
                loaded = torch.load(path, **options)
                assert torch.equal(loaded["weights"], weights)
                assert (loaded["step"], loaded["name"]) == (7, "x")
        """,
        root / "model.pt",
        root / "stream.pt",
    )


@pytest.mark.torch
def test_distributed_checkpoints_are_saved_and_loaded(
    one: MountedPlace, mounts: Mounts, torch_run: Callable[..., None]
) -> None:
    state = """
        import torch.distributed.checkpoint as dcp
        model = {f"layer{number}": torch.randn(300, 700) for number in range(6)}
    """
    save = """
        dcp.save({"model": model, "step": 3}, checkpoint_id=paths[0], no_dist=True)
    """
    load = """
        into = {"model": {name: torch.zeros(300, 700) for name in model}, "step": 0}
        dcp.load(into, checkpoint_id=paths[0], no_dist=True)
        assert into["step"] == 3
        assert all(torch.equal(into["model"][name], tensor) for name, tensor in model.items())
    """
    torch_run(state + save, one.target / "step-3")
    torch_run(state + load, mounts().target / "step-3")


@pytest.mark.torch
def test_safetensors_are_saved_and_mapped(one: MountedPlace, mounts: Mounts, torch_run: Callable[..., None]) -> None:
    pytest.importorskip("safetensors")
    tensors = """
        from safetensors import safe_open
        from safetensors.torch import save_file
        tensors = {f"t{number}": torch.randn(200 + number, 900) for number in range(8)}
    """
    save = """
        save_file(tensors, paths[0])
    """
    check = """
        with safe_open(paths[0], framework="pt") as file:
            assert set(file.keys()) == set(tensors)
            assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
            assert torch.equal(file.get_slice("t3")[10:20], tensors["t3"][10:20])
    """
    torch_run(tensors + save, one.target / "model.safetensors")
    torch_run(tensors + check, mounts().target / "model.safetensors")
