"""Real containers, with both runtimes: a busybox tree, its users, streams, exit codes, mounts, devices and end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import PermanentError, UsageError
from bootseer.image.containers.container import Container, Options, Runtime
from bootseer.image.containers.limits import Limits, parse_tmpfs, parse_ulimit
from bootseer.image.containers.process import ProcessOptions
from bootseer.image.containers.runtime_config import Bind, parse_bind
from busybox import CONFIG, make_tree, running, runtime_or_skip, without_mixed_cgroups
from waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces and mounts"),
]

Ran = subprocess.CompletedProcess[str]
Run = Callable[..., Ran]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "root")


@pytest.fixture(params=["runc", "crun"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return runtime_or_skip(request.param)


@pytest.fixture
def run(tmp_path: Path, root: Path, runtime: Runtime) -> Iterator[Run]:
    """`run(words, **options)`: run a command in a container and wait for it."""

    def call(*words: str, options: Options | None = None, env: dict[str, str] | None = None, **kwargs: object) -> Ran:
        given = options or Options()
        given = replace(given, process=replace(given.process, command=words), runtime=runtime)
        folder = tmp_path / "container"
        container = Container(folder, root, {"config": CONFIG}, given, env or {}, cdi_folders=[tmp_path / "cdi"])
        try:
            return subprocess.run(
                container.command,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
                preexec_fn=without_mixed_cgroups if runtime == "crun" else None,
                **kwargs,  # type: ignore[call-overload]
            )
        finally:
            container.close()
            assert not folder.exists()

    yield call
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_streams_folder_variables_and_exit_code_pass(run: Run) -> None:
    ran = run("sh", "-c", "cat; pwd; echo $GREETING; echo word >&2; exit 7", input="in\n")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("in\n/work\nhello\n", "word\n", 7)


def test_files_as_standard_streams_keep_their_owner(run: Run, tmp_path: Path) -> None:
    """While the program runs, the runtime makes its user their owner."""
    (tmp_path / "in").write_text("in\n")
    os.chown(tmp_path / "in", 77, 78)
    for user, code in (("worker", 0), ("root", 0), ("worker", 127)):
        with (tmp_path / "in").open() as file:
            words = ("sh", "-c", "cat; stat -L -c %u /proc/self/fd/0") if code == 0 else ("missing",)
            ran = run(*words, options=Options(process=ProcessOptions(user=user)), stdin=file)
        assert (ran.returncode, ran.stdout[:3]) == (code, "in\n" if code == 0 else ""), ran.stderr
        status = (tmp_path / "in").stat()
        assert (status.st_uid, status.st_gid) == (77, 78)


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("KILL", 137), ("USR1", 138), ("INT", 130)])
def test_the_signal_that_ended_the_program_is_reported_as_a_shell_does(run: Run, name: str, code: int) -> None:
    assert run("sh", "-c", f"kill -{name} $$").returncode == code


def test_the_program_runs_as_the_user_of_the_image_s_files(run: Run) -> None:
    ran = run("sh", "-c", "id; echo $HOME", options=Options(process=ProcessOptions(user="worker")))
    assert ran.stdout.split("\n")[:2] == [
        "uid=1000(worker) gid=1001(worker) groups=44(render)",
        "/home/worker",
    ]


def test_rights_are_the_usual_ones_and_no_more(run: Run) -> None:
    ran = run("sh", "-c", "grep CapEff /proc/self/status; echo x > /proc/sys/kernel/hostname; mount -t tmpfs x /tmp")
    held = int(ran.stdout.split()[1], 16)
    assert held & 1  # CAP_CHOWN
    for number in (13, 21, 27):  # CAP_NET_RAW, on the host's network; CAP_SYS_ADMIN; CAP_MKNOD
        assert not held & (1 << number)
    assert "Read-only file system" in ran.stderr
    assert "ermitted" in ran.stderr or "denied" in ran.stderr
    more = run("grep", "CapEff", "/proc/self/status", options=Options(limits=Limits(capabilities=("sys_ptrace",))))
    assert int(more.stdout.split()[1], 16) & (1 << 19)


@pytest.mark.parametrize(
    ("added", "dropped", "held"),
    [
        ((), ("ALL",), 0),
        (("kill",), ("all",), 1 << 5),
        ((), ("CHOWN", "cap_kill"), 0x800405FB & ~0x21),
    ],
)
def test_rights_can_be_left_out(run: Run, added: tuple[str, ...], dropped: tuple[str, ...], held: int) -> None:
    options = Options(limits=Limits(capabilities=added, dropped=dropped))
    ran = run("grep", "CapEff", "/proc/self/status", options=options)
    assert int(ran.stdout.split()[1], 16) == held, ran.stderr


def test_all_rights_are_those_that_we_have(run: Run) -> None:
    ran = run("grep", "CapEff", "/proc/self/status", options=Options(limits=Limits(capabilities=("ALL",))))
    ours = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd"))
    assert ran.stdout.split()[1] == ours.split()[1], ran.stderr


def test_limits_of_the_process_are_those_asked_for(run: Run) -> None:
    limits = Limits(rlimits=(parse_ulimit("nofile=64:128"), parse_ulimit("core=0")))
    ran = run("sh", "-c", "ulimit -n; ulimit -Hn; ulimit -c", options=Options(limits=limits))
    assert ran.stdout.split() == ["64", "128", "0"]


def test_a_folder_in_memory_is_mounted_before_mounts_in_it_and_after_those_around_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").write_text("content")
    options = Options(
        limits=Limits(tmpfs=(parse_tmpfs("/data/fast:size=1m,mode=0711"), parse_tmpfs("/new/scratch:exec"))),
        binds=(Bind(str(tmp_path / "file"), "/data/fast/file"), Bind(str(tmp_path / "data"), "/data")),
    )
    fill = "dd if=/dev/zero of=/data/fast/x bs=1M count=2"
    script = f"cat /data/fast/file; stat -c ' %a' /data/fast; {fill}; grep /new/scratch /proc/self/mountinfo"
    ran = run("sh", "-c", script, options=options)
    content, mounted = ran.stdout.splitlines()
    assert content == "content 711", ran.stderr
    assert "No space left" in ran.stderr
    assert {"nosuid", "nodev"} <= set(mounted.split()[5].split(","))
    assert "noexec" not in mounted
    assert list((tmp_path / "data" / "fast").iterdir()) == []


def test_a_host_name_of_its_own_leaves_the_machine_s_alone(run: Run) -> None:
    ran = run("sh", "-c", "cat /proc/sys/kernel/hostname /etc/hostname", options=Options(limits=Limits(hostname="box")))
    assert ran.stdout == "box\nbox\n", ran.stderr
    assert os.uname().nodename != "box"


def test_further_groups_are_the_image_s_or_numbers(run: Run) -> None:
    ran = run("id", "-G", options=Options(process=ProcessOptions(user="worker", groups=("staff", "4242"))))
    assert ran.stdout.split() == ["1001", "44", "50", "4242"], ran.stderr
    with pytest.raises(UsageError, match="'nobody'"):
        run("id", options=Options(process=ProcessOptions(groups=("nobody",))))


def test_mounts_bring_files_and_folders_of_the_host(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").write_text("content")
    binds = (Bind(str(tmp_path / "data"), "/new/data"), Bind(str(tmp_path / "file"), "/new/file", read_only=True))
    ran = run("sh", "-c", "cat /new/file; echo x > /new/file; echo out > /new/data/out", options=Options(binds=binds))
    assert ran.stdout == "content", ran.stderr
    assert "Read-only file system" in ran.stderr
    assert (tmp_path / "data" / "out").read_text() == "out\n"


def test_the_last_of_several_mounts_in_one_place_is_seen(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    binds = (
        Bind(str(tmp_path / "one"), "/new"),
        Bind(str(tmp_path / "two"), "/new", read_only=True),
        Bind(str(tmp_path / "two"), "/etc/hosts"),  # over the host's, which is mounted there
    )
    ran = run("sh", "-c", "cat /new /etc/hosts; echo x > /new", options=Options(binds=binds))
    assert ran.stdout == "twotwo"
    assert "Read-only file system" in ran.stderr


def test_a_link_in_the_image_does_not_lead_a_mount_to_the_host(run: Run, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (tmp_path / "file").write_text("content")
    run("cat", "/link/file", options=Options(binds=(Bind(str(tmp_path / "file"), "/link/file"),)))
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["dev", "proc", "sys"])
def test_an_image_whose_kernel_folders_are_links_is_not_started(
    run: Run, root: Path, tmp_path: Path, name: str
) -> None:
    (root / name).symlink_to(tmp_path)
    with pytest.raises(PermanentError, match="symbolic link"):
        run("true")


def test_a_read_only_root_takes_no_files(run: Run) -> None:
    ran = run(
        "sh", "-c", "echo x > /x; echo y > /dev/shm/y && cat /dev/shm/y", options=Options(limits=Limits(read_only=True))
    )
    assert "Read-only file system" in ran.stderr
    assert ran.stdout == "y\n"


def test_network_and_host_name_are_the_host_s(run: Run) -> None:
    ran = run("sh", "-c", "cat /proc/sys/kernel/hostname /etc/hosts; echo; ls /sys/class/net")
    assert ran.stdout.startswith(os.uname().nodename + "\n" + Path("/etc/hosts").read_text())
    assert sorted(ran.stdout.rpartition("\n\n")[2].split()) == sorted(
        path.name for path in Path("/sys/class/net").iterdir()
    )


def test_open_files_of_the_caller_are_not_passed_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        ran = run("sh", "-c", f"cat /proc/*/fd/{folder}/secret /proc/*/fd/{folder}/../secret; ls /proc/self/fd",
                  pass_fds=[folder])  # fmt: skip
    finally:
        os.close(folder)
    assert "of the host" not in ran.stdout
    assert ran.stdout.split() == ["0", "1", "2", "3"]  # 3: the folder that `ls` lists


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user may read, unlike those of tests."""
    with tempfile.TemporaryDirectory(prefix="bootseer-test-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("user", ["0", "worker"])
def test_no_process_that_the_container_sees_leads_to_the_host(run: Run, readable: Path, user: str) -> None:
    secret = readable / "secret"
    secret.write_text("of the host")
    show = f"for p in /proc/[0-9]*; do for way in root cwd; do cat $p/$way{secret}; ls $p/$way/; done; done"
    # With this capability the first process can be inspected, too.
    options = Options(process=ProcessOptions(user=user), limits=Limits(capabilities=("SYS_PTRACE",)))
    with subprocess.Popen(["sleep", "600"], user=0 if user == "0" else 1000, group=1001, extra_groups=[]) as process:
        try:
            ran = run("sh", "-c", f"{show}; cat /proc/1/comm", options=options)
        finally:
            process.kill()
    assert "of the host" not in ran.stdout
    assert ran.stdout.endswith("bootseer-init\n")
    assert "can't open" in ran.stderr  # the file does not exist in the container


def test_the_first_process_gains_no_rights_by_what_it_starts(run: Run) -> None:
    """It is root outside the container's limits: a process that traces it could make it start another program."""
    ran = run("grep", "-E", "NoNewPrivs|CapPrm", "/proc/1/status")
    assert ran.stdout.split() == ["CapPrm:", "0" * 16, "NoNewPrivs:", "1"]


def test_orphans_are_reaped_and_the_program_is_not_the_first_process(run: Run) -> None:
    ran = run("sh", "-c", "(true & exec true); (sleep 0 &); busybox sleep 0.3; busybox ps -o stat,comm; echo $$")
    *processes, number = ran.stdout.splitlines()
    assert int(number) > 1
    assert not [line for line in processes if line.startswith("Z")]


def test_what_the_program_left_running_ends_with_it(run: Run) -> None:
    ran = run("sh", "-c", "busybox setsid sleep 600.77 & exit 3")
    assert ran.returncode == 3
    assert running("sleep 600.77") == []


def test_the_host_s_process_ids_are_there_when_asked_for(run: Run) -> None:
    ran = run("sh", "-c", f"cat /proc/{os.getpid()}/comm", options=Options(own_pids=False))
    assert ran.stdout == Path("/proc/self/comm").read_text()


def test_limits_are_inherited(run: Run) -> None:
    ran = run("sh", "-c", "ulimit -n")
    soft = subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True, check=True).stdout
    assert ran.stdout == soft


