"""Kerberos logins by the system's GSSAPI library (MIT's libgssapi_krb5), called through ctypes.

Each login asks the library for a ticket, so that a renewed one is used (`$KRB5CCNAME`); with `$KRB5_CLIENT_KTNAME` the
library gets tickets from a keytab itself. Its calls may block on a hung KDC: callers bound them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any, Final

from bootseer.errors import AccessError, BootseerError, PermanentError, TransientError
from bootseer.hdfs.sasl import AUTHENTICATION, INTEGRITY, PRIVACY, LoginError

_LIBRARY: Final = "libgssapi_krb5.so.2"
_KERBEROS = bytes.fromhex("2a864886f712010202")
_HOST_SERVICE = bytes.fromhex("2a864886f71201020104")  # service@host
_PRINCIPAL = bytes.fromhex("2a864886f71201020201")  # service/host@REALM
_MUTUAL, _REPLAY, _SEQUENCE, _CONFIDENTIAL, _INTEGRITY = 2, 4, 8, 16, 32
_CONTINUE_NEEDED: Final = 1
_ERRORS: Final = 0xFFFF0000
_MAX_TEXTS: Final = 8
_LAYERS: Final = {AUTHENTICATION: 1, INTEGRITY: 2, PRIVACY: 4}
_MAX_BUFFER: Final = 0xFFFFFF
_KEYTAB: Final = "the keytab has no key, or an old one, for this name: check $KRB5_CLIENT_KTNAME"
_HINTS: Final[tuple[tuple[str, str, type[BootseerError]], ...]] = (
    ("expired", "renew the ticket (kinit)", AccessError),
    ("clock skew", "set this machine's clock: it differs too much from the KDC's", AccessError),
    (
        "gss initiate failed",
        "the server refuses the ticket: are both clocks right, and is its keytab current?",
        AccessError,
    ),
    ("cannot contact any kdc", "check that the KDC of krb5.conf runs and can be reached", TransientError),
    ("cannot find kdc", "check the realm and its KDC in krb5.conf ($KRB5_CONFIG)", AccessError),
    ("server not found", "check dfs.namenode.kerberos.principal, and the names of hosts in DNS", AccessError),
    ("preauthentication failed", _KEYTAB, AccessError),
    ("decrypt integrity", _KEYTAB, AccessError),
    ("keytab", _KEYTAB, AccessError),
)
"""Substrings of Kerberos's messages: MIT's error codes do not survive its error layers."""


def login_error(peer: str, text: str) -> BootseerError:
    """The error for a refused login, with a hint."""
    low = text.lower()
    for part, hint, kind in _HINTS:
        if part in low:
            return kind(f"{peer}: Kerberos: {text}; {hint}")
    return AccessError(f"{peer}: Kerberos: {text}; is there a ticket (klist, kinit; $KRB5CCNAME, $KRB5_CLIENT_KTNAME)?")


class _Buffer(ctypes.Structure):
    _fields_ = (("length", ctypes.c_size_t), ("value", ctypes.c_void_p))


class _Oid(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint32), ("elements", ctypes.c_void_p))


@functools.cache
def _library() -> Any:
    """Load the library. Raises `PermanentError` if it is not installed. By the types of its arguments ctypes passes
    structures and numbers by reference."""
    try:
        found = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise PermanentError(f"Kerberos needs {_LIBRARY}: {error}; install it (Debian: libgssapi-krb5-2)") from error
    number, pointer, size = ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int
    of = ctypes.POINTER
    out, handle, buffer = of(number), of(pointer), of(_Buffer)
    arguments: dict[str, tuple[Any, ...]] = {
        "gss_import_name": (out, buffer, of(_Oid), handle),
        "gss_init_sec_context": (
            out, pointer, handle, pointer, of(_Oid), number, number, pointer, buffer, handle, buffer, out, out
        ),
        "gss_wrap": (out, pointer, size, number, buffer, of(size), buffer),
        "gss_unwrap": (out, pointer, buffer, buffer, of(size), out),
        "gss_display_status": (out, number, size, of(_Oid), out, buffer),
        "gss_release_buffer": (out, buffer),
        "gss_release_name": (out, handle),
        "gss_delete_sec_context": (out, handle, buffer),
    }  # fmt: skip
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, number
    return found


class Kerberos:
    """A login by the user's Kerberos ticket. Used by one thread at a time. Raises errors of `login_error`."""

    def __init__(self, peer: str, target: str, protections: Sequence[str]) -> None:
        """`target`: `service@host`, or `service/host@REALM`. `peer` names the server in errors."""
        self._peer = peer
        self._wanted = protections
        self.protection = AUTHENTICATION
        """The negotiated one, once `is_done`."""
        self.is_done = False
        self._lib = _library()
        self._context = ctypes.c_void_p()
        self._name = ctypes.c_void_p()
        self._minor = ctypes.c_uint32()
        self._is_open = False
        """Whether both sides are authenticated."""
        self._mechanism = _oid(_KERBEROS)
        kind = _oid(_PRINCIPAL if "/" in target else _HOST_SERVICE)
        name, _alive = _as_buffer(target.encode())
        self._check(self._lib.gss_import_name(self._minor, name, kind, self._name))

    def __del__(self) -> None:
        minor = ctypes.c_uint32()
        if "_name" in self.__dict__:
            self._lib.gss_release_name(minor, self._name)
            self._lib.gss_delete_sec_context(minor, self._context, None)

    def step(self, challenge: bytes) -> bytes:
        """The answer to a challenge, which is empty in the first step. Raises `LoginError`."""
        if not self._is_open:
            return self._authenticate(challenge)
        if self.is_done:
            return b""
        # The last message lists the server's protections; the answer is the chosen one.
        offered = self.unwrap(challenge)
        if len(offered) != 4:
            raise LoginError("the server names no layers of protection")
        found = next((name for name in self._wanted if offered[0] & _LAYERS[name]), None)
        if found is None:
            raise AccessError(
                f"the NameNode requires another protection than {', '.join(self._wanted)}; "
                "set hadoop.rpc.protection as it is there"
            )
        size = 0 if found == AUTHENTICATION else _MAX_BUFFER
        answer = self.wrap(struct.pack(">I", _LAYERS[found] << 24 | size))
        self.protection, self.is_done = found, True
        return answer

    def _authenticate(self, challenge: bytes) -> bytes:
        asked, _alive = _as_buffer(challenge)
        answer, flags = _Buffer(), ctypes.c_uint32()
        wanted = _MUTUAL | _REPLAY | _SEQUENCE | _CONFIDENTIAL | _INTEGRITY
        status = self._lib.gss_init_sec_context(
            self._minor, None, self._context, self._name, self._mechanism,
            wanted, 0, None, asked, None, answer, flags, None,
        )  # fmt: skip
        token = self._taken(answer, status)
        self._is_open = not status & _CONTINUE_NEEDED
        if self._is_open and not flags.value & _MUTUAL:
            raise AccessError(f"{self._peer}: Kerberos: the server has not proved its name")
        return token

    def wrap(self, data: bytes) -> bytes:
        """Protect a message: by a checksum, and with `privacy` by encryption."""
        given, _alive = _as_buffer(data)
        out = _Buffer()
        status = self._lib.gss_wrap(self._minor, self._context, self.protection == PRIVACY, 0, given, None, out)
        return self._taken(out, status)

    def unwrap(self, data: bytes) -> bytes:
        given, _alive = _as_buffer(data)
        out = _Buffer()
        status = self._lib.gss_unwrap(self._minor, self._context, given, out, None, None)
        return self._taken(out, status)

    def _taken(self, buffer: _Buffer, status: int) -> bytes:
        """The result of a call that ended with this status."""
        data = ctypes.string_at(buffer.value, buffer.length) if buffer.value else b""
        self._lib.gss_release_buffer(ctypes.c_uint32(), buffer)
        self._check(status)
        return data

    def _check(self, status: int) -> None:
        if status & _ERRORS:
            # The mechanism's text comes first: the generic one says little.
            texts = [*self._texts(self._minor.value, 2), *self._texts(status, 1)]
            raise login_error(self._peer, texts[0] if texts else f"status {status:#x}")

    def _texts(self, status: int, kind: int) -> list[str]:
        more, out, texts = ctypes.c_uint32(), _Buffer(), list[str]()
        while status and len(texts) < _MAX_TEXTS:
            if self._lib.gss_display_status(ctypes.c_uint32(), status, kind, self._mechanism, more, out) & _ERRORS:
                break
            texts.append(self._taken(out, 0).decode(errors="replace"))
            if not more.value:
                break
        return texts


def _as_buffer(data: bytes) -> tuple[_Buffer, object]:
    """A buffer for the library, and the object that keeps its memory alive."""
    kept = ctypes.create_string_buffer(data, len(data)) if data else None
    return _Buffer(len(data), ctypes.cast(kept, ctypes.c_void_p) if kept is not None else None), kept


@functools.cache
def _oid(elements: bytes) -> _Oid:
    return _Oid(len(elements), ctypes.cast(_static_buffer(elements), ctypes.c_void_p))


@functools.cache
def _static_buffer(elements: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(elements, len(elements))
