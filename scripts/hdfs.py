"""Start, stop and show the HDFS for development. Called by scripts/hdfs.sh, which documents its usage.

A background process keeps the cluster of the tests running until SIGTERM. Whether it runs is decided by the lock on its
file, which the kernel releases when it ends, not by the files of a killed one. Its servers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
sys.path.append(str(ROOT / "tests"))

import hadoop  # noqa: E402
from hdfs_links import links_missing  # noqa: E402

_PORT = 8020
"""Of the NameNode, if it is free, so that the address is the same at each start."""
_START_S = 300.0
_STOP_S = 30.0
_MOST = 100_000
_IS_BRIEF = os.environ.get("BOOTSEER_HDFS_BRIEF") == "1"
"""Set by tests and the demo, whose servers run for a short time: Java then compiles less."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="hdfs.sh", description="An HDFS for development.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".hadoop" / "running", help="where it keeps its files")
    verbs = parser.add_subparsers(dest="verb", metavar="start|stop|status|uri|rate")
    start = verbs.add_parser("start")
    start.add_argument("--datanodes", type=_count, default=4, metavar="N")
    start.add_argument(
        "--rate-mbit",
        type=_count,
        metavar="MBIT",
        help="a link of this rate for each DataNode, in a network namespace of its own (root)",
    )
    for verb in ("stop", "status", "uri", "rate"):
        verbs.add_parser(verb)
    keep = verbs.add_parser("keep")
    keep.add_argument("datanodes", type=int)
    keep.add_argument("rate_mbit", type=int, help="0: no links")
    arguments = parser.parse_args()
    keeper = Keeper(arguments.folder.absolute())
    match arguments.verb:
        case "keep":
            return keeper.keep(arguments.datanodes, arguments.rate_mbit)
        case "stop":
            return keeper.stop()
        case "status":
            return keeper.status()
        case "uri":
            return keeper.print_uri()
        case "rate":
            return keeper.print_rate()
        case _:
            return keeper.start(getattr(arguments, "datanodes", 4), getattr(arguments, "rate_mbit", None))


class Keeper:
    """The background process: `keep` runs in it, the other methods control it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid_file, self._uri_file, self._log = folder / "keeper.pid", folder / "uri", folder / "keeper.log"
        self._rate_file = folder / "rate"

    def start(self, num_datanodes: int, rate_mbit: int | None) -> int:
        if reason := hadoop.missing():
            return _fail(reason)
        if rate_mbit is not None and (reason := links_missing()):
            return _fail(f"no DataNode can have a link of its own: {reason}; start it without --rate-mbit")
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._runs():
            with self._log.open("wb") as log:
                words = [sys.executable, __file__, "--folder", str(self._folder), "keep", str(num_datanodes)]
                words.append(str(rate_mbit or 0))
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
                )
            until = time.monotonic() + _START_S
            try:
                while not (self._runs() and self._uri()):
                    # The process ended: another one is starting, or it failed.
                    if time.monotonic() > until or (child.poll() is not None and not self._runs()):
                        return _fail(f"it does not start: {self._log.read_text(errors='replace')[-3000:].strip()}")
                    time.sleep(0.1)
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
                return 130
        elif rate_mbit is not None and rate_mbit != self._rate_mbit():
            return _fail(
                f"it runs already, {self._rate_words()}; stop it first: scripts/hdfs.sh stop, or make hdfs ARGS=stop"
            )
        return self.status()

    def stop(self) -> int:
        pid = self._pid()
        if not self._runs() or pid is None:
            _say("it does not run")
            return 0
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            until = time.monotonic() + _STOP_S
            while time.monotonic() < until:
                if not self._runs():
                    _say("stopped")
                    return 0
                time.sleep(0.05)
        return _fail(f"process {pid} does not end")

    def status(self) -> int:
        if not self._runs():
            _say(f"it does not run; its files are in {self._folder}")
            return 1
        sys.stdout.write(f"{self._uri() or 'starting'}\n")
        if self._rate_mbit():
            _say(self._rate_words())
        _say(f"files, logs and settings (HADOOP_CONF_DIR: conf) are in {self._folder}/hdfs")
        _say("stop it with scripts/hdfs.sh stop, or make hdfs ARGS=stop")
        return 0

    def print_uri(self) -> int:
        if not self._runs() or not self._uri():
            _say("it does not run; start it with make hdfs")
            return 1
        sys.stdout.write(f"{self._uri()}\n")
        return 0

    def print_rate(self) -> int:
        if not self._runs():
            return 1
        sys.stdout.write(f"{self._rate_words()}\n")
        return 0

    def keep(self, num_datanodes: int, rate_mbit: int) -> int:
        """Run the cluster until SIGTERM or SIGINT. `rate_mbit` 0: without links."""
        from hdfs_cluster import HdfsCluster  # imports pytest, which other verbs do not need

        lock = os.open(self._pid_file, os.O_RDWR | os.O_CREAT, 0o644)
        if not _take(lock):
            return 0
        self._uri_file.unlink(missing_ok=True)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        self._rate_file.write_text(f"{rate_mbit}\n")
        # Behind links the cluster has its own address, so all ports are free.
        port = _PORT if rate_mbit else _free(_PORT)
        with HdfsCluster(
            self._folder, num_datanodes=num_datanodes, rate_mbit=rate_mbit or None, port=port, is_brief=_IS_BRIEF
        ) as cluster:
            new = self._uri_file.with_suffix(".new")
            new.write_text(cluster.uri)
            new.replace(self._uri_file)
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                while all(process.poll() is None for process in [*cluster.datanodes, cluster.namenode]):
                    time.sleep(1.0)
                _say("a server has ended, so all end; its log tells why")
            self._uri_file.unlink()
            cluster.stop()
        return 0

    def _runs(self) -> bool:
        try:
            probe = os.open(self._pid_file, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(probe)
        return False

    def _pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _rate_mbit(self) -> int:
        try:
            return int(self._rate_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _rate_words(self) -> str:
        rate = self._rate_mbit()
        return f"each DataNode behind a link of {rate} Mbit/s" if rate else "without limits of its links"

    def _uri(self) -> str:
        try:
            return self._uri_file.read_text()
        except FileNotFoundError:
            return ""


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST}")
    return int(text)


def _take(lock: int) -> bool:
    """Whether the lock could be acquired; a check holds it only for a moment."""
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def _free(port: int) -> int | None:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return port
    return None


def _fail(message: str) -> int:
    _say(message)
    return 1


def _say(message: str) -> None:
    sys.stderr.write(f"hdfs: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
