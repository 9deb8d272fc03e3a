"""Trees of layers, compared with `umoci unpack`: converted and shown by overlayfs, and as written by `unpack`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bootseer.artifact.objects import read_index
from bootseer.artifact.unpacked import unpack
from bootseer.erofs.merged import MergedLayers
from bootseer.erofs.writer import ErofsWriter
from bootseer.errors import BootseerError
from bootseer.image.conversion.convert import block_reader, convert
from bootseer.image.conversion.layer_tree import LayerTree
from bootseer.image.conversion.tar import Member
from bootseer.image.document import ImageDocument
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.store.store import Store
from erofs_images import Facts, Tree, facts_of_folder, fsck, mounted, needs_root, overlaid
from oci_images import (
    Entry,
    device,
    directory,
    fifo,
    file,
    hard_link,
    layer,
    opaque,
    symlink,
    whiteout,
    write_layout,
)
from store_doubles import MemoryStore
from stored import open_merged

pytestmark = [
    pytest.mark.root,
    needs_root,
    pytest.mark.skipif(shutil.which("umoci") is None, reason="needs umoci"),
]
STARTED_NS = time.time_ns()
MADE_UP = stat.S_IFDIR | 0o755


def _convert(folder: Path, layers: Sequence[bytes]) -> tuple[ImageDocument, Store]:
    if not (folder / "layout").exists():
        write_layout(folder / "layout", layers)
    store = MemoryStore(str(folder))
    return convert(open_source(parse_reference(f"oci:{folder}/layout")), store), store


def _unpacked(folder: Path, layers: Sequence[bytes]) -> dict[bytes, Facts]:
    document, store = _convert(folder, layers)
    unpack(open_merged(document, store), folder / "unpacked")
    return facts_of_folder(folder / "unpacked")


def _mounted(folder: Path, layers: Sequence[bytes]) -> dict[bytes, Facts]:
    document, store = _convert(folder, layers)
    with contextlib.ExitStack() as stack:
        folders = []
        for number, part in enumerate(document.layers):
            read = block_reader(store, read_index(store, part.file))
            image = folder / f"{number}.erofs"
            image.write_bytes(read(0, part.file.size_bytes))
            fsck(image)
            folders.append(stack.enter_context(mounted(image, folder / str(number))))
        return facts_of_folder(stack.enter_context(overlaid(folders, folder / "merged")))


def _by_umoci(folder: Path, layers: Sequence[bytes]) -> dict[bytes, Facts] | None:
    if not (folder / "layout").exists():
        write_layout(folder / "layout", layers)
    command = ["umoci", "unpack", "--image", f"{folder}/layout:latest", folder / "umoci"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    return facts_of_folder(folder / "umoci" / "rootfs")


def _comparable(found: Tree, expected: Tree) -> tuple[dict[bytes, Facts], dict[bytes, Facts]]:
    """Both trees without what may differ.

    The attributes of directories that no layer describes are unspecified. umoci does not restore the time of a
    directory after some entries.
    """
    left, right = dict(found), dict(expected)
    for path in found.keys() & expected.keys():
        made_up = found[path].mode == MADE_UP and found[path].mtime_ns == 0
        if made_up and stat.S_ISDIR(expected[path].mode):
            right[path] = left[path]
        elif stat.S_ISDIR(expected[path].mode) and expected[path].mtime_ns >= STARTED_NS:
            right[path] = dataclasses.replace(right[path], mtime_ns=left[path].mtime_ns)
    return left, right


def _check(tmp_path: Path, *layers: Sequence[Entry], links: bool = True) -> dict[bytes, Facts]:
    """Check that both ways agree with umoci. `links` compares the numbers of links, too."""
    tars = [layer(*entries) for entries in layers]
    expected = _by_umoci(tmp_path, tars)
    assert expected is not None
    shown = _mounted(tmp_path, tars)
    assert _unpacked(tmp_path, tars) == shown
    assert set(shown) == set(expected)
    left, right = _comparable(shown, expected)
    for path in shown:
        found, wanted = left[path], right[path]
        if not links:
            found, wanted = (dataclasses.replace(facts, nlink=0, same_file=b"") for facts in (found, wanted))
        assert found == wanted, path
    return shown


def test_an_ordinary_image_is_what_umoci_unpacks(tmp_path: Path) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    shown = _check(
        tmp_path,
        [
            directory("./", mode=0o711, uid=3),
            directory("bin", mode=0o1777),
            file("bin/su", b"x" * 5000, mode=0o4755, uid=1000, gid=2**32 - 2),
            file("bin/ping", b"p", xattrs={"security.capability": capability, "user.note": b"n" * 3000}),
            hard_link("bin/su2", "bin/su"),
            hard_link("bin/su3", "bin/su2"),
            symlink("sbin", "bin", uid=5, mtime=7),
            hard_link("sbin2", "sbin"),
            device("null", 1, 3, mode=0o666),
            device("sda", 8, 259, block=True),
            fifo("pipe", mode=0o620),
            file("new", b"", mtime=0, pax={"mtime": "1700000000.123456789"}),
            file("old", b"", mtime=0, pax={"mtime": "-1.25"}),
            file("caf\udce9", b"not UTF-8"),
            file("d/" + "n" * 200 + "/" + "m" * 200, b"long"),
        ],
        [file("bin/more", b"more"), directory("bin", mode=0o755)],
    )
    assert shown[b"new"].mtime_ns == 1_700_000_000_123_456_789
    assert shown[b"old"].mtime_ns == -1_250_000_000
    assert shown[b"bin/su"].nlink == 3
    assert shown[b"caf\xe9"].size == 9


LOWER = [
    directory("./"),
    directory("usr", mode=0o750, uid=9),
    directory("usr/lib", mode=0o700, gid=8, xattrs={"user.kept": b"1"}),
    file("usr/lib/a", b"a" * 9000, mode=0o600, uid=4),
    file("usr/lib/b", b"b"),
    symlink("lib", "usr/lib"),
    symlink("abs", "/usr/lib"),
    symlink("up", "../../../usr"),
    directory("d"),
    directory("d/e"),
    file("d/e/f", b"f"),
    file("d/g", b"g"),
    file("z", b"z"),
]


@pytest.mark.parametrize(
    "upper",
    [
        pytest.param([whiteout("d/g"), whiteout("z")], id="whiteouts"),
        pytest.param([whiteout("d")], id="whiteout of a directory"),
        pytest.param([whiteout("d"), directory("d", mode=0o711), file("d/n", b"n")], id="directory made anew"),
        pytest.param([opaque("d"), file("d/n", b"n")], id="opaque in front"),
        pytest.param([directory("d"), file("d/n", b"n"), opaque("d")], id="opaque behind"),
        pytest.param([opaque("d/e")], id="opaque in a directory that is not in the layer"),
        pytest.param([file("z", b"new"), whiteout("z")], id="a file beats a whiteout behind it"),
        pytest.param([whiteout("z"), file("z", b"new")], id="a file beats a whiteout in front of it"),
        pytest.param([whiteout("no/such"), opaque("nor/this")], id="nothing to hide"),
        pytest.param([whiteout("d/no/g"), whiteout("d")], id="whiteout of nothing, then of the directory above"),
        pytest.param([whiteout("d/e/f"), whiteout("d")], id="whiteout of something, then of the directory above"),
        pytest.param([file("usr/lib/n", b"n")], id="directories that are not in the layer"),
        pytest.param([file("lib/n", b"n")], id="through a symbolic link"),
        pytest.param([file("abs/n", b"n"), file("up/lib/m", b"m")], id="through links that leave the root"),
        pytest.param([whiteout("lib/a")], id="whiteout through a symbolic link"),
        pytest.param([directory("lib", mode=0o711), file("lib/n", b"n")], id="directory over a symbolic link"),
        pytest.param([file("d", b"file")], id="file over a directory"),
        pytest.param([file("d/e", b"file"), directory("d/e", mode=0o700)], id="file, then directory, over a directory"),
        pytest.param([directory("d/e", xattrs={"user.new": b"2"})], id="directory with other attributes"),
        pytest.param([directory("q"), file("q/a", b"1"), file("q", b"2")], id="file over a directory of the layer"),
        pytest.param([file("q", b"1"), file("q", b"22"), directory("r"), file("r/s"), directory("r")], id="twice"),
        pytest.param([file("./d/../d//h", b"h"), file("/k", b"k")], id="names to be cleaned"),
        pytest.param([file("n/e/w", b"w")], id="directories that are nowhere"),
        pytest.param([], id="empty layer"),
        pytest.param([directory("./", mode=0o700, mtime=5)], id="the root directory itself"),
        pytest.param([whiteout("usr/lib"), file("usr/lib/x", b"x")], id="implicit directory over a whiteout"),
        pytest.param([symlink("l2", "d"), file("l2/n", b"n")], id="through a link of the same layer"),
        pytest.param([file("d/.wh..wh.plnk", b"x")], id="bookkeeping of AUFS"),
        pytest.param([hard_link("n", "usr/lib/a"), whiteout("usr/lib/a")], id="a moved file"),
        pytest.param([hard_link("n", "d/e/f"), whiteout("d/e")], id="a file moved out of a removed directory"),
        pytest.param([hard_link("d/n", "d/g"), opaque("d")], id="a file moved inside an emptied directory"),
        pytest.param([hard_link("n", "d/g"), file("d/g", b"x"), whiteout("d/g")], id="a file over a moved one"),
        pytest.param([hard_link("n", "d/g"), file("d/m"), whiteout("d")], id="a moved file beside a new one"),
        pytest.param([hard_link("n", "d/e/f"), file("d/e/m"), opaque("d")], id="a moved file beside a new one, deeper"),
        pytest.param([opaque("d"), file("d/n"), whiteout("d/g")], id="whiteout in an opaque directory"),
        pytest.param([file("d/n"), whiteout("d/g"), opaque("d")], id="whiteout in a directory made opaque"),
    ],
)
def test_a_second_layer_means_what_it_means_to_umoci(upper: list[Entry], tmp_path: Path) -> None:
    _check(tmp_path, LOWER, upper)


def test_a_hard_link_into_a_lower_layer_is_one_file_with_two_names(tmp_path: Path) -> None:
    shown = _check(tmp_path, LOWER, [hard_link("hard", "usr/lib/a"), hard_link("s", "lib"), file("x")], links=False)
    assert shown[b"hard"].same_file == shown[b"usr/lib/a"].same_file
    assert (shown[b"hard"].nlink, shown[b"hard"].uid) == (2, 4)
    assert shown[b"s"].content == b"usr/lib"


def test_three_layers_resolve_against_everything_below_them(tmp_path: Path) -> None:
    middle = [whiteout("lib"), symlink("lib", "d/e"), directory("usr/lib", mode=0o755, uid=77), whiteout("d/g")]
    _check(tmp_path, LOWER, middle, [file("lib/n", b"n"), file("usr/lib/m", b"m"), file("d/o", b"o")])


def test_a_layer_that_hides_everything_is_the_only_one_left(tmp_path: Path) -> None:
    tars = [layer(*LOWER), layer(opaque(""), file("only", b"x"))]
    document, _ = _convert(tmp_path, tars)
    shown = _unpacked(tmp_path, tars)
    assert [part.diff_id for part in document.layers[:-1]] == [document.config["rootfs"]["diff_ids"][1]]  # type: ignore[index]
    assert set(shown) == {b"", b"only"}
    assert shown[b""].mtime_ns == 1_600_000_000 * 10**9


def test_marks_of_overlayfs_in_a_layer_have_no_power(tmp_path: Path) -> None:
    upper = [directory("d", xattrs={"trusted.overlay.opaque": b"y", "trusted.overlay.redirect": b"/usr"})]
    shown = _mounted(tmp_path, [layer(*LOWER), layer(*upper)])
    assert shown[b"d/e/f"].size == 1
    found = _unpacked(tmp_path, [layer(*LOWER), layer(*upper)])
    assert dict(found[b"d"].xattrs) == {b"trusted.overlay.opaque": b"y", b"trusted.overlay.redirect": b"/usr"}


def test_repeated_marks_cost_no_more_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a layer of a few MB, with a million marks for a directory of a million files, is converted for days."""
    writer = ErofsWriter(io.BytesIO())
    tree = LayerTree(writer, lower=MergedLayers([]))
    for name in (b"a", b"a/b", *(b"a/b/%d" % number for number in range(50)), b"c/d/e", b"c/d/f"):
        tree.add(Member(name, stat.S_IFDIR, 0o755, 0, 0, 0, (0, 0), b"", 0))
    walk, walked = writer.tree.walk_directory, list[int]()

    def counted(inode: int) -> Iterator[tuple[bytes, int]]:
        walked.append(inode)
        return walk(inode)

    monkeypatch.setattr(writer.tree, "walk_directory", counted)
    for mark in (b"a/b/.wh..wh..opq", b"a/.wh.b", b".wh.c", b".wh..wh..opq"):
        for _ in range(2):
            before = len(walked)
            tree.add(Member(mark, stat.S_IFREG, 0o644, 0, 0, 0, (0, 0), b"", 0))
        assert len(walked) == before


