"""containerd starts pods from converted images without pulling them, and from others like with overlayfs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="needs grpcio")

import warm  # noqa: E402
from bootseer.hdfs.protobuf import Message, field  # noqa: E402
from bootseer.mounts import kernel  # noqa: E402
from bootseer.snapshotter.lazy import LazyImages, Settings  # noqa: E402
from bootseer.snapshotter.service import SERVICE, SOCKET, check  # noqa: E402
from bootseer.snapshotter.snapshots import Snapshots  # noqa: E402
from containerd import Containerd, containerd  # noqa: E402
from deep_trees import make_deep  # noqa: E402
from image_node import LARGE_BYTES, Node, node  # noqa: E402
from snapshotter_images import convert, pause, push_small  # noqa: E402

assert node
pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.slow]
VIEW, ACTIVE, COMMITTED = 1, 2, 3
_START = """
import sys, time
from bootseer.cli.main import main
from bootseer.snapshotter import lazy

{}
sys.exit(main())
"""
PATIENT = ("-c", _START.format("lazy._DECIDE_S = 60"))
"""A busy machine may take longer than a second to decide."""
LATE = (
    "-c",
    _START.format(
        """
find = lazy.LazyImages._find
lazy.LazyImages._find = lambda *arguments: time.sleep(1.2 * lazy._DECIDE_S) or find(*arguments)
"""
    ),
)


@pytest.fixture
def running(node: Node) -> Iterator[Containerd]:
    with containerd(node.folder / "c", node.env, pause(node), program=PATIENT) as found:
        yield found


def mounts_of(answer: Message) -> list[tuple[str, str, list[str]]]:
    found = [Message(data) for data in answer.every(1)]
    return [(m.text(1), m.text(2), [option.decode() for option in m.every(4)]) for m in found]


def info_of(data: bytes) -> tuple[str, str, int, dict[str, str]]:
    info = Message(data)
    labels = {Message(entry).text(1): Message(entry).text(2, "") for entry in info.every(6)}
    return info.text(1), info.text(2, ""), info.number(3, 0), labels


def bootseer(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends: for a snapshotter that does not start to serve."""
    return warm.bootseer(words, env=os.environ, cwd=Path.cwd())


def failure(call: Any) -> Any:
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return "accepted"


def protocol(node: Containerd, name: str) -> list[Any]:
    """A snapshotter's answers over the lifecycle of two layers, a container and a view, without paths and times."""
    heard: list[Any] = []

    root = field(4, field(1, "containerd.io/gc.root") + field(2, "now"))  # otherwise it is garbage-collected

    def ask(method: str, *fields: bytes) -> Any:
        kept = (root,) if method in ("Prepare", "View", "Commit") else ()
        return node.ask(method, *fields, *kept, snapshotter=name)

    def shape(answer: Message) -> None:
        heard.append(
            [
                (kind, sorted(o.partition("=")[0] + ":" * o.count(":") for o in options))
                for kind, _, options in mounts_of(answer)
            ]
        )

    for number, parent in ((1, ""), (2, "layer-1")):
        answer = ask("Prepare", field(2, f"extract-{number}"), field(3, parent))
        shape(answer)
        kind, source, options = mounts_of(answer)[0]
        upper = source if kind == "bind" else next(o for o in options if o.startswith("upperdir=")).partition("=")[2]
        Path(upper, f"file-{number}").write_bytes(b"x" * 10_000)
        os.link(f"{upper}/file-{number}", f"{upper}/again")
        usage = ask("Usage", field(2, f"extract-{number}"))
        heard.append((usage.number(1, 0), usage.number(2, 0)))
        ask("Commit", field(2, f"layer-{number}"), field(3, f"extract-{number}"))
        usage = ask("Usage", field(2, f"layer-{number}"))
        heard.append((usage.number(1, 0), usage.number(2, 0)))
    shape(ask("Prepare", field(2, "container"), field(3, "layer-2")))
    shape(ask("Mounts", field(2, "container")))
    shape(ask("View", field(2, "view"), field(3, "layer-1")))
    shape(ask("View", field(2, "view-2"), field(3, "layer-2")))
    heard.append(failure(lambda: ask("Remove", field(2, "layer-1"))))
    heard.append(failure(lambda: ask("Stat", field(2, "nothing"))))
    heard.append(failure(lambda: ask("Prepare", field(2, "container"), field(3, "layer-2"))))
    heard.append(failure(lambda: ask("Prepare", field(2, "of-nothing"), field(3, "nothing"))))
    label = field(6, field(1, "a.b/c") + field(2, "d"))
    ask("Update", field(2, field(1, "container") + label), field(3, field(1, "labels.a.b/c")))
    heard.append(info_of(ask("Stat", field(2, "container")).data(1)))
    for filters in (
        (),
        ('labels."a.b/c"==d,parent=="layer-2"',),
        ("name==view", "parent==layer-1"),
        ("name==nothing",),
    ):
        answers = node.ask("List", *(field(2, text) for text in filters), snapshotter=name, stream=True)
        heard.append(sorted(info_of(data)[:3] for answer in answers for data in answer.every(1)))
    for key in ("view", "view-2", "container", "layer-2", "layer-1"):
        ask("Remove", field(2, key))
    heard.append([data for answer in node.ask("List", snapshotter=name, stream=True) for data in answer.every(1)])
    return heard


