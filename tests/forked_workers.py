"""Starts the workers of pytest-xdist as forks of one process that has imported all tests.

Importing them takes 6 s of processor time in each worker; a fork has them in `sys.modules` and collects in 1 s.
`worker_server` is that process, and also the program that xdist starts instead of Python.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_SHOWN_S = 0.005
"""The shortest duration that `--durations` shows."""
_server = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bootseer-workers-"))) / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(len(specs))
            code = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import worker_server; worker_server.serve()"
            number = listener.fileno()
            arguments = (*config.invocation_params.args, "-n0", "--collect-only", "-qq")
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(number), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
            )
        stack.enter_context(process)  # at exit closes its input, which ends it, and waits
        for spec in specs:
            spec.python = shlex.join([sys.executable, "-IS", str(_HERE / "worker_server.py"), str(path)])
        config.stash[_server] = stack.pop_all()


def pytest_configure(config: pytest.Config) -> None:
    """In a worker, do not send reports of short setups and teardowns, which nothing shows: half of all reports, and
    each takes a millisecond of processor time."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and config.option.xmlpath is None:
            plugin.sendevent = partial(_send_unless_dull, plugin.sendevent)


def _send_unless_dull(send: Callable[..., None], name: str, **values: Any) -> None:
    report = values.get("data", {}) if name == "testreport" else {}
    if not report or report["when"] == "call" or report["outcome"] != "passed" or report["duration"] >= _SHOWN_S:
        send(name, **values)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (stack := config.stash.get(_server, None)) is not None:
        stack.close()
