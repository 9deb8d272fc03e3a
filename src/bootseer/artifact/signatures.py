"""Signatures of documents and hot sets in stores: made when they are written, verified before they are used.

A signed object is a DSSE envelope: payload and ed25519 signatures in one object, so that both are replaced atomically.
The signature covers the object's name too, so that no signed object can be substituted for another one. The format is
in docs/formats/signed-object.md, the reasons in docs/adr/0029-signatures.md.

Keys are PEM files, as made by `openssl genpkey -algorithm ed25519`. They are read when needed, also in child processes,
so that no secret is held in memory or passed on.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from bootseer.artifact.document import readable
from bootseer.errors import CorruptError, SignatureError, UsageError, needs_extra, os_errors_as
from bootseer.io.trusted_folder import is_secret, open_trusted, trusted_uids

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TYPE = "application/vnd.bootseer.object.v1; name="
"""The DSSE payload type; the object's name follows."""
MAX_SIGNATURES = 16
_MAX_TEXT = 512
_BEGIN = b'{"payload":"'
_MAX_KEY_BYTES = 1 << 20
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAKE = "make KEY: openssl genpkey -algorithm ed25519 -out KEY; the key to trust: openssl pkey -in KEY -pubout"


def stored_limit(payload_bytes: int) -> int:
    """The size of the largest object, signed or not, with a payload of at most `payload_bytes`."""
    return payload_bytes * 4 // 3 + (MAX_SIGNATURES + 1) * 2 * _MAX_TEXT


class _Signature(Struct, frozen=True):
    keyid: str
    sig: bytes


@readable
class _Envelope(Struct, frozen=True, rename={"kind": "payloadType"}):
    """Encoded in this order, which is that of the sorted keys."""

    payload: bytes
    kind: str
    signatures: Annotated[tuple[_Signature, ...], Meta(min_length=1, max_length=MAX_SIGNATURES)]


class Signatures(Struct, frozen=True):
    """The keys to sign with, and the keys whose signatures are required. By default nothing is signed or verified."""

    signing: tuple[str, ...] = ()
    """Private key files: what is written is signed with each of them."""
    trusted: str = ""
    """A file or folder of public keys: what is read must be signed with one of them. Empty: no signature required."""

    @property
    def may_publish(self) -> bool:
        """Whether nodes with the same requirement would accept what is written here."""
        return bool(self.signing) or not self.trusted

    def check(self) -> None:
        """Raise `UsageError` unless all keys are usable and this node would accept its own signatures."""
        trusted = _public_keys(self.trusted) if self.trusted else {}
        own = {key_id(_private_key(path).public_key()) for path in self.signing}
        if trusted and own and own.isdisjoint(trusted):
            raise UsageError(
                f"{self.signing[0]}: what it signs would not be accepted, it is not among the keys in {self.trusted}",
                hint=f"openssl pkey -in {self.signing[0]} -pubout prints its public key",
            )

    def seal(self, name: str, payload: bytes) -> bytes:
        """The object to store under `name`: an envelope, or the payload itself without a signing key."""
        if not self.signing:
            return payload
        kind = TYPE + name
        rows = []
        for path in self.signing:
            key = _private_key(path)
            signature = key.sign(_signed_bytes(kind, payload))
            rows.append(_Signature(key_id(key.public_key()), signature))
        return msgspec.json.encode(_Envelope(payload, kind, tuple(rows)))

    def open(self, name: str, data: bytes, where: str, *, reuse: bool = False) -> bytes:
        """Verify the object stored under `name`; returns its payload. `where` is the store, for messages.

        `reuse`: the payload becomes part of what is signed here, so if we sign, it must be signed by a trusted key or
        one of our own. Raises `SignatureError` without a valid signature, `CorruptError` for a malformed envelope.
        """
        required = bool(self.trusted or (reuse and self.signing))
        if not is_signed(data):
            if required:
                raise SignatureError(f"{where}: {name} is not signed")
            return data
        try:
            found = msgspec.json.decode(data, type=_Envelope)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptError(f"{where}: {name}: the envelope of its signatures cannot be read: {error}") from error
        if found.kind != TYPE + name:
            other = found.kind.removeprefix(TYPE)[:200]
            raise SignatureError(f"{where}: {name} holds another signed object: {other!r}")
        if required:
            keys = _public_keys(self.trusted) if self.trusted else {}
            if reuse:
                own = (_private_key(path).public_key() for path in self.signing)
                keys |= {key_id(key): key for key in own}
            _verify(_signed_bytes(found.kind, found.payload), found.signatures, keys, f"{where}: {name}")
        return found.payload