NAMES = st.sampled_from(["a", "b", "c", "a/b", "a/c", "b/a", "a/b/c", "c/a/b", "b/b/b"])
CONTENT = st.binary(max_size=8)
FIELDS = st.fixed_dictionaries(
    {"mode": st.sampled_from([0o644, 0o700, 0o4711]), "uid": st.integers(0, 9), "mtime": st.integers(1, 99)}
)
ENTRIES = st.one_of(
    st.builds(lambda name, content, fields: file(name, content, **fields), NAMES, CONTENT, FIELDS),
    st.builds(lambda name, fields: directory(name, **fields), NAMES, FIELDS),
    st.builds(symlink, NAMES, st.sampled_from(["a", "b", "/c", "../a", "a/b"])),
)
MARKS = st.one_of(st.builds(whiteout, NAMES), st.builds(opaque, NAMES))
# Marks come first, as writers put them: after entries in a directory without an entry, their meaning is unspecified.
LAYERS = st.builds(
    lambda marks, entries: [*marks, *entries], st.lists(MARKS, max_size=3), st.lists(ENTRIES, max_size=6)
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LAYERS, min_size=1, max_size=4))
@example([[file("c/a/b", b"")], [whiteout("c/a/b"), opaque("c")]])
def test_whatever_umoci_can_unpack_comes_out_the_same(layers: list[list[Entry]]) -> None:
    with _folder() as folder:
        tars = [layer(directory("./"), *entries) for entries in layers]
        expected = _by_umoci(folder, tars)
        if expected is None:
            with contextlib.suppress(BootseerError):
                _unpacked(folder, tars)
            return
        shown = _unpacked(folder, tars)
        assert shown.keys() == expected.keys()
        left, right = _comparable(shown, expected)
        assert left == right


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
