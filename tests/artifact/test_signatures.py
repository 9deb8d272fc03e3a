"""Signed objects: which signatures are valid, and which objects are accepted."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bootseer.artifact.signatures import MAX_SIGNATURES, UNSIGNED, Signatures, is_signed, stored_limit
from bootseer.errors import AccessError, CorruptError, SignatureError, UsageError
from signing_keys import make_key, trust

NAME = "images/sha256-" + "ab" * 32
PAYLOAD = b'{"a":1}\n\xff'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b` are keys, `trusted` holds the public half of `a`."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("a", "b"):
        make_key(folder / name)
    trust(folder / "trusted", folder / "a")
    return folder


@pytest.fixture(scope="module")
def strict(folder: Path) -> Signatures:
    return Signatures(trusted=str(folder / "trusted"))


def sealed(folder: Path, *keys: str, name: str = NAME, payload: bytes = PAYLOAD) -> bytes:
    return Signatures(tuple(str(folder / key) for key in keys)).seal(name, payload)


def changed(data: bytes, **changes: Any) -> bytes:
    value = {**json.loads(data), **changes}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_what_a_trusted_key_signed_is_accepted(folder: Path, strict: Signatures) -> None:
    data = sealed(folder, "a")
    assert strict.open(NAME, data, "s") == PAYLOAD == UNSIGNED.open(NAME, data, "s")
    assert len(data) <= stored_limit(len(PAYLOAD))
    assert sealed(folder, "a") == data  # equal objects have equal bytes


def test_nothing_is_signed_and_nothing_required_by_default() -> None:
    assert UNSIGNED.seal(NAME, PAYLOAD) == PAYLOAD == UNSIGNED.open(NAME, PAYLOAD, "s")
    assert not is_signed(PAYLOAD)


def test_what_is_not_signed_is_refused(strict: Signatures) -> None:
    with pytest.raises(SignatureError, match=f"^s: {NAME} is not signed$"):
        strict.open(NAME, PAYLOAD, "s")


def test_the_signature_of_a_key_that_is_not_trusted_does_not_count(folder: Path, strict: Signatures) -> None:
    with pytest.raises(SignatureError, match=r"signed by a key that is not trusted \([0-9a-f]{16}\)"):
        strict.open(NAME, sealed(folder, "b"), "s")


def test_one_good_signature_is_enough(folder: Path, strict: Signatures) -> None:
    """Keys are rotated by signing with both for a while."""
    assert strict.open(NAME, sealed(folder, "b", "a"), "s") == PAYLOAD
    both = json.loads(sealed(folder, "b", "a"))["signatures"]
    broken = changed(sealed(folder, "a"), signatures=[{**both[1], "sig": both[0]["sig"]}, *both])
    assert strict.open(NAME, broken, "s") == PAYLOAD


def test_several_keys_may_be_trusted_in_a_file_or_a_folder(folder: Path, tmp_path: Path) -> None:
    file = trust(tmp_path / "both", folder / "a", folder / "b")
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    for key in ("a", "b"):
        trust(keys / f"{key}.pem", folder / key)
    (keys / "notes.txt").write_text("not a key")
    for trusted in (file, str(keys)):
        for key in ("a", "b"):
            assert Signatures(trusted=trusted).open(NAME, sealed(folder, key), "s") == PAYLOAD


@pytest.mark.parametrize(
    "other", ["images/sha256-" + "cd" * 32, f"environments/{'ab' * 32}/document", NAME[:-1], NAME + "a", ""]
)
def test_a_signed_object_cannot_stand_for_another_one(folder: Path, strict: Signatures, other: str) -> None:
    data = sealed(folder, "a")
    with pytest.raises(SignatureError, match=f"holds another signed object: '{NAME}'"):
        strict.open(other, data, "s")
    kind = json.loads(sealed(folder, "b", name=other))["payloadType"]
    with pytest.raises(SignatureError, match="does not match"):
        strict.open(other, changed(data, payloadType=kind), "s")


def test_another_payload_is_not_what_was_signed(folder: Path, strict: Signatures) -> None:
    for payload in (b"", PAYLOAD + b" ", b"x" * 1000):
        forged = changed(sealed(folder, "a"), payload=base64.b64encode(payload).decode())
        with pytest.raises(SignatureError, match="does not match"):
            strict.open(NAME, forged, "s")


def test_bytes_of_the_name_are_not_taken_for_the_payload(folder: Path, strict: Signatures) -> None:
    """Lengths are signed too: bytes moved from one to the other are detected."""
    value = json.loads(sealed(folder, "a", payload=b"ab"))
    value |= {"payloadType": value["payloadType"] + " 2 ab", "payload": ""}
    with pytest.raises(SignatureError):
        strict.open(NAME + " 2 ab", json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), "s")


@pytest.mark.parametrize(
    "signatures",
    [
        None,
        {},
        [],
        "x",
        [1],
        [{}],
        [{"keyid": "a"}],
        [{"keyid": "a", "sig": None}],
        [{"keyid": "a", "sig": "!"}],
        [{"keyid": "a", "sig": "\N{GREEK SMALL LETTER ALPHA}"}],
        [{"keyid": "a", "sig": ""}] * (MAX_SIGNATURES + 1),
    ],
)
def test_an_envelope_without_sense_is_corrupt(folder: Path, strict: Signatures, signatures: object) -> None:
    for signs in (strict, UNSIGNED):
        with pytest.raises(CorruptError, match=NAME):
            signs.open(NAME, changed(sealed(folder, "a"), signatures=signatures), "s")


@pytest.mark.parametrize("length", [0, 1, 63, 65, 100_000])
def test_a_signature_of_another_length_does_not_match(folder: Path, strict: Signatures, length: int) -> None:
    row = {**json.loads(sealed(folder, "a"))["signatures"][0], "sig": base64.b64encode(bytes(length)).decode()}
    with pytest.raises(SignatureError, match="does not match"):
        strict.open(NAME, changed(sealed(folder, "a"), signatures=[row]), "s")


def test_a_cut_or_damaged_envelope_is_never_accepted(folder: Path, strict: Signatures) -> None:
    data = sealed(folder, "a")
    for end in range(len(data)):
        with pytest.raises((CorruptError, SignatureError)):
            strict.open(NAME, data[:end], "s")
    for at in range(len(data)):
        try:
            assert strict.open(NAME, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "s") == PAYLOAD
        except (CorruptError, SignatureError):
            continue


@given(st.binary(max_size=300))
@example(b'{"payload":"' + b"[" * 100_000)
def test_any_bytes_are_refused(folder: Path, strict: Signatures, data: bytes) -> None:
    for given_data in (data, b'{"payload":"' + data):
        with pytest.raises((CorruptError, SignatureError)):
            strict.open(NAME, given_data, "s")


def test_what_becomes_part_of_a_signed_object_must_be_signed(folder: Path) -> None:
    own = Signatures((str(folder / "a"),))
    assert own.open(NAME, PAYLOAD, "s") == PAYLOAD
    assert own.open(NAME, sealed(folder, "a"), "s", reuse=True) == PAYLOAD
    for data in (PAYLOAD, sealed(folder, "b")):
        with pytest.raises(SignatureError):
            own.open(NAME, data, "s", reuse=True)
    assert UNSIGNED.open(NAME, PAYLOAD, "s", reuse=True) == PAYLOAD


def test_other_programs_can_verify_it(folder: Path, tmp_path: Path) -> None:
    """The envelope is DSSE; openssl verifies it."""
    value = json.loads(sealed(folder, "a"))
    kind = value["payloadType"].encode()
    (tmp_path / "signed").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(PAYLOAD), PAYLOAD))
    (tmp_path / "signature").write_bytes(base64.b64decode(value["signatures"][0]["sig"]))
    files = ["-sigfile", tmp_path / "signature", "-in", tmp_path / "signed"]
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", folder / "a.pub", "-rawin", *files]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", folder / "a.pub", "-outform", "DER"], check=True, capture_output=True
    ).stdout
    shown = subprocess.run(["sha256sum"], input=der, check=True, capture_output=True).stdout.split()[0].decode()
    assert value["signatures"][0]["keyid"] == shown


class TestKeys:
    """Unusable keys are reported before anything is done."""

    def test_a_private_key_that_others_may_read_is_refused(self, folder: Path, tmp_path: Path) -> None:
        key = make_key(tmp_path / "key")
        for mode in (0o640, 0o604, 0o660, 0o644):
            key.chmod(mode)
            with pytest.raises(UsageError, match="may be read by others") as caught:
                Signatures((str(key),)).check()
            assert caught.value.hint == f"chmod 600 {key}"
        key.chmod(0o400)
        Signatures((str(key),)).check()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_key_of_root_may_be_for_the_users_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Like the mode in pods with an `fsGroup` in Kubernetes; wider ones are refused."""
        path = make_key(tmp_path / "key")
        os.chown(path, 0, 64321)
        monkeypatch.setattr(os, "geteuid", lambda: 64321)
        for mode in (0o440, 0o640):
            path.chmod(mode)
            Signatures((str(path),)).check()
        for mode in (0o444, 0o460):
            path.chmod(mode)
            with pytest.raises(UsageError, match="may be read by others"):
                Signatures((str(path),)).check()

    def test_trusted_keys_that_others_may_write_are_refused(self, folder: Path, tmp_path: Path) -> None:
        path = Path(trust(tmp_path / "keys", folder / "a"))
        path.chmod(0o664)
        with pytest.raises(UsageError, match="may be written by others"):
            Signatures(trusted=str(path)).check()
        opened = tmp_path / "folder"
        opened.mkdir()
        trust(opened / "a.pem", folder / "a")
        opened.chmod(0o777)
        with pytest.raises(UsageError, match="may be written by others"):
            Signatures(trusted=str(opened)).check()

    @pytest.mark.parametrize("is_folder", [True, False])
    def test_trusted_keys_below_a_folder_that_others_can_change_are_refused(
        self, folder: Path, tmp_path: Path, is_folder: bool
    ) -> None:
        above = tmp_path / "above"
        keys = above / "keys"
        keys.mkdir(parents=True)
        path = Path(trust(keys / "a.pem", folder / "a"))
        Signatures(trusted=str(keys if is_folder else path)).check()
        above.chmod(0o777)
        with pytest.raises(AccessError, match=f"{above} can be changed by other users"):
            Signatures(trusted=str(keys if is_folder else path)).check()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    @pytest.mark.parametrize("kind", ["file", "link", "link of theirs", "in a folder"])
    def test_trusted_keys_of_another_user_are_refused(self, folder: Path, tmp_path: Path, kind: str) -> None:
        """In a folder with the sticky bit anyone can create a file with this name first."""
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        path = Path(trust(shared / "theirs.pem", folder / "a"))
        Signatures(trusted=str(path)).check()
        os.chown(path, 64321, 64321)
        if kind != "file":
            link = (tmp_path if kind == "link" else shared) / "link.pem"
            if kind == "in a folder":
                link = tmp_path / "keys" / "link.pem"
                link.parent.mkdir()
            if kind == "link of theirs":
                os.chown(path, 0, 0)
            link.symlink_to(path)
            if kind == "link of theirs":
                os.chown(link, 64321, 64321, follow_symlinks=False)
            path = link.parent if kind == "in a folder" else link
        with pytest.raises(UsageError, match="belongs to another user"):
            Signatures(trusted=str(path)).check()

    def test_other_files_are_named(self, folder: Path, tmp_path: Path) -> None:
        rsa, text, pipe = make_key(tmp_path / "rsa", "rsa"), tmp_path / "text", tmp_path / "pipe"
        text.touch(mode=0o600)
        os.mkfifo(pipe, 0o600)
        locked = tmp_path / "locked"
        command = ["openssl", "pkey", "-in", folder / "a", "-aes256", "-passout", "pass:x", "-out", locked]
        subprocess.run(command, check=True, umask=0o077)
        for path, why in (
            (rsa, "not an ed25519 key"),
            (text, "not a private key"),
            (locked, "without a password"),
            (tmp_path / "nothing", "No such file"),
            (tmp_path, "Is a directory|not a file"),
            (pipe, "not a file"),
            (folder / "a.pub", "others|not a private key"),
        ):
            with pytest.raises(UsageError, match=why) as caught:
                Signatures((str(path),)).check()
            assert str(path) in str(caught.value)
            assert caught.value.hint

    def test_a_file_without_trusted_keys_is_an_error(self, folder: Path, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        rsa = make_key(tmp_path / "rsa", "rsa")
        for path, why in (
            (tmp_path / "nothing", "No such file"),
            (empty, "no public keys"),
            (folder / "a", "no public keys"),
            (Path(trust(tmp_path / "mixed", folder / "a", rsa)), "not an ed25519 key"),
        ):
            with pytest.raises(UsageError, match=why):
                Signatures(trusted=str(path)).check()

    def test_one_s_own_signature_must_count(self, folder: Path) -> None:
        trusted = str(folder / "trusted")
        Signatures((str(folder / "a"),), trusted).check()
        Signatures((str(folder / "b"), str(folder / "a")), trusted).check()
        with pytest.raises(UsageError, match="would not be accepted"):
            Signatures((str(folder / "b"),), trusted).check()
