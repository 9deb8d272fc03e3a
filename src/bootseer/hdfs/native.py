"""hdfs-native's client, with its traps dealt with once: fork, panics, calls that never return, errors that are text.

A client that was made before `fork` hangs in the child, and so does taking it apart: the child forgets it unharmed and
makes its own. Worse, the library keeps connections to DataNodes for the whole process, and a child that used them would
take its parent's answers and give it other files' bytes: it waits until they have expired (`wait_until_own`). Calls
know no deadline (`bounded`), and reading past the end panics, which is no `Exception`. The library has no classes for
most errors: the name of the Java class in their text decides. Called by the other modules here that use the library
(`native_names`, `writer`, `native_reads`).

One lock guards the client while it is made; it is safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hdfs_native import Client

from bootseer.bounded import stream_within, within
from bootseer.errors import BootseerError, NotFoundError, TransientError, UsageError
from bootseer.hdfs.answers import kind_of_error
from bootseer.io.fork import after_fork

T = TypeVar("T")

_KEPT_S = 5.0
"""The library forgets a connection that was idle for 3 s."""
_FIXED_SETTINGS = {
    # Each attempt sleeps longer; the default of 15 keeps a caller 3 minutes at a NameNode that is not there.
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "2000",
}


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """How long things may take, and what the library is told besides."""

    call_s: float = 60.0
    """For one question to the NameNodes, all tries and failover included; of a listing, for each page. A restarted
    NameNode is away for half a minute and more."""
    write_s: float = 20.0
    """For one buffer on its way, and for a DataNode to confirm it."""
    close_s: float = 60.0
    """For the end of a file: the last bytes, all confirmations, and the NameNode's own wait for them."""
    socket_timeout_s: float = 5.0
    """After this, a silent DataNode counts as hung. Busy disks answer within 1 or 2 s."""
    conf_dir: str | None = None
    """Hadoop's configuration. None: `$HADOOP_CONF_DIR`, or else `$HADOOP_HOME/etc/hadoop`."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of Hadoop that count more than the configuration's."""


_REMOTE = re.compile(r'RPCError\("(?:\w+\.)*([\w$]+)", "(.*?)(?:"\))?$')
"""How the library shows an answer that is an error: the class and the text, quoted."""
_KERBEROS = re.compile(r'GSSAPIError\(.*, "(.*?)"?\)?$')


class Native:
    """The library's client of one file system, one per process."""

    def __init__(self, uri: str, settings: NativeSettings, *, server: str = "") -> None:
        """`uri` is what messages call it; `server` is where it is, if that is written in another way."""
        self.uri = uri
        self.settings = settings
        self._properties = {
            **_FIXED_SETTINGS,
            "dfs.client.socket-timeout": str(round(settings.socket_timeout_s * 1000)),
            **settings.properties,
        }
        self._server = server or uri
        self._lock = threading.Lock()
        self._client: Client | None = None
        after_fork(self.forget_client)

    def call(self, what: str, ask: Callable[[Client], T], timeout_s: float | None = None) -> T:
        """What `ask` returns, within a time (`call_s` unless told otherwise), its errors mapped; `what` it is about."""
        with mapping(what):
            return within(timeout_s or self.settings.call_s, what, lambda: ask(self.client()))

    def stream(self, what: str, ask: Callable[[Client], Iterable[T]]) -> Generator[T, None, None]:
        """What `ask` yields, each of it within `call_s`, its errors mapped."""
        items = stream_within(self.settings.call_s, what, lambda: ask(self.client()), each=True)
        with mapping(what), contextlib.closing(items):
            yield from items

    def client(self) -> Client:
        """This process's client. May block: only to be called inside of `call` and its like."""
        with self._lock:
            if self._client is None:
                self._client = Client(self._server, self._properties, self.settings.conf_dir)
            return self._client

    def close(self) -> None:
        """Forget the client; its connections close when nobody uses them."""
        with self._lock:
            self._client = None

    def forget_client(self) -> None:
        """In the child of a fork: have no client, and never take apart the one of the parent."""
        # A thread of the parent may have held the lock.
        self._lock = threading.Lock()
        client, self._client = self._client, None
        if client is not None:
            never_take_apart(client)


def note_read() -> None:
    """The library has just read from a DataNode, and keeps the connection."""
    _kept.last_read_s = time.monotonic()


def wait_until_own() -> None:
    """In the child of a fork: wait until connections that the parent has read from are not used any more."""
    time.sleep(max(0.0, _kept.foreign_until_s - time.monotonic()))


def never_take_apart(thing: object) -> None:
    """Keep an object of the library for ever: in the child of a fork its destructor would wait for the parent's
    threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextlib.contextmanager
def mapping(what: str) -> Iterator[None]:
    """Errors of the library that pass through here become ours; `what` they are about."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, BootseerError):
            raise
        # Panics of Rust code are no Exceptions.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise mapped(error, what) from error
        raise


def mapped(error: BaseException, what: str) -> BootseerError:
    """An error of the library as one of ours."""
    text = str(error)
    # Below the first line stands a Java stack trace, which tells a user nothing.
    first = text.replace("\\n", "\n").partition("\n")[0]
    if remote := _REMOTE.match(first):
        first = f"{remote[1]}: {remote[2]}".replace('\\"', '"')
    elif kerberos := _KERBEROS.match(first):
        first = f"Kerberos: {kerberos[1]}; is there a ticket (klist, kinit)?"
    elif "RPC listener disconnected" in first:
        first = "the NameNode ends the connection; if it wants Kerberos, HADOOP_CONF_DIR must name its configuration"
    first = first[:300]
    said = f"{what}: {first}"
    if isinstance(error, FileNotFoundError) or ("(is not a directory)" in text and "AccessControlException" in text):
        # Some answers are the bare path. Nothing lies below a file; HDFS calls the question a lack of rights.
        return NotFoundError(said if " " in first else f"{what} is not there")
    kind = kind_of_error(text)
    if kind is not None:
        return kind(said)
    if "No NameNode hosts found" in text:
        hint = "name host and port, or set HADOOP_CONF_DIR to where the service's NameNodes are named"
        return UsageError(f"{what}: no NameNode is known for this address", hint=hint)
    return TransientError(said)


class _Kept:
    """The connections to DataNodes that the library keeps for this process."""

    last_read_s = -math.inf
    foreign_until_s = -math.inf
    """Until then, some may be the parent's."""


_kept = _Kept()


def _after_fork() -> None:
    _kept.foreign_until_s = max(_kept.foreign_until_s, _kept.last_read_s + _KEPT_S)


after_fork(_after_fork)
