"""The protocol between peers: HTTP/1.1 requests for ranges of block files, signed with the job's secret.

A connection starts with `GET /v1/hello`, in which both sides send a nonce; the connection's key is the HMAC of both
under the job's secret. The server sends its name and proves knowledge of the secret. Each request then carries an
increasing number and an HMAC of its significant fields. So requests cannot be replayed, on this or another connection,
without synchronized clocks or a memory of nonces. Responses are not signed: receivers verify the digest of each block.

    GET /v1/files/IDENTITY HTTP/1.1             IDENTITY: of the file's index
    Range: bytes=FIRST-LAST                     of the uncompressed file, in whole blocks
    Bootseer-Level: rack | global | held        what the owner may do when it has not got them
    Bootseer-Sender: NAME                       of the requesting node; empty if it serves nothing
    Authorization: Bootseer NUMBER MAC

    GET /v1/readers/IDENTITY/FIRST/BITS         which nodes read or have these blocks: see `readers`
    Bootseer-Sender: NAME [keeps]
    Bootseer-Without: NAME

    GET /v1/start                               which nodes are ready for their command: see `readiness`

    102 Processing                              the owner waits for the store; again every 0.1 s
    Bootseer-Ready: NUMBER                      blocks of the file that it has by now
    206 Partial Content, 403, 404, 416, 429, 503

Decides and touches nothing.
"""

from __future__ import annotations

import hmac
import re
from typing import Final, NamedTuple

from msgspec import Struct, field

from bootseer.blocks.index import MAX_BLOCK_SIZE, is_identity
from bootseer.errors import CorruptError
from bootseer.peers.choice import Level
from bootseer.peers.readiness import TARGET, StartReport

MAX_HEAD: Final = 4096
MAX_RANGE: Final = 4 << 20
"""Of a request for several blocks; a single block may be larger."""
HELLO: Final = "/v1/hello"
_FILES: Final = "/v1/files/"
_READERS: Final = "/v1/readers/"
_NONCE: Final = re.compile(r"[0-9a-f]{32}")
_BLOCKS: Final = re.compile(r"([0-9a-f]{64})/([0-9]{1,9})/([0-9a-f]{1,8})")
_SENDER: Final = re.compile(r"([!-~]{1,255})( keeps)?")
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
REASONS: Final = {
    102: "Processing", 200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
    416: "Range Not Satisfiable", 429: "Too Many Requests", 503: "Service Unavailable",
}  # fmt: skip


class Head(NamedTuple):
    """First line and fields of a request or an answer; the names of fields in lower case."""

    first: tuple[str, str]
    """Method and target of a request; status and reason of an answer."""
    fields: dict[str, str]


class Request(Struct, frozen=True):
    """A range of a block file."""

    file: str
    start: int
    length: int
    level: Level
    sender: str = ""
    """The name of the requesting node; empty if it serves nothing."""

    @property
    def lines(self) -> str:
        """The first lines of the request, which are signed."""
        return (
            f"GET {_FILES}{self.file} HTTP/1.1\r\nRange: bytes={self.start}-{self.start + self.length - 1}\r\n"
            f"Bootseer-Level: {self.level}\r\nBootseer-Sender: {self.sender}\r\n"
        )

    @classmethod
    def of(cls, head: Head) -> Request:
        """Raises `CorruptError`."""
        method, target = head.first
        found = _RANGE.fullmatch(head.fields.get("range", ""))
        identity = target.removeprefix(_FILES)
        level = head.fields.get("bootseer-level", "")
        if method != "GET" or not is_identity(identity) or found is None or level not in set(Level):
            raise CorruptError("malformed request of a peer")
        start, last = int(found[1]), int(found[2])
        if not start <= last < start + MAX_BLOCK_SIZE:
            raise CorruptError("a peer asks for more than it may at once")
        return cls(identity, start, last - start + 1, Level(level), head.fields.get("bootseer-sender", ""))


