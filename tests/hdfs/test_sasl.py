"""Logins with tokens: validation of the server's messages, and of token files. Real servers: test_hdfs_protected."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
from pathlib import Path

import pytest

from bootseer.errors import AccessError
from bootseer.hdfs.errors import DataNodeError, RefusedError
from bootseer.hdfs.protection import Messages, Protection
from bootseer.hdfs.protobuf import delimited, field
from bootseer.hdfs.sasl import AUTHENTICATION, INTEGRITY, PRIVACY, LoginError, Token, _Layer, delegation_token

TOKEN = Token(b"who", b"secret", "HDFS_DELEGATION_TOKEN", "nn:8020")
NONCE = 'realm="default",nonce="abc",qop="auth,auth-int,auth-conf",charset=utf-8,algorithm=md5-sess,cipher="3des,rc4"'


def _as_proto(token: Token) -> bytes:
    return field(1, token.identifier) + field(2, token.secret) + field(3, token.kind) + field(4, token.service)


def _server_proof(answer: bytes, secret: str, tail: str) -> bytes:
    """The last message of a server with the secret, by RFC 2831."""
    said = {
        key: quoted or bare for key, quoted, bare in re.findall(r'([a-z-]+)=(?:"([^"]*)"|([^,]*))', answer.decode())
    }

    def md5(text: bytes) -> bytes:
        return hashlib.md5(text, usedforsecurity=False).digest()

    known = md5(f"{said['username']}:{said['realm']}:{secret}".encode())
    key = md5(known + f":{said['nonce']}:{said['cnonce']}".encode()).hex()
    asked = md5(f":{said['digest-uri']}{tail}".encode()).hex()
    proof = md5(f"{key}:{said['nonce']}:{said['nc']}:{said['cnonce']}:{said['qop']}:{asked}".encode()).hex()
    return f"rspauth={proof}".encode()


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    for secret, is_known in ((TOKEN.secret, True), (b"other", False)):
        login = TOKEN.login("/default", (AUTHENTICATION,))
        last = _server_proof(login.step(NONCE.encode()), base64.b64encode(secret).decode(), "")
        if is_known:
            assert login.step(last) == b""
        else:
            with pytest.raises(LoginError, match="proved"):
                login.step(last)
        assert login.is_done is is_known


@pytest.mark.parametrize(
    "challenge", ["", "\0", 'nonce="abc', NONCE.replace("md5-sess", "md5"), NONCE.replace("auth-conf", "")]
)
def test_challenges_that_are_invalid_or_offer_less_protection_are_refused(challenge: str) -> None:
    with pytest.raises(LoginError):
        TOKEN.login("/default", (PRIVACY,)).step(challenge.encode())


@pytest.mark.parametrize(("protection", "cipher"), [(INTEGRITY, ""), (PRIVACY, "rc4"), (PRIVACY, "3des")])
def test_changed_or_reordered_messages_are_refused(protection: str, cipher: str) -> None:
    pytest.importorskip("cryptography")

    def sent() -> tuple[_Layer, list[bytes]]:
        key = bytes(range(16))
        sender, receiver = (_Layer(key, "client-to-server", cipher, seal=seal) for seal in (True, False))
        return receiver, [sender.wrap(data) for data in (b"", b"12345678", os.urandom(1000))]

    receiver, messages = sent()
    assert [len(receiver.unwrap(message)) for message in messages] == [0, 8, 1000]
    with pytest.raises(LoginError):
        receiver.unwrap(messages[2])
    for spoil in (lambda data: b"", lambda data: bytes((data[0] ^ 1,)) + data[1:], lambda data: data[:-8] + data[-6:]):
        receiver, messages = sent()
        with pytest.raises(LoginError):
            receiver.unwrap(spoil(messages[0]))
    receiver, messages = sent()
    with pytest.raises(LoginError):
        receiver.unwrap(messages[1])


def test_a_message_that_is_too_long_or_changed_ends_the_connection() -> None:
    login = TOKEN.login("hdfs/0", (INTEGRITY,))
    login.step(NONCE.encode())
    with pytest.raises(DataNodeError, match="a message of"):
        Messages(login).open(b"\xff\xff\xff\xff")
    with pytest.raises(DataNodeError):
        Messages(login).open(struct.pack(">I", 20) + bytes(20))
    assert Messages(login).open(b"\0\0\0") == b""


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (delimited(field(1, 0) + field(2, b"nonsense")), DataNodeError),
        (delimited(b"\xff\xff"), DataNodeError),
        (b"\xff\xff\xff\x7f", DataNodeError),
        (b"\xff" * 20, DataNodeError),
        (delimited(field(1, 1) + field(3, "Block token is expired")), RefusedError),
    ],
)
def test_a_datanode_with_an_invalid_login_is_refused(answer: bytes, kind: type[DataNodeError]) -> None:
    settings = {"dfs.data.transfer.protection": "authentication"}
    protection = Protection(settings, kerberos=True, ask_key=bytes)
    left = bytearray(answer)

    def receive(length: int) -> bytes:
        taken = bytes(left[:length])
        del left[:length]
        return taken

    assert protection.log_in(1000, _as_proto(TOKEN), lambda data: None, receive) is None, "a privileged port"
    with pytest.raises(kind) as error:
        protection.log_in(9866, _as_proto(TOKEN), lambda data: None, receive)
    assert type(error.value) is kind


def test_the_token_of_a_job_is_found_in_both_forms_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert delegation_token(["nn:8020"]) is None
    file = tmp_path / "tokens"
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(file))
    with pytest.raises(AccessError, match=r"HADOOP_TOKEN_FILE_LOCATION.*No such file"):
        delegation_token(["nn:8020"])
    other = Token(b"x" * 200, b"y", "HDFS_DELEGATION_TOKEN", "other:8020")
    proto = b"".join(field(1, field(1, "alias") + field(2, _as_proto(token))) for token in (other, TOKEN))
    plain = b"\x02"
    for token in (other, TOKEN):
        texts = (b"alias", token.identifier, token.secret, token.kind.encode(), token.service.encode())
        # Lengths above 127 are encoded as their number of bytes, counted down from 0x8f, and the bytes.
        plain += b"".join((bytes((len(t),)) if len(t) < 128 else bytes((0x8F, len(t)))) + t for t in texts)
    for data in (b"HDTS\1" + delimited(proto), b"HDTS\0" + plain + b"\0"):
        file.write_bytes(data)
        assert delegation_token(["here:8020", "nn:8020"]) == TOKEN
        assert delegation_token(["elsewhere:8020"]) is None
        for end in (0, 4, 5, 6, 30, len(data) - 40):
            file.write_bytes(data[:end])
            with pytest.raises(AccessError, match="is not a Hadoop token file"):
                delegation_token(["nn:8020"])
    assert "secret" not in repr(TOKEN)
