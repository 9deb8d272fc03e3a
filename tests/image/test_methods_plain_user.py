"""Images of an ordinary user: containers and mounts, by the ways that such a user has."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from bootseer.artifact.places import unpacked_folder
from bootseer.image.mounting import trial
from bootseer.mounts.layers import MountMethod
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from bootseer.snapshotter import service
from busybox import running
from conftest_launch import BOOTSEER
from plain_user import UID, as_plain_user, home_of, run_as_plain_user
from waiting import until
from ways_image import Image

pytestmark = [pytest.mark.root, pytest.mark.fuse]

LIST = (
    "cd /; busybox find . -xdev ! -path './etc/*' ! -path ./etc ! -path './dev*' ! -path './proc*' ! -path './sys*' "
    "! -path './run*' ! -path . ! -type d -exec busybox stat -c '%n %a %F %s %h %Y %t %T' {} + | busybox sort;"
    "busybox find ./d -type d -exec busybox stat -c '%n %a %Y' {} + | busybox sort;"
    "busybox find d hidden hard owned secret becomes large -type f -exec sha256sum {} + | busybox sort;"
    "busybox readlink link"
)
Plain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def plain(image: Image) -> Iterator[Plain]:
    """`plain(words, fuse=...)`: run the program as an ordinary user. It must leave nothing behind."""
    home = home_of(image.folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER_")}
    env.update(BOOTSEER_RUNTIME=str(home / "runtime"), BOOTSEER_CACHE=str(home / "cache"), BOOTSEER_STORE=image.store)

    def call(*words: str, fuse: bool, **options: object) -> subprocess.CompletedProcess[str]:
        return run_as_plain_user(image.folder, *words, fuse=fuse, env=env, **options)

    yield call
    assert list((home / "runtime" / "mounts").glob("*")) == []
    assert list((home / "cache" / "containers").glob("*")) == []


def run_of(image: Image, *words: str, **options: str) -> list[str]:
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["image", "run", image.reference, "--loading", "lazy", *given, "--", *words]


@pytest.mark.parametrize(("fuse", "way"), [(True, MountMethod.FUSE_TREE), (False, MountMethod.UNPACK)])
def test_a_container_of_a_plain_user_sees_what_root_s_sees(
    image: Image, plain: Plain, fuse: bool, way: MountMethod
) -> None:
    words = run_of(image, "sh", "-c", LIST)
    env = {"BOOTSEER_RUNTIME": str(image.folder / "runtime"), "BOOTSEER_CACHE": str(image.folder / "cache")}
    of_root = warm.bootseer(words, env={**os.environ, **env, "BOOTSEER_STORE": image.store}, cwd=image.folder)
    assert (of_root.returncode, of_root.stderr) == (0, "")
    assert of_root.stdout.count("\n") > 600
    ran = plain(*words, fuse=fuse)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == of_root.stdout.splitlines()
    assert f"by {way.value}; not by EROFS from files or EROFS from loop devices: it needs root" in ran.stderr
    assert ran.stderr.count("is mounted by") == 1


@pytest.mark.parametrize("fuse", [True, False])
def test_changes_of_one_container_are_not_in_the_next(image: Image, plain: Plain, fuse: bool) -> None:
    script = "cat d/changed; echo mine > d/changed; rm -r hidden; echo x > new; cat d/changed; ls"
    shell = ("sh", "-c", f"alias rm='busybox rm'; cd /; {script}")
    first = plain(*run_of(image, *shell), fuse=fuse)
    again = plain(*run_of(image, *shell), fuse=fuse)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("newmine\n")
    assert again.stdout == first.stdout


def test_a_written_out_tree_whose_root_is_closed_is_deleted(image: Image, plain: Plain) -> None:
    trees = unpacked_folder(image.folder / "home" / "cache")
    assert plain(*run_of(image, "true"), fuse=False).returncode == 0
    (tree,) = [path for path in trees.iterdir() if path.suffix != ".lock"]
    tree.chmod(0o555)  # like the root directory of many images
    pruned = plain("cache", "prune", fuse=False)
    assert pruned.returncode == 0, pruned.stderr
    assert list(trees.iterdir()) == []


def test_the_files_are_written_out_once(image: Image, plain: Plain) -> None:
    trees = unpacked_folder(image.folder / "home" / "cache")
    made = []
    for _ in range(2):
        assert plain(*run_of(image, "true"), fuse=False).returncode == 0
        (tree,) = [path for path in trees.iterdir() if path.suffix != ".lock"]
        made.append((tree.name, tree.stat().st_ino, (tree / "d" / "changed").stat().st_ctime_ns))
    assert made[0] == made[1]


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_options_of_a_plain_user_s_container_hold_or_are_refused(image: Image, plain: Plain, runtime: str) -> None:
    given = ["--runtime", runtime, "--hostname", "box", "--tmpfs", "/tmp/fast:size=1m", "--ulimit", "nofile=64"]
    words = ["image", "run", image.reference, *given, "--cap-drop", "ALL"]
    look = "cat /proc/sys/kernel/hostname; ulimit -n; busybox grep -E 'CapEff|fast' /proc/self/status /proc/mounts"
    ran = plain(*words, "--", "sh", "-c", look, fuse=True)
    assert ran.stdout.startswith("box\n64\n"), ran.stderr
    assert "CapEff:\t0000000000000000" in ran.stdout
    assert "/tmp/fast tmpfs" in ran.stdout
    ran = plain(*words, "--group-add=7", "--", "true", fuse=True)
    assert (ran.returncode, "needs root" in ran.stderr, ran.stdout) == (2, True, ""), ran.stderr


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_streams_exit_code_and_root_of_a_plain_user_s_container(image: Image, plain: Plain, runtime: str) -> None:
    ran = plain(
        *run_of(image, "sh", "-c", "cat; id -u; echo $GREETING; pwd; exit 7", runtime=runtime), fuse=True, input="in\n"
    )
    assert (ran.returncode, ran.stdout) == (7, "in\n0\nhello\n/work\n"), ran.stderr


@pytest.mark.parametrize(("user", "ids"), [("worker", "1000 1001"), ("5:44", "5 44"), ("0:44", "0 44")])
def test_another_user_of_the_image_is_the_caller_by_another_name(
    image: Image, plain: Plain, user: str, ids: str
) -> None:
    script = "echo $(id -u) $(id -g); cat /secret; echo; echo x > file && stat -c '%u %g' file"
    home = image.folder / "home"
    script += "; echo y > /out/file"
    ran = plain(*run_of(image, "sh", "-c", script, user=user, mount=f"{home}:/out"), fuse=True)
    assert ran.stdout == f"{ids}\nfor the owner alone\n{ids}\n", ran.stderr
    assert (home / "file").stat().st_uid == UID


def test_a_plain_user_s_devices_and_system_files_are_the_host_s_and_protected(image: Image, plain: Plain) -> None:
    script = "dd if=/dev/zero bs=4 count=1 2>/dev/null | wc -c; ls -d /sys/class; echo x > /proc/sys/kernel/hostname"
    ran = plain(*run_of(image, "sh", "-c", script, device="/dev/full"), fuse=True)
    assert ran.stdout == "4\n/sys/class\n"
    assert "Read-only file system" in ran.stderr


@pytest.mark.parametrize("user", ["0", "worker"])
def test_a_plain_user_s_container_sees_its_own_processes_alone(image: Image, plain: Plain, user: str) -> None:
    script = "cat /proc/1/comm; echo $(ls -d /proc/[0-9]* | wc -l); ls /proc/1/root"
    ran = plain(*run_of(image, "sh", "-c", script, user=user), fuse=True)
    assert ran.returncode != 0
    assert ran.stdout.startswith("bootseer-init\n"), ran.stderr
    assert int(ran.stdout.split()[1]) < 6
    assert "Permission denied" in ran.stderr


def test_where_proc_is_covered_the_container_sees_the_processes_around_it(image: Image, plain: Plain) -> None:
    """Like in most containers: the kernel then refuses a new mount of proc."""
    ran = plain(*run_of(image, "cat", f"/proc/{os.getpid()}/comm"), fuse=True, covered=True)
    assert ran.stdout == Path("/proc/self/comm").read_text(), ran.stderr
    assert "the container sees the processes of this machine: mount proc: Operation not permitted" in ran.stderr


def test_a_user_other_than_root_needs_crun(image: Image, plain: Plain) -> None:
    ran = plain(*run_of(image, "true", user="worker", runtime="runc"), fuse=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "user 1000:1001 of a container without root needs crun" in ran.stderr


def test_the_way_and_why_stand_in_the_events(image: Image, plain: Plain) -> None:
    spool = image.folder / "home" / "spool"
    words = run_of(image, "true", spool=str(spool))
    assert plain("run", "-q", "--image", words[2], *words[3:], fuse=False).returncode == 0
    events = scan(sources([str(spool)])).events
    (ended,) = [event.attrs for event in events if event.stage == "image_loading" and event.phase == "end"]
    assert (ended["way"], ended["mode"]) == ("unpacked files", "fallback")
    assert "file trees through FUSE: /dev/fuse cannot be opened: Permission denied" in ended["refused_ways"]


def test_a_plain_user_mounts_through_fusermount(image: Image, plain: Plain) -> None:
    point = image.folder / "home" / "mnt"
    bootseer = shlex.join(BOOTSEER)
    script = (
        f"{bootseer} image mount {image.reference} {point} --loading lazy >&2 && "
        f"cat {point}/d/changed {point}/secret && "
        f"{bootseer} image list --json && {bootseer} image umount {point} && ls -A {point}"
    )
    ran = in_shell(image, script)
    assert ran.returncode == 0, ran.stderr
    content, _, rest = ran.stdout.partition("alone")
    assert content == "newfor the owner "
    (mount,) = json.loads(rest)["mounts"]
    assert (mount["target"], mount["state"]) == (str(point), "mounted")


def in_shell(image: Image, script: str) -> subprocess.CompletedProcess[str]:
    """Run several commands as an ordinary user with FUSE, in one mount namespace."""
    home = home_of(image.folder)
    env = {**os.environ, "BOOTSEER_RUNTIME": str(home / "runtime"), "BOOTSEER_CACHE": str(home / "cache")}
    return subprocess.run(
        ["sh", "-c", script],
        preexec_fn=as_plain_user(image.folder, fuse=True),
        env={**env, "BOOTSEER_STORE": image.store, "HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_without_fuse_a_plain_user_s_mount_is_an_error_with_the_way_out(image: Image, plain: Plain) -> None:
    ran = plain("image", "mount", image.reference, str(image.folder / "home" / "mnt"), fuse=False)
    assert ran.returncode == 2
    assert "without root: /dev/fuse cannot be opened" in ran.stderr
    assert "image run" in ran.stderr


@pytest.mark.parametrize(("fuse", "status", "found"), [(True, "limited", "FUSE"), (False, "limited", "unpacked")])
def test_the_doctor_tells_the_way_and_why(plain: Plain, fuse: bool, status: str, found: str) -> None:
    checks = json.loads(plain("doctor", "--json", fuse=fuse).stdout)["checks"]
    (row,) = [check for check in checks if check["name"] == trial.CHECK]
    assert row["status"] == status
    assert found in row["found"]
    assert "it needs root" in row["why"]
    (row,) = [check for check in checks if check["name"] == service.CHECK]
    assert row["why"].startswith("only root")  # whose socket lies elsewhere


@pytest.mark.parametrize("fuse", [True, False])
def test_killed_a_plain_user_s_run_leaves_neither_command_nor_files(image: Image, plain: Plain, fuse: bool) -> None:
    home = home_of(image.folder)
    env = {**os.environ, "BOOTSEER_RUNTIME": str(home / "runtime"), "BOOTSEER_CACHE": str(home / "cache")}
    with subprocess.Popen(
        [*BOOTSEER, *run_of(image, "sh", "-c", "(sleep 600.66 &); echo up; exec sleep 600.66")],
        preexec_fn=as_plain_user(image.folder, fuse=fuse),  # noqa: PLW1509 - no other thread runs
        env={**env, "BOOTSEER_STORE": image.store, "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        until(lambda: len(running("sleep 600.66")) == 2)
        process.kill()
    until(lambda: running("sleep 600.66") == [])
    until(lambda: list((home / "runtime" / "mounts").iterdir()) == [])
    until(lambda: list((home / "cache" / "containers").iterdir()) == [])
