"""`bootseer run --image --setup`: the setup runs in the container once, later its layer lies on top of the image."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.mounts import kernel
from bootseer.trace.event import Event
from image_node import Node

pytestmark = [pytest.mark.root, pytest.mark.fuse]
Run = Callable[..., subprocess.CompletedProcess[str]]
SETUP = """
mkdir -p /opt/tool; cat words > /opt/tool/words
echo more >> /etc/profile
export GREETING=hello
"""


@pytest.fixture
def job(run: Run, node: Node, tmp_path: Path, events: Callable[[], list[Event]]) -> Callable[..., Any]:
    """`job(words)`: run in the image with the setup; what was printed, and what was said of the environment."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "words").write_text("words of the project\n")
    (project / "setup.sh").write_text(SETUP)
    store = {"BOOTSEER_STORE": str(tmp_path / "store")}

    def call(*words: str, code: int = 0, more: dict[str, str] | None = None, setup: str = "setup.sh") -> Any:
        ran = run(
            "run", "-q", "--image", node.reference, "--setup", setup, *words,
            more={**node.env, **store, **(more or {})}, cwd=project, timeout=120,
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
        measured = (tmp_path / "spool").exists()
        said = [event.attrs for event in events() if event.stage == "environment_start"] if measured else []
        return ran, said[-1] if said else {}

    return call


def test_the_setup_runs_once_in_the_image_and_later_its_layer_is_mounted(
    job: Callable[..., Any], node: Node, tmp_path: Path
) -> None:
    words = ("--", "sh", "-c", 'cat /opt/tool/words; tail -1 /etc/profile; echo "greeting: $GREETING"; ls /opt')
    first, start = job(*words)
    assert first.stdout == "words of the project\nmore\ngreeting: hello\ntool\n"
    assert (start["mode"], start["trust"]) == ("captured", "unobserved")
    (document,) = (tmp_path / "store").glob("environments/*/document")
    assert json.loads(document.read_text())["roots"] == []
    second, start = job(*words)
    assert second.stdout == first.stdout
    assert (start["mode"], start["code"]) == ("restored", "hit")
    mounted = [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/") and "/layers/" not in point]
    assert not mounted


def test_the_job_s_changes_are_in_no_snapshot(job: Callable[..., Any]) -> None:
    job("--", "sh", "-c", "echo changed > /opt/tool/words")
    ran, start = job("--", "cat", "/opt/tool/words")
    assert (ran.stdout, start["mode"]) == ("words of the project\n", "restored")


def test_a_failing_setup_starts_nothing(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "bad.sh").write_text("exit 5\n")
    ran, _ = job("--", "echo", "started", code=5, setup="bad.sh")
    assert "started" not in ran.stdout
    assert "exit code 5" in ran.stderr
    assert not list((tmp_path / "store").glob("environments/*/document"))


def test_without_measuring_the_setup_still_runs(job: Callable[..., Any]) -> None:
    ran, start = job("--", "cat", "/opt/tool/words", more={"BOOTSEER_DISABLE": "1"})
    assert (ran.stdout, start) == ("words of the project\n", {})
