"""Run programs in forks of a process that has already done their imports: importing PyTorch takes 2 s of processor
time, and importing the modules of `bootseer report` takes more than its work on a small log.

Each program is a separate process with its own arguments, environment, output and exit code, like `python FILE` or
`python -m bootseer`. This does not test the start of Python or torchrun (and the hook in it), nor whether a command
imports all modules that it needs.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from bootseer.fuse.syscalls import libc

_PATIENCE_S = 600
_PR_SET_DUMPABLE = 4
context = multiprocessing.get_context("forkserver")


class Parent:
    """A separate fork server: the context has only one for the whole process, started by the first test that needs it,
    with that test's environment and imports."""

    def __init__(self, *modules: str, **env: Callable[[], Path | str]) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([*modules])
        self._env = env

    def start(self, *processes: ForkServerProcess) -> None:
        given = {name: str(value()) for name, value in self._env.items()}
        with (
            # PyTorch reads its number of threads when it is imported.
            mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **given}),
            mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process),
        ):
            for process in processes:
                process.start()


def python_path() -> str:
    """The value of PYTHONPATH for the tests' modules; an existing value, e.g. of another source tree, comes first."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))


def _secret_rules() -> Path:
    from once import compiled_secret_rules  # here, so that forks do not import it

    return compiled_secret_rules()


TORCH = Parent(
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "bootseer.checkpoint.dcp"),
    "torch._dynamo",  # a rank imports it when it distributes its first tensor: 0.7 s of processor time
)
SHARES_TORCH = frozenset(
    f"tests/{name}.py"
    for name in ("checkpoint/dcp/test_ranks", "checkpoint/mount/test_programs", "examples/test_moe", "hook/test_hook")
)
"""The files that use it most: one worker runs all of them, because each worker would import PyTorch for its forks."""
CHECKPOINTS = Parent(
    *(f"bootseer.checkpoint.{name}" for name in ("mount.mounted", "publish", "reading.reading")),
    *("bootseer.checkpoint.writing.writing", "bootseer.places.folder", "bootseer.places.hdfs", "bootseer.hdfs.client"),
    *(f"bootseer.peers.{name}" for name in ("choice", "job", "readers", "server")),
    *("concurrent.futures.thread", "runpy", "unittest.mock"),  # which this module imports
)
_bootseer = Parent(
    *(f"bootseer.cli.{name}" for name in ("main", "report", "image", "env", "ckpt", "simulate", "fleet", "agent")),
    *("bootseer.report.render.terminal", "bootseer.report.render.html", "bootseer.places.objects"),
    *(f"bootseer.launch.{name}" for name in ("run", "session", "supervise")),
    *(f"bootseer.launch.environment.{name}" for name in ("start", "setup", "capture", "publish", "restore")),
    *("concurrent.futures.thread", "runpy", "unittest.mock"),  # which this module imports
    *(f"bootseer.env.capturing.{name}" for name in ("capture", "effects", "leftovers", "overlay", "watch")),
    *("bootseer.launch.image.environment", "bootseer.image.conversion.convert", "bootseer.store.registry"),
    *("bootseer.env.snapshot.oracle", "in_capture", "plain_user", "read_secret_rules", "store_doubles"),
    PYTHONPATH=python_path,
    KF_RULE_CACHE_DIR=_secret_rules,
)
_service = Parent(
    *("bootseer.cli.main", "bootseer.cli.serve", "bootseer.service.app", "bootseer.cli.pattern"),
    *("alembic.command", "alembic.script", "sqlalchemy.dialects.sqlite"),
    *("concurrent.futures.thread", "runpy", "unittest.mock"),
)


class Started:
    """A running fork, with a part of the interface of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        input: str = "",  # noqa: A002
        become: Callable[[], None] | None = None,
        main: Callable[[list[str]], None] | None = None,
    ) -> None:
        """Start `python -m bootseer` with these arguments, or `main`."""
        pipes = [Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        self._words = [*map(str, words)]
        self._process = context.Process(
            target=_copy_main, args=(main or _bootseer_main, self._words, dict(env), str(cwd), input, become, *writers)
        )
        try:
            (_service if words[0] == "serve" else _bootseer).start(self._process)
        finally:
            for writer in writers:
                writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None
        threads = ThreadPoolExecutor(2)
        self._outputs = [threads.submit(_all_of, reader) for reader, _ in pipes]
        threads.shutdown(wait=False)

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = _PATIENCE_S) -> tuple[str, str]:
        """Wait for its end and the end of all processes that have its output open."""
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._words, timeout)
        self._process.join()
        self.returncode = self._process.exitcode
        out, err = (output.result() for output in self._outputs)
        return out, err

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def bootseer(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float = _PATIENCE_S,
    input: str = "",  # noqa: A002 - as in `subprocess.run`
    become: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bootseer` with these arguments; waits like `Started.communicate`.

    `become` is called first in the new process, which must be able to import it.
    """
    return _ended(_bootseer_main, words, env=env, cwd=cwd, timeout=timeout, input=input, become=become)


def job(
    script: Path,
    *,
    input: str,  # noqa: A002
    env: Mapping[str, str],
    timeout: float = _PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT` with this input and wait for its end; for scripts that use captures and snapshots."""
    return _ended(_job_main, [str(script)], env=env, cwd=Path.cwd(), timeout=timeout, input=input, become=None)


def _ended(
    main: Callable[[list[str]], None], words: Sequence[str], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    started = Started(words, main=main, **options)
    try:
        output = started.communicate(timeout)
        assert started.returncode is not None
        return subprocess.CompletedProcess(words, started.returncode, *output)
    finally:
        started.close()


def _all_of(reader: Connection) -> str:
    with reader, open(reader.fileno(), encoding="utf-8", closefd=False) as file:
        return file.read()


def _copy_main(
    main: Callable[[list[str]], None],
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    text: str,
    become: Callable[[], None] | None,
    *outputs: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(cwd)
    if text:
        with tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            os.dup2(given.fileno(), 0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    # New stream objects: those of the parent have cached properties of the old files.
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    if become is not None:
        become()
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # like after exec: /proc/self belongs to the new user
    main(words)


def _bootseer_main(words: list[str]) -> None:
    sys.argv = ["bootseer", *words]
    runpy.run_module("bootseer", run_name="__main__", alter_sys=True)


def _job_main(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def run(
    script: Path,
    *commands: Sequence[str],
    folder: Path,
    max_file_bytes: int = resource.RLIM_INFINITY,
    parent: Parent = TORCH,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the script in concurrent forks of `parent`, one for each command's arguments, and wait for all; several are
    ranks, with torchrun's variables.

    Their output is kept in the folder; `max_file_bytes`: limit of each file that they write.
    """
    from registry import free_port  # here, so that forks do not import it

    folder.mkdir(parents=True, exist_ok=True)
    outputs = [(str(folder / f"{number}.out"), str(folder / f"{number}.err")) for number in range(len(commands))]
    port = free_port()
    processes = [
        context.Process(
            target=_main,
            args=([str(script), *words], {**os.environ, **_rank(rank, len(commands), port)}, output, max_file_bytes),
            daemon=True,
        )
        for rank, (words, output) in enumerate(zip(commands, outputs, strict=True))
    ]
    try:
        parent.start(*processes)
        for process in processes:
            assert wait([process.sentinel], _PATIENCE_S), f"{process} has not ended"
            process.join()
        return [
            subprocess.CompletedProcess(words, process.exitcode, *(Path(path).read_text() for path in output))
            for words, process, output in zip(commands, processes, outputs, strict=True)
        ]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
                process.close()


def _rank(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **rendezvous}


def _main(words: list[str], environment: dict[str, str], output: tuple[str, str], max_file_bytes: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
