"""Captures of real setups on a real kernel: what they find, what they do not touch, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from bootseer.env.capturing.capture import open_capture
from bootseer.env.capturing.overlay import Plan, build_root
from bootseer.errors import BootseerError
from bootseer.io.proc import open_files
from bootseer.mounts import kernel
from bootseer.mounts.kernel import is_mounted_anywhere
from bootseer.mounts.layers import mount_overlay
from bootseer.mounts.namespace import Built, Namespace
from env.capturing.captured import DEADLINE_S, Machine
from in_capture import run_in
from once import lent_python_with_pip
from plain_user import UID, as_plain_user

pytestmark = pytest.mark.root
NEW = "/opt/bootseer-test"
"""A folder on the machine's own disk that exists only in captures."""
BOTH = pytest.mark.parametrize("way", ["overlay", "user"])


def wheel(folder: Path, version: str, modules: dict[str, str]) -> Path:
    """A small package `thing` with a console script, a data file and the given modules."""
    info = f"thing-{version}.dist-info"
    files = {
        **{f"thing/{name}": text for name, text in modules.items()},
        "thing/data/table.txt": f"data of {version}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nthing = thing:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"thing-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@BOTH
def test_a_capture_finds_what_pip_installs_replaces_and_removes(machine: Machine, way: str) -> None:
    old = wheel(machine.folder, "1.0", {"__init__.py": "def main(): print('one')", "gone.py": "x = 1", "same.py": ""})
    new = wheel(machine.folder, "2.0", {"__init__.py": "def main(): print('two')", "more.py": "y = 2", "same.py": ""})
    install = ["-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index"]
    with lent_python_with_pip(machine.work / "env"):
        subprocess.run([machine.work / "env/bin/python", *install, old], check=True)
        ended = machine.capture(f"/srv/env/bin/python {' '.join(install)} {new}", way)
        # The machine itself is unchanged.
        assert subprocess.run([machine.work / "env/bin/thing"], capture_output=True, check=True).stdout == b"one\n"

    assert ended.said["code"] == 0, ended.error
    place = next(path for path in ended.changes if path.endswith("/thing-2.0.dist-info")).rpartition("/")[0]
    actions = ended.actions(f"{place}/")
    assert actions["thing/__init__.py"] == "modified"
    assert actions["thing/more.py"] == "added"
    assert actions["thing/gone.py"] == "deleted"
    assert actions["thing/data/table.txt"] == "modified"
    assert actions["thing-1.0.dist-info"] == "deleted"
    assert ended.changes["/srv/env/bin/thing"]["mode"] & 0o111


@BOTH
def test_a_capture_finds_what_dpkg_does(machine: Machine, way: str) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg here")
    package = machine.folder / "package"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN/control").write_text(
        "Package: bootseer-test\nVersion: 1\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: test\n"
    )
    (package / "usr/share/bootseer-test").mkdir(parents=True)
    (package / "usr/share/bootseer-test/file").write_text("from a package")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", package, machine.folder / "p.deb"], check=True)

    ended = machine.capture(f"dpkg -i {machine.folder}/p.deb", way)

    assert ended.said["code"] == 0, ended.error
    changes = ended.changes
    assert changes["/usr/share/bootseer-test"]["owner"] == [0, 0]
    assert changes["/usr/share/bootseer-test/file"]["text"] == "from a package"
    assert changes["/var/lib/dpkg/status"]["action"] == "modified"
    assert changes["/var/lib/dpkg/info/bootseer-test.list"]["action"] == "added"
    assert not [path for path in changes if path.endswith("-old") or path.startswith("/var/log")]
    assert not Path("/usr/share/bootseer-test").exists()


