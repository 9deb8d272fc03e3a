"""The demo: its cleanup of folders and processes, and its starts with a small image instead of PyTorch's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hadoop
import hdfs_links
from bootseer.image.sources.source import this_platform
from bootseer.mounts.kernel import mount_points
from busybox import CONFIG
from hdfs_links import links_missing
from image_node import base_layers
from oci_images import write_layout
from waiting import processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("full-pull", "lazy", "recorded", "again", "hot-update")
SIZE = 40 << 20
PROGRAMS = ("docker-registry", "skopeo", "containerd", "ctr", "runc")

needs_venv = pytest.mark.skipif(not (ROOT / ".venv/bin/bootseer").exists(), reason="needs the .venv of `make setup`")

_no_hdfs = hadoop.missing() or links_missing()
needs_hdfs = pytest.mark.skipif(bool(_no_hdfs), reason=_no_hdfs)


@needs_venv
def test_a_folder_of_others_is_never_emptied(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    result = subprocess.run([EXAMPLES / "demo.sh", tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "contains files that are not of this demo" in result.stderr
    assert kept.read_text() == "years of work"


@pytest.fixture
def image(tmp_path: Path) -> str:
    """A small image, by skopeo's name."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount and empty the page cache")
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    layout = tmp_path / "layout"
    layers = base_layers(tmp_path / "tree")
    write_layout(layout, layers, tag="1", architecture=this_platform().architecture, **CONFIG)
    return f"oci:{layout}:1"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The checkpoint folder of a job that has saved once."""
    step = tmp_path / "checkpoints/step-1"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(os.urandom(SIZE))
    (step.parent / "latest").write_text("step-1\n")
    return step.parent


def starts(image: str, out: Path, short: Path, *command: str, within: tuple[object, ...] = ()) -> subprocess.Popen[str]:
    out.mkdir()
    words = [*within, EXAMPLES / "starts.sh", image, out, "--began-pattern", "^step 1 ", "--", *command]
    return group(words, short)


def group(words: list[object], short: Path) -> subprocess.Popen[str]:
    """Start a new process group, like the foreground process group of a terminal."""
    return subprocess.Popen(
        [str(word) for word in words],
        env={**os.environ, "TMPDIR": str(short), "BOOTSEER_HDFS_BRIEF": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left(out: Path, short: Path) -> list[str]:
    """Mounts and processes that still use one of the folders."""
    found = [point for point in mount_points() if point.startswith((f"{out}/", f"{short}/"))]
    for _, words in processes():
        line = words.replace(b"\0", b" ").decode(errors="replace")
        if str(out) in line or str(short) in line:
            found.append(line)
    return found


def spaces() -> set[str]:
    """Leftover network namespaces of links to DataNodes, without those of running clusters."""
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    found = {line.split()[0] for line in said.splitlines() if line.startswith("hdfs")}
    return {name for name in found if not hdfs_links.is_claimed(int(name.removeprefix("hdfs").partition("-")[0]))}


@needs_venv
@needs_hdfs
@pytest.mark.hdfs
@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("no_spaces_left")
def test_starts_are_measured_compared_and_leave_nothing_behind(
    image: str, tmp_path: Path, short: Path, checkpoints: Path
) -> None:
    out = tmp_path / "out"
    job = f"cat /hot {out}/checkpoints/step-1/weights | wc -c; echo step 1 loss 2; [ $0 = sh ] || exec sleep 600"
    within = ("env", "RUN_ON=on", EXAMPLES / "with_hdfs.sh", out, checkpoints, "--")
    with starts(image, out, short, "sh", "-c", job, within=within) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    reports = [json.loads((out / f"{name}.json").read_text()) for name in NAMES]
    assert [report["startup"]["outcome"] for report in reports] == ["training_began"] * 5
    stages = [{row["stage"] for row in report["stages"]} for report in reports]
    assert ["image_loading" in names for names in stages] == [True] * 4 + [False]
    modes = [[row["mode"] for row in report["images"]] for report in reports]
    assert modes[:3] == [[], ["lazy"], ["hot"]]
    assert modes[3][0] in ("hot", "local")
    assert [report["startup"]["kind"] for report in reports] == ["full"] * 4 + ["hot_update"]
    assert reports[4]["restarts"][0]["by"] == "request"
    # The checkpoint: copied by one client, then read from all DataNodes at once.
    assert "model_initialization.checkpoint_copy" in stages[0]
    assert reports[0]["checkpoints"] == []
    for report in reports[1:3]:
        (row,) = report["checkpoints"]
        assert (row["mode"], len(row["datanodes"]), row["read_bytes"] >= SIZE) == ("mounted", 4, True)
    page, picture = (out / "index.html").read_text(), (out / "picture.svg").read_text()
    assert all(f'<a href="{name}.html">' in page and (out / f"{name}.html").exists() for name in NAMES)
    assert picture in page
    before, after = (report["overhead"]["startup_s"] for report in (reports[0], reports[2]))
    sentence = (
        f"Without BootSeer, the first training step ends {before:.1f} s after the submission; with BootSeer "
        f"{after:.1f} s after it on a new node, {before / after:.1f} times as fast: "
    )
    assert sentence in " ".join(said.split())
    assert re.search(r"the checkpoint [0-9.]+ s (less|more)", " ".join(said.split()))
    assert (out / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert not (out / "hdfs").exists()
    assert left(out, short) == []
    assert not any(short.iterdir())


@pytest.fixture
def no_spaces_left() -> Iterator[None]:
    before = spaces()
    yield
    until = time.monotonic() + 300
    while not spaces() <= before:  # other tests have some for a moment
        assert time.monotonic() < until
        time.sleep(0.2)


@needs_venv
@needs_hdfs
@pytest.mark.hdfs
@pytest.mark.root
@pytest.mark.usefixtures("no_spaces_left")
@pytest.mark.parametrize("when", ["an HDFS on this machine", "it runs"])
def test_an_interrupt_ends_the_hdfs_too(tmp_path: Path, short: Path, checkpoints: Path, when: str) -> None:
    out = tmp_path / "out"
    # exec: a child that the shell has just forked would have no handler yet and miss the signal.
    words = [EXAMPLES / "with_hdfs.sh", out, checkpoints, "--", "sh", "-c", "echo it runs; exec sleep 600"]
    with group(words, short) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if when in line:
                if when != "it runs":
                    while not (out / "hdfs/keeper.pid").exists():
                        time.sleep(0.05)
                os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
        assert process.wait(300) == 130, said
    assert "Traceback" not in said
    assert not (out / "hdfs").exists()
    assert left(out, short) == []


@needs_venv
def test_without_an_hdfs_one_line_names_the_omitted_part(tmp_path: Path, checkpoints: Path) -> None:
    words = [
        EXAMPLES / "with_hdfs.sh",
        tmp_path / "out",
        checkpoints,
        "--",
        "sh",
        "-c",
        "echo ${CHECKPOINT_PLAIN-none}",
    ]
    env = {**os.environ, "HADOOP_HOME": str(tmp_path / "nothing")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "NOT SHOWN" in line)
    assert "resumes from a checkpoint in HDFS, because " in line
    assert str(tmp_path / "nothing") in line


@needs_venv
@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.parametrize(
    ("number", "rest"), [(1, "exec sleep 600"), (2, "if [ -e /run/bootseer ]; then exec sleep 600; fi")]
)
def test_an_interrupt_leaves_nothing_behind(image: str, tmp_path: Path, short: Path, number: int, rest: str) -> None:
    out = tmp_path / "out"
    num_running = 0
    with starts(image, out, short, "sh", "-c", f"echo it runs; {rest}") as process:
        assert process.stdout is not None
        for line in process.stdout:
            num_running += "it runs" in line
            if "it runs" in line and num_running == number:
                os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
        assert process.wait(300) != 0
    assert num_running == number
    assert left(out, short) == []
    assert not any(short.iterdir())
