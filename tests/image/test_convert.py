"""Conversion as a whole: what is verified, what is published and when, what is done once, what is reproducible."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from msgspec.structs import replace

from bootseer.artifact.progress import no_progress
from bootseer.artifact.unpacked import unpack
from bootseer.errors import CorruptError, PermanentError, TransientError
from bootseer.image.conversion.convert import convert
from bootseer.image.conversion.layer import ConvertOptions, LayerLimits
from bootseer.image.conversion.layer_document import layer_name
from bootseer.image.document import ImageDocument
from bootseer.image.mounting import resolve
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import ImageSource, open_source
from bootseer.store.file import FileStore
from bootseer.store.store import Store
from oci_images import (
    OCI_LAYER,
    Entry,
    add_blob,
    add_to_index,
    config_of,
    directory,
    file,
    hard_link,
    layer,
    symlink,
    whiteout,
    write_layout,
)
from store_doubles import MemoryStore
from stored import open_merged

BASE = layer(directory("./"), directory("usr"), directory("usr/lib", mode=0o700), symlink("lib", "usr/lib"))
MORE = layer(directory("d"), file("d/a", b"a" * 5000))
NEEDY = layer(file("lib/n", b"n"))


def _source(folder: Path, *layers: bytes) -> ImageSource:
    write_layout(folder, layers)
    return open_source(parse_reference(f"oci:{folder}"))


def _names(store: Store, prefix: str = "") -> list[str]:
    return sorted(stored.name for stored in store.list(prefix))


def _spoil(source: ImageSource, number: int, change: bytes, at: int) -> ImageSource:
    """The source with other bytes in one layer."""
    layers = list(source.layers)
    inner = layers[number].read

    def read(start: int) -> Generator[bytes, None, None]:
        data = bytearray(b"".join(inner(0)))
        data[at : at + len(change)] = change
        yield bytes(data[start:])

    layers[number] = replace(layers[number], read=read)
    return replace(source, layers=tuple(layers))


def test_the_document_is_found_under_the_digest_of_the_manifest(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    source = _source(tmp_path, BASE, MORE)
    document = convert(source, store)
    data = b"".join(store.read(document.name))
    assert ImageDocument.parse(data) == document
    assert document.digest == source.digest
    assert document.config == source.config
    for stored in document.objects:
        assert store.stat(stored.name) == stored


def test_bytes_that_are_not_those_of_the_digest_publish_nothing(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    write_layout(tmp_path, [BASE, layer(file("x", b"0" * 2000))], compression="")
    source = _spoil(open_source(parse_reference(f"oci:{tmp_path}")), 1, b"1", 700)
    with pytest.raises(CorruptError, match=r"layer 2 of 2.*do not match sha256"):
        convert(source, store)
    assert _names(store, "images/") == []
    assert len(_names(store, "layers/")) <= 1  # the intact layer may be kept
    assert convert(open_source(parse_reference(f"oci:{tmp_path}")), store).layers


def test_a_layer_that_the_configuration_does_not_name_publishes_nothing(tmp_path: Path) -> None:
    config = add_blob(tmp_path, json.dumps(config_of([MORE])).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [add_blob(tmp_path, BASE, OCI_LAYER)],
    }
    add_to_index(tmp_path, manifest, "latest")
    store = MemoryStore(str(tmp_path))
    with pytest.raises(CorruptError, match="uncompressed"):
        convert(open_source(parse_reference(f"oci:{tmp_path}")), store)
    assert _names(store) == []


def _given(source: ImageSource, stored: bytes) -> ImageSource:
    """The source with these bytes as its only layer, and their size in its manifest."""
    layer = replace(source.layers[0], size_bytes=len(stored), read=lambda start: (yield stored[start:]))
    return replace(source, layers=(layer,))


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(gzip.compress(MORE, 1, mtime=1), id="gzip"),
        pytest.param(gzip.compress(MORE[:700]) + gzip.compress(MORE[700:]), id="members"),
        pytest.param(zstandard.compress(MORE), id="zstd"),
        pytest.param(MORE, id="plain"),
    ],
)
def test_other_bytes_that_unpack_to_the_layer_are_the_layer(stored: bytes, tmp_path: Path) -> None:
    source = _source(tmp_path, MORE)
    expected = convert(source, MemoryStore(str(tmp_path / "1"))).layers
    assert convert(_given(source, stored), MemoryStore(str(tmp_path / "2"))).layers == expected


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(gzip.compress(MORE.replace(b"aa", b"ab")), id="gzip"),
        pytest.param(gzip.compress(MORE + bytes(512)), id="longer"),
        pytest.param(gzip.compress(MORE)[:-4], id="cut"),
        pytest.param(gzip.compress(MORE) + b"x", id="something behind"),
        pytest.param(gzip.compress(MORE) + gzip.compress(b"x"), id="a member behind"),
        pytest.param(zstandard.compress(MORE[:-512]), id="zstd"),
        pytest.param(zstandard.compress(MORE) + b"x", id="something behind zstd"),
        pytest.param(MORE + bytes(512), id="plain"),
    ],
)
def test_sound_bytes_that_do_not_unpack_to_the_layer_publish_nothing(stored: bytes, tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    with pytest.raises(CorruptError, match="layer 1 of 1"):
        convert(_given(_source(tmp_path, MORE), stored), store)
    assert _names(store) == []


@pytest.mark.parametrize("size", [0, 100])
def test_a_layer_that_is_too_short_is_corrupt(size: int, tmp_path: Path) -> None:
    source = _source(tmp_path, BASE)
    inner = source.layers[0].read

    def read(start: int) -> Generator[bytes, None, None]:
        yield b"".join(inner(0))[start:size]

    with pytest.raises(CorruptError):
        convert(replace(source, layers=(replace(source.layers[0], read=read),)), MemoryStore(str(tmp_path)))


def _unreadable(source: ImageSource) -> ImageSource:
    """The source, whose layers must not be read."""

    def read(start: int) -> Generator[bytes, None, None]:
        raise PermanentError("the layer was read")
        yield b""

    return replace(source, layers=tuple(replace(one, read=read) for one in source.layers))


def test_layers_are_converted_once_for_all_images(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    first = convert(_source(tmp_path / "1", BASE, MORE), store)
    second = convert(_unreadable(_source(tmp_path / "2", BASE, BASE, MORE)), store)
    assert {part.file for part in second.layers} == {part.file for part in first.layers}


def test_a_layer_whose_blocks_are_gone_is_converted_again(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    document = convert(_source(tmp_path, BASE, MORE), store)
    store.delete(document.layers[1].file.stripes[0].name)
    with pytest.raises(PermanentError, match="was read"):
        convert(_unreadable(open_source(parse_reference(f"oci:{tmp_path}"))), store)
    assert convert(open_source(parse_reference(f"oci:{tmp_path}")), store) == document
    assert store.stat(document.layers[1].file.stripes[0].name)


def test_a_layer_document_that_does_not_fit_its_objects_is_made_again(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    document = convert(_source(tmp_path, MORE), store)
    [name] = _names(store, "layers/")
    value = json.loads(b"".join(store.read(name)))
    value["file"]["index_bytes"] += 1
    upload = store.upload()
    upload.write(json.dumps(value).encode())
    upload.commit(name)
    assert convert(open_source(parse_reference(f"oci:{tmp_path}")), store) == document
    assert json.loads(b"".join(store.read(name)))["file"]["identity"] == document.layers[0].file.identity


def test_a_layer_that_needs_lower_ones_is_converted_once_for_each_stack_of_them(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    other_base = layer(directory("./"), directory("lib", mode=0o750))
    first = convert(_source(tmp_path / "1", BASE, NEEDY), store)
    second = convert(_source(tmp_path / "2", other_base, NEEDY), store)
    assert first.layers[1].diff_id == second.layers[1].diff_id
    assert first.layers[1].file != second.layers[1].file
    again = _unreadable(open_source(parse_reference(f"oci:{tmp_path}/1")))
    assert convert(again, store) == first
    # With one more layer above it.
    third = convert(_source(tmp_path / "3", BASE, NEEDY, MORE), store)
    assert third.layers[1].file == first.layers[1].file
    convert(_unreadable(_source(tmp_path / "4", BASE, NEEDY, MORE)), store)


def test_a_list_of_questions_that_an_earlier_version_stored_for_a_layer_is_ignored(tmp_path: Path) -> None:
    expected = convert(_source(tmp_path / "1", BASE, NEEDY), MemoryStore(f"{tmp_path}/other"))
    store = MemoryStore(str(tmp_path))
    options = ConvertOptions()
    name = layer_name(expected.layers[1].diff_id, block_size=options.block_size, level=options.level)
    assert store.create(name, json.dumps({"schema": "bootseer.layer/1", "questions": [["757372"]]}).encode())
    assert convert(_source(tmp_path / "2", BASE, NEEDY), store) == expected


def test_a_layer_at_the_bottom_of_one_image_and_in_the_middle_of_another_is_not_the_same(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    bottom = convert(_source(tmp_path / "1", NEEDY), store)
    middle = convert(_source(tmp_path / "2", BASE, NEEDY), store)
    assert bottom.layers[0].diff_id == middle.layers[1].diff_id
    assert bottom.layers[0].file != middle.layers[1].file
    assert open_merged(middle, store).lookup((b"usr", b"lib", b"n")) is not None


def test_layers_that_wait_for_a_lower_one_leave_others_their_turn(tmp_path: Path) -> None:
    source = _source(tmp_path, BASE, NEEDY, layer(file("lib/m", b"m")), MORE)
    began = threading.Event()

    def read_last(start: int) -> Generator[bytes, None, None]:
        began.set()
        yield from source.layers[3].read(start)

    def read_first(start: int) -> Generator[bytes, None, None]:
        assert began.wait(60)
        yield from source.layers[0].read(start)

    reads = (read_first, source.layers[1].read, source.layers[2].read, read_last)
    layers = tuple(replace(each, read=read) for each, read in zip(source.layers, reads, strict=True))
    store = MemoryStore(str(tmp_path))
    document = convert(replace(source, layers=layers), store, jobs=2)
    assert document == convert(source, MemoryStore(f"{tmp_path} again"), jobs=1)


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_the_result_does_not_depend_on_the_number_of_jobs(jobs: int, tmp_path: Path) -> None:
    layers = [BASE, NEEDY, MORE, layer(file("d/b", b"b")), layer(file("lib/n/../m", b"m"), hard_link("h", "d/b"))]
    document = convert(_source(tmp_path, *layers), MemoryStore(f"{tmp_path}{jobs}"), jobs=jobs)
    assert document == convert(open_source(parse_reference(f"oci:{tmp_path}")), MemoryStore(str(tmp_path)))


def test_progress_reaches_the_end_of_every_layer(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = _source(tmp_path, BASE, MORE)
    convert(source, MemoryStore(str(tmp_path)), progress=lambda *step: seen.append(step))
    total = sum(one.size_bytes for one in source.layers)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_an_interruption_leaves_no_image_and_no_upload(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    source = _source(tmp_path / "layout", BASE, layer(file("noise", os.urandom(3 << 20))))

    def give_up(done: int, total: int) -> None:
        if done > 1 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, store, progress=give_up)
    assert _names(store, "images/") == []
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


def test_an_upload_that_fails_for_a_moment_is_done_again(tmp_path: Path) -> None:
    inner = MemoryStore(str(tmp_path))
    failed: list[int] = []

    class Flaky(MemoryStore):
        def upload(self):  # type: ignore[no-untyped-def]
            if not failed:
                failed.append(1)
                raise TransientError("come again")
            return super().upload()

    assert convert(_source(tmp_path, BASE, MORE), Flaky(str(tmp_path))).layers
    assert failed
    assert _names(inner, "images/")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([file("../x")], "leaves the root directory"),
        ([hard_link("a", "../../x")], "leaves the root directory"),
        ([hard_link("a", "missing")], "which does not exist"),
        ([directory("d"), hard_link("a", "d")], "which is a directory"),
        ([file("a"), file("a/b")], "is not a directory"),
        ([symlink("a", "b"), symlink("b", "a"), file("a/c")], "too many symbolic links"),
        ([file("n" * 256)], "not the name of a file"),
        ([file("d/" * 2500 + "f")], "a path of"),
        ([file("a", xattrs={"user.a": b"x" * 65536})], "extended attribute"),
        ([file("a", uid=2**32 - 1)], "outside Linux's range"),
        ([file(".wh.")], "a whiteout without a name"),
        ([file("./.wh..")], "a whiteout without a name"),
        ([symlink("a", "t" * 5000)], "symbolic link"),
        ([file("./", b"x")], "root directory"),
    ],
)
def test_a_hostile_member_is_refused_with_layer_and_name(entries: list[Entry], words: str, tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    with pytest.raises(PermanentError, match=words) as caught:
        convert(_source(tmp_path, BASE, layer(*entries)), store)
    assert "layer 2 of 2, at '" in str(caught.value)
    assert _names(store, "images/") == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (layer(file("d/" * 200 + "f")), "more than 100 files"),
        (layer(file("zeros", bytes(3 << 20))), "larger than 2.0 MiB"),
        (layer(*(file(f"f{number}") for number in range(101))), "more than 100 files"),
        (BASE + bytes(3 << 20), "larger than 2.0 MiB"),
        (layer(*(symlink(f"l{number}", "x" * 4000) for number in range(50))), "exceed 128.0 KiB"),
        (layer(*(file(f"f{number}", xattrs={"user.a": b"x" * 4000}) for number in range(50))), "exceed 128.0 KiB"),
        (
            layer(
                file(
                    "hole",
                    b"0\n".ljust(512, b"\0"),
                    pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)},
                )
            ),
            "larger than 2.0 MiB",
        ),
    ],
)
def test_a_bomb_is_refused_when_it_reaches_the_limit(data: bytes, words: str, tmp_path: Path) -> None:
    options = ConvertOptions(limits=LayerLimits(unpacked_bytes=2 << 20, members=100, text_bytes=128 << 10))
    with pytest.raises(PermanentError, match=words):
        convert(_source(tmp_path, data), MemoryStore(str(tmp_path)), options=options)


def test_two_thousand_nested_directories_of_which_none_is_described(tmp_path: Path) -> None:
    store = MemoryStore(str(tmp_path))
    document = convert(_source(tmp_path, BASE, layer(file("d/" * 2000 + "f", b"deep"))), store)
    tree = open_merged(document, store)
    node = tree.lookup((b"d",) * 2000 + (b"f",))
    assert node is not None
    assert b"".join(node.content()) == b"deep"


_CONVERT = """
import sys
from pathlib import Path
from bootseer.image.conversion.convert import convert
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.store.open import open_store
def say(done, total):
    print("progress", done, flush=True)
