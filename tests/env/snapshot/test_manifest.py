"""Manifests are the same after storing and reading them, and forged ones are refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.env.snapshot import manifest as format_
from bootseer.env.snapshot.manifest import SCHEMA, Entry, Manifest, path_bytes
from bootseer.env.snapshot.write import store_manifest
from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.store.store import Stored
from env_snapshots import load_manifest
from store_doubles import MemoryStore

DIGEST = "blake3:" + "0f" * 32
FILE = {"path": "/a", "kind": "file", "mode": 0o644, "size": 3, "digest": DIGEST}

_names = st.binary(min_size=1, max_size=12).filter(lambda name: name not in {b".", b".."} and not {0, 47} & {*name})
_paths = st.lists(_names, min_size=1, max_size=4).map(
    lambda names: "/" + b"/".join(names).decode("utf-8", "surrogateescape")
)
_owners = st.integers(0, 2**32 - 2)
_common: dict[str, Any] = {
    "mode": st.integers(0, 0o7777),
    "uid": _owners,
    "gid": _owners,
    "xattrs": st.dictionaries(st.sampled_from(["user.a", "security.capability"]), st.binary(max_size=9)),
    "modified": st.booleans(),
    "before": st.sampled_from(["", "directory", "other", "symlink:a\nb", "file:sha256:" + "ab" * 32]),
}
_entries = st.one_of(
    st.builds(
        Entry,
        path=_paths,
        kind=st.just("file"),
        size=st.integers(0, 2**63 - 1),
        digest=st.binary(min_size=32, max_size=32).map(lambda raw: f"blake3:{raw.hex()}"),
        **_common,
    ),
    st.builds(Entry, path=_paths, kind=st.just("directory"), opaque=st.booleans(), **_common),
    st.builds(Entry, path=_paths, kind=st.just("symlink"), target=_paths, **_common),
    st.builds(Entry, path=_paths, kind=st.just("fifo"), **_common),
    st.builds(Entry, path=_paths, kind=st.just("deleted"), before=_common["before"]),
)


def _tree(entries: list[Entry]) -> tuple[Entry, ...]:
    """The entries that can be in one tree, in order."""
    found: dict[bytes, Entry] = {}
    for entry in sorted(entries, key=lambda entry: path_bytes(entry.path)):
        raw = path_bytes(entry.path)
        above = [raw.rsplit(b"/", count)[0] for count in range(1, raw.count(b"/"))]
        if all(found[path].kind == "directory" for path in above if path in found):
            found.setdefault(raw, entry)
    return tuple(found.values())


_trees = st.lists(_entries, max_size=8).map(_tree)


@given(_trees)
def test_a_manifest_says_the_same_when_it_is_read_again(entries: tuple[Entry, ...]) -> None:
    data = Manifest(entries).encode()
    assert Manifest.parse(data) == Manifest(entries)
    assert Manifest.parse(data).encode() == data


@given(_trees)
def test_what_was_there_before_does_not_count(entries: tuple[Entry, ...]) -> None:
    others = tuple(replace(entry, before="") if entry.kind == "file" else entry for entry in entries)
    assert Manifest(entries).digest == Manifest(others).digest


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/b"},
        {"mode": 0o645},
        {"uid": 1},
        {"gid": 1},
        {"size": 4},
        {"digest": "blake3:" + "1f" * 32},
        {"xattrs": {"user.a": b""}},
    ],
)
def test_everything_that_a_job_can_see_counts(change: dict[str, Any]) -> None:
    entry = Entry("/a", "file", 0o644, size=3, digest=DIGEST)
    assert Manifest((entry,)).digest != Manifest((replace(entry, **change),)).digest


def test_a_manifest_is_in_a_store_under_its_content_name() -> None:
    store = MemoryStore("manifests")
    manifest = Manifest((Entry("/a", "file", 0o644, size=3, digest=DIGEST),))
    stored = store_manifest(store, manifest)
    assert stored.name.startswith("sha256:")
    assert load_manifest(store, stored) == manifest
    with pytest.raises(PermanentError, match="larger than"):
        load_manifest(store, Stored(stored.name, stored.size_bytes - 1))


def _packed(*lines: Any, entries: int | None = None, schema: str = SCHEMA) -> bytes:
    head = {"schema": schema, "entries": len(lines) if entries is None else entries}
    return zstandard.compress("".join(json.dumps(line) + "\n" for line in (head, *lines)).encode())


@pytest.mark.parametrize(
    "path",
    [
        *("", "a", "/", "//a", "/a/", "/a//b", "/a/../b", "/..", "/a/.", "/a\0b", "/" + "n" * 256, "/n" * 3000),
        *("/\ud800", "/\udcc3\udca9", "/../../etc/passwd"),
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(CorruptError):
        Manifest.parse(_packed(FILE | {"path": path}))


def test_a_manifest_of_version_0_2_is_read_in_which_entries_have_another_key() -> None:
    assert Manifest.parse(_packed(FILE | {"loose": True})) == Manifest.parse(_packed(FILE))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "device"},
        {"kind": "directory"},
        {"kind": ["file"]},
        {"mode": -1},
        {"mode": 0o10000},
        {"mode": True},
        {"mode": 1.0},
        {"uid": 2**32 - 1},
        {"size": -1},
        {"size": 2**63},
        {"size": "3"},
        {"digest": ""},
        {"digest": "sha256:" + "00" * 32},
        {"digest": None},
        {"target": "/x"},
        {"opaque": True},
        {"opaque": 1},
        {"before": "file:md5:0"},
        {"before": "symlink:"},
        {"xattrs": ["user.a"]},
        {"xattrs": {"user.a": 1}},
        {"xattrs": {"trusted.overlay.redirect": "L2V0Yw=="}},
        {"xattrs": {"user.a": "no base64"}},
        {"xattrs": {"user." + "a" * 255: ""}},
        {"link": "/z"},
        {"kind": "symlink", "target": "", "size": 0, "digest": ""},
        {"kind": "symlink", "target": "a\0b", "size": 0, "digest": ""},
    ],
)
def test_fields_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    Manifest.parse(_packed(FILE))
    with pytest.raises(CorruptError):
        Manifest.parse(_packed(FILE | change))


def test_entries_that_contradict_each_other_are_refused() -> None:
    link, below = FILE | {"path": "/b", "link": "/a"}, FILE | {"path": "/a/b"}
    assert Manifest.parse(_packed(FILE, link)).entries[1].link == "/a"
    for lines in (
        [FILE, FILE],
        [link | {"link": ""}, FILE],  # not in order
        [FILE, below],  # below a file
        [{"path": "/a", "kind": "deleted"}, below],
        [{"path": "/a", "kind": "symlink", "target": "/etc"}, FILE | {"path": "/a/b/c"}],
        [FILE, FILE | {"path": "/a-"}, FILE | {"path": "/a-b"}, below],  # sorted before what is below the first
        [FILE, link | {"digest": "blake3:" + "00" * 32}],
        [link | {"path": "/a", "link": "/b"}, FILE | {"path": "/b"}],  # hard link to a later entry
        [FILE, link, link | {"path": "/c", "link": "/b"}],  # hard link to a hard link
    ):
        with pytest.raises(CorruptError):
            Manifest.parse(_packed(*lines))


def test_names_that_begin_alike_are_no_contradiction() -> None:
    paths = ["/a", "/a-", "/a-/b", "/a-b", "/a-b/c", "/ab"]
    rows = [
        FILE | {"path": path} if path not in ("/a-", "/a-b") else {"path": path, "kind": "directory"} for path in paths
    ]
    assert [entry.path for entry in Manifest.parse(_packed(*rows)).entries] == paths


def test_a_path_is_not_looked_up_once_for_each_folder_above() -> None:
    """Of two thousand each: a manifest of a megabyte took an hour."""
    data = Manifest(tuple(Entry(f"{'/a' * 2000}/{number}", "deleted") for number in range(9))).encode()
    calls: Counter[str] = Counter()

    def note(_frame: object, event: str, function: object) -> None:
        calls.update([getattr(function, "__name__", "")] if event == "c_call" else [])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        Manifest.parse(data)
    finally:
        sys.setprofile(before)
    del calls["len"]  # of each name
    assert calls.total() < 2000


def test_damaged_bytes_are_refused() -> None:
    data = _packed(FILE)
    text = zstandard.decompress(data)
    for damaged in (
        b"",
        b"not a frame",
        data[:-1],
        data + b"x",
        data + data,
        _packed(FILE, entries=2),
        _packed(schema="bootseer.index/1"),
        zstandard.compress(b""),
        zstandard.compress(text[:-1]),
        zstandard.compress(text + b"[1]\n"),
        zstandard.compress(b"\xff" + text),
        zstandard.compress(b"[" * 100_000 + b"\n"),
    ):
        with pytest.raises(CorruptError):
            Manifest.parse(damaged)
    with pytest.raises(PermanentError, match="this BootSeer supports"):
        Manifest.parse(_packed(schema="bootseer.manifest/2"))


def test_a_small_frame_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptError, match="line of more than"):
        Manifest.parse(zstandard.compress(b" " * (format_.MAX_LINE_BYTES * 64)))
    monkeypatch.setattr(format_, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(CorruptError, match="bytes of text"):
        Manifest.parse(zstandard.compress(b"{}\n" * 1000))
    monkeypatch.setattr(format_, "MAX_STORED_BYTES", 10)
    with pytest.raises(CorruptError, match="more than the 10"):
        Manifest.parse(_packed(FILE))


@given(st.data())
def test_no_damage_to_the_text_ends_in_another_error(data: st.DataObject) -> None:
    text = bytearray(zstandard.decompress(_packed(FILE, FILE | {"path": "/b", "xattrs": {"user.a": "eHg="}})))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        entries = Manifest.parse(zstandard.compress(bytes(text))).entries
    except BootseerError:
        return
    assert all(entry.path.startswith("/") and ".." not in entry.path.split("/") for entry in entries)