@BOTH
def test_deletions_and_replaced_folders_are_distinguished_from_changed_ones(machine: Machine, way: str) -> None:
    for name in ("file", "dir/inside", "again/old", "again/same", "to_file/x", "changed/x", "kept/x"):
        path = machine.work / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (machine.work / "to_dir").write_text("file")
    (machine.work / "link").symlink_to("/etc/passwd")
    ended = machine.capture(
        "rm file; rm -r dir; rm -r again; mkdir again; printf again/same > again/same; echo new > again/new;"
        "rm -r to_file; echo f > to_file; rm to_dir; mkdir -p to_dir/sub; chmod 700 changed; touch kept;"
        "echo y > kept/y; ln -sfn /etc/group link",
        way,
    )
    below = ended.below("/srv/")
    assert ended.actions("/srv/") == {
        "file": "deleted",
        "dir": "deleted",
        "again": "modified",
        "again/old": "deleted",
        "again/same": "modified",  # unchanged, but needed: the new folder hides the old one
        "again/new": "added",
        "to_file": "modified",
        "to_dir": "modified",
        "to_dir/sub": "added",
        "changed": "modified",
        "kept/y": "added",
        "link": "modified",
    }
    assert [path for path, found in below.items() if found["opaque"]] == ["again"]
    assert below["file"]["before"].startswith("file:sha256:")
    assert below["dir"]["before"] == "directory"
    assert below["link"]["before"] == "symlink:/etc/passwd"
    assert below["link"]["text"] == "/etc/group"


@BOTH
def test_the_rules_apply_to_a_home_that_a_link_leads_to(machine: Machine, way: str) -> None:
    (machine.work / "real").mkdir()
    (machine.work / "link").symlink_to("real")
    script = "mkdir $HOME/.aws; echo secret > $HOME/.aws/credentials; echo x > $HOME/kept"
    ended = machine.capture(script, way, env={"HOME": "/srv/link"})
    assert ended.actions("/srv/real/") == {".aws": "added", "kept": "added"}
    assert ended.said["left_out"]["credentials"] == ["/srv/real/.aws/credentials"]


@BOTH
def test_credentials_that_links_at_home_lead_to_are_left_out(machine: Machine, way: str) -> None:
    (machine.work / "aws").mkdir()
    for name, target in ((".aws", "aws"), (".pgpass", "passwords")):
        (machine.home / "user" / name).symlink_to(f"/srv/{target}")
    ended = machine.capture("echo secret > ~/.aws/credentials; echo word > ~/.pgpass; echo x > ~/.aws/config", way)
    assert ended.actions("/srv/") == {"aws/config": "added"}
    assert sorted(ended.said["left_out"]["credentials"]) == ["/srv/aws/credentials", "/srv/passwords"]


@BOTH
def test_what_was_only_touched_or_written_anew_is_no_change(machine: Machine, way: str) -> None:
    for name in ("touched", "same", "mode", "other"):
        (machine.work / name).write_text("content of one size")
    ended = machine.capture(
        "touch touched; printf 'content of one size' > same; chmod 600 mode; chmod 644 mode;"
        "printf 'content of 1 sizes' > other; mkdir empty; rmdir empty",
        way,
    )
    assert ended.actions("/srv/") == {"other": "modified"}


@BOTH
def test_hard_links_sparse_files_owners_and_attributes_are_kept(machine: Machine, way: str) -> None:
    (machine.work / "first").write_text("linked")
    ended = machine.capture(
        f"ln first second; mkdir {NEW}; cd {NEW}; echo 1 > a; ln a b; truncate -s 1G hole; chown 33:34 a; chmod 4755 b;"
        "cp /bin/true prog; setcap cap_net_bind_service+ep prog;"
        f'{sys.executable} -c \'import os; os.setxattr("a", "user.note", b"1")\';'
        "mkfifo pipe; mknod null c 1 3 || true",
        way,
    )
    assert ended.said["code"] == 0, ended.error
    linked, new = ended.below("/srv/"), ended.below(f"{NEW}/")
    assert linked["first"]["inode"] == linked["second"]["inode"], "the old name belongs to the new one"
    assert new["a"]["inode"] == new["b"]["inode"]
    assert (new["a"]["owner"], new["a"]["mode"]) == ([33, 34], 0o4755)
    assert "user.note" in new["a"]["xattrs"]
    assert "security.capability" in new["prog"]["xattrs"]
    assert new["hole"]["size"] == 1 << 30
    assert new["hole"]["blocks"] < 100
    assert "pipe" in new
    assert "null" not in new