def test_the_usual_devices_are_there_and_a_disk_cannot_be_made(run: Run) -> None:
    ran = run("sh", "-c", "echo x > /dev/null && dd if=/dev/urandom bs=8 count=1 | wc -c && ls /dev/shm /dev/pts/ptmx")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("8\n")
    # Device 1:1 is the machine's memory: never readable, whether or not the device node can be created.
    made = run("sh", "-c", "busybox mknod /tmp/mem c 1 1; dd if=/tmp/mem bs=1 count=1")
    assert made.returncode != 0
    assert "permitted" in made.stderr


def test_devices_and_set_uid_programs_of_a_mounted_folder_have_no_effect(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.mknod(data / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (data / "zero").chmod(0o666)
    options = Options(process=ProcessOptions(user="worker"), binds=(Bind(str(data), "/data"),))
    ran = run("sh", "-c", "cat /data/zero | busybox head -c 1; grep ' /data ' /proc/self/mountinfo", options=options)
    assert "denied" in ran.stderr
    assert {"nosuid", "nodev"} <= set(ran.stdout.split()[5].split(","))


def test_a_device_s_file_brings_node_variables_and_mounts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    edits = {
        "deviceNodes": [{"path": "/dev/tool", "hostPath": "/dev/zero"}],
        "env": ["TOOL=1"],
        "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/tool/name", "options": ["ro", "bind"]}],
    }
    (tmp_path / "cdi" / "tool.json").write_text(
        json.dumps({"kind": "acme.com/tool", "devices": [{"name": "0", "containerEdits": edits}]})
    )
    ran = run(
        "sh", "-c", "echo $TOOL; cat /tool/name; dd if=/dev/tool bs=4 count=1 | wc -c",
        options=Options(devices=("acme.com/tool=0",)),
    )  # fmt: skip
    assert ran.stdout == f"1\n{Path('/etc/hostname').read_text()}4\n"


