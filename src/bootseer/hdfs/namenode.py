"""RPCs to the NameNodes of a cluster: locations of blocks, names and folders, and (`ask`) any other encoded request.

A cluster may have several NameNodes (HA): one is active, the others are in standby, hung or gone. The one that answered
last is asked first. Observers are never used: they may lack recent writes.

Each RPC has a connection of its own, at most `_MAX_CONNECTIONS` at a time. A hung NameNode is left after its share of
the time, and another one asked; hdfs-native would wait for it forever. An RPC whose answer was lost is repeated with
the same call id, so that a rename is not done twice.

Paths are absolute paths of the file system, "/a/b". Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.block_locations import FileStatus, LocatedFile, Node, parse_located, parse_node, parse_status
from bootseer.hdfs.errors import kind_of_error
from bootseer.hdfs.protection import Protection
from bootseer.hdfs.protobuf import MalformedError, Message, field
from bootseer.hdfs.rpc import Login, RemoteError, RpcConnection, UnreachableError
from bootseer.hdfs.sasl import check_ciphers, delegation_token
from bootseer.io.fork import in_each_process
from bootseer.io.idle import IdleConnections
from bootseer.logs import logger

_LOG = logger(__name__)

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_MAX_CONNECTIONS: Final = 8
_MAX_NUMBER: Final = 0x7FFFFFFF
_IDLE_S: Final = 8.0
"""Servers close connections that are idle for 10 s."""
_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 2.0
_FIRST_S: Final = 0.5
"""How long after its creation a client retries addresses at which no NameNode has ever answered."""
_NEW_S: Final = 2.0
"""The first attempt of a client at each of several NameNodes, until one has answered."""
_RETRIED_KINDS = frozenset(
    {
        "StandbyException",
        "RetriableException",
        "ObserverRetryOnActiveException",
        "SafeModeException",
        "StateStoreUnavailableException",  # a router's
    }
)
"""Errors after which another NameNode, or the same one later, may answer."""
_NOISE = re.compile(r"\b(?:[a-z]\w*\.){2,}(?=[A-Z])|\. Visit https:.*")
"""Noise in messages of NameNodes: Java packages, and links to documentation."""
_EVERYTHING: Final = (1 << 63) - 1
_LIVE: Final = 2
_IN_SERVICE: Final = 0
"""Neither decommissioned nor in maintenance: such a node gets no blocks."""
_OBSERVER: Final = 3
_UNCHANGED: Final = -1


class NameNode:
    """The NameNodes of one cluster. `ask_s` bounds each request, `call_timeout_s` each attempt at one of several
    NameNodes."""

    def __init__(self, cluster: Cluster, *, call_timeout_s: float = 10.0, ask_s: float = 30.0) -> None:
        self.cluster = cluster
        self.uri = f"hdfs://{cluster.authority}"
        self._ask_s = ask_s
        self._call_timeout_s = call_timeout_s
        self.protection = Protection(cluster.settings, kerberos=cluster.kerberos, ask_key=self._ask_key)
        self._is_closed = False
        self._has_answered = False
        """Whether a NameNode has ever answered: then it is waited for when it restarts."""
        self.least_block_bytes = 0
        """The minimum block size, once the NameNode has refused a smaller one."""
        self._made_s = time.monotonic()
        self._idle = IdleConnections[RpcConnection](_IDLE_S)
        in_each_process(self._reset)

    def _reset(self) -> None:
        # Client and call ids let NameNodes recognise a repeated request, and not execute it twice.
        self._client_id = os.urandom(16)
        self._numbers = itertools.count(1)
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._active = 0
        self._knows_encryption = False
        self._known_nodes: dict[bytes, Node] = {}

    def locate(self, path: str, *, timeout_s: float | None = None) -> LocatedFile:
        """The blocks of a file and their locations; of a file that is being written, the complete ones. Raises
        `NotFoundError`, `AccessError`, `TransientError`."""
        request = field(1, path) + field(2, 0) + field(3, _EVERYTHING)
        answer = self.ask("getBlockLocations", request, path, timeout_s)
        if 1 not in answer:
            raise self._not_found(path)
        with self.parsing(path):
            return parse_located(path, answer.data(1), self._known_nodes)

    def space(self) -> tuple[int, int]:
        """Total and free bytes of all DataNodes."""
        with self.parsing("/"):
            answer = self.ask("getFsStats")
            return answer.number(1), answer.number(3)

    def free_bytes_by_node(self) -> dict[str, int]:
        """Free bytes of each live DataNode in service, by `host:port`. Raises `AccessError` where only operators may
        ask."""
        with self.parsing("/"):
            answer = self.ask("getDatanodeReport", field(1, _LIVE))
            nodes = [Message(node) for node in answer.every(1)]
            return {
                parse_node(node.message(1)).host_port: node.number(4, 0)
                for node in nodes if node.number(10, _IN_SERVICE) == _IN_SERVICE
            }  # fmt: skip

    def stat(self, path: str) -> FileStatus:
        with self.parsing(path):
            answer = self.ask("getFileInfo", field(1, path), path)
            if 1 not in answer:
                raise self._not_found(path)
            return parse_status(path, answer.message(1))

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        """Make a folder, with `parents` also those above it. Raises `AlreadyExistsError` for a taken name, unless
        `parents` and it is a folder. Of two concurrent callers both may succeed: HDFS does not report it."""
        if not parents:
            with contextlib.suppress(NotFoundError):
                self.stat(path)
                raise AlreadyExistsError(f"{self.uri}{path} already exists")
        self.ask("mkdirs", field(1, path) + field(2, field(1, mode)) + field(3, parents), path)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename atomically. With `overwrite` a file replaces a file and a folder an empty folder. Raises
        `AlreadyExistsError`, `NotFoundError`, and `PermanentError` for what cannot be replaced."""
        try:
            self.ask("rename2", field(1, source) + field(2, target) + field(3, overwrite), source)
        except NotFoundError:
            # Routers have call ids of their own, so a NameNode does not recognise a repeated rename.
            with contextlib.suppress(NotFoundError):
                self.stat(target)
                if self._is_router():
                    return
            raise

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove. Raises `NotFoundError`, and `NotEmptyError` for a folder that is not empty."""
        with self.parsing(path):
            if not self.ask("delete", field(1, path) + field(2, recursive), path).number(1):
                raise self._not_found(path)

    def set_permission(self, path: str, mode: int) -> None:
        self.ask("setPermission", field(1, path) + field(2, field(1, mode)), path)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """Set owner and group by name; None leaves one unchanged. Only HDFS's superuser may change owners."""
        fields = b"".join(field(number, name) for number, name in ((2, owner), (3, group)) if name is not None)
        self.ask("setOwner", field(1, path) + fields, path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self.ask("setTimes", field(1, path) + field(2, mtime_ms) + field(3, _UNCHANGED), path)

    def list(self, path: str) -> Iterator[FileStatus]:
        """The entries of a folder, page by page; for a file, the file itself. Raises `NotFoundError`."""
        after = b""
        is_more = True
        while is_more:
            answer = self.ask("getListing", field(1, path) + field(2, after) + field(3, False), path)
            with self.parsing(path):
                if 1 not in answer:
                    raise self._not_found(path)
                page = answer.message(1)
                found = [Message(entry) for entry in page.every(1)]
                for entry in found:
                    name = entry.text(2)
                    yield parse_status(f"{path.rstrip('/')}/{name}" if name else path, entry)
                is_more = bool(page.number(2)) and bool(found)
                after = found[-1].data(2) if found else b""

    @contextlib.contextmanager
    def parsing(self, path: str) -> Iterator[None]:
        """Maps `MalformedError`s raised inside to `TransientError`."""
        try:
            yield
        except MalformedError as error:
            raise TransientError(f"{self.uri}{path}: the NameNode's answer is malformed: {error}") from error

    def close(self) -> None:
        """Close idle connections; those in use are closed after their request."""
        self._is_closed = True
        self._idle.close()

    def _is_router(self) -> bool:
        """Whether a router answers: NameNodes support this call, routers do not."""
        try:
            self.ask("getEditsFromTxid", field(1, 1 << 62))
        except BootseerError as error:
            return getattr(error.__cause__, "kind", "") == "UnsupportedOperationException"
        return False

    def _not_found(self, path: str) -> NotFoundError:
        return NotFoundError(f"{self.uri}{path} does not exist")

    def ask(self, method: str, request: bytes = b"", path: str = "/", timeout_s: float | None = None) -> Message:
        """Send a request to the NameNodes, with retries and failover; returns the answer."""
        num_namenodes = len(self.cluster.namenodes)
        call = next(self._numbers) & _MAX_NUMBER
        until = time.monotonic() + (self._ask_s if timeout_s is None else timeout_s)
        pause_s = _PAUSE_S
        failed: dict[int, Exception] = {}
        while True:
            errors: list[Exception] = []
            for _ in range(num_namenodes):
                free, left_s = self._free, until - time.monotonic()
                if left_s <= 0 or not free.acquire(timeout=left_s):
                    raise self._problem(path, failed)
                try:
                    number = self._active  # chosen after the wait, which may have been for requests to a hung one
                    answer = self._ask_one(number, method, request, call, self._attempt_until(until, number in failed))
                except (RemoteError, TransientError, AccessError) as error:
                    if isinstance(error, RemoteError):
                        self._has_answered = True
                        if error.kind not in _RETRIED_KINDS:
                            raise self._mapped(error, path) from error
                    # An attempt that was cut short by the deadline says less than the one before.
                    if number not in failed or time.monotonic() < until:
                        failed[number] = error
                    errors.append(error)
                    if self._active == number:
                        self._active = (number + 1) % num_namenodes
                else:
                    self._has_answered = True
                    with self.parsing(path):
                        return Message(answer)
                finally:
                    free.release()
            self._raise_if_final(path, errors)
            problem = self._problem(path, failed)
            if time.monotonic() + pause_s >= until:
                raise problem
            # All were tried: a NameNode is starting, or a standby is becoming active.
            _LOG.info("%s: retry in %.1f s: %s", method, pause_s, problem)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _problem(self, path: str, failed: Mapping[int, Exception]) -> BootseerError:
        """The error after a series of failed attempts, by the number of the NameNode."""
        problems, state = [], "answers"
        for number, error in failed.items():
            text = str(error)
            if isinstance(error, RemoteError):  # their messages do not name the server
                state = "is active"
                text = f"{':'.join(map(str, self.cluster.namenodes[number]))}: {_NOISE.sub('', text)}"
            problems.append(text)
        text = "; ".join(problems) or "none was asked in time"
        return TransientError(f"{self.uri}{path}: no NameNode {state}: {text}")

    def _raise_if_final(self, path: str, errors: Sequence[Exception]) -> None:
        """Raise if another round of attempts would not help, by the errors of this one: no NameNode accepts the login,
        or none has ever answered, none was reached now, and the grace period is over."""
        unreachable = [str(error) for error in errors if isinstance(error, UnreachableError)]
        refusals = [error for error in errors if isinstance(error, AccessError)]
        num_standby = sum(isinstance(error, RemoteError) and error.kind == "StandbyException" for error in errors)
        if refusals and len(refusals) + len(unreachable) + num_standby == len(errors):  # one alone may refuse a login
            raise refusals[0]
        is_none = not self._has_answered and len(unreachable) == len(errors)
        if is_none and time.monotonic() > self._made_s + _FIRST_S:
            raise UnreachableError(f"{self.uri}{path}: no NameNode is there: {'; '.join(unreachable)}")

    def _ask_one(self, number: int, method: str, request: bytes, call: int, until: float) -> bytes:
        idle = self._idle.take(number)
        if idle is not None:
            # A restarted server has closed its idle connections: try a new one. But a server that does not answer is
            # not asked again: fenced off by the journal, it may confirm what its successor does not know.
            try:
                return self._ask_over(idle, number, method, request, call, until)
            except TransientError as error:
                if isinstance(error.__cause__, TimeoutError | BlockingIOError):
                    raise
        return self._ask_over(self._connect(number, until), number, method, request, call, until)

    def _ask_over(
        self, connection: RpcConnection, number: int, method: str, request: bytes, call: int, until: float
    ) -> bytes:
        """Send a request over one connection, which is returned to the pool if it can be reused."""
        try:
            if not self._knows_encryption:
                self._check_encryption(connection, until)
            answer = connection.call(method, request, self._left_s(until), number=call)
        except RemoteError as error:
            if error.kind == "StandbyException":  # it may become an observer next
                connection.close()
            else:
                self._give(number, connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give(number, connection)
        return answer

    def _connect(self, number: int, until: float) -> RpcConnection:
        host, port = self.cluster.namenodes[number]
        timeout_s = self._left_s(until)
        login, user = None, self.cluster.user
        if self.cluster.kerberos:
            token = delegation_token(self._services(host, port))
            login = Login(self.cluster.settings, token)
            user = os.environ.get("HADOOP_PROXY_USER", "")
        connection = RpcConnection(
            host, port, _PROTOCOL, user, timeout_s=timeout_s, client_id=self._client_id, login=login
        )  # fmt: skip
        if len(self.cluster.namenodes) > 1:
            self._check_state(connection, until)
        return connection

    def _check_state(self, connection: RpcConnection, until: float) -> None:
        """Refuse an observer. It would refuse itself only with `dfs.namenode.state.context.enabled`."""
        number = next(self._numbers) & _MAX_NUMBER
        state = 0
        with contextlib.suppress(RemoteError, MalformedError):  # servers without observers do not know the call
            state = Message(connection.call("getHAServiceState", b"", self._left_s(until), number=number)).number(1)
        if state == _OBSERVER:
            connection.close()
            raise RemoteError("StandbyException", "an observer, which may lack recent writes")

    def _services(self, host: str, port: int) -> Iterator[str]:
        """The service names that a delegation token of this NameNode may have."""
        yield from (f"ha-hdfs:{self.cluster.authority}", f"{host}:{port}", f"{self.cluster.authority}:{port}")
        with contextlib.suppress(OSError):
            yield from {f"{found[4][0]}:{port}" for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}

    def _ask_key(self) -> bytes:
        """The key for logins to DataNodes of a cluster that encrypts its data."""
        with self.parsing("/"):
            answer = self.ask("getDataEncryptionKey")
            if 1 not in answer:
                raise PermanentError(
                    f"hdfs://{self.cluster.authority} encrypts its data (dfs.encrypt.data.transfer), but gives out no"
                    " key for it, as routers do: use the addresses of the cluster's own NameNodes"
                )
            return answer.data(1)

    def _check_encryption(self, connection: RpcConnection, until: float) -> None:
        """Find out whether DataNodes encrypt their data, which only the servers' configuration says."""
        answer = connection.call(
            "getServerDefaults", b"", self._left_s(until), number=next(self._numbers) & _MAX_NUMBER
        )
        with self.parsing("/"):
            self.protection.encrypts = bool(Message(answer).message(1).number(6, 0))
        if self.protection.needs_ciphers:
            check_ciphers(f"{self.cluster.authority} encrypts data transfer")
        self._knows_encryption = True

    def _left_s(self, until: float) -> float:
        return max(until - time.monotonic(), 0.001)

    def _attempt_until(self, until: float, is_repeated: bool) -> float:
        now_s = time.monotonic()
        if len(self.cluster.namenodes) == 1:
            return min(until, now_s + self._call_timeout_s)
        # A hung one must leave time for the others. A start has several processes, and none knows which one hangs.
        most_s = self._call_timeout_s if self._has_answered or is_repeated else _NEW_S
        return now_s + min((until - now_s) / 2, most_s)

    def _give(self, number: int, connection: RpcConnection) -> None:
        self._idle.give(number, connection)
        if self._is_closed:
            self._idle.close()

    def _mapped(self, error: RemoteError, path: str) -> BootseerError:
        # The Java class is a part of the message: callers show it.
        text = f"{error.kind}: {error}"
        kind = kind_of_error(text) or TransientError
        return kind(f"{self.uri}{path}{' does not exist' if kind is NotFoundError else f': {text}'}")
