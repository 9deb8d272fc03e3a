"""Any input is read or gives an error of one line: archives, folders, links, locked and vanished files."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import zlib

import pytest
import zstandard

from bootseer.errors import PermanentError, UsageError
from bootseer.report import inputs
from bootseer.report.log_scan import scan
from fleet import Fleet

LINES = Fleet(2).lines()
LOG = b"".join(LINES)


def read(path) -> bytes:
    return b"".join(inputs.blocks(inputs.Source(str(path), path)))


def pzstd(data: bytes) -> bytes:
    """As it compresses: before each frame is one that readers skip, with its length."""
    frame = zstandard.compress(data)
    return b"\x50\x2a\x4d\x18\x04\0\0\0" + len(frame).to_bytes(4, "little") + frame


@pytest.mark.parametrize("name", ["a.log", "a.gz", "a b\n.log", "-x"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, pzstd])
def test_compression_is_detected_by_content(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(LOG))
    assert read(path) == LOG


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, pzstd])
def test_consecutive_members_in_tiny_reads(tmp_path, monkeypatch, pack, size):
    monkeypatch.setattr(inputs, "_READ_BYTES", size)
    path = tmp_path / "rotated"
    path.write_bytes(pack(LOG[:999]) + pack(b"") + pack(LOG[999:]))
    assert read(path) == LOG


def test_an_archive_comes_in_large_blocks(tmp_path):
    """Each block is searched separately: with one block per step, reading would take 50 % longer."""
    log = random.Random(0).randbytes(1 << 20).hex().encode()
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(log))
    assert len(list(inputs.blocks(inputs.Source("log", path)))) <= 8


def test_padding_between_and_after_members_is_no_damage(tmp_path):
    path = tmp_path / "padded.gz"
    path.write_bytes(gzip.compress(LOG[:999]) + bytes(5000) + gzip.compress(LOG[999:]) + bytes(1000))
    assert read(path) == LOG


def test_plain_text_after_gzip_is_counted(tmp_path):
    path = tmp_path / "mixed.gz"
    path.write_bytes(gzip.compress(LOG) + b"a line that somebody appended\n")
    found = scan(inputs.sources([str(path)]))
    assert (len(found.events), found.skipped) == (len(LINES), {"archive_cut": 1})


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_cut_or_corrupted_archive_gives_what_it_holds(tmp_path, pack):
    lines = Fleet(20).lines()
    whole = pack(b"".join(lines)) if pack is gzip.compress else b"".join(pack(line) for line in lines)
    for damaged in (whole[:-20], whole[: len(whole) // 2], whole[:-400] + bytes(range(100)) + whole[-300:]):
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        found = scan(inputs.sources([str(path)]))
        assert found.skipped["archive_cut"] == 1
        assert len(lines) // 3 < len(found.events) <= len(lines)


@pytest.mark.slow
def test_a_bomb_is_read_in_pieces(tmp_path):
    packer = zlib.compressobj(9, wbits=31)
    path = tmp_path / "bomb.gz"
    zeros = bytes(1 << 20)
    path.write_bytes(b"".join(packer.compress(zeros) for _ in range(100)) + packer.compress(LOG) + packer.flush())
    largest = total = 0
    for block in inputs.blocks(inputs.Source("bomb", path)):
        largest, total = max(largest, len(block)), total + len(block)
    assert total == (100 << 20) + len(LOG)
    assert largest <= 2 << 20


def test_a_folder_is_walked_without_loops_fifos_and_hidden_files(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.log").write_bytes(LOG)
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / ".hidden").write_bytes(LOG)
    os.mkfifo(tmp_path / "fifo")
    assert [source.path for source in inputs.sources([str(tmp_path)])] == [tmp_path / "deep" / "er" / "a.log"]


@pytest.mark.parametrize("place", ["nowhere", "a/b/c", "n" * 5000])
def test_what_does_not_exist_is_a_usage_error(tmp_path, place):
    with pytest.raises(UsageError, match="no such file"):
        inputs.sources([str(tmp_path / place)])


def test_a_circle_of_links_is_no_traceback(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UsageError, match="no such file"):
        inputs.sources([str(tmp_path / "circle")])


def test_an_empty_folder_is_reported(tmp_path):
    with pytest.raises(UsageError, match="contains no files"):
        inputs.sources([str(tmp_path)])


def test_a_file_that_vanishes_from_a_folder_is_counted(tmp_path):
    (tmp_path / "a.log").write_bytes(LOG)
    (tmp_path / "b.log").write_bytes(LOG)
    listed = inputs.sources([str(tmp_path)])
    (tmp_path / "a.log").unlink()
    found = scan(listed)
    assert (len(found.events), found.skipped) == (len(LINES), {"unreadable": 1})


def test_a_file_that_was_named_must_be_readable(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(LOG)
    listed = inputs.sources([str(path)])
    path.unlink()
    with pytest.raises(PermanentError, match=r"a\.log: cannot be read"):
        scan(listed)


def test_a_name_that_is_no_text_can_be_shown(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9\x1b[31m\n.log")
    path.write_bytes(LOG)
    (source,) = inputs.sources([str(tmp_path)])
    assert source.name.isascii()
    assert source.name.isprintable()
    assert read(source.path) == LOG


def test_standard_input_may_be_closed_or_bring_its_bytes_one_by_one(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PermanentError, match="standard input is closed"):
        list(inputs.blocks(inputs.Source("-", None)))

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(1)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Slow(gzip.compress(b"a line\n"))))
    assert b"".join(inputs.blocks(inputs.Source("-", None))) == b"a line\n"


LOCKED = """
import os, sys
from bootseer.report.inputs import sources
from bootseer.launch.environment.plain import check_files
from bootseer.errors import UsageError
if os.geteuid() == 0:
    os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
print([source.name for source in sources(["logs"])], [source.name for source in sources(["logs/locked/b.log"])])
try:
    check_files("logs/locked/b.log", [])
except UsageError as error:
    print(error)
"""


def test_a_folder_that_may_be_listed_and_not_searched_is_no_traceback(tmp_path):
    tmp_path.chmod(0o755)
    locked = tmp_path / "logs" / "locked"
    locked.mkdir(parents=True)
    (tmp_path / "logs" / "a.log").write_text("a")
    (locked / "b.log").write_text("b")
    locked.chmod(0o444)
    done = subprocess.run(
        [sys.executable, "-c", LOCKED], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    locked.chmod(0o755)
    assert done.stdout.splitlines() == [
        "['logs/a.log', 'logs/locked/b.log'] ['logs/locked/b.log']",
        "logs/locked/b.log: no such file",
    ], done.stderr