def test_a_device_s_hook_that_fails_is_not_taken_for_the_program(run: Run, tmp_path: Path) -> None:
    # It reads its stdin: otherwise crun may find the pipe closed, and reports only that.
    script = """read -r state; echo 'exec: "ldconfig": executable file not found in $PATH' >&2; exit 1"""
    hook = {"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", script]}
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "tool.json").write_text(
        json.dumps({"kind": "acme.com/tool", "devices": [{"name": "0", "containerEdits": {"hooks": [hook]}}]})
    )
    ran = run("echo", "ran", options=Options(devices=("acme.com/tool=0",)))
    assert ran.returncode not in (0, 127)
    assert "hook" in ran.stderr
    assert "command not found" not in ran.stderr


def test_a_hook_that_hangs_does_not_keep_a_run_from_ending(tmp_path: Path, root: Path, runtime: Runtime) -> None:
    script = f"echo > {tmp_path}/begun; exec sleep 600.83"
    hook = {"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"]}
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "tool.json").write_text(
        json.dumps({"kind": "acme.com/tool", "devices": [{"name": "0", "containerEdits": {"hooks": [hook]}}]})
    )
    words = ProcessOptions(command=("true",))
    options = Options(process=words, runtime=runtime, devices=("acme.com/tool=0",))
    container = Container(tmp_path / "container", root, {"config": CONFIG}, options, {}, cdi_folders=[tmp_path / "cdi"])
    before = without_mixed_cgroups if runtime == "crun" else None
    try:
        with subprocess.Popen(container.command, preexec_fn=before) as process:  # noqa: PLW1509
            until((tmp_path / "begun").exists)
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        for pid in running("sleep 600.83"):
            os.kill(pid, signal.SIGKILL)
        container.close()


