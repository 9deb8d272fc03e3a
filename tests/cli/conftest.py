"""What the verbs say and do is tested here, not how their process starts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm

_OF_THE_INTERPRETER = ("PYTHON", "LANG", "LC_")


@pytest.fixture
def run(
    run: Callable[..., subprocess.CompletedProcess[str]], env: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `conftest_launch.run`, by the copy of a process that has imported the verbs, wherever that can be."""

    def call(*words: str, more: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        more = more or {}
        if kwargs.keys() - {"cwd", "timeout"} or any(name.startswith(_OF_THE_INTERPRETER) for name in more):
            return run(*words, more=more, **kwargs)
        return warm.bootseer(words, env={**env, **more}, **{"cwd": tmp_path, **kwargs})

    return call
