"""Mounts with their own daemon: mounting, all ways of ending, and the written data afterwards."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import warm
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount.mounted import (
    MountedCheckpoint,
    all_mounted,
    find_checkpoint,
    mount_checkpoint,
    runtime_of,
)
from bootseer.checkpoint.mount.serving import MountedPlace, MountRequest
from bootseer.errors import BootseerError, PermanentError, TransientError, UsageError
from bootseer.fuse import syscalls
from bootseer.io import locks
from bootseer.mounts import kernel
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime
from bootseer.places.folder import FolderPlace
from checkpoint.mounted_place import MIB
from waiting import until

pytestmark = pytest.mark.fuse

JOB = Path(__file__).with_name("mount_job.py")
LARGE = 20 * MIB + 5
Start = Callable[..., dict[str, Any]]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """The records of mounts; all of them are unmounted after the test."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    (tmp_path / "place").mkdir()
    record = runtime_of(tmp_path / "run")
    yield record
    for mounted in all_mounted(record):
        try:
            mounted.unmount(force=True)
        except BootseerError as error:
            pytest.fail(str(error))


@pytest.fixture
def start(tmp_path: Path, runtime: Runtime) -> Start:
    """Mounts the folder `place`; returns the output of `mount_job.py`."""

    def run(**values: object) -> dict[str, Any]:
        uri, target = values.pop("uri", tmp_path / "place"), values.pop("target", tmp_path / "mount")
        cache = values.pop("cache", tmp_path / "cache")
        options = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        words = [str(word) for word in (uri, target, tmp_path / "run", cache, *options)]
        (ended,) = warm.run(JOB, words, folder=tmp_path / "said", parent=warm.CHECKPOINTS)
        assert ended.stdout, ended.stderr
        said: dict[str, Any] = json.loads(ended.stdout)
        return said

    return run


def the(runtime: Runtime, target: Path) -> MountedCheckpoint:
    """The mount at `target`."""
    return find_checkpoint(runtime, target)


