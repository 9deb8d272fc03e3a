"""Fixtures that run the real program, with its spool in the test's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import warm
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from bootseer.trace.event import ALIVE, Event
from once import secret_rules

BOOTSEER = (sys.executable, "-m", "bootseer")
_LAUNCHERS = ("SLURM_", "PET_", "TORCHELASTIC_", "SKYPILOT_", "BOOTSEER_", "TRACEPARENT", "OTEL_", "POD_UID")
_OF_THE_INTERPRETER = ("PYTHON", "LANG", "LC_")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The machine's environment without launchers' variables, and with a new spool."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**clean, "BOOTSEER_SPOOL": str(tmp_path / "spool"), "KF_RULE_CACHE_DIR": str(secret_rules())}


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(env: dict[str, str], tmp_path: Path, run_anew: Run) -> Run:
    """`run(words, ...)`: run bootseer with these arguments and wait for its end, in a fork of a process that has
    imported the commands if the options allow it."""

    def call(*words: str, more: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        more = more or {}
        of_python = any(name.startswith(_OF_THE_INTERPRETER) for name in more)
        if of_python or kwargs.keys() - {"cwd", "timeout", "input", "become"}:
            return run_anew(*words, more=more, **kwargs)
        return warm.bootseer(words, env={**env, **more}, **{"cwd": tmp_path, **kwargs})

    return call


@pytest.fixture
def run_anew(env: dict[str, str], tmp_path: Path) -> Run:
    """The same in a new process of Python."""

    def call(*words: str, more: dict[str, str] | None = None, **kwargs: object) -> subprocess.CompletedProcess[str]:
        options: dict[str, object] = {
            "capture_output": True,
            "text": True,
            "timeout": 600,
            "cwd": tmp_path,
            "check": False,
            **kwargs,
        }
        return subprocess.run([*BOOTSEER, *words], env={**env, **(more or {})}, **options)  # type: ignore[call-overload] # noqa: PLW1510

    return call


@pytest.fixture
def events(env: dict[str, str]) -> Callable[[], list[Event]]:
    """`events()`: the events in the spool, in order of time."""

    def read() -> list[Event]:
        found = scan(sources([env["BOOTSEER_SPOOL"]]))
        assert not found.skipped
        return sorted(found.events, key=lambda event: event.mono_ns)

    return read


def stages(events: Sequence[Event], phase: str = "begin") -> list[str]:
    """Names of the stages, in order; without `alive`, which a slow machine has more often."""
    return [event.stage for event in events if event.phase == phase and event.stage != ALIVE]