def test_a_folder_of_devices_brings_all_of_them(run: Run, tmp_path: Path) -> None:
    (tmp_path / "devices" / "more").mkdir(parents=True)
    for name in ("null", "more/zero"):
        os.mknod(tmp_path / "devices" / name, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "devices" / "README").touch()
    options = Options(devices=(f"{tmp_path}/devices", "/dev/full:/dev/other:rwm", f"{tmp_path}/devices:/dev/more"))
    ran = run(
        "sh", "-c", f"cd {tmp_path}/devices && busybox find . /dev/other /dev/more -type c -o -type f", options=options
    )
    assert sorted(ran.stdout.split()) == [
        "./more/zero",
        "./null",
        "/dev/more/more/zero",
        "/dev/more/null",
        "/dev/other",
    ]


_PROBLEMS = {126: "may not be executed", 127: "command not found"}


@pytest.mark.parametrize(("program", "code"), [("nothing", 127), ("/etc/passwd", 126), ("./nothing", 127)])
def test_a_program_that_does_not_exist_is_reported_with_a_shell_s_exit_code(run: Run, program: str, code: int) -> None:
    ran = run(program)
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == f"bootseer: {program}: {_PROBLEMS[code]} in the container"


@pytest.mark.parametrize(("program", "code"), [("plain", 126), ("folder", 126), ("nothing", 127)])
def test_a_missing_program_below_a_mount_is_reported(run: Run, tmp_path: Path, program: str, code: int) -> None:
    (tmp_path / "tools" / "folder").mkdir(parents=True)
    (tmp_path / "tools" / "plain").write_text("#!/bin/sh\n")
    ran = run(f"/tools/{program}", options=Options(binds=(Bind(str(tmp_path / "tools"), "/tools"),)))
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == f"bootseer: /tools/{program}: {_PROBLEMS[code]} in the container"


