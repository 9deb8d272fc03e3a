"""The threads that carry out what `schedule` says: started when there is something to do, gone soon after.

At most two threads talk to one DataNode, and `max_threads` in all. One more looks ten times a second after what only
time brings about: deadlines, late requests, probes of DataNodes that are left alone. All shared state is in `Schedule`,
under one lock that nobody holds while waiting for a network or while telling a caller.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.hdfs.bad_blocks import BadBlockReports
from bootseer.hdfs.connections import Connections
from bootseer.hdfs.datanode import BlockRead, DataNodeConnection
from bootseer.hdfs.faults import DataNodeError, RefusedError, SilentError, UnevenError, WrongBytesError
from bootseer.hdfs.located import Block, LocatedFile, Node
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.outcome import ReadOutcome
from bootseer.hdfs.pieces import Source, Ticket
from bootseer.hdfs.runs import Run
from bootseer.hdfs.schedule import Schedule
from bootseer.hdfs.settings import ReadSettings

_IDLE_S: Final = 10.0
_TICK_S: Final = 0.1
_CLOSE_S: Final = 3.0
Job = Callable[[], None]


class Serving:
    """Threads, connections and the schedule of one `HdfsReads`."""

    def __init__(self, namenode: NameNode, settings: ReadSettings) -> None:
        self.namenode = namenode
        self.settings = settings
        self._reports = BadBlockReports(namenode)
        self._connections = Connections(silent_s=settings.silent_s, by_hostname=namenode.cluster.by_hostname)
        self._closed = False
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._time = threading.Condition(self._lock)
        self._schedule = Schedule(self.settings)
        self._probes: list[tuple[Block, Node]] = []
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._clock: threading.Thread | None = None

    @contextmanager
    def schedule(self) -> Iterator[Schedule]:
        """The schedule, for the one who holds the lock. Behind it threads are woken and callers are told."""
        with self._lock:
            yield self._schedule
            self._wake()
            ended, self._schedule.ended = self._schedule.ended, []
            wrong, self._schedule.wrong = self._schedule.wrong, []
        for ticket in ended:
            _tell(ticket)
        for block, nodes in wrong:
            self._reports.report(block, nodes)

    def submit(self, ticket: Ticket, *, here: bool = False) -> None:
        """Carry out a read; `here`: in this thread, which holds no lock and has time, if its DataNode is free."""
        run = None
        with self.schedule() as schedule:
            if self._closed:
                ticket.error = PermanentError(f"{ticket.source.named}: its reader was closed")
                schedule.ended.append(ticket)
            else:
                schedule.submit(ticket, time.monotonic())
                if here:
                    run = schedule.take(time.monotonic())
        if run is not None:
            self._carry_out(run)

    def close(self) -> None:
        """End all reads, threads and connections."""
        with self.schedule() as schedule:
            self._closed = True
            for ticket in schedule.tickets():
                schedule.fail(ticket, PermanentError(f"{ticket.source.named}: its reader was closed"), at_once=True)
            for run in schedule.runs:
                run.halt()
            self._work.notify_all()
            self._time.notify_all()
            threads = [*self._threads, *([self._clock] if self._clock else [])]
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
        self._connections.close()
        self._reports.close()

    def forget(self) -> None:
        """In the child of a fork: no thread is here, and nothing that was underway belongs to this process."""
        runs = list(self._schedule.runs)
        self._reset()
        self._connections.forget()
        for run in runs:
            if run.connection is not None:
                run.connection.close()

    # Threads

    def _wake(self) -> None:
        """Have as many threads awake as there is work, and a clock while anything is underway. Under the lock."""
        schedule = self._schedule
        wanted = schedule.num_ready + len(self._probes)
        if wanted:
            self._work.notify(min(wanted, self._num_idle))
        for _ in range(min(wanted - self._num_idle, self.settings.max_threads - len(self._threads))):
            thread = threading.Thread(target=self._serve, name="bootseer-hdfs", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the machine has no room for one more
                self._threads.discard(thread)
                if not self._threads:
                    raise
                break
            self._num_idle += 1  # until it has come up
        if schedule.num_pieces and self._clock is None and not self._closed:
            clock = threading.Thread(target=self._tick, name="bootseer-hdfs-clock", daemon=True)
            clock.start()
            self._clock = clock

    def _serve(self) -> None:
        """A thread: do what there is to do, until there has been nothing for a while."""
        with self._lock:
            self._num_idle -= 1
        try:
            while (job := self._next()) is not None:
                job()
                del job
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                is_last = not self._threads
            if is_last:
                self._connections.close()

    def _next(self) -> Job | None:
        with self._lock:
            while True:
                if self._closed:
                    return None
                job = self._job()
                if job is not None:
                    self._wake()
                    return job
                self._num_idle += 1
                woken = self._work.wait(_IDLE_S)
                self._num_idle -= 1
                if not woken and not self._schedule.num_ready and not self._probes:
                    return None

    def _job(self) -> Job | None:
        schedule = self._schedule
        if schedule.asking:
            source = schedule.asking.popleft()
            return lambda: self._locate(source)
        run = schedule.take(time.monotonic())
        if run is not None:
            return lambda: self._carry_out(run)
        if self._probes:
            block, node = self._probes.pop()
            return lambda: self._probe(block, node)
        return None

    def _tick(self) -> None:
        """The clock's thread."""
        until = time.monotonic() + _IDLE_S
        try:
            while time.monotonic() < until and not self._closed:
                with self.schedule() as schedule:
                    now_s = time.monotonic()
                    schedule.tick(now_s)
                    for node in schedule.choice.due(now_s):
                        line = schedule.queueing.lines[node]
                        if line.sample is not None:
                            self._probes.append((line.sample, line.node))
                    if schedule.num_pieces:
                        until = now_s + _IDLE_S
                self._connections.expire()
                with self._lock:
                    if not self._closed:
                        self._time.wait(_TICK_S)
        finally:
            with self._lock:
                self._clock = None
                self._wake()

    # Jobs

    def _carry_out(self, run: Run) -> None:
        """Read the pieces of a run."""
        error: DataNodeError | None = None
        try:
            if not self._read(run, self._connections.take(run.line.node)):
                # DataNodes close what lies idle: that says nothing of this one.
                self._connections.drop(run.line.node)
                self._read(run, None)
        except DataNodeError as caught:
            error = caught
        except Exception as caught:
            # Not foreseen; but whatever it is, somebody waits for these pieces.
            error = DataNodeError(f"{type(caught).__name__}: {caught}")
            _report()
        with self.schedule() as schedule:
            schedule.finished(run, error, time.monotonic())

    def _read(self, run: Run, connection: DataNodeConnection | None) -> bool:
        """Read a run from this connection, or from a new one. False when it was of no use any more."""
        is_new = connection is None
        if connection is None:
            connection = self._connections.connect(run.line.node, self._connect_s(run))
        is_whole = False
        try:
            with self._lock:
                run.connection = connection
                if run.stopped:
                    connection.stop()
            is_whole = self._receive(run, connection)
        except (RefusedError, SilentError, UnevenError, WrongBytesError):
            raise
        except DataNodeError:
            if is_new or run.received or run.stopped:
                raise
            return False
        finally:
            with self._lock:
                # From here on nobody stops it, so that its number can be used again.
                run.connection = None
            if is_whole and not self._closed:
                self._connections.give(run.line.node, connection)
            else:
                connection.close()
        return True

    def _receive(self, run: Run, connection: DataNodeConnection) -> bool:
        """Ask for a run and receive it. False when it was not received to its end."""
        first = run.pieces[0]
        read = BlockRead(
            connection,
            first.block,
            first.offset,
            run.length,
            check=first.ticket.check,
            strict=first.strict,
            max_packets=run.packets,
            on_silence=lambda silent_s: self._judge(run, silent_s),
        )
        while length := read.next_bytes():
            with self._lock:
                views = self._schedule.claim(run, length)
            if views is None:
                return False
            read.receive(views)
            with self.schedule() as schedule:
                schedule.received(run, length, time.monotonic())
        read.finish()
        return True

    def _judge(self, run: Run, silent_s: float) -> None:
        """Raise when a silent connection is not to be waited for any longer."""
        with self._lock:
            if self._schedule.silent(run, silent_s):
                raise SilentError(f"it said nothing for {silent_s:.1f} s")

    def _connect_s(self, run: Run) -> float:
        with self._lock:
            alone = not self._schedule.silent(run, 0.0)
        return self.settings.reconnect_s if alone else self.settings.silent_s

    def _locate(self, source: Source) -> None:
        """Ask the NameNode again where a file is."""
        answer: LocatedFile | BootseerError
        try:
            answer = self.namenode.locate(source.located.path)
            answer = self.namenode.with_open_block(answer)
        except NotFoundError:
            answer = PermanentError(f"{source.named} was removed while it was read")
        except BootseerError as error:
            answer = error
        except Exception as error:
            answer = TransientError(f"{source.named}: {type(error).__name__}: {error}")
            _report()
        with self.schedule() as schedule:
            schedule.located(source, answer, time.monotonic())

    def _probe(self, block: Block, node: Node) -> None:
        """See whether a DataNode that is left alone answers again."""

        def give_up(silent_s: float) -> None:
            raise SilentError(f"it said nothing for {silent_s:.1f} s")

        try:
            connection = self._connections.connect(node, self.settings.silent_s)
            try:
                # A request of its own: no reader waits for what may never come.
                BlockRead(connection, block, 0, 1, check=False, on_silence=give_up)
            finally:
                connection.close()
        except RefusedError:
            pass  # it has no such block any more, but it answers
        except DataNodeError:
            return
        with self.schedule() as schedule:
            schedule.choice.works(node.host_port)


def _tell(ticket: Ticket) -> None:
    try:
        ticket.done(ReadOutcome(ticket.error, ticket.node))
    except Exception:
        _report()
    # The caller keeps its ticket; what `done` refers to may be large.
    ticket.done = _told


def _told(outcome: ReadOutcome) -> None:
    """Nobody waits for a ticket that has ended."""


def _report() -> None:
    """Tell the one who watches over threads of the exception that is being handled."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))


_all: weakref.WeakSet[Serving] = weakref.WeakSet()


def _after_fork() -> None:
    for serving in _all:
        serving.forget()


os.register_at_fork(after_in_child=_after_fork)
