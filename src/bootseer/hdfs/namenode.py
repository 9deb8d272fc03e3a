"""RPCs to the NameNodes of a cluster: where blocks lie, names and folders, and (`ask`) whatever else a caller encodes.

Several NameNodes stand for one cluster (HA): one is active, the others say that they are not, hang or are gone. The
one that answered last is asked first. Observers are never asked: they may lack what was written just now.

Safe to use from many threads; each question has a connection of its own, at most `_MAX_CONNECTIONS` at a time.

A NameNode that hangs is left after its share of the time and another one asked, and the wait can be interrupted:
hdfs-native waits for it for ever. A question that is asked again because its answer was lost is the same question for
the NameNode, so that a rename is not done twice.

Paths are whole paths of the file system, "/a/b". Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.errors import kind_of_error
from bootseer.hdfs.located import FileStatus, LocatedFile, Node, parse_located, parse_node, parse_status
from bootseer.hdfs.protection import Protection
from bootseer.hdfs.protobuf import MalformedError, Message, field
from bootseer.hdfs.rpc import Login, RemoteError, RpcConnection, UnreachableError, UnsupportedError, connect
from bootseer.hdfs.sasl import delegation_token, has_ciphers
from bootseer.io.fork import after_fork
from bootseer.logs import logger

_LOG = logger(__name__)

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_MAX_CONNECTIONS: Final = 8
_MAX_NUMBER: Final = 0x7FFFFFFF
_IDLE_S: Final = 8.0
"""Servers close connections after 10 s without a question."""
_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 2.0
_FIRST_S: Final = 0.5
"""So long after it was made, a client waits for NameNodes at addresses where none has ever answered it."""
_LATER = frozenset(
    {
        "StandbyException",
        "RetriableException",
        "ObserverRetryOnActiveException",
        "SafeModeException",
        "StateStoreUnavailableException",  # a router's
    }
)
"""Another NameNode may answer, or the same one when it has come up."""
_NOISE = re.compile(r"\b(?:[a-z]\w*\.){2,}(?=[A-Z])|\. Visit https:.*")
"""Around what a NameNode says of its state: the packages of classes, and where to read more."""
_EVERYTHING: Final = (1 << 63) - 1
_LIVE: Final = 2
_OBSERVER: Final = 3


class NameNode:
    """The NameNodes of one cluster, as one. `ask_s` bounds each question, `call_timeout_s` what one of them takes."""

    def __init__(self, cluster: Cluster, *, call_timeout_s: float = 10.0, ask_s: float = 30.0) -> None:
        self.cluster = cluster
        self._ask_s = ask_s
        self._call_timeout_s = call_timeout_s
        self._supported = not cluster.unsupported
        self.protection = Protection(cluster.settings, kerberos=cluster.kerberos, ask_key=self._ask_key)
        self._is_closed = False
        self._has_answered = False
        """Whether there is a NameNode at one of the addresses: it is waited for when it restarts."""
        self._made_s = time.monotonic()
        self._reset()
        after_fork(self.forget)

    def _reset(self) -> None:
        # By these the NameNodes know a question that is asked again, and change nothing twice.
        self._client_id = os.urandom(16)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._active = 0
        self._knows_encryption = False
        if "protection" in self.__dict__:
            self.protection.forget()
        self._known_nodes: dict[bytes, Node] = {}
        self._idle: list[tuple[float, int, RpcConnection]] = []

    def locate(self, path: str, *, timeout_s: float | None = None) -> LocatedFile:
        """Where the blocks of a file lie, of one that is being written the finished ones.
        Raises `NotFoundError`, `AccessError`, `UnsupportedError`, `TransientError`."""
        located = self._locate(path, 0, timeout_s)
        while not located.is_whole:
            # Servers may tell less than all at once.
            more = self._locate(path, located.end, timeout_s)
            try:
                located = located.joined(more)
            except MalformedError as error:
                raise TransientError(f"{self._named(path)} was changed while it was located") from error
        return located

    def _locate(self, path: str, start: int, timeout_s: float | None) -> LocatedFile:
        request = field(1, path) + field(2, start) + field(3, _EVERYTHING - start)
        answer = self.ask("getBlockLocations", request, path, timeout_s)
        with self.parsing(path):
            message = Message(answer)
            if 1 not in message:
                raise NotFoundError(f"{self._named(path)} is not there")
            return parse_located(path, message.data(1), self._known_nodes)

    def space(self) -> tuple[int, int]:
        """Bytes of all DataNodes together, and how many of them are free."""
        with self.parsing("/"):
            message = Message(self.ask("getFsStats", b"", "/", None))
            return message.number(1), message.number(3)

    def rooms(self) -> dict[str, int]:
        """Bytes free on each live DataNode, by `host:port`. Raises `AccessError` where only an operator may ask."""
        with self.parsing("/"):
            nodes = [
                Message(node) for node in Message(self.ask("getDatanodeReport", field(1, _LIVE), "/", None)).every(1)
            ]
            return {parse_node(node.message(1)).host_port: node.number(4, 0) for node in nodes}

    @contextlib.contextmanager
    def parsing(self, path: str) -> Iterator[None]:
        """Errors of an answer's form that pass through here become `TransientError`."""
        try:
            yield
        except MalformedError as error:
            raise TransientError(f"{self._named(path)}: the NameNode's answer is malformed: {error}") from error

    def close(self) -> None:
        """Close idle connections; others close after their question, as do those of later ones."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()

    def forget(self) -> None:
        """In the child of a fork: leave the parent's connections to the parent, and have own locks."""
        idle = self._idle
        self._reset()
        for _, _, connection in idle:
            connection.close()

    def _named(self, path: str) -> str:
        return f"hdfs://{self.cluster.authority}{path}"

    def ask(self, method: str, request: bytes, path: str, timeout_s: float | None) -> bytes:
        """One answer of whichever NameNode has one, within the time for all attempts."""
        if not self._supported:
            raise UnsupportedError(f"{self._named(path)}: {self.cluster.unsupported or 'another client is needed'}")
        num_namenodes = len(self.cluster.namenodes)
        call = next(self._numbers) & _MAX_NUMBER
        until = time.monotonic() + (self._ask_s if timeout_s is None else timeout_s)
        pause_s = _PAUSE_S
        failed: dict[int, Exception] = {}
        while True:
            unreachable: list[str] = []
            refusals: list[AccessError] = []
            num_standby = 0
            for _ in range(num_namenodes):
                if time.monotonic() >= until:
                    raise self._problem(path, failed)
                number = self._active
                try:
                    answer = self._ask_one(number, method, request, call, until)
                    self._has_answered = True
                    return answer
                except RemoteError as error:
                    self._has_answered = True
                    if error.kind not in _LATER:
                        raise self._mapped(error, path) from error
                    failed[number] = error
                    num_standby += error.kind == "StandbyException"
                except UnsupportedError:
                    self._supported = False
                    raise
                except (TransientError, AccessError) as error:
                    unreachable += [str(error)] if isinstance(error, UnreachableError) else []
                    # A login that one of them refuses may be its fault alone.
                    refusals += [error] if isinstance(error, AccessError) else []
                    if number not in failed or time.monotonic() < until:  # not what the end of the time has cut short
                        failed[number] = error
                if self._active == number:
                    self._active = (number + 1) % num_namenodes
            if refusals and len(refusals) + len(unreachable) + num_standby == num_namenodes:
                raise refusals[0]
            self._check_there(path, unreachable)
            problem = self._problem(path, failed)
            if time.monotonic() + pause_s >= until:
                raise problem
            # All have been asked: the NameNode is starting, or a standby becomes active.
            _LOG.info("%s: asked again in %.1f s: %s", method, pause_s, problem)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _problem(self, path: str, failed: Mapping[int, Exception]) -> BootseerError:
        """What to say of a time in which these NameNodes have failed, each by its number."""
        problems, state = [], "answers"
        for number, error in failed.items():
            text = str(error)
            if isinstance(error, RemoteError):  # which does not say whose it is
                state = "is active"
                text = f"{':'.join(map(str, self.cluster.namenodes[number]))}: {_NOISE.sub('', text)}"
            problems.append(text)
        text = "; ".join(problems) or "none was asked in time"
        return TransientError(f"{self._named(path)}: no NameNode {state}: {text}")

    def check_there(self, path: str) -> None:
        """Raise `UnreachableError` when no server is at any of the addresses; for callers that use another client."""
        while not self._has_answered:
            unreachable = []
            for host, port in self.cluster.namenodes:
                try:
                    connect(host, port, self._call_timeout_s).close()
                    self._has_answered = True
                except UnreachableError as error:
                    unreachable.append(str(error))
                except TransientError:  # one that hangs is waited for
                    self._has_answered = True
            self._check_there(path, unreachable)
            time.sleep(0.0 if self._has_answered else _PAUSE_S)

    def _check_there(self, path: str, unreachable: list[str]) -> None:
        """Raise when there never was a NameNode, and none of them was reached in this round, after a while."""
        is_none = not self._has_answered and len(unreachable) == len(self.cluster.namenodes)
        if is_none and time.monotonic() > self._made_s + _FIRST_S:
            raise UnreachableError(f"{self._named(path)}: no NameNode is there: {'; '.join(unreachable)}")

    def _ask_one(self, number: int, method: str, request: bytes, call: int, until: float) -> bytes:
        if not self._free.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise TransientError("too many questions wait for an answer")
        free = self._free
        try:
            idle = self._take(number)
            if idle is not None:
                # A restarted server has closed what lay idle here: that says nothing of it. One that does not answer is
                # not asked twice: shut out by its journal, it calls done what its successor does not know.
                try:
                    return self._ask_over(idle, number, method, request, call, until)
                except TransientError as error:
                    if isinstance(error.__cause__, TimeoutError | BlockingIOError) and len(self.cluster.namenodes) > 1:
                        raise
            return self._ask_over(self._connect(number, until), number, method, request, call, until)
        finally:
            free.release()

    def _ask_over(
        self, connection: RpcConnection, number: int, method: str, request: bytes, call: int, until: float
    ) -> bytes:
        """One answer over one connection, which is kept when it can be used again."""
        try:
            if not self._knows_encryption:
                self._check_encryption(connection, until)
            answer = connection.call(method, request, self._left_s(until), number=call)
        except RemoteError as error:
            if error.kind == "StandbyException":  # the next time it may observe
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
        """Refuse one that observes. Only where `dfs.namenode.state.context.enabled` is set it would do so itself."""
        number = next(self._numbers) & _MAX_NUMBER
        state = 0
        with contextlib.suppress(RemoteError, MalformedError):  # of servers that know no observers
            state = Message(connection.call("getHAServiceState", b"", self._left_s(until), number=number)).number(1)
        if state == _OBSERVER:
            connection.close()
            raise RemoteError("StandbyException", "it observes, and may lack what was written just now")

    def _services(self, host: str, port: int) -> Iterator[str]:
        """What a delegation token may call this NameNode."""
        yield from (f"ha-hdfs:{self.cluster.authority}", f"{host}:{port}", f"{self.cluster.authority}:{port}")
        with contextlib.suppress(OSError):
            yield from {f"{found[4][0]}:{port}" for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}

    def _ask_key(self) -> bytes:
        """The key with which DataNodes of a cluster that encrypts its data are logged in to."""
        with self.parsing("/"):
            return Message(self.ask("getDataEncryptionKey", b"", "/", None)).data(1)

    def _check_encryption(self, connection: RpcConnection, until: float) -> None:
        """Whether DataNodes want their data encrypted, which only the servers' settings say."""
        answer = connection.call(
            "getServerDefaults", b"", self._left_s(until), number=next(self._numbers) & _MAX_NUMBER
        )
        with self.parsing("/"):
            self.protection.encrypts = bool(Message(answer).message(1).number(6, 0))
        if self.protection.needs_ciphers and not has_ciphers():
            raise UnsupportedError(
                f"{self.cluster.authority} encrypts data transfer, which needs the Python package cryptography"
            )
        self._knows_encryption = True

    def _left_s(self, until: float) -> float:
        # With several NameNodes, a hung one must leave time for the others.
        return min(max(until - time.monotonic(), 0.001), self._call_timeout_s)

    def _take(self, number: int) -> RpcConnection | None:
        fresh_s = time.monotonic() - _IDLE_S
        with self._lock:
            old = [entry for entry in self._idle if entry[0] < fresh_s]
            self._idle = [entry for entry in self._idle if entry[0] >= fresh_s]
            found = next((entry for entry in reversed(self._idle) if entry[1] == number), None)
            if found is not None:
                self._idle.remove(found)
        for _, _, connection in old:
            connection.close()
        return found[2] if found else None

    def _give(self, number: int, connection: RpcConnection) -> None:
        with self._lock:
            if len(self._idle) < _MAX_CONNECTIONS and not self._is_closed:
                self._idle.append((time.monotonic(), number, connection))
                return
        connection.close()

    def _mapped(self, error: RemoteError, path: str) -> BootseerError:
        message = f"{self._named(path)}: {error}"
        if error.kind == "FileNotFoundException" and "not a file" not in str(error):
            return NotFoundError(f"{self._named(path)} is not there")
        if "(is not a directory)" in str(error) and error.kind == "AccessControlException":
            # Nothing lies below a file; HDFS calls the question a lack of rights.
            return NotFoundError(f"{self._named(path)} is not there")
        if error.kind in ("AccessControlException", "AuthorizationException"):
            return AccessError(message)
        if error.kind in ("UnresolvedPathException", "RpcNoSuchMethodException"):
            return PermanentError(message)
        # What these mean stands in the class or in the text, which the caller may want to show too.
        whole = f"{error.kind}: {error}"
        kind = kind_of_error(whole)
        return TransientError(message) if kind is None else kind(f"{self._named(path)}: {whole}")