def test_access_lists_are_changes(machine: Machine) -> None:
    (machine.work / "file").write_text("x")
    entries = b"\x02\x00\x00\x00" + b"".join(
        tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + number.to_bytes(4, "little")
        for tag, rights, number in (
            (1, 6, 0xFFFFFFFF),
            (2, 4, 1234),
            (4, 4, 0xFFFFFFFF),
            (0x10, 4, 0xFFFFFFFF),
            (0x20, 4, 0xFFFFFFFF),
        )
    )
    code = f'import os; os.setxattr("file", "system.posix_acl_access", bytes.fromhex("{entries.hex()}"))'
    ended = machine.capture(f"{sys.executable} -c '{code}'")
    assert ended.said["code"] == 0, ended.error
    assert "system.posix_acl_access" in ended.below("/srv/")["file"]["xattrs"]


@BOTH
def test_excluded_paths_are_left_out_and_reported(machine: Machine, way: str) -> None:
    ended = machine.capture(
        "cd ~; mkdir -p .ssh .cache/huggingface/hub app/node_modules/m; echo k > .ssh/id_rsa;"
        "echo h > .ssh/known_hosts; echo t > .netrc; echo x > .bash_history; echo 12 > app/run.pid;"
        ": > app/build.lock; echo lock > app/uv.lock; : > app/node_modules/m/package.lock;"
        "echo m > .cache/huggingface/hub/model; echo t > .cache/huggingface/token; echo i > /etc/machine-id;"
        f"{sys.executable} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"app/socket\")'",
        way,
    )
    assert set(ended.below("/home/user/")) == {
        ".ssh",
        ".ssh/known_hosts",
        ".cache/huggingface",
        ".cache/huggingface/hub",
        ".cache/huggingface/hub/model",
        "app",
        "app/uv.lock",
        "app/node_modules",
        "app/node_modules/m",
        "app/node_modules/m/package.lock",
    }
    assert "/etc/machine-id" not in ended.changes
    assert set(ended.said["left_out"]) >= {"credentials", "history", "pid file", "lock file", "socket"}
    assert any("/home/user/.netrc" in line for line in ended.said["missed"])
    assert not any("run.pid" in line for line in ended.said["missed"])


@BOTH
def test_temporary_folders_and_package_caches_are_the_real_ones(machine: Machine, way: str) -> None:
    marker = machine.folder / "marker"
    own = machine.folder / "spool"
    own.mkdir()
    ended = machine.capture(
        f"echo real > {marker}; echo w > ~/.cache/pip/wheel; echo e > {own}/event; echo b > ~/built;"
        f"ls {machine.captures}/; cat /proc/$$/comm; test -e /dev/null; test -s /etc/hosts",
        way,
        own=[str(own)],
    )
    assert ended.said["code"] == 0, ended.error
    assert marker.read_text() == "real\n"
    assert (own / "event").read_text() == "e\n"
    assert (machine.home / "user/.cache/pip/wheel").read_text() == "w\n"
    assert list((machine.home / "user/.cache/uv").iterdir()) == [], "made for the capture, and not used"
    assert not (machine.home / "user/built").exists()
    assert set(ended.below("/home/user/")) == {"built"}
    assert not list(machine.captures.iterdir())
    assert ended.error.startswith("sh"), "the folder of captures is empty for the setup"


def test_other_mounts_stay_as_they_are_and_disks_are_captured(machine: Machine) -> None:
    ended = machine.capture(
        'awk \'$5 == "/proc" || $5 == "/dev" || $5 == "/srv" || $5 == "/" { print $5, $(NF-2) }\' /proc/self/mountinfo;'
        "echo 1 > /dev/shm/bootseer-test; rm /dev/shm/bootseer-test; pwd"
    )
    lines = set(ended.error.splitlines())
    assert {"/ overlay", "/srv overlay", "/proc proc", "/srv"} <= lines
    assert {"/", "/srv", "/home"} <= set(ended.said["points"])
    assert ended.said["way"] == "overlay"


