"""The threads that execute the `schedule`: started when there is work, ended soon after.

At most two threads talk to one DataNode, and `max_threads` in all. A timer runs ten times per second for deadlines,
late requests, and probes of excluded DataNodes. All shared state is in `Schedule`, under one lock that is never held
while a thread waits for the network.

Callbacks are made by these threads alone, with no lock held: not by the timer, which must not wait for a caller, and
not by threads that ask for estimates or submit reads, whatever locks these hold. The exception is `read_inline`, whose
caller holds no lock. So callers may ask for estimates under locks of their own, and `done` may submit the next read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.hdfs.block_locations import Block, LocatedFile, Node
from bootseer.hdfs.datanode import BlockRead, DataNodeConnection, raise_silent
from bootseer.hdfs.errors import DataNodeError, RefusedError, SilentError, UnevenError, WrongBytesError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.requests import NOTHING, HdfsSource, ReadSettings, Run, Ticket
from bootseer.hdfs.schedule import Schedule
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.io.fork import in_each_process
from bootseer.io.idle import IdleConnections
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.io.timer import Timer
from bootseer.logs import logger

_LOG = logger(__name__)

_IDLE_S: Final = 10.0
_TICK_S: Final = 0.1
_CLOSE_S: Final = 3.0
_KEEP_IDLE_S: Final = 3.0
"""DataNodes close idle connections after 4 s, `dfs.datanode.socket.reuse.keepalive`."""
Job = Callable[[], None]


class ReadThreads:
    """Threads, connections and the schedule of one `HdfsReads`. Usable in the child of a fork, where it starts
    empty."""

    def __init__(self, namenode: NameNode, settings: ReadSettings) -> None:
        self.namenode = namenode
        self.settings = settings
        self._connections = IdleConnections[DataNodeConnection](_KEEP_IDLE_S)
        self._threads = Executor("bootseer-hdfs", settings.max_threads)
        self._timer = Timer("bootseer-hdfs-clock", 1)
        self._closed = False
        self._schedule = Schedule(settings)
        in_each_process(self._begin)

    def _begin(self) -> None:
        parents = list(self._schedule.runs)
        self._lock = threading.Lock()
        self._schedule = Schedule(self.settings)
        self._unscheduled: set[DataNodeConnection] = set()
        """Connections outside of runs: of probes, and of inline reads."""
        self._num_starting = 0
        """Threads that were requested and have not looked for work yet."""
        self._ticking = False
        self._ticks_until_s = 0.0
        for run in parents:
            if run.connection is not None:
                run.connection.close()

    @contextmanager
    def schedule(self) -> Iterator[Schedule]:
        """The schedule, locked. Threads are woken afterwards; no callback is made."""
        with self._lock:
            try:
                yield self._schedule
            finally:
                with suppress(TransientError):  # no thread can be started now: the timer, or a later call, tries again
                    self._wake()

    @contextmanager
    def estimates(self) -> Iterator[Schedule]:
        """The schedule, locked, for queries alone. The only thing that callers may use under locks of their own: it
        takes one lock for a moment, and makes no callbacks."""
        with self._lock:
            yield self._schedule

    def submit(self, ticket: Ticket) -> None:
        """Submit a read. Raises `BootseerError`, and then does not call its `done`."""
        with self._lock:
            if self._closed:
                raise PermanentError(f"{ticket.source.uri}: its reader was closed")
            try:
                self._schedule.submit(ticket, time.monotonic())
                self._wake()
            except BaseException:
                # No other thread has seen it: the lock was held throughout.
                self._schedule.fail(ticket, TransientError("it was not begun"), at_once=True)
                with suppress(ValueError):
                    self._schedule.ended.remove(ticket)
                raise

    def read_inline(self, ticket: Ticket) -> bool:
        """Carry out a small read in this thread, if one of its DataNodes has an idle connection, and call back. This
        thread must hold no lock.

        Bypasses the schedule, whose bookkeeping would take most of the time of one small piece. Any error, and an
        answer later than usual, is left to the schedule: returns False, and the DataNode is avoided.
        """
        began_s = time.monotonic()
        block = ticket.source.located.block_at(ticket.offset)
        is_in_one = ticket.offset + len(ticket.into) <= block.end
        found = self._idle(block, len(ticket.into), began_s) if is_in_one else None
        if found is None:
            return False
        node, connection, late_s = found
        ticket.node = node.host_port
        is_whole = False
        try:
            self._read_unscheduled(ticket, block, connection, late_s)
            is_whole = True
        except SilentError:
            self._connections.drop(node.host_port)
        except DataNodeError:
            pass
        finally:
            with self._lock:
                self._unscheduled.discard(connection)
                if is_whole:
                    queue = self._schedule.queues.queue(node)
                    queue.note_read(block, len(ticket.into), time.monotonic() - began_s)
            self._give_back(node, connection, is_whole)
        if is_whole:
            ticket.into = NOTHING
            _call_back(ticket)
        else:
            ticket.avoid |= {node.host_port}
        return is_whole

    def _idle(self, block: Block, length: int, now_s: float) -> tuple[Node, DataNodeConnection, float] | None:
        """An idle connection to the best DataNode that has one, and its timeout."""
        with self._lock:
            if self._closed:
                return None
            choice, queues = self._schedule.choice, self._schedule.queues
            nodes = {node.host_port: node for node in block.nodes if not choice.is_open(node.host_port)}
            for name in sorted(nodes, key=lambda name: queues.expected_s(name, length, now_s)):
                connection = self._connections.take(name)
                if connection is not None:
                    self._unscheduled.add(connection)
                    return nodes[name], connection, choice.late_s()
        return None

    def _read_unscheduled(self, ticket: Ticket, block: Block, connection: DataNodeConnection, late_s: float) -> None:
        connection.set_timeout(late_s)
        read = BlockRead(
            connection, block, ticket.offset - block.start, len(ticket.into),
            check=ticket.check and block.id not in ticket.source.unchecked, on_silence=raise_silent,
        )  # fmt: skip
        done = 0
        while part := read.next_bytes():
            read.receive([ticket.into[done : done + part]])
            done += part
        read.finish()
        connection.set_timeout(self.settings.silent_s)

    def _new_connection(self, node: Node) -> DataNodeConnection:
        address = node.address(by_hostname=self.namenode.cluster.by_hostname)
        return DataNodeConnection(address, silent_s=self.settings.silent_s, protection=self.namenode.protection)

    def _give_back(self, node: Node, connection: DataNodeConnection, is_whole: bool) -> None:
        """`is_whole`: the latest read was received completely, so that the connection can be reused."""
        if is_whole and not self._closed:
            self._connections.give(node.host_port, connection)
        else:
            connection.close()

    def close(self) -> None:
        """End all reads, threads and connections. Must not be called from a `done`."""
        with self._lock:
            self._closed = True
            for ticket in self._schedule.tickets():
                error = PermanentError(f"{ticket.source.uri}: its reader was closed")
                self._schedule.fail(ticket, error, at_once=True)
            for run in self._schedule.runs:
                run.halt()
            for connection in self._unscheduled:
                connection.stop()
        while (job := self._next_callback()) is not None:
            job()
        self._timer.close(_CLOSE_S, drop=True)
        self._threads.close(_CLOSE_S)
        self._connections.close()

    # Threads

    def _wake(self) -> None:
        """Have as many threads as there is work, and the timer while anything is in flight. Called with the lock held.

        Raises `TransientError` if there is no thread and none can be started.
        """
        if self._closed:
            return  # the remaining threads make the remaining callbacks
        now_s = time.monotonic()
        if self._schedule.num_pieces:
            self._ticks_until_s = now_s + _IDLE_S  # also afterwards, for probes of excluded DataNodes
        if not self._ticking and now_s < self._ticks_until_s:
            with suppress(TransientError):
                self._timer.after(_TICK_S, self._tick)
                self._ticking = True
        wanted = min(self._schedule.num_ready, self.settings.max_threads)
        while self._num_starting < wanted:
            self._threads.submit(self._serve)
            self._num_starting += 1

    def _serve(self) -> None:
        with self._lock:
            self._num_starting -= 1
        while (job := self._next_callback() or self._next()) is not None:
            run_reported(job)
            del job

    @contextmanager
    def _as_worker(self) -> Iterator[Schedule]:
        """As `schedule`, for worker threads: this thread calls back one of the reads that have ended, whose bytes are
        in its CPU cache, and woken threads call back the others."""
        with self.schedule() as schedule:
            yield schedule
            ended = schedule.ended.popleft() if schedule.ended else None
        if ended is not None:
            _call_back(ended)

    def _next_callback(self) -> Job | None:
        with self._lock:
            if self._schedule.ended:
                return partial(_call_back, self._schedule.ended.popleft())
        return None

    def _next(self) -> Job | None:
        """The next job; None if the thread is not needed any more."""
        with self.schedule() as schedule:
            if self._closed:
                return None
            if schedule.to_locate:
                return partial(self._locate, schedule.to_locate.popleft())
            run = schedule.take(time.monotonic())
            return partial(self._carry_out, run) if run is not None else None

    def _tick(self) -> None:
        with self.schedule() as schedule:
            self._ticking = False
            now_s = time.monotonic()
            num_hedges = schedule.counts["hedges"]
            schedule.tick(now_s)
            num_hedges = schedule.counts["hedges"] - num_hedges
            for node in schedule.choice.due_probes(now_s):
                queue = schedule.queues.by_node[node]
                if queue.sample is not None:
                    with suppress(TransientError):  # it is tried again after the next pause
                        self._threads.submit(partial(self._probe, queue.sample, queue.node), urgent=False)
        if num_hedges:
            _LOG.debug("%d late pieces are requested from other DataNodes too (hedged)", num_hedges)
        self._connections.expire()

    # Jobs

    def _carry_out(self, run: Run) -> None:
        error: DataNodeError | None = None
        try:
            if not self._read(run, self._connections.take(run.queue.name)):
                # DataNodes close idle connections: not a failure.
                self._connections.drop(run.queue.name)
                self._read(run, None)
        except DataNodeError as caught:
            error = caught
        except BaseException as caught:
            error = DataNodeError(f"{type(caught).__name__}: {caught}")
            raise
        finally:
            # In any case: readers wait for these pieces.
            with self._as_worker() as schedule:
                schedule.finished(run, error, time.monotonic())
                is_excluded = schedule.choice.is_open(run.queue.name)
            if error is not None and not run.stopped:
                consequence = "is excluded for a while" if is_excluded else "failed one request"
                _LOG.info("DataNode %s %s: %s", run.queue.name, consequence, error)

    def _read(self, run: Run, connection: DataNodeConnection | None) -> bool:
        """Read a run over this connection, or a new one. Returns False if an idle connection proves to be closed."""
        is_new = connection is None
        if connection is None:
            connection = self._new_connection(run.queue.node)
        is_whole = False
        try:
            with self._lock:
                # From now on the run can be stopped, also while it connects.
                run.connection = connection
                if run.stopped:
                    connection.stop()
                is_alone = is_new and not self._schedule.should_give_up(run, 0.0)
            if is_new:
                connection.connect(self.settings.reconnect_s if is_alone else self.settings.silent_s)
            is_whole = self._receive(run, connection)
        except (RefusedError, SilentError, UnevenError, WrongBytesError):
            raise
        except DataNodeError:
            if is_new or run.received or run.stopped:
                raise
            return False
        finally:
            with self._lock:
                # From now on it cannot be stopped: the file descriptor may be reused.
                run.connection = None
            self._give_back(run.queue.node, connection, is_whole)
        return True

    def _receive(self, run: Run, connection: DataNodeConnection) -> bool:
        """Request and receive a run. Returns whether it was received completely."""
        first = run.pieces[0]
        read = BlockRead(
            connection,
            first.block,
            first.offset,
            run.length,
            check=first.check,
            max_packets=run.packets,
            on_silence=lambda silent_s: self._check_silence(run, silent_s),
        )
        while length := read.next_bytes():
            with self._lock:
                views = self._schedule.claim(run, length)
                if self._schedule.ended:  # otherwise there is no new work
                    with suppress(TransientError):
                        self._wake()
            if views is None:
                return False
            read.receive(views)
            with self._as_worker() as schedule:
                schedule.received(run, length, time.monotonic())
        read.finish()
        return True

    def _check_silence(self, run: Run, silent_s: float) -> None:
        """Raise if a silent connection is to be given up."""
        with self._lock:
            if self._schedule.should_give_up(run, silent_s):
                raise_silent(silent_s)

    def _locate(self, source: HdfsSource) -> None:
        answer: LocatedFile | BootseerError
        try:
            answer = self.namenode.locate(source.located.path)
        except NotFoundError:
            answer = PermanentError(f"{source.uri} was removed while it was read")
        except BootseerError as error:
            answer = error
        except BaseException as error:
            answer = TransientError(f"{source.uri}: {type(error).__name__}: {error}")
            report_exception()
        with self._as_worker() as schedule:
            schedule.located(source, answer, time.monotonic())

    def _probe(self, block: Block, node: Node) -> None:
        try:
            connection = self._new_connection(node)
            with self._lock:
                self._unscheduled.add(connection)
            try:
                connection.connect(self.settings.silent_s)
                # A request of its own, so that no reader waits for it.
                BlockRead(connection, block, 0, 1, check=False, on_silence=raise_silent)
            finally:
                with self._lock:
                    self._unscheduled.discard(connection)
                connection.close()
        except RefusedError:
            pass  # the block is gone, but the node answers
        except DataNodeError:
            return
        with self.schedule() as schedule:
            schedule.choice.probe_succeeded(node.host_port)


def _call_back(ticket: Ticket) -> None:
    # The caller keeps its ticket; the callback may refer to large objects.
    done, ticket.done = ticket.done, _no_callback
    run_reported(partial(done, ReadOutcome(ticket.error, ticket.node)))


def _no_callback(outcome: ReadOutcome) -> None:
    """Replaces the callback of a ticket that has ended."""