_UNCHANGED: Final = -1


class Names:
    """All methods raise `UnsupportedError` for a cluster that needs another client."""

    def __init__(self, namenode: NameNode) -> None:
        self._namenode = namenode

    def stat(self, path: str) -> FileStatus:
        with self._namenode.parsing(path):
            answer = self._ask("getFileInfo", field(1, path), path)
            if 1 not in answer:
                raise NotFoundError(f"{self._named(path)} is not there")
            return parse_status(path, answer.message(1))

    def make_folder(self, path: str, mode: int, *, parents: bool) -> None:
        """Make a folder; one that is there stays."""
        self._ask("mkdirs", field(1, path) + field(2, field(1, mode)) + field(3, parents), path)

    def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        try:
            self._ask("rename2", field(1, source) + field(2, target) + field(3, overwrite), source)
        except NotFoundError:
            # A router asks by numbers of its own: a NameNode that is asked again does not know that it is done already.
            with contextlib.suppress(NotFoundError):
                self.stat(target)
                if self._is_router():
                    return
            raise

    def delete(self, path: str, *, recursive: bool) -> bool:
        """Remove: whether there was anything."""
        with self._namenode.parsing(path):
            return bool(self._ask("delete", field(1, path) + field(2, recursive), path).number(1))

    def set_permission(self, path: str, mode: int) -> None:
        self._ask("setPermission", field(1, path) + field(2, field(1, mode)), path)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        fields = b"".join(field(number, name) for number, name in ((2, owner), (3, group)) if name is not None)
        self._ask("setOwner", field(1, path) + fields, path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._ask("setTimes", field(1, path) + field(2, mtime_ms) + field(3, _UNCHANGED), path)

    def list(self, path: str) -> Iterator[FileStatus]:
        """What lies in a folder, a page at a time; a file itself."""
        after = b""
        is_more = True
        while is_more:
            answer = self._ask("getListing", field(1, path) + field(2, after) + field(3, False), path)
            with self._namenode.parsing(path):
                if 1 not in answer:
                    raise NotFoundError(f"{self._named(path)} is not there")
                page = answer.message(1)
                found = [Message(entry) for entry in page.every(1)]
                for entry in found:
                    name = entry.text(2)
                    yield parse_status(f"{path.rstrip('/')}/{name}" if name else path, entry)
                is_more = bool(page.number(2)) and bool(found)
                after = found[-1].data(2) if found else b""

    def _ask(self, method: str, request: bytes, path: str) -> Message:
        with self._namenode.parsing(path):
            return Message(self._namenode.ask(method, request, path, None))

    def _is_router(self) -> bool:
        """Whether a router answers, by a question that these do not pass on."""
        try:
            self._namenode.ask("getEditsFromTxid", field(1, 1 << 62), "/", None)
        except BootseerError as error:
            return getattr(error.__cause__, "kind", "") == "UnsupportedOperationException"
        return False

    def _named(self, path: str) -> str:
        return f"hdfs://{self._namenode.cluster.authority}{path}"
