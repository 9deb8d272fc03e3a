"""The `bootseer ckpt` commands: output, JSON, exit codes and errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.checkpoint.files import Files
from bootseer.cli.ckpt_place import split, tell_fallback, tell_left_out
from bootseer.errors import NotFoundError, UsageError
from bootseer.places.folder import FolderPlace
from conftest_launch import BOOTSEER
from registry import free_port

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
_MIB = 1 << 20


@pytest.fixture
def ckpt(run: Run) -> Run:
    """`ckpt(words)` runs `bootseer ckpt`, which must end with exit code `code`."""

    def call(*words: str, code: int = 0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        ran = run("ckpt", *words, **kwargs)
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
        return ran

    return call


@pytest.fixture
def job(tmp_path: Path) -> str:
    return f"file://{tmp_path}/jobs/moe"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "step-10"
    (folder / "sub").mkdir(parents=True)
    (folder / "model").write_bytes(os.urandom(9 * _MIB))
    (folder / "sub" / "config").write_bytes(b"{}")
    return folder


def as_json(ran: subprocess.CompletedProcess[str], schema: str) -> Any:
    value = json.loads(ran.stdout)
    assert value["schema"] == schema
    return value


def test_put_list_latest_get_verify_and_remove(ckpt: Run, job: str, source: Path, tmp_path: Path) -> None:
    put = as_json(ckpt("put", str(source), job, "--json"), "bootseer.checkpoint-put/1")
    assert (put["checkpoint"], put["files"], put["striped_files"]) == (f"{job}/step-10", 2, 1)
    assert put["latest"] == "step-10"
    assert "1 file" in ckpt("put", str(source / "model"), job, "--name", "step-20.pt", "--parity").stdout
    listed = as_json(ckpt("list", job, "--json"), "bootseer.checkpoints/1")
    assert [(row["name"], row["step"], row["latest"]) for row in listed["checkpoints"]] == [
        ("step-10", 10, False),
        ("step-20.pt", 20, True),
    ]
    shown = ckpt("list", job).stdout
    assert "step-20.pt" in shown
    assert "9.0 MiB" in shown
    assert "2 checkpoints" in shown
    assert ckpt("latest", job).stdout == "step-20.pt\n"
    assert ckpt("latest", job, "step-10").stdout == "step-10\n"
    ckpt("get", f"{job}/latest", "here")
    assert (tmp_path / "here/model").read_bytes() == (source / "model").read_bytes()
    assert (tmp_path / "here/sub/config").read_bytes() == b"{}"
    assert "`bootseer ckpt latest` prints" in ckpt("get", f"{job}/latest/model", code=1).stderr
    ckpt("get", f"{job}/step-20.pt")
    assert (tmp_path / "step-20.pt").read_bytes() == (source / "model").read_bytes()
    assert ": no problems" in ckpt("verify", f"{job}/latest").stdout
    assert "latest" in ckpt("remove", f"{job}/step-10", code=1).stderr
    both = ckpt("remove", f"{job}/step-20.pt", f"{job}/step-30", "--json", code=1)
    assert "step-30" in both.stderr
    removed = as_json(both, "bootseer.checkpoints-removed/1")
    assert [row["size_bytes"] for row in removed["removed"]] == [9 * _MIB]
    ckpt("remove", f"{job}/step-10", "--force")
    assert "0 checkpoints" in ckpt("list", job).stdout
    assert "no latest" in ckpt("latest", job, code=1).stderr


@pytest.mark.parametrize("authority", ["127.0.0.1", "no-such-host.invalid"])
@pytest.mark.parametrize(
    "words",
    [
        ("ckpt", "list", "URI"),
        ("ckpt", "put", "step-10", "URI"),
        ("ckpt", "get", "URI/step-10"),
        ("ckpt", "mount", "URI", "there"),
        ("env", "list", "--store", "URI"),
        ("run", "--checkpoint", "URI", "--", "true"),
    ],
    ids=" ".join,
)
def test_an_hdfs_that_does_not_exist_is_an_error_soon(
    run: Run, source: Path, words: Sequence[str], authority: str
) -> None:
    pytest.importorskip("hdfs_native", reason="extra hdfs")
    uri = f"hdfs://{authority}:{free_port()}/jobs"
    ran = run(*(word.replace("URI", uri) for word in words))
    assert ran.returncode == 1
    assert f"no NameNode is there: {uri[7:].partition('/')[0]} cannot be reached: " in ran.stderr


def test_names_that_are_taken_need_replace(ckpt: Run, job: str, source: Path, tmp_path: Path) -> None:
    ckpt("put", str(source), job)
    refused = ckpt("put", str(source), job, code=1)
    assert "already" in refused.stderr
    assert "--replace" in refused.stderr
    ckpt("put", str(source), job, "--replace")
    ckpt("get", f"{job}/step-10", "out")
    assert "--replace" in ckpt("get", f"{job}/step-10", "out", code=1).stderr
    ckpt("get", f"{job}/step-10", "out", "--replace")
    earlier = ckpt("put", str(source), job, "--name", "step-9")
    assert "latest stays at step-10" in earlier.stdout
    ckpt("put", str(source), job, "--name", "step-11", "--no-latest")
    assert ckpt("latest", job).stdout == "step-10\n"


def test_a_dangling_latest_is_an_error_with_the_newest_whole_checkpoint(
    ckpt: Run, job: str, source: Path, tmp_path: Path
) -> None:
    ckpt("put", str(source), job)
    (tmp_path / "jobs/moe/latest").write_text("step-99")
    ran = ckpt("latest", job, "--json", code=1)
    told = as_json(ran, "bootseer.checkpoint-latest/1")
    assert (told["latest"], told["newest_whole"]) == ("step-99", "step-10")
    assert "the newest complete checkpoint is step-10" in ran.stderr
    assert "does not exist" in ckpt("list", job).stdout
    assert "does not exist" in ckpt("get", f"{job}/latest", code=1).stderr
    assert "list" in ckpt("latest", job, "step-5", code=1).stderr
    ckpt("latest", job, "step-10")
    next((tmp_path / "jobs/moe/step-10/.stripes").glob("*/*")).unlink()
    assert "lost some of its parts; there is no complete checkpoint" in ckpt("latest", job, code=1).stderr
    (tmp_path / "jobs/moe/step-11").mkdir()
    (tmp_path / "jobs/moe/step-11/__0_0.distcp").write_bytes(b"x")
    assert "latest names step-11, which was not saved completely" in ckpt("latest", job, "step-11", code=1).stderr


def test_stat_shows_parts_and_verify_shows_wrong_bytes(ckpt: Run, job: str, source: Path, tmp_path: Path) -> None:
    ckpt("put", str(source), job, "--stripes", "2", "--parity")
    shown = as_json(ckpt("stat", f"{job}/step-10/model", "--json"), "bootseer.checkpoint-file/1")
    assert (shown["size_bytes"], shown["striped"]) == (9 * _MIB, True)
    (segment,) = shown["segments"]
    assert [part["kind"] for part in segment["parts"]] == ["data", "data", "parity"]
    part = tmp_path / "jobs/moe/step-10/.stripes" / shown["id"] / segment["parts"][1]["name"]
    assert "striped, 9.0 MiB" in ckpt("stat", f"{job}/step-10/model").stdout
    assert "ordinary" in ckpt("stat", f"{job}/step-10/sub/config").stdout
    assert "folder" in ckpt("stat", f"{job}/step-10", code=1).stderr
    data = bytearray(part.read_bytes())
    data[_MIB] ^= 1
    part.write_bytes(data)
    ran = ckpt("verify", f"{job}/step-10", code=1)
    assert f"step-10/model: bytes {3 * _MIB:,} to {4 * _MIB:,}, part {part.name}" in ran.stdout
    assert "can be rebuilt from parity" in ran.stdout
    (problem,) = as_json(ckpt("verify", f"{job}/step-10", "--json", code=1), "bootseer.checkpoint-verified/1")[
        "problems"
    ]
    assert (problem["offset"], problem["part"], problem["repairable"]) == (3 * _MIB, part.name, True)
    part.unlink()
    assert "missing, or of the wrong length" in ckpt("stat", f"{job}/step-10/model", code=1).stdout
    said = ckpt("verify", f"{job}/step-10", code=1).stdout
    assert said.count(part.name) == 2, "one line; the reason also names it"
    assert "more places in it" in said
    assert "nothing is lost" in said


def test_names_of_others_do_not_drive_the_terminal(ckpt: Run, job: str, source: Path, tmp_path: Path) -> None:
    ckpt("put", str(source), job)
    evil = tmp_path / "jobs/moe" / "\x1b[31mstep-11"
    (tmp_path / "jobs/moe/step-10").rename(evil)
    ran = [ckpt("list", job), ckpt("verify", f"{job}/{evil.name}"), ckpt("stat", f"{job}/{evil.name}/model")]
    assert all("step-11" in one.stdout and "\x1b" not in one.stdout for one in ran)


def test_policies_are_set_for_folders_and_those_below(ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "jobs/moe").mkdir(parents=True)
    assert "by default" in ckpt("policy", "jobs").stdout
    ckpt("policy", "jobs", "--stripes", "8", "--parity", "--part-size", "16m")
    below = as_json(ckpt("policy", "jobs/moe", "--json"), "bootseer.checkpoint-policy/1")
    assert below["policy"]["stripes"] == 8
    assert below["policy"]["part_bytes"] == 16 * _MIB
    assert below["set_for"] == f"file://{tmp_path}/jobs"
    ckpt("policy", "jobs/moe", "--no-parity", "--replication", "2")
    assert "replication 2" in ckpt("policy", "jobs/moe").stdout
    ckpt("policy", "jobs/moe", "--inherit")
    assert "8 stripes and parity" in ckpt("policy", "jobs/moe").stdout
    ckpt("policy", "jobs/moe", "--stripes", "1", "--replication", "1")
    assert "1 stripe and parity, parts of up to 16.0 MiB, replication 1, " in ckpt("policy", "jobs/moe").stdout
    for words in (("--part-size", "5"), ("--part-size", "x"), ("--inherit", "--parity")):
        assert "hint" in ckpt("policy", "jobs", *words, code=2).stderr
    for verb in (("policy", "jobs"), ("put", ".", "jobs")):
        assert "1<=x<=64" in ckpt(*verb, "--stripes", "65", code=2).stderr
    ckpt("policy", "nowhere", code=1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("list", "ftp://bucket/x"), 2),
        (("list", "nowhere"), 1),
        (("get", "nowhere/step-1"), 1),
        (("verify", "nowhere/step-1"), 1),
        (("stat", "/"), 2),
        (("remove", "nowhere/step-1"), 1),
        (("remove", "nowhere/latest"), 2),
        (("put", "nowhere", "job"), 2),
        (("list", "job/.stripes"), 2),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(ckpt: Run, words: tuple[str, ...], code: int) -> None:
    ran = ckpt(*words, code=code)
    assert ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize("verb", ["", "put", "get", "list", "latest", "stat", "verify", "remove", "policy"])
def test_help_has_an_example(ckpt: Run, verb: str) -> None:
    shown = ckpt(*([verb] if verb else []), "--help").stdout
    assert f"bootseer ckpt {verb}" in shown


def test_a_mistyped_address_makes_no_folder(ckpt: Run, source: Path, tmp_path: Path) -> None:
    assert "not a place" in ckpt("put", str(source), "hdfs:/namenode/jobs", code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10"]


def test_an_invalid_policy_is_removed_as_its_error_suggests(ckpt: Run, source: Path, tmp_path: Path) -> None:
    policy = tmp_path / "job" / ".stripes" / "policy.json"
    policy.parent.mkdir(parents=True)
    for text in ("nonsense", '{"schema": "bootseer.stripes/2"}'):
        policy.write_text(text)
        for words in (["put", str(source), "job"], ["policy", "job"], ["policy", "job", "--stripes", "2"]):
            assert "--inherit" in ckpt(*words, code=1).stderr
        assert "by default" in ckpt("policy", "job", "--inherit").stdout
        assert not policy.exists()


def test_ctrl_c_leaves_nothing_of_a_put_but_what_the_next_one_goes_on_with(
    ckpt: Run, source: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    job = tmp_path / "jobs"
    for number in range(200):
        (source / f"file{number}").write_bytes(os.urandom(9 * _MIB) if number < 3 else b"x" * 1000)
    with (source / "large").open("wb") as large:
        large.truncate(1 << 30)  # large enough not to end before it is interrupted
    putting = subprocess.Popen(
        [*BOOTSEER, "ckpt", "put", str(source), str(job)], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    # Interrupted after it has begun to write.
    while not any(job.glob(".attempts/*/*")):
        assert putting.poll() is None
        time.sleep(0.01)
    putting.send_signal(signal.SIGINT)
    _, errors = putting.communicate(timeout=180)
    assert putting.returncode == 130, errors
    assert "Traceback" not in errors
    assert [path.name for path in job.iterdir() if path.name != ".attempts"] == []
    (source / "large").write_bytes(b"not so large")
    ckpt("put", str(source), str(job))
    assert [path for path in (job / ".attempts").rglob("*") if path.is_file()] == []
    assert ": no problems" in ckpt("verify", f"{job}/step-10").stdout


@pytest.mark.parametrize(
    ("uri", "folder", "name"),
    [
        ("hdfs://nn:8020/jobs/moe", "hdfs://nn:8020/jobs", "moe"),
        ("hdfs://nn/moe/", "hdfs://nn", "moe"),
        ("hdfs:///jobs/moe", "hdfs:///jobs", "moe"),
        ("hdfs:///moe", "hdfs:///", "moe"),
        ("file:///a/b", "file:///a", "b"),
        ("/a/b", "file:///a", "b"),
        ("/a", "file:///", "a"),
    ],
)
def test_an_address_is_a_folder_and_a_name(uri: str, folder: str, name: str) -> None:
    assert split(uri) == (folder, name)


@pytest.mark.parametrize(
    "uri",
    ["hdfs://nn", "hdfs:/nn/a", "s3:/b/a", "file:a/b", "hdfs://nn/", "hdfs:///", "", "/", "file:///", "hdfs://nn/.."],
)
def test_an_address_without_a_name_is_refused(uri: str) -> None:
    with pytest.raises(UsageError):
        split(uri)


def test_a_fallback_is_reported_once_and_returned(capfd: pytest.CaptureFixture[str]) -> None:
    assert tell_fallback({"fallback": ""}) == tell_fallback({}) == ""
    assert capfd.readouterr().err == ""
    assert tell_fallback({"fallback": "it wants Kerberos"}) == "it wants Kerberos"
    assert capfd.readouterr().err == "bootseer: reads use hdfs-native and are slower: it wants Kerberos\n"


def test_links_missing_in_a_copy_are_reported(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(FolderPlace(source.parent)) as place:
        tell_left_out(Files(place), source.name)
        assert capfd.readouterr().err == ""
        (source / "sub" / "weights").symlink_to("../model")
        tell_left_out(Files(place), source.name)
        assert f"are left out: {source}/sub/weights\n" in capfd.readouterr().err
        with pytest.raises(NotFoundError, match="is a symbolic link or special file"):
            place.stat(f"{source.name}/sub/weights")


def test_verbs_import_no_library_of_hdfs(env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from bootseer.cli import ckpt, ckpt_jobs, ckpt_mount; "
        "from bootseer.checkpoint import publish, catalog, verify; "
        "sys.exit(any(name in sys.modules for name in ('hdfs_native', 'numpy', 'torch', 'fsspec')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=False).returncode == 0


def test_a_file_can_go_to_standard_output(ckpt: Run, job: str, source: Path, tmp_path: Path) -> None:
    ckpt("put", str(source), job)
    with (tmp_path / "out").open("wb") as out:
        ckpt("get", f"{job}/step-10/model", "-", capture_output=False, stdout=out, stderr=subprocess.PIPE)
    assert (tmp_path / "out").read_bytes() == (source / "model").read_bytes()
    assert "only a file" in ckpt("get", f"{job}/step-10", "-", code=2).stderr
    assert "--json" in ckpt("get", f"{job}/step-10/model", "-", "--json", code=2).stderr
    with Path("/dev/full").open("wb") as full:
        words = ["get", f"{job}/step-10/model", "-"]
        refused = ckpt(*words, code=1, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert "cannot be written" in refused.stderr


def test_an_empty_name_is_an_error_and_not_the_default(ckpt: Run, job: str, source: Path) -> None:
    """Scripts pass variables that are not set."""
    assert "'' cannot be the name of a checkpoint" in ckpt("put", str(source), job, "--name", "", code=2).stderr
    ckpt("put", str(source), job)
    assert "DST is empty" in ckpt("get", f"{job}/step-10", "", "--replace", code=2).stderr


def test_a_file_is_not_a_job(ckpt: Run, source: Path, tmp_path: Path) -> None:
    for words in (("list", "step-10/model"), ("put", str(source), "step-10/model"), ("latest", "step-10/model")):
        assert "is not a folder" in ckpt(*words, code=1).stderr


def test_an_hdfs_that_does_not_answer_is_reported_and_ctrl_c_ends_the_wait(env: dict[str, str]) -> None:
    pytest.importorskip("hdfs_native", reason="the extra hdfs is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"hdfs://127.0.0.1:{silent.getsockname()[1]}/jobs"
        with subprocess.Popen([*BOOTSEER, "ckpt", "list", uri], env=env, stderr=subprocess.PIPE, text=True) as listing:
            assert listing.stderr is not None
            assert f"still waiting for {uri}" in listing.stderr.readline()
            listing.send_signal(signal.SIGINT)
            assert listing.wait(60) == 130
            assert "Traceback" not in listing.stderr.read()
