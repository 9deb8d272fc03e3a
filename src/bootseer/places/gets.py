"""Requests for ranges of objects, by obstore or, from S3 servers without TLS, by Python's client.

obstore allocates and clears memory for each piece, copies into it, and wakes two threads; Python's client receives into
one buffer for each request. It uses addresses signed by obstore. obstore makes all other requests: with TLS, through
proxies, to other clouds, and for a minute after a response that was missing or not exactly the requested bytes. So only
obstore's errors need to be understood.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Generator, Iterator
from datetime import timedelta
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import PreconditionError

from bootseer.io.idle import IdleConnections
from bootseer.logs import logger
from bootseer.places.bucket import Bucket

if TYPE_CHECKING:
    from bootseer.places.object_data import ObjectFile

_LOG = logger(__name__)
_CONNECT_S, _READ_S = 10.0, 60.0
"""As in `bucket`."""
_VALID = timedelta(minutes=15)
"""Like a signature in a header: clocks may differ by as much."""
_UNUSUAL = {"HTTP_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "AWS_SKIP_SIGNATURE"}
_OFF_S = 60.0
_IDLE_S = 90.0
"""For how long a connection may be idle, as in obstore: routers forget it after some minutes, without a word."""
_PIECE_BYTES = 256 << 10
"""Size of the pieces that are copied to readers: each is still in the processor's cache."""


class _Connection(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_READ_S)

    def is_usable(self) -> bool:
        """Whether the server has not closed it, and sends nothing that was not requested."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def __del__(self) -> None:
        self.close()  # of a place that was not closed


class Gets:
    """The requests to one bucket. Safe to use from many threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._idle = IdleConnections[_Connection](_IDLE_S)
        is_usual = bucket.scheme == "s3" and _UNUSUAL.isdisjoint(name.upper() for name in os.environ)
        self._off_until_s = 0.0 if is_usual else math.inf

    def pieces(self, file: ObjectFile, start: int, end: int) -> Generator[bytes | memoryview, None, None]:
        """A range of this version of an object as it arrives, each piece until the next one."""
        if (plain := self._plain(file, start, end)) is not None:
            yield from plain
            return
        options: Any = {} if file.e_tag.startswith("W/") else {"if_match": file.e_tag}  # a weak tag never matches
        if end - start < file.size_bytes:  # some servers ignore the range if it is the whole object
            options["range"] = (start, end)
        answer = obstore.get(self._bucket.reader, file.key, options=options)
        if (answer.meta["e_tag"] or file.e_tag).removeprefix("W/") != file.e_tag.removeprefix("W/"):
            raise PreconditionError("the server ignores If-Match")
        yield from answer.stream(min_chunk_size=_PIECE_BYTES)

    def _plain(self, file: ObjectFile, start: int, end: int) -> Iterator[memoryview] | None:
        """The same without obstore; None: not possible."""
        if time.monotonic() < self._off_until_s or file.e_tag.startswith("W/"):
            return None
        address = urlsplit(obstore.sign(self._bucket.reader, "GET", file.key, _VALID))
        if address.scheme != "http" or "@" in address.netloc:
            self._off_until_s = math.inf
            return None
        connection, is_usual = self._connection(address.netloc), False
        try:
            is_whole = end - start == file.size_bytes
            headers = {"If-Match": file.e_tag} | ({} if is_whole else {"Range": f"bytes={start}-{end - 1}"})
            connection.request("GET", f"{address.path}?{address.query}", headers=headers)
            response = connection.getresponse()
            wanted = "" if is_whole else f"bytes {start}-{end - 1}/{file.size_bytes}"
            is_usual = (
                response.status == (200 if is_whole else 206)
                and response.length == end - start
                and response.getheader("Content-Range", "") == wanted
                and response.getheader("ETag") == file.e_tag
            )
            return self._body(connection, response) if is_usual else None
        finally:
            if not is_usual:  # or no response that Python's client understands
                connection.close()
                _LOG.info("%s: obstore reads for %g s: no usual response to a signed address", self._bucket.uri, _OFF_S)
                self._off_until_s = max(self._off_until_s, time.monotonic() + _OFF_S)

    def _body(self, connection: _Connection, response: HTTPResponse) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(response.length or 0, _PIECE_BYTES)))
        try:
            while True:
                if not (count := response.readinto(buffer)):
                    raise ConnectionResetError("the connection was closed too early")
                if not response.length:
                    break
                yield buffer[:count]
        except BaseException:  # the reader needs no more, perhaps
            response.close()
            connection.close()
            raise
        # Before the last piece, which may bring about the next request.
        self._idle.give(self._bucket.uri, connection)
        if self._off_until_s == math.inf:
            self.close()
        yield buffer[:count]

    def _connection(self, address: str) -> _Connection:
        """An idle one, unless the server has closed it, or a new one."""
        while (connection := self._idle.take(self._bucket.uri)) is not None:
            if connection.is_usable():
                return connection
            connection.close()
        return _Connection(address, timeout=_CONNECT_S)

    def close(self) -> None:
        self._off_until_s = math.inf
        self._idle.close()
