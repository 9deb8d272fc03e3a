"""Tests side by side: `pytest -n 4` runs them in four processes.

They are forked when all tests are collected. Workers that collect for themselves, as pytest-xdist's do, spend 10 s of
processor time each, and a run of a minute and a half is a third of that. Each takes whole files, in the order of
`pytest_collection_modifyitems`, and all files that share a server (`shares`) are as one. What a worker leaves that died
is run by a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import sys
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from s3_server import SHARES_S3
from shared_hdfs import SHARES_HDFS

shares = {**dict.fromkeys(SHARES_HDFS, "shared_hdfs"), **dict.fromkeys(SHARES_S3, "shared_s3")}
_MAX_DEATHS = 10
"""Of workers, in one run: more than that is no test's fault."""


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs some of the tests. pytest's own plugins go by the same attribute."""
    return hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("side by side")
    group._addoption("-n", dest="workers", type=int, default=0, metavar="N", help="run the tests in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or session.testsfailed or not session.items:
        return None
    _Run(session).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@dataclass(eq=False)
class _Worker:
    """A process as the main one sees it."""

    number: int
    pid: int
    pipe: Connection
    todo: deque[int] = field(default_factory=deque)
    """Tests that it was given and has not ended; the first is the one that it runs, when `is_running`."""
    is_running: bool = False


class _Run:
    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        groups: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            file = item.nodeid.partition("::")[0]
            groups.setdefault(shares.get(file, file), []).append(index)
        self._groups = deque(groups.values())
        self._workers: list[_Worker] = []
        self._deaths = 0
        self._stop = mmap.mmap(-1, 1)
        """Its byte is set when workers are to end behind the test that they run."""

    def run(self) -> None:
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for number in range(min(self._config.option.workers, len(self._groups))):
            self._start(number)
        try:
            while self._workers:
                for pipe in wait([worker.pipe for worker in self._workers]):
                    (worker,) = (worker for worker in self._workers if worker.pipe is pipe)
                    message = None
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        message = worker.pipe.recv()
                    if message is None:
                        self._end(worker)
                    else:
                        self._hear(worker, *message)
                if self._session.shouldfail or self._session.shouldstop:
                    self._stop[0] = 1
        except BaseException:  # as an interrupt of the terminal, which they hear too
            self._stop[0] = 1
            for worker in self._workers:
                worker.pipe.close()
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
            raise

    def _start(self, number: int) -> None:
        mine, its = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a library has at its import
            pid = os.fork()
        if pid == 0:
            mine.close()
            for other in self._workers:
                other.pipe.close()
            _Child(self._session, number, its, self._stop).run()
        its.close()
        self._workers.append(_Worker(number, pid, mine))

    def _hear(self, worker: _Worker, kind: str, value: Any) -> None:
        hook = self._config.hook
        if kind == "next":
            worker.todo = deque(self._groups.popleft() if self._groups and not self._stop[0] else ())
            with contextlib.suppress(OSError):  # it has died since: `_end` finds what it was given
                worker.pipe.send(list(worker.todo))
        elif kind == "begun":
            worker.is_running = True
        elif kind == "ended":
            worker.is_running = False
            for data in value:
                report = hook.pytest_report_from_serializable(config=self._config, data=data)
                hook.pytest_runtest_logreport(report=report)
            nodeid = self._session.items[worker.todo.popleft()].nodeid
            hook.pytest_runtest_logfinish(nodeid=nodeid, location=("", None, ""))
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        else:
            self._session.shouldfail = f"worker {worker.number}: {value}"

    def _end(self, worker: _Worker) -> None:
        worker.pipe.close()
        self._workers.remove(worker)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.todo or self._stop[0]:
            return
        if worker.is_running:
            item = self._session.items[worker.todo.popleft()]
            why = f"its process has ended with {status}"  # -9: by SIGKILL
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            self._config.hook.pytest_runtest_logreport(report=report)
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            self._session.shouldfail = "workers end again and again"
        elif worker.todo:
            self._groups.appendleft(list(worker.todo))
            self._start(worker.number)


class _Child:
    """A worker as it sees itself."""

    def __init__(self, session: pytest.Session, number: int, pipe: Connection, stop: mmap.mmap) -> None:
        self._session, self._config = session, session.config
        self._number, self._pipe, self._stop = number, pipe, stop
        self._reports: list[object] = []
        self._is_ready = False

    def run(self) -> None:
        """Runs tests until there are none, and ends the process."""
        status = 1
        try:
            self._prepare()
            status = self._work()
            self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=status)
            self._config._ensure_unconfigure()
        except BaseException:
            status = 3
            with contextlib.suppress(OSError):
                self._pipe.send(("failed", traceback.format_exc()))
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            os._exit(status)

    def _prepare(self) -> None:
        config = self._config
        config.workerinput = {"workerid": f"gw{self._number}"}  # type: ignore[attr-defined]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        # What tests print is caught in a file, and that of the main process would be the same for all.
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        config.pluginmanager.getplugin("terminalreporter")._tw._file = os.fdopen(null, "w")
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._given_basetemp, factory._basetemp = factory.getbasetemp() / f"gw{self._number}", None
        config.pluginmanager.register(self)  # here it hears of all earlier warnings, which the main process knows
        self._is_ready = True

    def _work(self) -> int:
        session = self._session
        try:
            while group := self._ask():
                for item, next_item in zip(group, [*group[1:], session], strict=True):
                    if self._stop[0]:
                        break
                    self._pipe.send(("begun", None))
                    # What the next test shares with this one stays, and between files what all of the session share:
                    # which file is the next is not asked before this one has ended, others may be free by then.
                    self._config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                    self._pipe.send(("ended", self._reports))
                    self._reports = []
        except (KeyboardInterrupt, EOFError, ConnectionError):  # here, or in the main process, which listens no more
            return int(pytest.ExitCode.INTERRUPTED)
        return int(pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK)

    def _ask(self) -> list[pytest.Item]:
        self._pipe.send(("next", None))
        return [self._session.items[index] for index in self._pipe.recv()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if self._is_ready:
            text, category = str(warning_message.message), warning_message.category
            plain = warnings.WarningMessage(text, category, warning_message.filename, warning_message.lineno)
            self._pipe.send(("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": None}))
