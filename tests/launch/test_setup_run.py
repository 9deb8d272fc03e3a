"""The steps of a setup, after a signal that asked it to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.env.changes import Action, Change
from bootseer.env.installing.choose import Command, Installation
from bootseer.env.installing.interpreter import ask, runner
from bootseer.env.installing.packages import Distribution
from bootseer.errors import Interrupted
from bootseer.launch.environment import setup
from bootseer.launch.environment.capture import _CapturedSetup
from bootseer.launch.environment.setup import SetupHost, SetupRun
from bootseer.launch.environment.task import EnvironmentOptions, Task


class Host(SetupHost):
    """Each program ends with this code."""

    def __init__(self, task: Task, code: int) -> None:
        super().__init__(task)
        self.code = code
        self.ran: list[str] = []

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        self.ran.append(argv[0])
        return self.code


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    (tmp_path / "requirements.txt").write_text("alpha\n")
    options = EnvironmentOptions(tmp_path / "cache", tmp_path / "runtime")
    task = Task(None, (str(tmp_path / "requirements.txt"),), options, os.environ)
    yield task
    task.folder.remove()


@pytest.mark.parametrize(("code", "ran"), [(2, ["uv", "pip"]), (143, ["uv"]), (130, ["uv"]), (139, ["uv", "pip"])])
def test_pip_tries_after_uv_has_failed_and_not_after_a_signal(
    task: Task, monkeypatch: pytest.MonkeyPatch, code: int, ran: list[str]
) -> None:
    ways = Installation((Command("uv", ("uv",), {}), Command("pip", ("pip",), {})))
    monkeypatch.setattr(setup, "choose", lambda *_, **__: ways)
    host = Host(task, code)
    assert SetupRun(host).run().code == code
    assert host.ran == ran


def test_settings_that_an_image_links_to_are_its_own_files(task: Task, tmp_path: Path) -> None:
    """The node's may have passwords, which the setup would get."""
    outside, root = tmp_path / "pip.conf", tmp_path / "root"
    outside.write_text("[global]\nindex-url = https://node:pw@pypi.example/simple\n")
    (root / "etc").mkdir(parents=True)
    (root / "etc/pip.conf").symlink_to(outside)
    host = SetupHost(task, root=str(root))
    assert host.at("/etc/pip.conf") == root / str(outside).lstrip("/")


def test_a_signal_during_the_compilation_ends_the_setup(task: Task) -> None:
    python = ask(sys.executable, os.environ, runner())
    new = [Distribution("alpha", "1", f"{python.folders[0]}/alpha-1.dist-info", 0)]
    SetupRun(Host(task, 1)).compile(python, new)
    with pytest.raises(Interrupted) as raised:
        SetupRun(Host(task, 128 + signal.SIGTERM)).compile(python, new)
    assert raised.value.exit_code == 143


@pytest.mark.parametrize(("end", "code"), [("exit 1", 130), ("exit 0", 0)])
def test_a_program_of_a_setup_that_fails_after_a_signal_has_the_signal_s_exit_code(end: str, code: int) -> None:
    """pip and conda end with 1 after Ctrl-C."""
    run = (
        "from bootseer.launch import command, session, supervise; import os, sys; supervise.block_signals();"
        "sys.exit(command.run_program(sys.argv[1:], os.environ, session.Unmeasured({}).tracer, of_setup=True))"
    )
    script = f"trap '{end}' INT; kill -INT $PPID; sleep 60 & wait; exit 3"
    ended = subprocess.run([sys.executable, "-c", run, "sh", "-c", script], check=False, timeout=120)
    assert ended.returncode == code


def test_packages_that_no_capture_has_found_keep_a_snapshot_from_being_made() -> None:
    """In a scan, too: of a Python below /tmp, or on a network disk."""
    new = [Distribution(name, "1", f"/{place}/{name}-1.dist-info", 0) for place, name in ("ax", "ay", "bz")]
    changes = [Change("/a/x-1.dist-info", Action.ADDED), Change("/a/y-1.dist-info/RECORD", Action.MODIFIED)]
    captured: Any = SimpleNamespace(changes=changes, done=SimpleNamespace(new=new))
    assert [*_CapturedSetup._packages_outside(captured)] == ["it installed z into /b, which is not captured"]