UNSIGNED = Signatures()


def is_signed(data: bytes) -> bool:
    """Whether an object is an envelope; its signatures are not checked."""
    return data.startswith(_BEGIN)


def key_id(key: Ed25519PublicKey) -> str:
    """The id of a key: the SHA-256 of its public half in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _signed_bytes(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: no two pairs of type and payload give the same bytes."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def _verify(signed: bytes, rows: tuple[_Signature, ...], keys: dict[str, Ed25519PublicKey], where: str) -> None:
    """One valid signature is sufficient: others may be for readers that trust other keys."""
    from cryptography.exceptions import InvalidSignature

    known = [(keys[row.keyid], row.sig) for row in rows if row.keyid in keys]
    for key, signature in known:
        try:
            key.verify(signature, signed)
        except InvalidSignature:
            continue
        return
    if known:
        raise SignatureError(f"{where}: its signature does not match")
    names = ", ".join(row.keyid[:16] if row.keyid.isalnum() else repr(row.keyid[:16]) for row in rows[:3])
    raise SignatureError(f"{where}: signed by a key that is not trusted ({names})")


def _library() -> Any:
    """The modules of `cryptography` that we need. Any: its types would cost the import where nothing is signed."""
    with needs_extra("sign", "a signature"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return serialization, ed25519


def _private_key(path: str) -> Ed25519PrivateKey:
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_private_key(_read(Path(path), 0o077, "may be read by others", "600"), None)
    except (ValueError, TypeError) as error:  # another format, or encrypted with a password
        raise UsageError(f"{path}: not a private key without a password, in PEM", hint=_MAKE) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{path}: not an ed25519 key", hint=_MAKE)
    found: Ed25519PrivateKey = key
    return found


def _public_keys(place: str) -> dict[str, Ed25519PublicKey]:
    """The keys in a file, or in the `.pem` files of a folder, by id."""
    serialization, ed25519 = _library()
    path = Path(place)
    found = {}
    is_folder = os.path.isdir(path)  # noqa: PTH112 - Path raises for a link that the kernel does not follow
    if is_folder and path.stat().st_mode & 0o022:
        raise UsageError(f"{path}: this folder of keys may be written by others", hint=f"chmod go-w {path}")
    if os.path.lexists(path):  # otherwise reading it reports the error
        folder = path if is_folder else path.parent
        os.close(open_trusted(folder, otherwise="keep the trusted keys in another folder"))
    for file in sorted(path.glob("*.pem")) if is_folder else [path]:
        for block in _PUBLIC.findall(_read(file, 0o022, "may be written by others", "go-w")):
            try:
                key = serialization.load_pem_public_key(block)
            except ValueError as error:
                raise UsageError(f"{file}: a public key in it cannot be read", hint=_MAKE) from error
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise UsageError(f"{file}: a key in it is not an ed25519 key", hint=_MAKE)
            found[key_id(key)] = key
    if not found:
        raise UsageError(f"{place}: no public keys (PEM) are there", hint=_MAKE)
    return found


def _read(path: Path, forbidden: int, reason: str, mend: str) -> bytes:
    with os_errors_as(UsageError, f"{path}: the key cannot be read", hint=_MAKE):
        # In a shared folder like /tmp any user may have created the file, or a symbolic link to it.
        _check_owner(path, path.lstat())
        # Non-blocking: the path may be a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path}: not a file", hint=_MAKE)
            _check_owner(path, status)
            if status.st_mode & forbidden and not is_secret(status):
                raise UsageError(f"{path}: this key {reason}", hint=f"chmod {mend} {path}")
            return file.read(_MAX_KEY_BYTES)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in trusted_uids():
        raise UsageError(f"{path}: this key belongs to another user", hint="keep keys in files of your own")