def test_a_place_is_mounted_used_and_unmounted(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    target = Path(start()["target"])
    data = os.urandom(LARGE)
    (target / "f").write_bytes(data)
    assert (target / "f").read_bytes() == data
    status = the(runtime, target).status()
    assert status["uri"] == str(tmp_path / "place")
    assert status["read_bytes"] >= LARGE
    assert {"place_bytes", "cache_bytes", "rebuilt", "refused", "place", "writing"} <= status.keys()
    assert [one.health for one in all_mounted(runtime)] == ["mounted"]
    the(runtime, target).unmount()
    assert all_mounted(runtime) == []
    assert not kernel.is_mount(target)
    assert list(runtime.mounts.iterdir()) == []
    with pytest.raises(UsageError, match="no checkpoints are mounted"):
        the(runtime, target)


def test_a_mount_of_another_runtime_folder_is_named_as_one(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    """As after a start with another BOOTSEER_RUNTIME, or a clean-up of /tmp."""
    target = Path(start()["target"])
    with pytest.raises(UsageError, match="no checkpoints are mounted") as raised:
        find_checkpoint(Runtime(tmp_path / "other"), target)
    assert f"umount {target}" in raised.value.hint
    the(runtime, target).unmount()


def test_mounting_does_not_wait_for_another_process_that_mounts_there(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_LONG_S", 0.0)
    target = tmp_path / "mount"
    lock = runtime.root / f"{zlib.crc32(os.fsencode(target)):08x}.lock"
    refused = pytest.raises(UsageError, match=f"process {os.getpid()} is mounting there")
    with locks.flocked(lock, deadline_s=0), refused:
        mount_checkpoint(MountRequest(str(tmp_path / "place")), target, runtime=tmp_path / "run")


def test_the_next_mount_reads_from_the_node_cache(runtime: Runtime, start: Start) -> None:
    target = Path(start()["target"])
    data = os.urandom(LARGE)
    (target / "f").write_bytes(data)
    until = time.monotonic() + 300
    # The kernel reports the close a moment later. Reads before that use the written data, and are not cached.
    while the(runtime, target).status()["open_files"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert (target / "f").read_bytes() == data
    the(runtime, target).unmount()
    start()
    assert (target / "f").read_bytes() == data
    status = the(runtime, target).status()
    assert status["cache_bytes"] == LARGE
    assert status["place_bytes"] == 0


def test_a_mount_in_use_is_kept_and_the_error_names_files_being_written(runtime: Runtime, start: Start) -> None:
    target = Path(start()["target"])
    with (target / "f").open("wb", buffering=0) as file:
        file.write(b"x")
        with pytest.raises(TransientError, match=r"being written: f; fuser"):
            the(runtime, target).unmount()
        file.write(b"y")
    assert (target / "f").read_bytes() == b"xy"
    the(runtime, target).unmount()


def test_an_unmount_reports_what_it_waits_for(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    target = Path(start()["target"])
    (target / "sent").write_bytes(b"1")
    assert the(runtime, target).ending() == f"unmounting {target}"
    with (target / "f").open("wb") as file:
        file.write(b"1")
        file.flush()
        assert the(runtime, target).ending() == f"sending what was written to {tmp_path / 'place'}"


def test_a_forced_end_publishes_what_was_written(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    target = Path(start()["target"])
    data = os.urandom(LARGE)
    file = (target / "f").open("wb", buffering=0)
    file.write(data)
    said = the(runtime, target).unmount(force=True)
    assert (said["published"], said["lost"]) == (["f"], [])
    with pytest.raises(OSError, match=r"not connected|abort|Input/output"):
        file.write(b"x")
    with pytest.raises(OSError, match=r"not connected|abort|Input/output"):
        file.close()
    start()
    assert (target / "f").read_bytes() == data


def test_a_signal_publishes_what_was_written(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    said = start()
    target = Path(said["target"])
    handle = os.open(target / "f", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"written")
    os.kill(said["pid"], signal.SIGTERM)
    until(lambda: not kernel.is_mount(target), "unmounted")
    until((tmp_path / "place/f").exists, "published")
    assert (tmp_path / "place/f").read_bytes() == b"written"
    with pytest.raises(OSError, match=r"not connected|abort|Input/output"):
        os.close(handle)


def test_after_the_daemons_death_users_get_errors_and_nothing_published_is_lost(
    tmp_path: Path, runtime: Runtime, start: Start
) -> None:
    said = start()
    target = Path(said["target"])
    data = os.urandom(LARGE)
    (target / "published").write_bytes(data)
    handle = os.open(target / "open", os.O_WRONLY | os.O_CREAT)
    os.write(handle, data)
    os.kill(said["pid"], signal.SIGKILL)
    until(lambda: the(runtime, target).health == "daemon dead", "dead")
    for call in (lambda: list(target.iterdir()), lambda: os.write(handle, b"x"), (target / "published").read_bytes):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    with pytest.raises(OSError):
        os.close(handle)
    assert the(runtime, target).status() == {}
    # Mounting again removes the dead mount.
    start()
    assert (target / "published").read_bytes() == data
    assert os.listdir(target) == ["published"]  # noqa: PTH208
    the(runtime, target).unmount()


def test_an_unmount_cleans_up_after_a_dead_daemon(runtime: Runtime, start: Start) -> None:
    said = start()
    target = Path(said["target"])
    os.kill(said["pid"], signal.SIGKILL)
    until(lambda: the(runtime, target).health == "daemon dead", "dead")
    the(runtime, target).unmount()
    assert not kernel.is_mount(target)
    assert list(runtime.mounts.iterdir()) == []
    assert os.listdir(target) == []  # noqa: PTH208


@pytest.mark.root
def test_another_file_system_mounted_instead_of_a_dead_mount_is_kept(runtime: Runtime, start: Start) -> None:
    said = start()
    target = Path(said["target"])
    os.kill(said["pid"], signal.SIGKILL)
    until(lambda: the(runtime, target).health == "daemon dead", "dead")
    kernel.unmount(target, lazy=True)
    syscalls.mount("tmpfs", "somebody's", target)
    try:
        assert start()["error"] == f"{target}: something is mounted there"
        assert kernel.is_mount(target)
        assert all_mounted(runtime) == []
    finally:
        kernel.unmount(target)


@pytest.mark.root
@pytest.mark.parametrize("is_dead", [True, False])
def test_a_mount_below_another_one_stays_recorded(runtime: Runtime, start: Start, is_dead: bool) -> None:
    said = start()
    target = Path(said["target"])
    if is_dead:
        os.kill(said["pid"], signal.SIGKILL)
        until(lambda: the(runtime, target).health == "daemon dead", "dead")
    # Mounting over a dead mount is not possible, so the other one is created elsewhere and moved there.
    other = target.with_name("other")
    other.mkdir()
    syscalls.mount("tmpfs", "somebody's", other)
    moved = kernel.clone_mount(other, recursive=True)
    kernel.unmount(other)
    kernel.attach(moved, target)
    for force in (False, True):
        with pytest.raises(TransientError, match="another file system is mounted over it"):
            the(runtime, target).unmount(force=force)
    kernel.unmount(target)
    the(runtime, target).unmount()
    assert not kernel.is_mount(target)


@pytest.mark.root
def test_a_bind_mount_that_an_earlier_version_left_is_unmounted(tmp_path: Path, runtime: Runtime) -> None:
    target, details = tmp_path / "mount", {"access": "plain", "cache": ""}
    target.mkdir()
    state = MountState(runtime.new_folder().name, str(target), "x", runtime.boot, made_s=1.0, details=details)
    runtime.write(replace(state, daemon=ProcessId(2**22 + 1, 1)))
    kernel.attach(kernel.clone_mount(tmp_path / "place", recursive=True), target)
    assert the(runtime, target).health == "daemon dead"
    the(runtime, target).unmount()
    assert not kernel.is_mount(target)
    assert all_mounted(runtime) == []


def test_mounting_over_a_mount_or_a_file_or_into_the_place_is_refused(
    tmp_path: Path, runtime: Runtime, start: Start
) -> None:
    start()
    assert start()["kind"] == "UsageError"
    (tmp_path / "file").write_text("x")
    assert "not a folder" in start(target=tmp_path / "file")["error"]
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert "not a folder" in start(target=tmp_path / "link")["error"]
    assert "lies in" in start(target=tmp_path / "place/inside")["error"]
    own = tmp_path / "own"
    (own / "place").mkdir(parents=True)
    for what in ({"uri": own / "place"}, {"cache": own / "cache"}, {"spool": str(own / "spool")}):
        assert f"lies in {own}" in start(target=own, **what)["error"], "the daemon would wait for itself"
    assert len(all_mounted(runtime)) == 1


def test_two_processes_do_not_mount_on_one_folder_at_the_same_time(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def start(*_: object, **__: object) -> None:
        begun.append(1)
        mount_checkpoint(MountRequest(str(tmp_path / "place")), tmp_path / "mount", runtime=tmp_path / "run")

    monkeypatch.setattr("bootseer.checkpoint.mount.mounted.start_daemon", start)
    monkeypatch.setattr("bootseer.checkpoint.mount.mounted._START_S", 0.01)
    with pytest.raises(TransientError, match="locked"):
        start()
    assert len(begun) == 2


def test_a_missing_place_is_not_mounted(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    assert start(uri=tmp_path / "none")["kind"] == "NotFoundError"
    assert not kernel.is_mount(tmp_path / "mount")
    assert list(runtime.mounts.iterdir()) == []


def test_a_spool_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="the spool folder /proc/spool: "):
        MountedPlace(MountRequest(str(tmp_path), spool=Path("/proc/spool")), print)


def test_a_read_only_mount_changes_nothing(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    (tmp_path / "place/f").write_bytes(b"x")
    target = Path(start(read_only=True)["target"])
    assert (target / "f").read_bytes() == b"x"
    with pytest.raises(OSError, match="Read-only"):
        (target / "g").write_bytes(b"y")


def test_new_files_have_the_stripes_of_their_folders_policy(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    Files(FolderPlace(tmp_path / "place")).set_policy("", Policy(stripes=2, parity=True))
    target = Path(start()["target"])
    (target / "f").write_bytes(bytes(LARGE))
    the(runtime, target).unmount()
    (parts,) = (path for path in (tmp_path / "place/.stripes").iterdir() if path.is_dir())
    assert len(list(parts.iterdir())) == 3


def test_a_daemon_raises_its_limit_of_open_files_to_the_maximum(start: Start) -> None:
    limits = Path(f"/proc/{start()['pid']}/limits").read_text().splitlines()
    (soft, most) = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
    assert soft == most


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.root)])
def test_an_unmount_lists_files_that_could_not_be_published(
    tmp_path: Path, runtime: Runtime, start: Start, copied: bool
) -> None:
    target = Path(start()["target"])
    (target / "folder").mkdir()
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x'); print(flush=True); input()"
    argv = [sys.executable, "-c", code, target / "folder/f"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (tmp_path / "place/folder").rename(tmp_path / "place/elsewhere")
        writer.kill()
    until(lambda: the(runtime, target).status()["lost"] == ["folder/f"], "told")
    # If another mount namespace has a copy of the mount, the daemon continues.
    with contextlib.ExitStack() as stack:
        if copied:
            holder = stack.enter_context(subprocess.Popen(["unshare", "--mount", "sleep", "600"]))
            stack.callback(holder.kill)
            own = Path("/proc/self/ns/mnt").readlink()
            until(lambda: Path(f"/proc/{holder.pid}/ns/mnt").readlink() != own, "in its own namespace")
        assert the(runtime, target).unmount()["lost"] == ["folder/f"]


def test_a_mount_for_a_job_ends_with_it_and_has_a_separate_folder(tmp_path: Path, runtime: Runtime) -> None:
    argv = [
        sys.executable,
        str(JOB),
        str(tmp_path / "place"),
        "",
        str(tmp_path / "run"),
        "",
        "lifeline=true",
        "hold=true",
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        target = Path(json.loads(job.stdout.readline())["target"])
        (target / "f").write_bytes(b"x")
        job.kill()
    until(lambda: not kernel.is_mount(target), "unmounted")
    assert (tmp_path / "place/f").read_bytes() == b"x"


def test_files_read_by_one_start_are_prefetched_for_the_next(tmp_path: Path, runtime: Runtime, start: Start) -> None:
    target = Path(start(cache="")["target"])
    for step in (1, 2):
        (target / f"step-{step}").mkdir()
        for name in ("used", "unused"):
            (target / f"step-{step}" / name).write_bytes(os.urandom(LARGE))
    (target / "latest").write_text("step-1\n")
    the(runtime, target).unmount()

    start(slot="0 of 2")
    assert len((target / "step-1/used").read_bytes()) == LARGE
    assert the(runtime, target).began()["read_bytes"] >= LARGE
    assert len((target / "step-1/unused").read_bytes()) == LARGE, "after the start"
    the(runtime, target).unmount()

    (tmp_path / "place/latest").write_text("step-2\n")
    start(slot="0 of 2")
    until(lambda: int(the(runtime, target).status()["place_bytes"]) >= LARGE, "brought")
    assert len((target / "step-2/used").read_bytes()) == LARGE
    status = the(runtime, target).status()
    assert LARGE <= status["place_bytes"] < 2 * LARGE, "nothing unused is prefetched, and nothing twice"


def test_files_read_by_two_nodes_are_prefetched_on_a_node_that_joins(
    tmp_path: Path, runtime: Runtime, start: Start
) -> None:
    def published(number: int) -> None:
        lists = tmp_path / "place/.stripes-hot"
        until(lambda: len(list(lists.glob("*.json"))) == number, "published")

    def prefetched(num_bytes: int) -> None:
        until(lambda: int(the(runtime, target).status()["place_bytes"]) >= num_bytes, "prefetched")

    target = Path(start(cache="")["target"])
    (target / "step-1").mkdir()
    for name in ("shared", "shard-0", "shard-1"):
        (target / "step-1" / name).write_bytes(os.urandom(LARGE))
    (target / "latest").write_text("step-1\n")
    the(runtime, target).unmount()

    for node in (0, 1):
        start(slot=f"{node} of 2", cache=tmp_path / f"cache-{node}")
        for name in ("shared", f"shard-{node}"):
            assert len((target / "step-1" / name).read_bytes()) == LARGE
        the(runtime, target).unmount()
        published(node + 1)

    for slot, names in (("2 of 3", ["shared"]), ("1 of 2", ["shared", "shard-1"])):
        start(slot=slot, cache=tmp_path / f"cache of {slot}")
        assert sorted(path.name for path in target.iterdir()) == ["latest", "step-1"]
        prefetched(len(names) * LARGE)
        for name in names:
            assert len((target / "step-1" / name).read_bytes()) == LARGE
        status = the(runtime, target).status()
        assert status["place_bytes"] < (len(names) + 1) * LARGE, "no other node's shard, nothing twice"
        the(runtime, target).unmount()
