"""SASL logins to Hadoop's servers by tokens (DIGEST-MD5, RFC 2831), and what those by Kerberos (`gssapi`) share.

A token is an identifier and a secret issued by a NameNode: a delegation token for RPCs to it, which jobs have in the
file `$HADOOP_TOKEN_FILE_LOCATION`, or a block token for DataNodes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bootseer.errors import AccessError, UsageError
from bootseer.hdfs.protobuf import MalformedError, Message, read_delimited

AUTHENTICATION, INTEGRITY, PRIVACY = "authentication", "integrity", "privacy"
PROTECTIONS: Final = (AUTHENTICATION, INTEGRITY, PRIVACY)
_QOPS: Final = {AUTHENTICATION: "auth", INTEGRITY: "auth-int", PRIVACY: "auth-conf"}
_MAX_FILE_BYTES: Final = 16 << 20
_PAIR = re.compile(r'\s*([a-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^",]*))\s*(?:,|$)')
_DELEGATION: Final = "HDFS_DELEGATION_TOKEN"


class LoginError(Exception):
    """The peer violates the mechanism, or has not proved that it knows the secret."""


def wanted_protections(setting: str) -> tuple[str, ...]:
    """The known protections in a setting such as `hadoop.rpc.protection`, in its order; `authentication` by default."""
    named = [name.strip().lower() for name in setting.split(",")]
    return tuple(name for name in named if name in PROTECTIONS) or (AUTHENTICATION,)


class Digest:
    """A login by a token: both sides prove that they know its secret. Used by one thread at a time."""

    def __init__(
        self, user: str, secret: str, uri: str, protections: Sequence[str], *, ciphers: Sequence[str] = ("rc4", "3des")
    ) -> None:
        """`uri`: service and host, as `hdfs/0`. `ciphers`: for `privacy`, the preferred one first."""
        self._user, self._secret, self._uri = user, secret, uri
        self._wanted, self._ciphers = protections, ciphers
        self.protection = AUTHENTICATION
        self.is_done = False
        self._expected = b""
        self._out: _Layer | None = None
        self._in: _Layer | None = None

    def step(self, challenge: bytes) -> bytes:
        if self._expected:
            proved = _pairs(challenge).get("rspauth", "")
            if not hmac.compare_digest(proved.encode(), self._expected):
                raise LoginError("the server has not proved that it knows the token")
            self.is_done = True
            return b""
        fields = _pairs(challenge)
        offered = [qop.strip() for qop in fields.get("qop", "auth").split(",")]
        found = next((name for name in self._wanted if _QOPS[name] in offered), None)
        if found is None or not fields.get("nonce") or fields.get("algorithm") != "md5-sess":
            raise LoginError(f"the server offers {', '.join(offered)} where {', '.join(self._wanted)} is wanted")
        self.protection = found
        cipher = ""
        if found == PRIVACY:
            has = [name.strip() for name in fields.get("cipher", "").split(",")]
            cipher = next((name for name in self._ciphers if name in has), "")
            if not cipher:
                raise LoginError(f"the server offers the ciphers {', '.join(has)} only")
        realm, nonce, qop = fields.get("realm", ""), fields["nonce"], _QOPS[found]
        cnonce = base64.b64encode(os.urandom(24)).decode()
        known = _md5(f"{self._user}:{realm}:{self._secret}".encode()) + f":{nonce}:{cnonce}".encode()
        key = _md5(known)
        tail = "" if found == AUTHENTICATION else ":" + "0" * 32

        def proof(verb: str) -> str:
            digest = _md5(f"{verb}:{self._uri}{tail}".encode()).hex()
            return _md5(f"{key.hex()}:{nonce}:00000001:{cnonce}:{qop}:{digest}".encode()).hex()

        self._expected = proof("").encode()
        if found != AUTHENTICATION:
            self._out = _Layer(key, "client-to-server", cipher, seal=True)
            self._in = _Layer(key, "server-to-client", cipher, seal=False)
        quoted = {"username": self._user, "realm": realm, "nonce": nonce, "cnonce": cnonce, "digest-uri": self._uri}
        answer = ["charset=utf-8", *(f'{name}="{_escaped(text)}"' for name, text in quoted.items())]
        answer += ["nc=00000001", f"qop={qop}", f"response={proof('AUTHENTICATE')}", "maxbuf=65536"]
        answer += [f'cipher="{cipher}"'] if cipher else []
        return ",".join(answer).encode()

    def wrap(self, data: bytes) -> bytes:
        return self._out.wrap(data) if self._out else data

    def unwrap(self, data: bytes) -> bytes:
        """Raises `LoginError`."""
        return self._in.unwrap(data) if self._in else data


class _Layer:
    """The protection of one direction. Messages are numbered."""

    def __init__(self, key: bytes, direction: str, cipher: str, *, seal: bool) -> None:
        self._sums = _md5(key + f"Digest session key to {direction} signing key magic constant".encode())
        self._number = 0
        self._block = 8 if cipher == "3des" else 1
        self._cipher: Any = None
        if cipher:
            sealing = _md5(key + f"Digest H(A1) to {direction} sealing key magic constant".encode())
            self._cipher = _cipher(cipher, sealing, seal=seal)

    def wrap(self, data: bytes) -> bytes:
        sealed, number = self._sum(data), struct.pack(">I", self._next())
        if self._cipher is None:
            return b"".join((data, sealed, b"\0\1", number))
        pad = self._block - (len(data) + len(sealed)) % self._block if self._block > 1 else 0
        return b"".join((self._cipher.update(b"".join((data, bytes((pad,)) * pad, sealed))), b"\0\1", number))

    def unwrap(self, data: bytes) -> bytes:
        if len(data) < 16 or data[-6:] != struct.pack(">HI", 1, self._number):
            raise LoginError("a message that is not the next one")
        plain = data[:-6] if self._cipher is None else self._cipher.update(data[:-6])
        found, trailer = plain[:-10], plain[-10:]
        if self._block > 1 and found:
            found = found[: -found[-1]]
        if not hmac.compare_digest(self._sum(found), trailer):
            raise LoginError("a message was changed in transit")
        self._next()
        return found

    def _sum(self, data: bytes) -> bytes:
        return hmac.digest(self._sums, struct.pack(">I", self._number) + data, "md5")[:10]

    def _next(self) -> int:
        number = self._number
        self._number = (number + 1) & 0xFFFFFFFF
        return number


def check_ciphers(subject: str) -> None:
    """Raise `UsageError` without the package that encryption needs."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(f"{subject}, which needs the Python package cryptography", hint="pip install 'bootseer[hdfs]'")


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _cipher(name: str, key: bytes, *, seal: bool) -> Any:
    from cryptography.hazmat.decrepit.ciphers.algorithms import ARC4, TripleDES
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import CBC

    if name == "3des":
        # Two keys of 56 bits, each spread over 8 bytes; the parity bits are not used.
        halves = [int.from_bytes(key[at : at + 7], "big") for at in (0, 7)]
        first, second = (bytes((half >> shift & 0x7F) << 1 for shift in range(49, -1, -7)) for half in halves)
        cipher: Cipher[Any] = Cipher(TripleDES(first + second + first), CBC(key[8:16]))
    else:
        cipher = Cipher(ARC4(key), mode=None)
    return cipher.encryptor() if seal else cipher.decryptor()


