"""`bootseer run --image --process-snapshot`: dumped in a container, restored in others, also on another node."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.trace.event import Event
from image_node import Node
from launch.test_run_restarts import PYTHON, image_with_python

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON not in [f"python3.{minor}" for minor in range(11, 30)], reason="needs the system's Python 3.11 or later"
    ),
]
LAUNCH = """import os, subprocess, sys
print("colorsys" in sys.modules, sys.argv, os.environ.get("ADDED"), flush=True)
env = {**os.environ, "LAUNCHER": str(os.getpid())}
sys.exit(subprocess.call([sys.executable, "/job/child.py"], env=env))
"""
CHILD = """import os, sys
print("colorsys" in sys.modules, str(os.getppid()) == os.environ["LAUNCHER"])
import colorsys, safetensors
"""


def test_a_launcher_is_restored_in_another_container_and_on_another_node(
    run: Callable[..., subprocess.CompletedProcess[str]],
    events: Callable[[], list[Event]],
    env: dict[str, str],
    node: Node,
    tmp_path: Path,
    criu: str,
) -> None:
    env.update(node.env)
    job = tmp_path / "job"
    (job / "library").mkdir(parents=True)
    (job / "library" / "safetensors.py").touch()
    (job / "launch.py").write_text(LAUNCH)
    (job / "child.py").write_text(CHILD)
    tmp_path.chmod(0o755)
    names = [name for name in ("/usr/bin", "/usr/lib", "/lib", "/lib64") if Path(name).exists()]
    folders = [*(f"{name}:{name}:ro" for name in names), f"{job}:/job:ro", f"{Path(criu).parent}:/opt/criu:ro"]
    words = [
        "run",
        "-q",
        "--image",
        image_with_python(node, PYTHON),
        "--process-snapshot",
        "--loading",
        "lazy",
        "--cap-add",
        "CHECKPOINT_RESTORE",
    ]
    words += [word for folder in folders for word in ("--mount", folder)]
    words += ["--container-env", "PYTHONPATH=/job/library", "--container-env", "BOOTSEER_CRIU=/opt/criu/criu"]
    command = ["--", "/usr/bin/python3", "/job/launch.py"]
    first = run(*words, *command)
    assert (first.returncode, first.stderr) == (0, "")
    again = run(*words, "--container-env", "ADDED=1", *command, "--lr=1")
    elsewhere = run(*words, *command, more={"BOOTSEER_CACHE": str(tmp_path / "other")})
    assert first.stdout == "False ['/job/launch.py'] None\nFalse True\n"
    assert again.stdout == "True ['/job/launch.py', '--lr=1'] 1\nTrue True\n", again.stderr
    assert elsewhere.stdout == "True ['/job/launch.py'] None\nTrue True\n", elsewhere.stderr
    assert (again.stderr, elsewhere.stderr) == ("", "")
    warm = [event.attrs for event in events() if event.stage == "warm_start"]
    assert sorted(attrs["program"] for attrs in warm) == ["child.py"] * 2 + ["the launcher"] * 2
    assert not any("why_not" in attrs for attrs in warm)
    for cache in (node.cache, tmp_path / "other"):
        assert list((cache / "containers").iterdir()) == []
