"""Programs that use PyTorch, run by forks of a process that has imported it: the import is 2 s of processor time.

Each is a process of its own, with its own arguments, environment, output and exit code, as of `python FILE`. How Python
or torchrun starts (and what the hook does then) is not seen this way.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

from registry import free_port

_PATIENCE_S = 600
_context = multiprocessing.get_context("forkserver")
# Other tests have a fork server too. The context knows only one for the whole process, and the first test that needs it
# starts it, with that test's environment and imports.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.tensor"])


def run(
    script: Path, *commands: Sequence[str], folder: Path, max_file_bytes: int = resource.RLIM_INFINITY
) -> list[subprocess.CompletedProcess[str]]:
    """Run the script with each of these arguments at once, to the end; several are ranks, with torchrun's variables.

    What they print is kept in the folder; `max_file_bytes`: of any file that they write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [(str(folder / f"{number}.out"), str(folder / f"{number}.err")) for number in range(len(commands))]
    port = free_port()
    processes = [
        _context.Process(
            target=_main,
            args=([str(script), *words], _rank(rank, len(commands), port), output, max_file_bytes),
            daemon=True,
        )
        for rank, (words, output) in enumerate(zip(commands, outputs, strict=True))
    ]
    try:
        with (
            # PyTorch reads how many threads it may start when it is imported.
            mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
            mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process),
        ):
            for process in processes:
                process.start()
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
    os.environ.update(environment)
    for number, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