def _pairs(challenge: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    text = challenge.decode(errors="replace")
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None:
            raise LoginError("malformed DIGEST-MD5 challenge")
        quoted = match[2]
        found[match[1]] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else match[3].strip()
        at = match.end()
    return found


def _escaped(text: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", text)


@dataclass(frozen=True, slots=True)
class Token:
    """An identifier, which servers parse, and its secret."""

    identifier: bytes
    secret: bytes = field(repr=False)
    kind: str
    service: str
    """The server: `host:port`, or `ha-hdfs:service`."""

    @classmethod
    def parse(cls, data: bytes) -> Token:
        message = Message(data)
        return cls(message.data(1), message.data(2), message.text(3), message.text(4))

    def login(self, uri: str, protections: Sequence[str]) -> Digest:
        user, secret = (base64.b64encode(part).decode() for part in (self.identifier, self.secret))
        return Digest(user, secret, uri, protections)


def delegation_token(services: Iterable[str]) -> Token | None:
    """The job's token for one of these services, from the token file; None without one. Raises `AccessError`."""
    name = os.environ.get("HADOOP_TOKEN_FILE_LOCATION")
    if not name:
        return None
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
        tokens = _tokens(data)
    except OSError as error:
        raise AccessError(f"$HADOOP_TOKEN_FILE_LOCATION: {name}: {error.strerror or error}") from error
    except (MalformedError, UnicodeDecodeError, IndexError) as error:
        raise AccessError(f"$HADOOP_TOKEN_FILE_LOCATION: {name} is not a Hadoop token file: {error}") from error
    wanted = set(services)
    return next((token for token in tokens if token.kind == _DELEGATION and token.service in wanted), None)


def _tokens(data: bytes) -> list[Token]:
    """Parse a token file of either format; its fifth byte tells which."""
    if data[:5] == b"HDTS\1":
        return [Token.parse(Message(entry).data(2)) for entry in Message(read_delimited(data, 5)[0]).every(1)]
    if data[:5] != b"HDTS\0":
        raise MalformedError("it does not begin as one")
    at = 5

    def number() -> int:
        # Hadoop's variable-length integer: one byte, or a byte that says how many follow.
        nonlocal at
        first, at = data[at], at + 1
        if first < 0x80:
            return first
        size = 0x90 - first
        if not 0 < size <= 4:
            raise MalformedError("malformed length")
        at += size
        return int.from_bytes(data[at - size : at], "big")

    def piece() -> bytes:
        nonlocal at
        length = number()
        if length > len(data) - at:
            raise MalformedError("it is cut off")
        at += length
        return data[at - length : at]

    found = []
    for _ in range(number()):
        _, identifier, secret, kind, service = (piece() for _ in range(5))
        found.append(Token(identifier, secret, kind.decode(), service.decode()))
    return found