def test_crun_where_both_versions_of_cgroups_have_controllers(tmp_path: Path, root: Path) -> None:
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    if not controllers.exists() or not controllers.read_text().strip():
        pytest.skip("needs cgroups of both versions with controllers")
    options = Options(process=ProcessOptions(command=("true",)), runtime=runtime_or_skip("crun"))
    container = Container(tmp_path / "container", root, {"config": CONFIG}, options, {})
    try:
        ran = subprocess.run(container.command, capture_output=True, text=True, timeout=180, check=False)
    finally:
        container.close()
    assert ran.returncode == 125
    assert (
        "crun cannot start containers where both versions of cgroups have controllers\nhint: --runtime runc"
        in ran.stderr
    )


def test_a_program_from_a_mount_is_found(run: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "greet").write_text("#!/bin/sh\necho greetings\n")
    (tmp_path / "tools" / "greet").chmod(0o755)
    ran = run("/tools/greet", options=Options(binds=(Bind(str(tmp_path / "tools"), "/tools"),)))
    assert ran.stdout == "greetings\n"


_KILLED = """
import os, subprocess, sys
from pathlib import Path
from bootseer.image.containers.container import Container, Options
from bootseer.image.containers.process import ProcessOptions
words = ProcessOptions(command=("sh", "-c", f"(sleep {sys.argv[3]} & ) ; echo up; sleep {sys.argv[3]}"))
options = Options(process=words)
container = Container(Path(sys.argv[1]), Path(sys.argv[2]), {"config": {"Env": ["PATH=/bin"]}}, options, {})
container.start_guard([["touch", sys.argv[1] + "/../cleaned"]])
subprocess.run(container.command)
"""


def test_a_container_goes_with_the_program_that_was_killed(tmp_path: Path, root: Path) -> None:
    time_s = "600.88"
    words = [sys.executable, "-c", _KILLED, str(tmp_path / "container"), str(root), time_s]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        until(lambda: len(running(f"sleep {time_s}")) == 2)  # "up" may be printed before the second one has begun
        (shim,) = children(process.pid, "--pid-file")
        process.send_signal(signal.SIGKILL)
        os.kill(shim, signal.SIGKILL)  # as when `supervise` has started it
    until((tmp_path / "cleaned").exists)
    until(lambda: running(f"sleep {time_s}") == [])


def children(parent: int, word: str) -> list[int]:
    """Children of a process with a word in their command line."""
    pids = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return [pid for pid in pids if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("words", ["", "/a", "/a:b", "/:/b:rx", "/nowhere/at/all:/b", "/:/b:ro:x"])
def test_words_that_are_no_mount_are_usage_errors(words: str) -> None:
    with pytest.raises(UsageError):
        parse_bind(words)


def test_a_mount_s_words_are_source_target_and_mode(tmp_path: Path) -> None:
    assert parse_bind(f"{tmp_path}:/data:ro") == Bind(str(tmp_path), "/data", read_only=True)
    assert parse_bind(f"{tmp_path}:/data") == Bind(str(tmp_path), "/data")


def test_containers_of_processes_with_the_same_number_do_not_share_a_cgroup(root: Path, tmp_path: Path) -> None:
    """Its name is the container's id, also on nodes with separate PID namespaces."""
    made = [
        Container(
            tmp_path / name / "container",
            root,
            {"config": CONFIG},
            Options(process=ProcessOptions(command=["true"])),
            {},
        )
        for name in ("one", "other")
    ]
    ids = {container.command[-1] for container in made}
    for container in made:
        container.close()
    assert len(ids) == 2
