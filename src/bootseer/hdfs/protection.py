"""Connections to the DataNodes of a secured cluster: login (SASL) and protection of the data.

The login uses the token of the first block that is read, or, where the cluster encrypts all its data, a key from the
NameNode. With the protection `authentication` data is sent as it is, and packets are received straight into the
reader's memory; so they are with AES-CTR, which is decrypted in place. The others (`integrity`, and `privacy` with
DataNodes without AES) send messages, each of which is verified as a whole.
"""

from __future__ import annotations

import base64
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bootseer.errors import BootseerError
from bootseer.hdfs.errors import DataNodeError, RefusedError
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, receive_delimited
from bootseer.hdfs.sasl import (
    AUTHENTICATION,
    PRIVACY,
    Digest,
    LoginError,
    Token,
    wanted_protections,
)
from bootseer.io.fork import in_each_process

_MAGIC = struct.pack(">I", 0xDEADBEEF)
_URI: Final = "hdfs/0"
_AES: Final = 2
_MAX_ANSWER_BYTES: Final = 64 << 10
_MAX_MESSAGE_BYTES: Final = 32 << 20
_PRIVILEGED: Final = 1024
"""Ports below this prove that root started the DataNode: Hadoop then omits the login."""


class Aes:
    """A stream cipher in each direction."""

    def __init__(self, option: Message, unwrap: Callable[[bytes], bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        out_key, in_key = unwrap(option.data(2)), unwrap(option.data(4))
        self._out: Any = Cipher(algorithms.AES(out_key), modes.CTR(option.data(3))).encryptor()
        self._in: Any = Cipher(algorithms.AES(in_key), modes.CTR(option.data(5))).decryptor()

    def seal(self, views: Sequence[bytes | memoryview]) -> list[bytes]:
        return [self._out.update(view) for view in views]

    def open(self, data: bytes) -> bytes:
        return bytes(self._in.update(data))

    def open_in_place(self, views: Sequence[memoryview], length: int) -> None:
        """Decrypt the first `length` bytes of `views`."""
        for view in views:
            part = view[:length]
            if part:
                self._in.update_into(part, part)
            length -= len(part)


class Messages:
    """Messages that the login's mechanism protects."""

    def __init__(self, mechanism: Digest) -> None:
        self._mechanism = mechanism
        self._received = bytearray()

    def seal(self, views: Sequence[bytes | memoryview]) -> list[bytes]:
        sealed = self._mechanism.wrap(b"".join(views))
        return [struct.pack(">I", len(sealed)) + sealed]

    def open(self, data: bytes) -> bytes:
        """Unprotect complete messages. Raises `DataNodeError`."""
        self._received += data
        opened = []
        at, received = 0, bytes(self._received)
        while len(received) - at >= 4:
            end = at + 4 + int.from_bytes(received[at : at + 4], "big")
            if end - at > _MAX_MESSAGE_BYTES:
                raise DataNodeError(f"a message of {end - at} bytes")
            if end > len(received):
                break
            try:
                opened.append(self._mechanism.unwrap(received[at + 4 : end]))
            except LoginError as error:
                raise DataNodeError(str(error)) from error
            at = end
        del self._received[:at]
        return b"".join(opened)


Channel = Aes | Messages


class Protection:
    """The protection of one cluster's DataNode connections. Safe to use from many threads."""

    def __init__(self, settings: Mapping[str, str], *, kerberos: bool, ask_key: Callable[[], bytes]) -> None:
        """`ask_key`: gets a `DataEncryptionKeyProto` from the NameNode."""
        named = settings.get("dfs.data.transfer.protection", "")
        self._wanted = wanted_protections(named) if kerberos and named else ()
        self._ask_key = ask_key
        self.encrypts = False
        """Whether the cluster encrypts all its data, according to the NameNode."""
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[float, Message] | None = None

    @property
    def needs_ciphers(self) -> bool:
        """Whether data may be encrypted, which needs the package `cryptography`."""
        return self.encrypts or PRIVACY in self._wanted

    def check_key(self) -> None:
        """Raise `PermanentError` if the cluster encrypts its data and no key for it can be had, as through routers."""
        if self.encrypts:
            self._data_key()

    def log_in(
        self, port: int, token: bytes, send: Callable[[bytes], None], receive: Callable[[int], bytes]
    ) -> Channel | None:
        """Log in over a new connection to a DataNode at this port, with a block's token; returns the channel for all
        later bytes, None for plain ones. Raises `DataNodeError`, as do `send` and `receive`."""
        if not self.encrypts and (not self._wanted or port < _PRIVILEGED):
            return None
        try:
            mechanism = self._login(token)
            send(_MAGIC + _message(b""))
            challenge = self._answer(receive)
            answer = mechanism.step(challenge.data(2, b""))
            offer = field(4, field(1, _AES)) if mechanism.protection == PRIVACY else b""
            send(_message(answer, offer))
            last = self._answer(receive)
            mechanism.step(last.data(2, b""))
            if mechanism.protection == AUTHENTICATION:
                return None
            if 4 in last:
                return Aes(last.message(4), mechanism.unwrap)
            return Messages(mechanism)
        except (LoginError, MalformedError, ValueError) as error:
            raise DataNodeError(f"the login failed: {error}") from error
        except BootseerError as error:
            raise DataNodeError(f"no key to log in with: {error}") from error

    def _login(self, token: bytes) -> Digest:
        if not self.encrypts:
            return Token.parse(token).login(_URI, self._wanted)
        key = self._data_key()
        cipher = key.text(6, "") or "3des"
        user = f"{key.number(1)} {key.text(2)} {base64.b64encode(key.data(3)).decode()}"
        return Digest(user, base64.b64encode(key.data(4)).decode(), _URI, (PRIVACY,), ciphers=(cipher,))

    def _data_key(self) -> Message:
        with self._lock:
            if self._key is None or time.time() > self._key[0]:
                key = Message(self._ask_key())
                self._key = key.number(5) / 1000, key
            return self._key[1]

    def _answer(self, receive: Callable[[int], bytes]) -> Message:
        answer = Message(receive_delimited(receive, _MAX_ANSWER_BYTES))
        status = answer.number(1)
        if not status:
            return answer
        message = answer.text(3, "").partition("\n")[0][:200] or f"status {status}"
        with self._lock:
            self._key = None
        # Usually an expired key or token: the NameNode gives new ones.
        raise RefusedError(f"the login failed: {message}", token=True)


def _message(payload: bytes, offer: bytes = b"") -> bytes:
    return delimited(field(1, 0) + field(2, payload) + offer)