class Question(Struct, frozen=True):
    """Which nodes read or have blocks of a file."""

    file: str
    first: int
    blocks: int
    """Bits: number 0 is block `first`."""
    sender: str
    """The name of the requesting node, which reads the blocks that no other node reads."""
    keeps: bool
    """Whether it caches and serves them."""
    without: str = ""
    """A node named before that did not send them."""

    @property
    def lines(self) -> str:
        """As in `Request`."""
        return (
            f"GET {_READERS}{self.file}/{self.first}/{self.blocks:x} HTTP/1.1\r\n"
            f"Bootseer-Sender: {self.sender}{' keeps' * self.keeps}\r\nBootseer-Without: {self.without}\r\n"
        )

    @classmethod
    def of(cls, head: Head) -> Question:
        """Raises `CorruptError`."""
        found = _BLOCKS.fullmatch(head.first[1].removeprefix(_READERS))
        sender = _SENDER.fullmatch(head.fields.get("bootseer-sender", ""))
        if found is None or sender is None:
            raise CorruptError("malformed request of a peer")
        without = head.fields.get("bootseer-without", "")
        return cls(found[1], int(found[2]), int(found[3], 16), sender[1], bool(sender[2]), without)


class Signer(Struct):
    """Signs or verifies the requests of one connection. Each side has its own."""

    key: bytes
    number: int = field(default=0)

    @classmethod
    def of(cls, secret: bytes, client_nonce: str, server_nonce: str) -> Signer:
        """For a connection with these nonces. Raises `CorruptError` for an invalid nonce."""
        for nonce in (client_nonce, server_nonce):
            if not _NONCE.fullmatch(nonce):
                raise CorruptError("malformed nonce of a peer")
        return cls(hmac.digest(secret, f"bootseer peers 1\n{client_nonce}\n{server_nonce}".encode(), "sha256"))

    def proof(self, name: str) -> str:
        """The proof that a server of this name knows the secret."""
        return hmac.digest(self.key, f"served by {name}".encode(), "sha256").hex()

    def encode(self, request: Request | Question | StartReport, host: str) -> bytes:
        self.number += 1
        return (
            f"{request.lines}Host: {host}\r\n"
            f"Authorization: Bootseer {self.number} {self._mac(self.number, request)}\r\n\r\n"
        ).encode()

    def decode(self, head: Head) -> Request | Question | StartReport | None:
        """Parse and verify a client's request; None if it is not signed or was sent before.

        Raises `CorruptError` when it is malformed.
        """
        request: Request | Question | StartReport
        if head.first[0] == "GET" and head.first[1].startswith(_READERS):
            request = Question.of(head)
        elif head.first == ("GET", TARGET):
            request = StartReport.of(head.fields)
        else:
            request = Request.of(head)
        number, _, mac = head.fields.get("authorization", "").removeprefix("Bootseer ").partition(" ")
        if not (number.isascii() and number.isdecimal() and len(number) < 19 and int(number) > self.number):
            return None
        if not hmac.compare_digest(mac.encode(), self._mac(int(number), request).encode()):
            return None
        self.number = int(number)
        return request

    def _mac(self, number: int, request: Request | Question | StartReport) -> str:
        return hmac.digest(self.key, f"{number}\n{request.lines}".encode(), "sha256").hex()


def encode_readers(found: dict[str, int]) -> bytes:
    """The body of the response to a `Question`: a node and its blocks per line."""
    return "".join(f"{name}\t{blocks:x}\n" for name, blocks in found.items()).encode()


def parse_readers(body: bytes) -> dict[str, int]:
    try:
        lines = [line.split("\t") for line in body.decode().splitlines()]
        return {name: int(blocks, 16) for name, blocks in lines}
    except ValueError as error:
        raise CorruptError("malformed answer of a peer") from error


def encode_answer(status: int, length: int = 0, fields: str = "") -> bytes:
    """The head of a response; `fields` are whole lines. An interim response (1xx) has no length."""
    size = "" if status < 200 else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status} {REASONS[status]}\r\n{size}{fields}\r\n".encode()


def parse_head(data: bytes) -> Head:
    """Parse a head without its final empty line. Raises `CorruptError`."""
    lines = data.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) == 3 and words[2] == "HTTP/1.1":
        first = (words[0], words[1])
    elif len(words) >= 2 and words[0] == "HTTP/1.1" and re.fullmatch(r"[1-5]\d\d", words[1]):
        first = (words[1], words[2] if len(words) == 3 else "")
    else:
        raise CorruptError("a peer does not use HTTP/1.1")
    fields = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise CorruptError("malformed field in the head of a peer's message")
        fields[name.strip().lower()] = value.strip()
    return Head(first, fields)