document = convert(open_source(parse_reference(sys.argv[1])), open_store(sys.argv[2]), progress=say)
print(document.encode().decode())
"""


def _layers_of_all_kinds() -> Sequence[bytes]:
    many = [
        file(f"many/{number:04}", b"%d" % number * 100, xattrs={"user.b": b"1", "user.a": b"2"})
        for number in range(300)
    ]
    return [
        BASE,
        layer(directory("many"), *reversed(many)),
        NEEDY,
        layer(whiteout("many/0001"), hard_link("h", "lib/n")),
    ]


@pytest.mark.parametrize(("seed", "mask", "locale"), [("0", 0o077, "C"), ("42", 0o000, "C.UTF-8")])
def test_other_processes_store_the_same_bytes(seed: str, mask: int, locale: str, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", _layers_of_all_kinds())
    here = convert(open_source(parse_reference(f"oci:{tmp_path}/layout")), MemoryStore(str(tmp_path)))
    command = [sys.executable, "-c", _CONVERT, f"oci:{tmp_path}/layout", tmp_path / "store"]
    environment = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": "Asia/Tokyo"}
    done = subprocess.run(command, env=environment, umask=mask, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == here.encode()


@pytest.mark.slow
def test_what_was_killed_is_taken_up_again(tmp_path: Path) -> None:
    layers = [BASE, MORE, layer(file("noise", os.urandom(24 << 20)))]
    write_layout(tmp_path / "layout", layers, compression="")
    command = [sys.executable, "-c", _CONVERT, f"oci:{tmp_path}/layout", tmp_path / "store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line.removeprefix("progress ")) > 1 << 20:
                break
        process.send_signal(signal.SIGKILL)
    store = FileStore(tmp_path / "store")
    assert _names(store, "images/") == []
    document = convert(open_source(parse_reference(f"oci:{tmp_path}/layout")), store)
    assert document == convert(open_source(parse_reference(f"oci:{tmp_path}/layout")), MemoryStore(str(tmp_path)))
    unpack(open_merged(document, store), tmp_path / "out")
    assert (tmp_path / "out" / "noise").stat().st_size == 24 << 20


def test_of_starts_of_one_image_at_once_one_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path / "layout", [BASE])
    reference = parse_reference(f"oci:{tmp_path}/layout")
    request = Request(reference=reference, store=None, cache=tmp_path / "cache", runtime=tmp_path / "run")
    running: list[int] = []
    most: list[int] = []

    def converts(*_: object, **__: object) -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()

    monkeypatch.setattr("bootseer.image.conversion.convert.convert", converts)
    monkeypatch.setattr("bootseer.io.locks._LONG_S", 0.0)
    said: list[str] = []
    with ThreadPoolExecutor(3) as starts:
        for _ in range(3):
            starts.submit(resolve._convert_here, request, str(tmp_path / "store"), said.append, no_progress)
    assert most == [1, 1, 1]
    assert said
    assert all(f" has been converting oci:{tmp_path}/layout since " in line for line in said)
