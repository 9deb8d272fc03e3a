"""The protocol between peers: messages in MessagePack, each behind its length, signed with the job's secret.

    `Hello` -> `Welcome`                        both sides send a nonce; the server proves knowledge of the secret
    `Signed` `Request` -> `Answer`s             for a range of a block file; its bytes follow the answer 206
    `Signed` `Question` -> `Answer`             which nodes read or have blocks: see `readers`
    `Signed` `StartReport` -> `Answer`          which nodes are ready for their command: see `readiness`

The connection's key is the HMAC of both nonces under the job's secret. Each request carries an increasing number and an
HMAC of the number and the message. So requests cannot be replayed, on this or another connection, without synchronized
clocks or a memory of nonces. Responses are not signed: receivers verify the digest of each block.

Decides and touches nothing.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, encode

from bootseer.blocks.index import MAX_BLOCK_SIZE
from bootseer.errors import CorruptError
from bootseer.peers.choice import Level
from bootseer.peers.readiness import Readiness, StartReport

MAX_MESSAGE: Final = 1 << 14
MAX_RANGE: Final = 4 << 20
"""Of a request for several blocks; a single block may be larger."""
SIZE_BYTES: Final = 4
"""Of the length in front of a message."""
_Identity = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Name = Annotated[str, Meta(pattern=r"\A[!-~]{1,255}\Z")]
_NameOrNone = Annotated[str, Meta(pattern=r"\A[!-~]{0,255}\Z")]
_Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]
T = TypeVar("T")


class Hello(Struct, frozen=True, tag=True):
    """The first message of a client."""

    nonce: _Nonce


class Welcome(Struct, frozen=True, tag=True):
    """The answer to it."""

    nonce: _Nonce
    name: str
    """Of the server's node."""
    proof: bytes


class Request(Struct, frozen=True, tag=True):
    """A range of a block file."""

    file: _Identity
    """Of the file's index."""
    start: Annotated[int, Meta(ge=0, lt=1 << 60)]
    """In the uncompressed file; the range consists of whole blocks."""
    length: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    level: Level
    """What the owner may do when it has not got them."""
    sender: _NameOrNone = ""
    """The name of the requesting node; empty if it serves nothing."""


class Question(Struct, frozen=True, tag=True):
    """Which nodes read or have blocks of a file."""

    file: _Identity
    first: Annotated[int, Meta(ge=0, lt=10**9)]
    blocks: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Bits: number 0 is block `first`."""
    sender: _Name
    """The name of the requesting node, which reads the blocks that no other node reads."""
    keeps: bool
    """Whether it caches and serves them."""
    without: _NameOrNone = ""
    """A node named before that did not send them."""


Message = Request | Question | StartReport


class Signed(Struct, frozen=True, tag=True):
    """A client's request."""

    number: Annotated[int, Meta(ge=0, lt=1 << 60)]
    mac: bytes
    message: bytes


class Answer(Struct, frozen=True, tag=True, omit_defaults=True):
    """A server's answer."""

    status: int
    """As of HTTP: 102, 200, 206, 403, 404, 416, 429 or 503. 102: the owner waits for the store; again every 0.1 s."""
    length: int = 0
    """Of the bytes that follow."""
    num_ready: int = 0
    """With 102, the blocks of the file that the owner has by now."""
    readers: dict[str, Annotated[int, Meta(ge=0)]] = {}
    """The nodes to get blocks from, by name, and the blocks as bits."""
    readiness: Readiness = Readiness(0, {})


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
HELLO, SIGNED, ANSWER = Decoder(Hello), Decoder(Signed), Decoder(Answer)
WELCOME: Final = Decoder(Welcome | Answer)
"""An answer instead of a welcome: 429."""
_MESSAGE: Final[Decoder[Message]] = Decoder(Message)


class Signer(Struct):
    """Signs or verifies the requests of one connection. Each side has its own."""

    key: bytes
    number: int = 0

    @classmethod
    def of(cls, secret: bytes, client_nonce: bytes, server_nonce: bytes) -> Signer:
        """For a connection with these nonces."""
        return cls(hmac.digest(secret, b"bootseer peers 2\n" + client_nonce + server_nonce, "sha256"))

    def proof(self, name: str) -> bytes:
        """The proof that a server of this name knows the secret."""
        return hmac.digest(self.key, f"served by {name}".encode(), "sha256")

    def sign(self, message: Message) -> Signed:
        self.number += 1
        data = encode(message)
        return Signed(self.number, self._mac(self.number, data), data)

    def verify(self, signed: Signed) -> Message | None:
        """A client's request; None if it is not signed or was sent before. Raises `CorruptError` when it is
        malformed."""
        if signed.number <= self.number:
            return None
        if not hmac.compare_digest(signed.mac, self._mac(signed.number, signed.message)):
            return None
        self.number = signed.number
        return decode(_MESSAGE, signed.message)

    def _mac(self, number: int, data: bytes) -> bytes:
        return hmac.digest(self.key, b"%d\n%s" % (number, data), "sha256")


def framed(message: Hello | Welcome | Signed | Answer) -> bytes:
    """A message as it is sent."""
    data = encode(message)
    return len(data).to_bytes(SIZE_BYTES) + data


def framed_bytes(received: bytes) -> int:
    """How many bytes of a connection belong to the next message, as far as known. Raises `CorruptError`."""
    size = int.from_bytes(received[:SIZE_BYTES]) if len(received) >= SIZE_BYTES else 0
    if size > MAX_MESSAGE:
        raise CorruptError(f"a message is longer than {MAX_MESSAGE} bytes, or not one of a peer")
    return SIZE_BYTES + size


def decode(kind: Decoder[T], data: bytes) -> T:
    """Parse a message. Raises `CorruptError`."""
    try:
        return kind.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"a malformed message of a peer: {error}") from error
