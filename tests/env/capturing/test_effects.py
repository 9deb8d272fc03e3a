"""Effects of real setups besides written files, and the files that they leave in scratch folders."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.env.capturing import daemons, effects
from bootseer.env.capturing.effects import Baseline, KernelState, leftover_processes
from bootseer.env.capturing.reads import not_watched
from env.capturing.captured import Machine
from env.capturing.watched import look_at
from hung_mount import child_that_asks, hung_mount, needs_fuse

WAITS = f"{sys.executable} -c 'import signal; signal.pause()'"
NOBODY_WATCHED = not_watched("nobody watched")


@pytest.fixture
def left() -> Iterator[list[str]]:
    """Reasons that name processes, which are ended after the test."""
    reasons: list[str] = []
    yield reasons
    for reason in reasons:
        if (found := re.fullmatch(r"it left a process running: .* \((\d+)\)", reason)) is not None:
            os.kill(int(found[1]), signal.SIGKILL)


@pytest.mark.root
@pytest.mark.parametrize("start", ["setsid", "nohup", "env -i setsid", "(exec setsid"])
def test_a_daemon_is_named_and_goes_on(machine: Machine, left: list[str], start: str) -> None:
    end = ")" if start.startswith("(") else ""
    said = look_at(machine, f"{start} {WAITS} {end} </dev/null >/dev/null 2>&1 &")
    left += said["unsafe"]
    assert len(left) == 1
    found = re.fullmatch(r"it left a process running: python[\d.]* \((\d+)\)", left[0])
    assert found is not None
    assert Path("/proc", found[1]).exists()


@pytest.mark.root
def test_processes_of_others_and_those_that_just_end_are_not_the_setups(machine: Machine) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        try:
            said = look_at(machine, "sleep 0.3 </dev/null >/dev/null 2>&1 &", grace_s=20)
        finally:
            other.kill()
    assert said["unsafe"] == []


def test_without_mounts_of_its_own_a_daemon_is_known_by_its_environment() -> None:
    baseline = Baseline.take(lambda: None)
    env = {**os.environ, **baseline.environment}
    script = f"setsid {WAITS} </dev/null >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], env=env, stdout=subprocess.PIPE, check=True).stdout)
    try:
        _, this_time, _ = baseline.side_effects(NOBODY_WATCHED, grace_s=0.0)
        assert [reason for reason in this_time if "process" in reason and str(pid) in reason]
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_ends_while_it_is_looked_at_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> daemons.Daemon:
        process.kill()
        process.wait()
        raise ProcessLookupError

    monkeypatch.setattr(daemons, "_describe", end)
    setup = daemons.SetupContext({}, ("X", "1"), (), "node")
    with subprocess.Popen(["sleep", "100"]) as process:
        assert daemons.find_restartable({process.pid: "sleep"}, setup, NOBODY_WATCHED) == ([], [])


def test_without_mounts_of_its_own_a_new_mount_may_be_of_another_program() -> None:
    before = {"mounts": [], "scratch": [(str(path), False) for path in Path("/tmp").iterdir()]}
    unsafe, this_time, _ = Baseline(None, before, KernelState.now(), "mark").side_effects(NOBODY_WATCHED, grace_s=0.0)
    assert not unsafe
    assert any(reason.startswith("it mounted proc on /proc") for reason in this_time)


def test_of_what_could_not_be_read_before_no_difference_is_reported() -> None:
    unsafe, this_time, _ = Baseline(None, {}, KernelState.now(), "mark").side_effects(NOBODY_WATCHED, grace_s=0.0)
    assert not unsafe
    assert not [reason for reason in this_time if "mounted" in reason or "installed" in reason]


@pytest.mark.root
@needs_fuse
def test_a_killed_process_that_the_kernel_holds_is_not_left_running(tmp_path: Path) -> None:
    namespace = Path("/proc/self/ns/mnt").stat().st_ino
    with hung_mount(tmp_path / "hung") as path:
        pid = child_that_asks(path)
        assert pid in leftover_processes("", namespace, grace_s=0)
        os.kill(pid, signal.SIGKILL)
        assert pid not in leftover_processes("", namespace, grace_s=0)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.waitpid(pid, 0)


def test_a_process_whose_name_is_no_text_is_found() -> None:
    words = "import ctypes, signal; ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0); print(flush=True); signal.pause()"
    environment = {**os.environ, effects.MARK: "mark-of-this-test"}
    with subprocess.Popen([sys.executable, "-c", words], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert leftover_processes("mark-of-this-test", None, grace_s=0) == {process.pid: "\udcff"}
        process.kill()


def test_a_users_name_that_is_no_text_can_be_recorded(tmp_path: Path) -> None:
    accounts = tmp_path / "root/etc/passwd"
    accounts.parent.mkdir(parents=True)
    accounts.write_bytes(b"f\xfcr:x:12:12::/:/bin/sh\n")
    assert daemons._user(tmp_path, 12).encode() == "f\ufffdr".encode()


@pytest.mark.root
def test_mounts_of_the_setup_are_reported_and_those_of_the_host_are_not(machine: Machine) -> None:
    (machine.work / "theirs").mkdir()
    said = look_at(
        machine,
        "mkdir /srv/mine; mount -t tmpfs none /srv/mine",
        beside="mount -t tmpfs none /var/tmp",
    )
    assert said["unsafe"] == ["it mounted tmpfs on /srv/mine"]


@pytest.mark.root
def test_mounts_that_others_have_for_a_moment_are_not_the_setups(machine: Machine) -> None:
    """Containers start at the same time, each with a mount on a new path, which exists only for a moment."""
    mounts = "at=/var/tmp/$one.$((number+=1)); mkdir $at; mount -t tmpfs none $at; umount $at"
    loops = f"for one in 1 2 3 4; do (while kill -0 $PPID; do {mounts}; done) > /dev/null 2>&1 & done"
    said = look_at(machine, "mkdir /srv/mine; mount -t tmpfs none /srv/mine", beside=loops)
    assert said["unsafe"] == ["it mounted tmpfs on /srv/mine"]


@pytest.mark.root
@pytest.mark.parametrize("name", ["start-node@0a1b2c3d-abc", "run-1-aside"])  # of this version and of older ones
def test_what_stays_of_another_starts_container_is_not_the_setups(machine: Machine, name: str) -> None:
    at = f"/var/tmp/containers/{name}/root"
    said = look_at(machine, f"mkdir -p {at} /srv/mine; mount -t tmpfs none {at}; mount -t tmpfs none /srv/mine")
    assert said["unsafe"] == ["it mounted tmpfs on /srv/mine"]


@pytest.mark.root
def test_unmounting_is_reported(machine: Machine) -> None:
    said = look_at(machine, "umount -l /var/tmp")
    assert said["unsafe"] == ["it unmounted /var/tmp"]


@pytest.mark.root
def test_a_changed_setting_of_the_kernel_is_reported(machine: Machine) -> None:
    said = look_at(machine, "hostname renamed")
    assert said["unsafe"] == ["it changed the kernel setting kernel.hostname"]


@pytest.mark.root
def test_shared_memory_is_reported(machine: Machine) -> None:
    said = look_at(machine, "ipcmk -M 4096 >&2")
    number = said["error"].split()[-1]
    try:
        assert said["unsafe"] == [f"it left shared memory behind (System V, id {number})"]
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)


@pytest.mark.root
def test_users_and_groups_are_restored_with_their_files(machine: Machine) -> None:
    script = "echo 'made:x:4711:4712::/:/bin/sh' >> /etc/passwd; echo 'makers:x:4712:' >> /etc/group"
    said = look_at(machine, script)
    assert said["unsafe"] == []


@pytest.mark.root
def test_an_environment_in_a_scratch_folder_is_reported(machine: Machine) -> None:
    said = look_at(machine, f"{sys.executable} -m venv --without-pip /var/tmp/env")
    assert said["unsafe"] == ["it installed into /var/tmp/env, which is not kept: use another folder"]


@pytest.mark.root
def test_a_setup_that_only_writes_files_has_no_effects(machine: Machine) -> None:
    said = look_at(machine, "echo x > /srv/x; cd $(mktemp -d -p /var/tmp); echo y > y; echo z > /var/tmp/build.log")
    assert said["unsafe"] == []


def test_without_observation_only_an_environment_or_what_is_used_later_counts(tmp_path: Path) -> None:
    baseline = Baseline.take(lambda: None)
    names = [Path(f"/var/tmp/bootseer-{tmp_path.name}-{number}") for number in range(3)]
    for name in names:
        name.mkdir()
    (names[0] / "pyvenv.cfg").touch()
    try:
        mentions = [f"python {names[1]}/train.py"]
        unsafe, this_time, _ = baseline.side_effects(NOBODY_WATCHED, mentions=mentions, grace_s=0.0)
        assert not unsafe
        about = [reason for reason in this_time if tmp_path.name in reason]
        assert about == [f"it installed into {name}, which is not kept: use another folder" for name in names[:2]]
    finally:
        (names[0] / "pyvenv.cfg").unlink()
        for name in names:
            name.rmdir()


def test_a_kernel_that_is_left_alone_does_not_change() -> None:
    before = KernelState.now()
    subprocess.run(["true"], check=True)
    assert len(before.settings) > 100
    assert KernelState.now().changes(before) == []


@needs_fuse
def test_an_inspection_that_hangs_in_the_kernel_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "INSPECT_S", 0.5)
    with hung_mount(tmp_path / "hung") as path:
        assert effects._inspect_inside(lambda: void(path.stat())) == {}
    os.wait()


def void(_: object) -> None:
    """Drop a value."""


@pytest.mark.root
def test_other_users_private_folders_in_scratch_hide_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example `/tmp/systemd-private-...`, for a user who is not root."""
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(effects, "SCRATCH", (".",))
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    os.seteuid(64321)
    try:
        found = effects._inspect()["scratch"]
    finally:
        os.seteuid(0)
    assert found == [("./theirs", False)]
