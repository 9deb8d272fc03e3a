"""Environments when something fails: the job starts correctly, and the report shows the fallback."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootseer.launch.environment.lookup_process import LookupProcess
from bootseer.mounts import kernel
from environment_place import DEADLINE_S, Place, end, made_place

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def gated(place: Place, before: str = "", name: str = "setup.sh") -> tuple[str, Path]:
    """A script that waits until a file exists."""
    gate = place.outside / "gate"
    # Without a trap, bash continues after a SIGINT between two of its children.
    return place.counting_script(
        f"trap 'exit 130' INT\n{before}\nwhile [ ! -e {gate} ]; do sleep 0.05; done; echo made > made\n", name
    ), gate


def test_of_two_starts_at_once_one_builds_and_the_other_restores(place: Place) -> None:
    script, gate = gated(place)
    words = ("--setup", script, "--", "cat", "made")
    one = place.begin(*words)
    wait_for(lambda: place.num_setups)
    place.cache = "other"
    two = place.begin(*words)
    wait_for(lambda: any(event.stage == "environment_setup.wait" for event in place.events()))
    gate.touch()
    for run in (one, two):
        output, error = run.communicate(timeout=DEADLINE_S)
        assert (run.returncode, output) == (0, "made\n"), error
    assert "waiting for it, 600 s at most" in error
    assert place.num_setups == 1
    starts = {event.node: event.attrs for event in place.events() if event.stage == "environment_start"}
    assert {node: start["mode"] for node, start in starts.items()} == {"cache": "captured", "other": "restored"}
    (document,) = place.documents()
    # The wait for the builder is no saving.
    assert starts["other"]["saved_s"] == pytest.approx(document["setup_s"] - starts["other"]["seconds"], abs=0.01)


def test_where_events_cannot_be_written_snapshots_are_made_and_used_all_the_same(place: Place) -> None:
    words = ("--spool", "/dev/null", "--setup", place.counting_script("echo made > made"), "--", "cat", "made")
    for _ in range(2):
        ran = place.run(*words)
        assert "the command runs unmeasured" in ran.stderr
        assert ran.stdout == "made\n"
    assert place.num_setups == 1


def test_what_a_process_writes_that_ends_after_the_setup_is_in_the_snapshot(place: Place) -> None:
    script = place.counting_script(f"(sleep 0.4; echo late > {place.site}/late.txt) &\n")
    wait = f"for _ in $(seq 50); do [ ! -e {place.site}/late.txt ] || exit 0; sleep 0.1; done; exit 1"
    for place.cache in ("cache", "other"):
        place.run("--setup", script, "--", "sh", "-c", wait)


def test_of_a_setup_that_is_not_snapshot_safe_no_further_start_waits_for_a_builder(place: Place) -> None:
    secret = "export API_TOKEN=" + "a1B2" * 10
    script, gate = gated(place, secret)
    words = ("--setup", script, "--", "cat", "made")
    one = place.begin(*words)
    wait_for(lambda: place.num_setups)
    place.cache = "other"
    two = place.begin(*words)
    wait_for(lambda: any(event.stage == "environment_setup.wait" for event in place.events()))
    gate.mkdir()  # not a file: that would be an input of the next start
    for run in (one, two):
        output, error = run.communicate(timeout=DEADLINE_S)
        assert (run.returncode, output) == (0, "made\n"), error
    found = "this setup is not snapshot-safe, as cache found: it exports API_TOKEN, which looks like a secret"
    assert found in error
    place.cache = "third"
    assert found in place.run(*words).stderr
    codes = {event.node: event.attrs["code"] for event in place.events() if event.stage == "environment_start"}
    assert codes == {"cache": "no-snapshot", "other": "unsafe", "third": "unsafe"}
    assert len([event for event in place.events() if event.stage == "environment_setup.wait"]) == 2
    place.run("--env", "refresh", *words)
    assert (place.start()["mode"], place.num_setups) == ("captured", 4)


@pytest.mark.parametrize("wait", ["0s", "1s"])
def test_a_start_that_waits_too_long_installs(place: Place, wait: str) -> None:
    script, gate = gated(place)
    one = place.begin("--setup", script, "--", "cat", "made")
    wait_for(lambda: place.num_setups)
    place.cache = "other"
    two = place.begin("--env-wait", wait, "--setup", script, "--", "cat", "made")
    wait_for(lambda: place.num_setups == 2)
    gate.touch()
    for run in (one, two):
        output, error = run.communicate(timeout=DEADLINE_S)
        assert (run.returncode, output) == (0, "made\n"), error
    codes = {event.node: event.attrs["code"] for event in place.events() if event.stage == "environment_start"}
    assert codes == {"cache": "no-snapshot", "other": "waited-too-long"}


def test_a_lease_is_held_where_the_caller_has_left_many_files_open() -> None:
    beats: list[int] = []
    lease = SimpleNamespace(interval_s=0.01, beat=lambda: beats.append(1))  # it is lost at the first beat
    helper = LookupProcess.__new__(LookupProcess)
    read_end, write_end = os.pipe()
    try:
        helper._read_end = fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, 1024)
    except OSError:
        pytest.skip("no descriptor may be above 1023")
    helper._hold(cast(Any, lease), cast(Any, None))
    assert beats == [1]
    for each in (read_end, write_end, helper._read_end):
        os.close(each)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_setup_and_leaves_nothing(place: Place, number: int) -> None:
    script, gate = gated(place, "echo half > half")
    run = place.begin("--setup", script, "--", "touch", "started")
    wait_for(lambda: place.num_setups)
    end(run, number)
    assert run.returncode == 128 + number
    assert not (place.project / "started").exists()
    assert not (place.project / "half").exists()
    assert not place.leftovers(after_next=True)
    assert not place.mounts()
    gate.touch()
    assert place.run("--setup", script, "--", "cat", "made").stdout == "made\n"
    assert place.start()["code"] == "no-snapshot"  # no lease was held


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_wait_for_a_builder(place: Place, number: int) -> None:
    script, gate = gated(place)
    one = place.begin("--setup", script, "--", "true")
    wait_for(lambda: place.num_setups)
    place.cache = "other"
    two = place.begin("--setup", script, "--", "touch", "started")
    wait_for(lambda: any(event.stage == "environment_setup.wait" for event in place.events()))
    said = end(two, number)
    assert two.returncode == 128 + number
    assert "interrupted" in said
    assert not place.leftovers()
    gate.touch()
    one.communicate(timeout=DEADLINE_S)
    assert not (place.project / "started").exists()


def test_a_killed_builder_is_cleaned_up_and_replaced(place: Place) -> None:
    script, gate = gated(place)
    words = ("--setup", script, "--", "cat", "made")
    run = place.begin(*words)
    wait_for(lambda: place.num_setups)
    end(run)
    assert not place.mounts()
    assert place.leftovers()
    gate.touch()
    assert place.run(*words).stdout == "made\n"
    assert place.start()["mode"] == "captured"
    assert not place.leftovers(after_next=True)
    assert place.run(*words).stdout == "made\n"
    assert place.start()["mode"] == "restored"


def test_a_killed_job_leaves_nothing_mounted(place: Place) -> None:
    words = ("--setup", place.alpha_script(), "--")
    place.run(*words, "true")
    ready = place.project / "ready"
    run = place.begin(*words, "sh", "-c", f"touch {ready}; exec sleep 600")
    wait_for(ready.exists)
    end(run)
    assert not place.mounts()
    assert place.run(*words, "python", "-c", "import alpha; print(alpha.VERSION)").stdout == "1.0\n"
    assert place.start()["mode"] == "restored"
    assert not place.leftovers()


def test_a_killed_publisher_publishes_nothing_by_half(place: Place) -> None:
    script = place.counting_script("python -c \"open('big', 'wb').write(__import__('os').urandom(120 << 20))\"\n")
    ready = place.project / "ready"
    run = place.begin("--setup", script, "--", "sh", "-c", f"touch {ready}; exec sleep 600")
    wait_for(ready.exists)
    end(run)
    assert not place.documents()
    (place.project / "big").unlink()
    place.run("--setup", script, "--", "true")
    assert place.start()["mode"] == "captured"
    assert len(place.documents()) == 1


def test_a_command_that_a_signal_asked_to_end_ends_without_a_wait_for_the_publication(place: Place) -> None:
    ready = place.project / "ready"
    script = f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.02; done"
    rules = {"KF_RULE_CACHE_DIR": str(place.root / "none")}  # compiling them takes 4 s
    run = place.begin("--setup", place.counting_script("echo a > made\n"), "--", "sh", "-c", script, more=rules)
    wait_for(ready.exists)
    said = end(run, signal.SIGTERM)
    assert run.returncode == 0, said
    assert place.published()["published"] is False, said


def test_without_the_store_a_node_restores_what_it_knows(place: Place) -> None:
    check = ("--setup", place.alpha_script(), "--", "python", "-c", "import alpha; print(alpha.VERSION)")
    place.run(*check)
    place.run(*check)
    away = {"BOOTSEER_STORE": "oci://127.0.0.1:9/team/environments"}
    place.store.rename(place.root / "away")
    ran = place.run(*check, more=away)
    assert ran.stdout == "1.0\n"
    assert (place.start()["mode"], place.start()["code"]) == ("restored", "hit-on-node")
    place.cache = "other"
    assert place.run(*check, more=away).stdout == "1.0\n"
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "store-down")


def test_damaged_objects_make_the_setup_run_and_the_next_start_make_the_snapshot_anew(place: Place) -> None:
    script = place.counting_script("mkdir data; echo words > data/vocab\n")
    words = ("--setup", script, "--", "cat", "data/vocab")
    place.run(*words)
    for path in place.store.glob("sha256/*/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    for cache, mode, code in (
        ("other", "installed", "damaged"),
        ("third", "captured", "no-snapshot"),
        ("fourth", "restored", "hit"),
    ):
        place.cache = cache
        ran = place.run(*words)
        assert (ran.stdout, place.start()["mode"], place.start()["code"]) == ("words\n", mode, code)
        assert ("is removed from its store" in ran.stderr) is (code == "damaged")
        (place.project / "data" / "vocab").unlink()
    assert place.num_setups == 3


def test_a_block_file_that_was_cut_is_damaged(place: Place) -> None:
    words = ("--setup", place.alpha_script("seq 50000 > vocab\n"), "--", "tail", "-n", "1", "vocab")
    place.run(*words)
    largest = max(place.store.glob("sha256/*/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:4096])
    place.cache = "other"
    ran = place.run(*words)
    assert (ran.stdout, place.start()["code"]) == ("50000\n", "damaged")
    assert "is removed from its store: the next start makes it anew" in ran.stderr
    assert "written out" not in ran.stderr


@pytest.mark.fuse
def test_damage_that_only_reads_of_the_job_find_makes_the_snapshot_anew_at_the_next_start(place: Place) -> None:
    script = place.counting_script(f"head -c 4M /dev/urandom > {place.site}/big\n")
    words = ("--loading", "lazy", "--setup", script, "--", "sh", "-c", f"exec md5sum {place.site}/big")
    place.run(*words)
    largest = max(place.store.glob("sha256/*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    place.cache = "other"
    ran = place.run(*words, code=1)
    assert "Input/output error" in ran.stderr
    assert "is removed from its store: the next start makes it anew" in ran.stderr
    place.run(*words)
    assert (place.start()["mode"], place.num_setups) == ("captured", 2)


def test_a_forged_document_is_no_snapshot(place: Place) -> None:
    script = place.counting_script("echo words > vocab\n")
    words = ("--setup", script, "--", "cat", "vocab")
    place.run(*words)
    (path,) = place.store.glob("environments/*/document")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "roots": ["/proc", "/../etc"]}))
    place.cache = "other"
    assert place.run(*words).stdout == "words\n"
    assert place.start()["code"] == "broken"
    assert place.num_setups == 2


def test_a_document_under_another_key_is_refused(place: Place) -> None:
    script = place.counting_script("echo words > vocab\n")
    words = ("--setup", script, "--", "cat", "vocab")
    place.run(*words)
    (path,) = place.store.glob("environments/*/document")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "components": {**document["components"], "architecture": "sparc"}}))
    ran = place.run(*words)
    assert ran.stdout == "words\n"
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "refused:architecture")
    assert "sparc" in ran.stderr


def test_a_snapshot_may_be_removed_while_it_is_mounted(place: Place) -> None:
    words = ("--setup", place.alpha_script(), "--")
    place.run(*words, "true")
    ready, gate = place.project / "ready", place.project / "gate"
    script = (
        f"touch {ready}; while [ ! -e {gate} ]; do sleep 0.05; done; python -c 'import alpha; print(alpha.VERSION)'"
    )
    run = place.begin(*words, "sh", "-c", script)
    wait_for(ready.exists)
    (document,) = place.documents()
    assert place.bootseer("env", "remove", str(document["key"])).returncode == 0
    assert place.bootseer("env", "prune", "--grace", "0.001s").returncode == 0
    place.bootseer("cache", "prune", "--to", "0")
    gate.touch()
    output, error = run.communicate(timeout=DEADLINE_S)
    assert (run.returncode, output) == (0, "1.0\n"), error
    assert place.run(*words, "true").returncode == 0
    assert place.start()["mode"] == "captured"


def test_a_full_disk_makes_no_snapshot_and_no_harm(place: Place) -> None:
    disk = place.root / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "bootseer-test", str(disk)], check=True)
    try:
        place.more = {"BOOTSEER_STORE": str(disk / "store")}
        script = place.counting_script("python -c \"open('big', 'wb').write(__import__('os').urandom(20 << 20))\"\n")
        words = ("--setup", script, "--", "stat", "-c", "%s", "big")
        ran = place.run(*words)
        assert ran.stdout == f"{20 << 20}\n"
        assert place.published()["published"] is False
        assert "no snapshot of the environment was published" in ran.stderr
        (place.project / "big").unlink()
        place.more["BOOTSEER_CACHE"] = str(disk / "cache")
        ran = place.bootseer("run", "-q", *words)
        assert (ran.returncode, ran.stdout) == (0, f"{20 << 20}\n"), ran.stderr
        assert "for what the setup writes is full" in ran.stderr
    finally:
        for point in reversed([point for point in kernel.mount_points() if point.startswith(f"{disk}/")]):
            kernel.unmount(Path(point), lazy=True)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_job_that_dies_at_import_after_a_restore_has_its_environment_made_anew(place: Place) -> None:
    words = ("--setup", place.alpha_script(), "--")
    place.run(*words, "true")
    ran = place.run("--env", "require", *words, "python", "-c", "import alpha, no_such_module", code=1)
    assert "is at fault, --env refresh makes it anew" in ran.stderr
    assert place.documents()
    ran = place.run(*words, "python", "-c", "import alpha, no_such_module", code=1)
    assert "is removed from its store: the next start makes it anew" in ran.stderr
    place.run(*words, "python", "-c", "import alpha")
    assert (place.start()["mode"], place.start()["code"]) == ("captured", "no-snapshot")
    # Only once: the cause may be the job.
    ran = place.run(*words, "python", "-c", "import alpha, no_such_module", code=1)
    assert "is used further" in ran.stderr
    place.run(*words, "python", "-c", "import alpha")
    assert place.start()["mode"] == "restored"


@contextlib.contextmanager
def user_s(place: Place) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """The place belongs to an ordinary user, who runs `bootseer run` in it."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    from conftest_launch import BOOTSEER

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *BOOTSEER, "run", "-q", *words],
            env=place.env,
            cwd=place.project,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    place.keep_rules()
    for path, folders, files in os.walk(place.root):
        for name in ("", *folders, *files):
            os.chown(Path(path, name), 65534, 65534, follow_symlinks=False)
    yield run


def test_a_user_without_root_gets_the_same_job(place: Place) -> None:
    script = place.write("setup.sh", "mkdir -p data; echo words > data/vocab\n")
    with user_s(place) as run:
        for _ in range(2):
            ran = run("--setup", script, "--", "cat", "data/vocab")
            assert (ran.returncode, ran.stdout) == (0, "words\n"), ran.stderr
            assert "Traceback" not in ran.stderr


def test_a_setup_that_needs_more_than_a_user_namespace_allows_runs_without(place: Place) -> None:
    script = place.write("setup.sh", "set -e; echo words > ../shared/words\n")
    with user_s(place) as run:
        shared = place.root / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        ran = run("--setup", script, "--", "cat", str(shared / "words"))
        assert (ran.returncode, ran.stdout) == (0, "words\n"), ran.stderr
        failing = place.write("failing.sh", "exit 7\n")
        assert run("--setup", failing, "--", "true").returncode == 7