def test_the_doctor_checks_whether_the_snapshotter_answers(tmp_path: Path) -> None:
    assert check(tmp_path).status == "missing"
    with containerd(tmp_path / "c", {"BOOTSEER_RUNTIME": str(tmp_path / "r")}, "none", plugin_alone=True) as node:
        (tmp_path / SOCKET).symlink_to(node.socket)
        assert check(tmp_path).found.startswith("0 snapshots")
        node.kill("snapshotter")
        assert check(tmp_path).status == "broken"


def test_a_full_disk_is_one_line_and_costs_no_snapshot(tmp_path: Path) -> None:
    with containerd(tmp_path / "c", {"BOOTSEER_CACHE": str(tmp_path / "cache")}, "none", plugin_alone=True) as node:
        node.kill("snapshotter")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "disk", node.snapshots], check=True)
        node.start_snapshotter()

        def ask(method: str, *fields: bytes) -> Any:
            return node.call(node.socket, f"{SERVICE}/{method}", b"".join(fields))

        ask("Prepare", field(2, "extract"))
        ask("Commit", field(2, "layer"), field(3, "extract"))
        for key in ("container", "spare"):
            ask("Prepare", field(2, key), field(3, "layer"))
        with pytest.raises(grpc.RpcError, match="remove") as refused:  # containerd's own tests check for this word
            ask("Remove", field(2, "layer"))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        filler = node.snapshots / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        ask("Remove", field(2, "spare"))  # like kubelet, to free space
        with pytest.raises(grpc.RpcError) as full:
            for number in range(1000):  # succeeds until the database is full
                ask("Prepare", field(2, f"late-{number}"), field(3, "layer"))
        assert "full" in full.value.details() or "No space left" in full.value.details()
        assert "\n" not in full.value.details()
        assert mounts_of(ask("Mounts", field(2, "container")))
        node.kill("snapshotter")
        node.start_snapshotter()  # also on the full disk
        assert mounts_of(ask("Mounts", field(2, "container")))
        new = bootseer("snapshotter", "--root", str(node.snapshots / "new"), "--socket", str(tmp_path / "n"))
        assert (new.returncode, new.stderr.count("\n")) == (1, 1)
        assert "full; free space" in new.stderr or "No space left" in new.stderr
        filler.unlink()
        assert mounts_of(ask("Prepare", field(2, "later"), field(3, "layer")))


def test_a_signal_that_another_thread_receives_ends_it(tmp_path: Path) -> None:
    """The kernel may deliver it to any thread. The main thread slept until it was killed."""
    with containerd(tmp_path / "c", {}, "none", plugin_alone=True) as node:
        process = node.running["snapshotter"]
        thread = max(int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir())
        assert ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGTERM) == 0
        process.wait(20)
        del node.running["snapshotter"]


def test_folders_at_any_depth_are_counted_and_deleted(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "cache"), str(tmp_path / "runtime"))
    snapshots = Snapshots(tmp_path / "root", LazyImages(tmp_path / "root", settings))
    for depth, name in ((1200, "d"), (500, "n" * 200)):
        (mount,) = snapshots.prepare("container", "", {})
        make_deep(Path(mount.source), depth, name)
        _, inodes = snapshots.usage("container")
        assert (inodes == 1 + 4 * depth) if name == "d" else (1 < inodes < depth)  # what has no path is not counted
        snapshots.remove("container")
        assert not Path(mount.source).parent.exists()
    snapshots.cleanup()