def test_a_plain_user_captures_home_and_keeps_the_name(machine: Machine) -> None:
    home = machine.home / "user"
    (home / "old").write_text("old")
    for path in (home, home / "old"):
        os.chown(path, UID, UID)
    rights = as_plain_user(machine.folder, fuse=False)
    closed = machine.folder / "closed"
    (closed / "disk").mkdir(parents=True)
    closed.chmod(0o700)
    for path in (machine.folder, machine.folder.parent, machine.home):
        path.chmod(0o755)

    def become() -> None:
        kernel.unshare_mounts()
        kernel.attach(kernel.clone_mount(machine.home), Path("/home"))
        kernel.attach(kernel.create_mount("tmpfs", [("source", "out of reach")]), closed / "disk")
        os.chdir("/home/user")
        rights()

    ended = machine.capture(
        "id -u; id -g; pwd; mkdir env; echo x > env/x; rm old; if echo n > /usr/n; then exit 9; fi",
        "auto",
        become=become,
        captures="/home/user/.cache/captures",
    )
    assert ended.said["way"] == "user", ended.said["refused"]
    assert ended.said["points"] == ["/home/user"]
    assert ended.said["code"] == 0, ended.error
    assert [str(UID), str(UID), "/home/user"] == ended.error.splitlines()[:3]
    assert ended.actions("/home/user/") == {"env": "added", "env/x": "added", "old": "deleted"}
    assert ended.below("/home/user/")["env/x"]["owner"] == [UID, UID]
    assert "CAP_SYS_ADMIN" in ended.said["refused"]["overlay"]
    assert (home / "old").exists()


def test_two_captures_at_once_do_not_meet(machine: Machine) -> None:
    fifos = [machine.folder / name for name in ("a", "b")]
    for fifo in fifos:
        os.mkfifo(fifo)
    # Each opens its pipe after it has written its file, and continues when both have.
    jobs = [machine.begin(f"echo {fifo.name} > same; echo r > {fifo}; read go < {fifo}; cat same") for fifo in fifos]
    try:
        for fifo in fifos:
            assert fifo.read_text() == "r\n"
        for fifo in fifos:
            fifo.write_text("go\n")
        ended = [job.communicate(timeout=DEADLINE_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [error for _, error in ended] == ["a\n", "b\n"]
    assert not (machine.work / "same").exists()
    assert not list(machine.captures.iterdir())


def test_after_a_kill_nothing_stays_mounted_and_the_next_capture_cleans_up(machine: Machine) -> None:
    job = machine.begin("echo x > x; echo $$ >&2; read never")
    assert job.stderr is not None
    setup = int(job.stderr.readline())
    left = list(machine.captures.iterdir())
    assert len(left) == 1
    assert list(left[0].glob("uppers/*/x"))
    job.send_signal(signal.SIGKILL)
    job.communicate()
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{setup}").exists() or is_mounted_anywhere(f"/{left[0].name}/"):
        assert time.monotonic() < deadline, "something lives on"
        time.sleep(0.01)
    assert left[0].exists()
    machine.capture("true")
    assert not list(machine.captures.iterdir())
    assert not (machine.work / "x").exists()


def test_upper_layers_go_elsewhere_where_the_disk_takes_none(machine: Machine) -> None:
    folders = [machine.folder / name for name in ("lower", "upper", "work_", "disk")]
    for folder in folders:
        folder.mkdir()
    mount_overlay([folders[0]], folders[3], upper=folders[1], work=folders[2])
    try:
        ended = machine.capture("echo x > x", captures=str(folders[3] / "captures"))
    finally:
        kernel.unmount(folders[3])
    assert ended.below("/srv/")["x"]["text"] == "x\n"


def test_a_full_upper_layer_is_reported(machine: Machine) -> None:
    disk = machine.folder / "disk"
    disk.mkdir()
    kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("size", "20m")]), disk)
    try:
        ended = machine.capture("head -c 30m /dev/zero > big", captures=str(disk / "captures"))
    finally:
        kernel.unmount(disk)
    assert ended.said["code"] != 0
    assert "No space left" in ended.error
    assert ended.said["trouble"] == f"the disk of {disk}/captures for what the setup writes is full"


