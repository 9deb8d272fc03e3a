"""The demo: its care for folders and processes, and its starts with a small image instead of PyTorch's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.image.sources.source import this_platform
from bootseer.mounts.kernel import mount_points
from busybox import CONFIG
from image_node import base_layers
from oci_images import write_layout

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("full-pull", "lazy", "recorded", "hot-update")
PROGRAMS = ("docker-registry", "skopeo", "containerd", "ctr", "runc")

needs_venv = pytest.mark.skipif(
    not (ROOT / ".venv/bin/bootseer").exists(), reason="needs the .venv that make setup makes"
)


@needs_venv
def test_never_empties_a_folder_of_somebody_else(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    result = subprocess.run([EXAMPLES / "demo.sh", tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "holds something that is not of this demo" in result.stderr
    assert kept.read_text() == "years of work"


@pytest.fixture
def image(tmp_path: Path) -> str:
    """A small image, as skopeo calls it."""
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
    """A folder for sockets, whose names cannot be long."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


def starts(image: str, out: Path, short: Path, *command: str) -> subprocess.Popen[str]:
    out.mkdir()
    words = [EXAMPLES / "starts.sh", image, out, "--began-pattern", "^step 1 ", "--", *command]
    return subprocess.Popen(
        words,
        env={**os.environ, "TMPDIR": str(short)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left(out: Path, short: Path) -> list[str]:
    """Mounts and processes that still know one of the folders."""
    found = [point for point in mount_points() if point.startswith((f"{out}/", f"{short}/"))]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(out) in line or str(short) in line:
            found.append(line)
    return found


@needs_venv
@pytest.mark.root
@pytest.mark.fuse
def test_starts_are_measured_compared_and_leave_nothing_behind(image: str, tmp_path: Path, short: Path) -> None:
    out = tmp_path / "out"
    with starts(image, out, short, "sh", "-c", "cat /hot | wc -c; echo step 1 loss 2") as process:
        said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    reports = [json.loads((out / f"{name}.json").read_text()) for name in NAMES]
    assert [report["startup"]["outcome"] for report in reports] == ["training_began"] * 4
    stages = [{row["stage"] for row in report["stages"]} for report in reports]
    assert all("image_loading" in names for names in stages)
    modes = [[row["mode"] for row in report["images"]] for report in reports]
    assert modes[:3] == [[], ["lazy"], ["hot"]]
    assert modes[3][0] in ("hot", "local")
    assert reports[3]["startup"]["kind"] == "hot_update"
    page = (out / "index.html").read_text()
    assert all(f'<a href="{name}.html">' in page and (out / f"{name}.html").exists() for name in NAMES)
    assert "times as fast" in said
    assert left(out, short) == []
    assert not any(short.iterdir())


@needs_venv
@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.parametrize(("number", "rest"), [(1, "sleep 600"), (2, "if [ -e /run/bootseer ]; then sleep 600; fi")])
def test_an_interrupt_leaves_nothing_behind(image: str, tmp_path: Path, short: Path, number: int, rest: str) -> None:
    out = tmp_path / "out"
    num_running = 0
    with starts(image, out, short, "sh", "-c", f"echo it runs; {rest}") as process:
        assert process.stdout is not None
        for line in process.stdout:
            num_running += "it runs" in line
            if "it runs" in line and num_running == number:
                os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        assert process.wait(60) != 0
    assert num_running == number
    assert left(out, short) == []
    assert not any(short.iterdir())


@needs_venv
@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.torch
def test_a_resume_from_stripes_is_measured_beside_a_plain_one(tmp_path: Path, short: Path) -> None:
    out = tmp_path / "out"
    words = [EXAMPLES / "resume.sh", out, "40"]
    environment = {**os.environ, "TMPDIR": str(short)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plain, striped = (json.loads((out / f"{name}.json").read_text()) for name in ("plain", "striped"))
    assert plain["checkpoints"] == []
    assert striped["checkpoints"][0]["read_bytes"] > 30_000_000
    for report in (plain, striped):
        assert report["startup"]["outcome"] == "training_began"
        assert "model_initialization.checkpoint_read" in {row["stage"] for row in report["stages"]}
    assert done.stderr.count("resumed ") == 2
    assert "The checkpoint came" in done.stdout
    assert left(out, short) == []