def test_a_second_one_leaves_the_socket_to_the_first(tmp_path: Path) -> None:
    with containerd(tmp_path / "c", {"BOOTSEER_CACHE": str(tmp_path / "cache")}, "none", plugin_alone=True) as node:
        second = bootseer("snapshotter", "--socket", str(node.socket), "--root", str(tmp_path / "other"))
        assert second.returncode == 2
        assert second.stderr.startswith(f"bootseer: another process answers on {node.socket}")
        node.call(node.socket, f"{SERVICE}/Cleanup", b"")


def test_calls_wait_on_a_passed_socket_while_no_snapshotter_runs(node: Node) -> None:
    convert(node)
    with containerd(node.folder / "c", node.env, pause(node), activated=True, program=PATIENT) as running:
        assert protocol(running, "bootseer") == protocol(running, "overlayfs")
        running.pull(node.reference)
        pods: list[str] = []

        def run_pod(number: int) -> None:
            until = time.monotonic() + 300
            while True:
                try:
                    pod, container = running.start_pod(node.reference, ["sha256sum", "/hot"], f"pod-{number}")
                    break
                except grpc.RpcError as error:  # containerd waits for a second, then kubelet retries
                    assert error.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() < until
            assert running.ended(container) == 0, running.logs()
            pods.append(pod)

        with ThreadPoolExecutor(8) as pool:
            for number, end in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
                running.kill("snapshotter", end)
                call = pool.submit(running.call, running.socket, f"{SERVICE}/Cleanup", b"")
                started = pool.submit(run_pod, number)
                time.sleep(0.5)
                assert not call.done()
                running.start_snapshotter()
                call.result()
                started.result()
            list(pool.map(run_pod, range(10, 14)))
        assert len(pods) == 7


@pytest.mark.parametrize(
    ("number", "wrong"), [("2", "LISTEN_FDS=2"), ("1", "not a socket"), ("1", "passed no Unix socket")]
)
def test_an_invalid_passed_socket_is_an_error_in_one_line(tmp_path: Path, number: str, wrong: str) -> None:
    with socket.socket() as inet, (tmp_path / "file").open("w") as file:
        given = inet if "Unix" in wrong else file
        words = [sys.executable, "-P", "-m", "bootseer", "snapshotter", "--root", str(tmp_path / "root")]
        script = f'exec 3<&{given.fileno()} && LISTEN_FDS={number} LISTEN_PID=$$ exec "$@"'
        command = ["bash", "-c", script, "bash", *words]
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[given.fileno()], check=False)
    assert done.returncode == 2, done.stderr
    assert wrong in done.stderr.splitlines()[0]


def test_a_folder_of_others_is_refused_with_the_option_that_names_it(tmp_path: Path) -> None:
    for name in ("root", "root/images", "root/l", "root/snapshots", "sockets"):
        folder, option = tmp_path / name, "--socket" if name == "sockets" else "--root"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        place = tmp_path / "sockets" / "s.sock"
        done = bootseer("snapshotter", "--root", str(tmp_path / "root"), "--socket", str(place))
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert f"chmod go-w {folder}, or name another" in done.stderr
        assert option in done.stderr
        folder.chmod(0o700)


def test_the_protocol_is_answered_as_by_the_overlayfs_snapshotter(running: Containerd) -> None:
    assert protocol(running, "bootseer") == protocol(running, "overlayfs")
    running.collect()
    assert not list((running.snapshots / "snapshots").iterdir())