def test_a_view_that_would_lack_mounts_for_too_few_open_files_is_an_error(tmp_path: Path) -> None:
    def build() -> Built:
        while (last := os.dup(0)) < max(open_files()):
            pass  # until no lower number is free
        most = last + 3  # every machine has more mounts
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return build_root(Plan(tmp_path, ()))

    with pytest.raises(BootseerError, match="Too many open files"):
        Namespace.create(build)


def test_the_view_can_be_read_from_outside_and_sources_too(tmp_path: Path) -> None:
    with open_capture(tmp_path / "captures", ways=["overlay"]) as capture:
        assert run_in(capture, ["mkdir", NEW], dict(os.environ)) == 0
        assert (capture.root / NEW[1:]).is_dir()
        assert (capture.root / "proc/self/status").exists()
        assert capture.source_of(NEW).is_dir()
        assert not Path(NEW).exists()
        assert run_in(capture, ["sh", "-c", "kill -9 $$"]) == 137


def test_a_disk_that_is_unmounted_during_the_setup_is_no_change_of_it(tmp_path: Path) -> None:
    """For example the disk of a container that ends meanwhile."""
    with contextlib.ExitStack() as undo:
        # Temporary folders are not captured.
        disk = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="bootseer-test-", dir="/srv")))
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("mode", "0777")]), disk)
        mounted = undo.enter_context(contextlib.ExitStack())
        mounted.callback(kernel.unmount, disk)
        with open_capture(tmp_path / "captures", ways=["overlay"]) as capture:
            assert str(disk) in capture.points
            mounted.close()
            assert str(disk) not in [change.path for change in capture.changes()]


@BOTH
def test_a_project_and_an_environment_in_a_scratch_folder_are_captured_and_the_rest_is_not(
    machine: Machine, way: str
) -> None:
    scratch = machine.folder / "scratch"
    for name in ("project/cache", "env/bin", "others"):
        (scratch / name).mkdir(parents=True)
    (scratch / "env/pyvenv.cfg").touch()
    (scratch / "project/old").write_text("old")
    script = (
        "cd /var/tmp; echo p > project/new; rm project/old; echo e > env/bin/tool; echo r > others/rest; echo t > t"
    )
    script += "; echo c > project/cache/block; cat project/new"

    ended = machine.capture(
        script,
        way,
        binds={"/srv": str(machine.work), "/home": str(machine.home), "/var/tmp": str(scratch)},
        folders=["/var/tmp/project"],
        own=["/var/tmp/project/cache"],
        env={"PATH": f"/var/tmp/env/bin:{os.environ['PATH']}"},
    )

    assert ended.said["code"] == 0, ended.error
    assert ended.actions("/var/tmp/") == {"env/bin/tool": "added", "project/new": "added", "project/old": "deleted"}
    assert {"/var/tmp/project", "/var/tmp/env"} <= {*ended.said["points"]}
    # Captured changes are not on the machine; all others are, as without a capture.
    assert (scratch / "project/old").exists()
    assert not (scratch / "project/new").exists()
    assert not (scratch / "env/bin/tool").exists()
    assert (scratch / "others/rest").read_text() == "r\n"
    assert (scratch / "t").exists()
    assert (scratch / "project/cache/block").read_text() == "c\n"


def test_folders_that_a_plain_user_may_not_look_into_are_no_hindrance(machine: Machine) -> None:
    home = machine.home / "user"
    os.chown(home, UID, UID)
    rights = as_plain_user(machine.folder, fuse=False)
    closed = machine.folder / "closed"
    (closed / "env/bin").mkdir(parents=True)
    closed.chmod(0o700)
    for path in (machine.folder, machine.folder.parent, machine.home):
        path.chmod(0o755)

    def become() -> None:
        kernel.unshare_mounts()
        kernel.attach(kernel.clone_mount(machine.home), Path("/home"))
        os.chdir("/home/user")
        rights()

    ended = machine.capture(
        "echo x > x",
        "auto",
        become=become,
        captures="/home/user/.cache/captures",
        env={"PATH": f"{closed}/env/bin:{os.environ['PATH']}", "PIP_CACHE_DIR": f"{closed}/pip"},
    )
    assert ended.said["way"] == "user", ended.said["refused"]
    assert ended.actions("/home/user/") == {"x": "added"}
