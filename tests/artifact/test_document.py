"""JSON documents: they are validated, unknown fields are kept, and errors do not quote the input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from bootseer.artifact.document import OtherVersionError, decode, encode, printable
from bootseer.blocks.block_file import BlockFile
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, parse_object

SCHEMA = "bootseer.test/1"
CONTENT = "sha256:" + "ab" * 32


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    kind: Literal["set", "unset"] = "set"


@dataclass(frozen=True, slots=True)
class Document:
    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]+\Z")]
    count: Annotated[int, Meta(ge=0, le=9)] = 0
    parts: Annotated[tuple[Part, ...], Meta(max_length=2)] = ()
    at_s: float = 0.0
    file: BlockFile | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.parts) > self.count:
            raise ValueError("more parts than counted")


def read(value: object, limit: int = 10_000) -> Document:
    return decode(json.dumps(value).encode(), Document, "test document", limit=limit, schema=SCHEMA)


def test_a_document_reads_back_with_what_a_later_version_added() -> None:
    file = BlockFile(CONTENT, 1, "ab" * 32, 10, 5, (Stored(CONTENT, 5),))
    written = Document("ab", 1, (Part("\udcff"),), 5.0, file, {"later": {"x": [1]}, "more": 3})
    assert read(json.loads(encode(written, SCHEMA))) == written
    assert json.loads(encode(written, SCHEMA))["later"] == {"x": [1]}


def test_equal_documents_are_equal_bytes() -> None:
    one, other = (Document("ab", more=more) for more in ({"x": 1, "y": 2}, {"y": 2, "x": 1}))
    assert encode(one, SCHEMA) == encode(other, SCHEMA)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"key": 5}, "$.key"),
        ({"key": "ab\n"}, "$.key"),
        ({"key": None}, "$.key"),
        ({"count": True}, "$.count"),
        ({"count": 1.0}, "$.count"),
        ({"count": 10}, "$.count"),
        ({"at_s": 10**400}, "at_s"),
        ({"count": 2, "parts": [{"name": "x", "kind": "\x1b[2J"}]}, "$.parts[0].kind"),
        ({"count": 2, "parts": [{"kind": "set"}]}, "required field `name` - at `$.parts[0]`"),
        ({"parts": [{"name": "x"}]}, "more parts than counted"),
        ({"count": 9, "parts": [{"name": "x"}] * 3}, "$.parts"),
        ({"file": {"index": "../x"}}, "file"),
    ],
)
def test_the_wrong_field_is_named_and_cannot_steer_a_terminal(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(CorruptError) as caught:
        read({"schema": SCHEMA, "key": "ab", **wrong})
    assert str(caught.value).startswith("test document: ")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":NaN}', b'{"a":' + b"9" * 5000])
def test_other_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_object(data, "test document", 200_000)


def test_more_bytes_than_allowed_are_not_parsed() -> None:
    with pytest.raises(CorruptError, match="more than the 10"):
        read({"schema": SCHEMA, "key": "ab"}, limit=10)


@pytest.mark.parametrize("schema", ["bootseer.test/2", None, 5])
def test_another_version_is_distinguished_from_damage(schema: object) -> None:
    with pytest.raises(OtherVersionError, match="another version"):
        read({"schema": schema, "key": "ab"})


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(PermanentError):
        decode(data, Document, "test document", limit=200, schema=SCHEMA)


def test_what_is_shown_to_people_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2Jé") == "a\ufffd[2Jé"


THREADS = """
import sys, threading
from collections.abc import Mapping
from typing import Annotated
import msgspec
from bootseer.artifact.document import convert, readable
sys.setswitchinterval(1e-6)
for _ in range(200):
    class Part(msgspec.Struct, frozen=True):
        names: Mapping[str, Annotated[str, msgspec.Meta(max_length=9)]]
    @readable
    class Whole(msgspec.Struct, frozen=True):
        key: Annotated[str, msgspec.Meta(pattern=r"[0-9a-f]{4}")]
        parts: tuple[Part, ...]
    ready = threading.Barrier(8)
    def read():
        ready.wait()
        convert({"key": "0123", "parts": [{"names": {"a": "b"}}]}, Whole, "whole")
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_read_the_first_documents_at_the_same_time() -> None:
    """msgspec crashed, so that `bootseer env list` did so now and then."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