def test_a_converted_image_is_not_pulled_runs_and_outlives_every_kill(node: Node) -> None:
    convert(node)
    with containerd(node.folder / "c", node.env, pause(node), program=PATIENT) as running:
        before = len(node.requests())
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(running.pull, [node.reference] * 20))
        blobs = {
            layer["digest"]
            for layer in json.loads(
                (node.folder / "layout/blobs/sha256" / node.digest.removeprefix("sha256:")).read_text()
            )["layers"]
        }
        asked = node.requests()[before:]
        assert not [path for path in asked if any(digest in path for digest in blobs)], running.logs()
        # Another namespace of containerd asks for the same layer.
        listed = running.call(running.socket, f"{SERVICE}/List", b"", stream=True)
        names = [info_of(data)[:2] for answer in listed for data in answer.every(1)]
        lowest = next(name for name, parent in names if name.startswith("sha256:") and not parent)
        again = field(2, "other/1/key") + field(4, field(1, "containerd.io/snapshot.ref") + field(2, lowest))
        code = failure(lambda: running.call(running.socket, f"{SERVICE}/Prepare", again))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        pod, container = running.start_pod(
            node.reference, ["sh", "-c", "sha256sum /hot; echo x > made; cat made"], "one"
        )
        assert running.ended(container) == 0, running.logs()
        expected = subprocess.run(
            ["sha256sum", node.folder / "tree" / "hot"], capture_output=True, text=True, check=True
        )
        assert running.said("one") == [f"{expected.stdout.split()[0]}  /hot", "x"]
        # A reader that continues while both are killed.
        slow, reading = running.start_pod(node.reference, ["sh", "-c", "sleep 3; sha256sum /cold"], "two")
        running.kill("snapshotter")
        running.kill("containerd")
        running.start_snapshotter()
        running.start_containerd()
        assert running.ended(reading) == 0
        third, container = running.start_pod(node.reference, ["sha256sum", "/hot"], "three")
        assert running.ended(container) == 0
        for each in (pod, slow, third):
            running.remove_pod(each)
        # Like after a boot: nothing is mounted.
        running.kill("containerd")
        running.kill("snapshotter")
        for point in reversed([p for p in kernel.mount_points() if p.startswith(f"{node.folder}/")]):
            kernel.unmount(Path(point), lazy=True)
        running.start_snapshotter()
        running.start_containerd()
        fourth, container = running.start_pod(node.reference, ["sha256sum", "/hot"], "four")
        assert running.ended(container) == 0, running.logs()
        running.remove_pod(fourth)
        running.remove_image(node.reference)
        assert not list((running.snapshots / "images").iterdir())


def test_a_lazy_pull_asks_the_registry_for_no_more_than_it_needs(running: Containerd, node: Node) -> None:
    convert(node)
    before = len(node.registry.requests())
    running.pull(node.reference)
    asked = [logged for logged in node.registry.requests()[before:] if logged.method == "GET"]
    # The manifest and the configuration.
    theirs = [logged for logged in asked if logged.agent.startswith("containerd")]
    assert len(theirs) <= 3
    assert sum(logged.size_bytes for logged in theirs) <= 5 << 10
    # One document, and indexes of two layers and the root directory; then blocks, and possibly a hot set.
    ours = [logged for logged in asked if logged not in theirs]
    whole = [logged for logged in ours if logged.status == 200]
    assert len(whole) <= 1 + 3
    assert len({logged.path for logged in whole}) == len(whole)
    assert len([logged for logged in ours if logged.status == 404]) <= 1


def test_an_image_that_no_store_has_is_pulled_and_runs(running: Containerd, node: Node) -> None:
    running.pull(node.reference)
    pod, container = running.start_pod(node.reference, ["sha256sum", "/hot"])
    assert running.ended(container) == 0, running.logs()
    running.remove_pod(pod)
    running.remove_image(node.reference)
    running.call(running.socket, "containerd.services.snapshots.v1.Snapshots/Cleanup", b"")
    assert not list((running.snapshots / "snapshots").glob("*/fs/hot"))


def test_cleanups_during_a_pull_leave_its_image_mounted(node: Node) -> None:
    small = push_small(node)
    convert(node, small)
    with containerd(node.folder / "c", node.env, pause(node), program=PATIENT) as running:
        pulled = threading.Event()

        def clean_up() -> None:
            while not pulled.is_set():
                running.call(running.socket, f"{SERVICE}/Cleanup", b"")

        with ThreadPoolExecutor(1) as pool:
            cleaning = pool.submit(clean_up)
            try:
                running.pull(small)
            finally:
                pulled.set()
            cleaning.result()
        _, container = running.start_pod(small, ["true"])
        assert running.ended(container) == 0, running.logs()


@pytest.mark.parametrize("program", [PATIENT, LATE], ids=["in time", "late"])
def test_pods_of_one_image_at_once_fetch_it_once(node: Node, program: tuple[str, ...]) -> None:
    convert(node)
    with containerd(node.folder / "c", node.env, pause(node), program=program) as running:
        before = len(node.registry.requests())

        def run_pod(number: int) -> int:
            running.pull(node.reference)
            words = ["sh", "-c", "cat /hot /cold > /dev/null"]
            return running.ended(running.start_pod(node.reference, words, f"pod-{number}")[1])

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(run_pod, range(4))) == {0}, running.logs()
        asked = [logged for logged in node.registry.requests()[before:] if logged.method == "GET"]
        # For both layers, pulled by containerd or read by the containers.
        assert sum(logged.size_bytes for logged in asked) < 1.5 * 2 * LARGE_BYTES, running.logs()
