"""Starts of a job whose setup leaves three servers running, one of which builds an index. Used by `environment`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from registry import free_port

_BUILDS_S = (0, 0, 10)
_SERVER = """
import os, socket, sys, time
index = os.path.expanduser(f"~/index-{sys.argv[1]}")
if not os.path.exists(index):
    time.sleep(float(sys.argv[2]))
    open(index, "w").close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""
_JOB = """
import socket, sys, time
for port in sys.argv[1:]:
    socket.create_connection(("127.0.0.1", int(port))).close()
print(time.monotonic())
"""


class StartsWithDaemons:
    """Starts on new nodes, each of which has only the files of the job."""

    def __init__(self, folder: Path, bootseer: str) -> None:
        """`folder` is captured, so not in /tmp. The first start makes the snapshot."""
        self._folder, self._bootseer = folder, bootseer
        self._number = 0
        ports = [str(free_port()) for _ in _BUILDS_S]
        self._job = [sys.executable, "job.py", *ports]
        servers = (f"{sys.executable} server.py {port} {s}" for port, s in zip(ports, _BUILDS_S, strict=True))
        setup = "".join(f"{server} </dev/null >/dev/null 2>&1 &\n" for server in servers)
        setup += f"until {' '.join(self._job)}; do sleep 0.05; done >/dev/null 2>&1\n"
        folder.mkdir()
        for name, text in (("server.py", _SERVER), ("job.py", _JOB), ("setup.sh", setup)):
            (folder / name).write_text(text)
        self.restored("auto")

    def set_up(self) -> float:
        """Seconds until the job has reached all servers, without BootSeer."""
        return self._start(["sh", "-c", 'sh setup.sh && exec "$@"', "sh"])

    def restored(self, mode: str = "require") -> float:
        """The same with the snapshot."""
        try:
            return self._start([self._bootseer, "run", "--quiet", "--env", mode, "--setup", "setup.sh", "--"])
        finally:
            subprocess.run(
                [self._bootseer, "cache", "prune", "--to", "0"], env=self._env, check=True, stdout=subprocess.DEVNULL
            )

    @property
    def _env(self) -> dict[str, str]:
        node = self._folder / f"node-{self._number}"
        own = {
            "HOME": str(self._folder / "home"),
            "BOOTSEER_NODE": node.name,
            "BOOTSEER_STORE": str(self._folder / "store"),
        }
        own |= {"BOOTSEER_CACHE": f"{node}/cache", "BOOTSEER_SPOOL": f"{node}/spool", "BOOTSEER_RUNTIME": f"{node}/run"}
        return {**os.environ, **own}

    def _start(self, before: list[str]) -> float:
        self._number += 1
        shutil.rmtree(self._folder / "home", ignore_errors=True)
        (self._folder / "home").mkdir()
        began = time.monotonic()
        with subprocess.Popen(
            [*before, *self._job], cwd=self._folder, env=self._env, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            out, _ = process.communicate()
            if before[0] == "sh":  # what a setup leaves running without BootSeer
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise RuntimeError(f"the start with three servers ended with exit code {process.returncode}")
        return float(out) - began
