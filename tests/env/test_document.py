"""Documents of snapshots: written, read back, and refused when a store holds something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.artifact.document import OtherVersionError
from bootseer.env.document import CLOCK_SKEW_S, MAX_BYTES, Daemon, EnvironmentDocument, Export, document_name
from bootseer.errors import CorruptError, PermanentError
from env.life.samples import BUILT_S, KEY, digest_of, document

SIZE = st.integers(0, 1 << 60)
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=30).filter(str.isprintable)


def test_a_document_reads_back_as_it_was_written() -> None:
    written = document(max_age_s=7 * 86400.0, unaccounted=("/data/x",), trust="untrusted")
    assert EnvironmentDocument.parse(written.encode()) == written


@given(
    st.dictionaries(TEXT, st.text(max_size=50), max_size=5),
    st.lists(TEXT, max_size=5),
    SIZE,
    st.one_of(st.none(), st.floats(0, 1e9)),
    st.sampled_from(["set", "prepend", "append", "unset"]),
    st.text(st.characters(exclude_characters="\0"), max_size=30),
)
def test_every_document_reads_back(
    components: dict[str, str], packages: list[str], size: int, age: float | None, kind: Any, value: str
) -> None:
    written = document(
        components=components,
        packages=tuple(packages),
        size_bytes=size,
        max_age_s=age,
        exports=(Export("X", kind, value),),
    )
    assert EnvironmentDocument.parse(written.encode()) == written


def test_equal_documents_are_equal_bytes() -> None:
    turned = dict(reversed(document().components.items()))
    assert document(components=turned).encode() == document().encode()


def test_paths_that_are_no_utf_8_survive() -> None:
    written = document(roots=("/opt/\udcff",))
    assert EnvironmentDocument.parse(written.encode()).roots == ("/opt/\udcff",)


def test_what_later_versions_add_is_kept() -> None:
    value = {**json.loads(document().encode()), "signature": {"by": "somebody"}}
    read = EnvironmentDocument.parse(json.dumps(value).encode())
    assert read.more == {"signature": {"by": "somebody"}}
    assert json.loads(read.encode()) == value


def test_its_name_and_its_objects_are_those_of_the_store() -> None:
    made = document()
    assert made.name == document_name(KEY) == f"environments/{KEY}/document"
    assert [stored.name for stored in made.objects] == [
        digest_of(f"{part} of content") for part in ("index", "stripe", "manifest")
    ]


def test_texts_for_people_cannot_steer_a_terminal() -> None:
    read = EnvironmentDocument.parse(document(builder="node\x1b[2J", packages=("a\r==1",)).encode())
    assert read.builder.isprintable()
    assert read.packages[0].isprintable()


WRONG: list[tuple[str, Any]] = [
    ("key", None),
    ("key", "AB" * 32),
    ("key", KEY + "\n"),
    ("components", []),
    ("components", {"a": 1}),
    ("components", {str(number): "" for number in range(1001)}),
    ("file", None),
    ("file", {}),
    ("manifest", None),
    ("manifest", ["images/x", 1]),
    ("manifest", [digest_of("x"), -1]),
    ("manifest", [digest_of("x"), 1 << 40]),
    ("manifest", [digest_of("x"), True]),
    ("digest", "sha256:x"),
    ("roots", "/usr"),
    ("roots", ["/"]),
    ("roots", ["usr"]),
    ("roots", ["/usr/"]),
    ("roots", ["/usr/../etc"]),
    ("roots", ["/usr/./x"]),
    ("roots", ["/a\0b"]),
    ("roots", ["/proc/self"]),
    ("roots", ["/dev"]),
    ("roots", ["/usr", "/usr"]),
    ("roots", ["/usr/lib", "/usr"]),
    ("roots", ["/a/b", "/a!", "/a"]),
    ("roots", [5]),
    ("num_loose", -1),
    ("num_files", 1.5),
    ("num_files", True),
    ("size_bytes", "1"),
    ("packages", [1]),
    ("packages", ["x"] * 10_001),
    ("exports", [["A", "set", ""]]),
    ("exports", [{"name": "A=B", "kind": "set", "value": ""}]),
    ("exports", [{"name": "A", "kind": "source", "value": ""}]),
    ("exports", [{"name": "A", "kind": ["set"], "value": ""}]),
    ("exports", [{"name": "A", "kind": "set", "value": "a\0b"}]),
    ("platform", None),
    ("trust", "believed"),
    ("trust", ["observed"]),
    ("unaccounted", None),
    ("builder", 1),
    ("builder", "x" * 100_000),
    ("version", None),
    ("built_s", None),
    ("built_s", -1),
    ("built_s", True),
    ("built_s", 10**400),
    ("built_s", float("nan")),
    ("built_s", float("inf")),
    ("setup_s", "1"),
    ("max_age_s", "7d"),
    ("max_age_s", -1),
    ("job", None),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda value: str(value)[:40])
def test_a_document_with_a_wrong_field_is_corrupt(name: str, wrong: Any) -> None:
    value = {**json.loads(document().encode()), name: wrong}
    with pytest.raises(CorruptError):
        EnvironmentDocument.parse(json.dumps(value).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * (MAX_BYTES + 1)],
    ids=lambda data: repr(data[:9]),
)
def test_what_is_no_document_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        EnvironmentDocument.parse(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(PermanentError):
        EnvironmentDocument.parse(data)


@pytest.mark.parametrize("schema", ["bootseer.environment/3", "", None])
def test_another_version_is_distinguished_from_damage(schema: str | None) -> None:
    value = {**json.loads(document().encode()), "schema": schema}
    with pytest.raises(OtherVersionError, match="another version"):
        EnvironmentDocument.parse(json.dumps(value).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"built_s": float("nan")},
        {"roots": ("/",)},
        {"packages": tuple("x" * 200 for _ in range(9000))},
        {"platform": {1: {2}}},
    ],
    ids=str,
)
def test_nothing_is_written_that_could_not_be_read(changes: dict[str, Any]) -> None:
    with pytest.raises(PermanentError, match="cannot be written"):
        document(**changes).encode()


def test_age_is_measured_from_the_build() -> None:
    week = replace(document(), max_age_s=7 * 86400.0)
    assert not week.expired(BUILT_S)
    assert not week.expired(BUILT_S + 7 * 86400)
    assert week.expired(BUILT_S + 7 * 86400 + 1)
    assert not document().expired(BUILT_S + 1e9)


def test_a_snapshot_from_the_future_has_no_age_and_is_not_used_where_one_matters() -> None:
    week = replace(document(), max_age_s=7 * 86400.0)
    assert not week.expired(BUILT_S - CLOCK_SKEW_S)
    assert week.expired(BUILT_S - CLOCK_SKEW_S - 1)
    assert not document().expired(0)


def test_a_document_that_shows_none_of_its_files_is_none() -> None:
    value = json.loads(document().encode())
    value |= {"roots": [], "loose": None, "num_files": 3, "platform": {"base": "host 1234"}}
    with pytest.raises(CorruptError, match="roots"):
        EnvironmentDocument.parse(json.dumps(value).encode())
    value["platform"] = {"base": "image sha256:12"}
    assert EnvironmentDocument.parse(json.dumps(value).encode()).roots == ()


DAEMON = Daemon(
    "agent", "/bin/agent", ("agent", "-p"), (Export("A", "set", "1"),), "/", "bin", 2, 2, sockets=("tcp [::]:1",)
)  # fmt: skip


def test_daemons_are_read_only_by_those_that_can_start_them() -> None:
    written = document(daemons=(DAEMON,))
    assert EnvironmentDocument.parse(written.encode()) == written
    assert json.loads(written.encode())["schema"] == "bootseer.environment/2"
    assert json.loads(document().encode())["schema"] == "bootseer.environment/1"


def test_a_field_with_the_text_of_another_version_does_not_matter() -> None:
    written = document(builder="bootseer.environment/2")
    assert EnvironmentDocument.parse(written.encode()) == written


@pytest.mark.parametrize(
    "changed",
    [
        {"program": "../../bin/sh"}, {"program": "/bin/../sh"}, {"argv": []}, {"argv": ["a\0b"]}, {"uid": -1},
        {"uid": (1 << 32) - 1}, {"nice": 100}, {"cwd": "etc"}, {"sockets": ["ftp 1"]}, {"pid_files": ["x.pid"]},
        {"output": "log"}, {"env": [{"name": "A=B", "kind": "set", "value": ""}]}, {"argv": ["x" * 70_000]},
    ],
)  # fmt: skip
def test_daemons_that_no_capture_notes_are_refused(changed: dict[str, Any]) -> None:
    value = json.loads(document(daemons=(DAEMON,)).encode())
    value["daemons"][0].update(changed)
    with pytest.raises(CorruptError, match="daemons"):
        EnvironmentDocument.parse(json.dumps(value).encode())
