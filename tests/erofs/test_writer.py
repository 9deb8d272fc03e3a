"""Whole images: the kernel shows what was written, fsck accepts it, and our reader reads it."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.erofs.format import Attributes
from bootseer.erofs.writer import ROOT, ErofsWriter
from bootseer.errors import PermanentError
from erofs_images import (
    Facts,
    add_file,
    facts_of_folder,
    facts_of_image,
    fsck,
    mounted,
    needs_root,
    opened,
    write_image,
)

FILE = Attributes(stat.S_IFREG | 0o644)
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # what `setcap cap_net_bind_service+ep` stores
DIRECTORY = Attributes(stat.S_IFDIR | 0o755)

NAMES = st.one_of(
    st.binary(min_size=1, max_size=12).map(lambda raw: raw.replace(b"\0", b"0").replace(b"/", b"_")),
    st.integers(1, 255).map(lambda length: b"n" * length),
    st.sampled_from([b"...", b"!", b"-", b"a.b", b"\xff\xfe", "é".encode()]),
).filter(lambda name: name not in {b".", b".."})
XATTRS = st.dictionaries(
    st.one_of(
        st.sampled_from([b"user.a", b"user.b" * 20, b"trusted.overlay.opaque", b"security.other"]),
        st.integers(1, 40).map(lambda number: b"trusted.number%d" % number),
    ),
    st.one_of(st.binary(max_size=40), st.integers(0, 5000).map(bytes)),
    max_size=4,
)
KINDS = st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO])
ATTRIBUTES = st.builds(
    Attributes,
    mode=st.builds(lambda kind, bits: kind | (0o777 if kind == stat.S_IFLNK else bits), KINDS, st.integers(0, 0o7777)),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    mtime_ns=st.integers(-(10**19), 10**19),
    rdev=st.tuples(st.integers(0, 4095), st.integers(0, 2**20 - 1)),
    xattrs=XATTRS,
)
CONTENT = st.one_of(st.binary(max_size=20), st.integers(0, 20_000).map(lambda size: b"x" * size))
TARGETS = st.one_of(st.binary(min_size=1, max_size=30), st.integers(1, 4095).map(lambda size: b"t" * size)).map(
    lambda raw: raw.replace(b"\0", b"0")
)
# (directory, name, attributes, content, target, whether it is another name of an earlier file)
STEPS = st.lists(
    st.tuples(st.integers(0, 50), NAMES, ATTRIBUTES, CONTENT, TARGETS, st.integers(0, 5)), min_size=0, max_size=40
)


def _fill(steps: list[tuple[int, bytes, Attributes, bytes, bytes, int]]) -> Callable[[ErofsWriter], None]:
    def fill(writer: ErofsWriter) -> None:
        tree = writer.tree
        directories, files = [ROOT], []
        for where, name, given_attributes, content, target, again in steps:
            attributes = given_attributes
            directory = directories[where % len(directories)]
            if tree.child(directory, name) is not None:
                continue
            kind = stat.S_IFMT(attributes.mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):  # Linux has no user attributes on them
                attributes = replace(attributes, xattrs={})
            if again == 0 and files:
                tree.link(directory, name, files[where % len(files)])
                continue
            if kind == stat.S_IFREG:
                number = add_file(writer, attributes, content)
            else:
                number = tree.add(attributes, target=target if kind == stat.S_IFLNK else b"")
            tree.link(directory, name, number)
            (directories if kind == stat.S_IFDIR else files).append(number)

    return fill


@needs_root
@pytest.mark.root
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_the_kernel_and_the_reader_show_what_was_written(
    steps: list[tuple[int, bytes, Attributes, bytes, bytes, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "image")
        write_image(image, _fill(steps))
        fsck(image)
        with opened(image) as reader:
            read = facts_of_image(reader)
        with mounted(image, Path(folder, "mount")) as root:
            assert facts_of_folder(root) == read
        assert len(read) == 1 + len({(*path, name) for path, name in _paths(steps)})


def _paths(steps: list[tuple[int, bytes, Attributes, bytes, bytes, int]]) -> list[tuple[tuple[bytes, ...], bytes]]:
    """The expected names, computed without the code under test."""
    directories: list[tuple[bytes, ...]] = [()]
    files = 0
    found: list[tuple[tuple[bytes, ...], bytes]] = []
    for where, name, attributes, _, _, again in steps:
        directory = directories[where % len(directories)]
        if (directory, name) in found:
            continue
        found.append((directory, name))
        if again == 0 and files:
            continue
        if stat.S_ISDIR(attributes.mode):
            directories.append((*directory, name))
        else:
            files += 1
    return found


def _write_all_kinds(writer: ErofsWriter) -> None:
    tree = writer.tree
    setuid = Attributes(
        stat.S_IFREG | 0o4755, 1000, 2**32 - 2, -1_500_000_001, xattrs={b"security.capability": CAPABILITY}
    )
    both = add_file(writer, setuid, b"hello")
    tree.link(ROOT, b"a", both)
    tree.link(ROOT, b"!b", both)
    tree.link(ROOT, b"device", tree.add(Attributes(stat.S_IFCHR | 0o600, rdev=(4095, 2**20 - 1))))
    tree.link(ROOT, b"link", tree.add(Attributes(stat.S_IFLNK | 0o777), target=b"a"))


@needs_root
@pytest.mark.root
def test_all_attributes_reach_the_kernel(tmp_path: Path) -> None:
    write_image(tmp_path / "image", _write_all_kinds)
    with mounted(tmp_path / "image", tmp_path / "mount") as root:
        found = facts_of_folder(root)
        assert (root / "a").read_bytes() == b"hello"
    file: Facts = found[b"a"]
    assert (file.mode, file.uid, file.gid, file.mtime_ns) == (0o104755, 1000, 2**32 - 2, -1_500_000_001)
    assert (file.nlink, file.same_file, file.xattrs) == (2, b"!b", ((b"security.capability", CAPABILITY),))
    assert (found[b"device"].rdev, found[b"link"].content) == ((4095, 2**20 - 1), b"a")


def _write_many(writer: ErofsWriter) -> None:
    directory = writer.tree.add(DIRECTORY)
    writer.tree.link(ROOT, b"many", directory)
    for number in range(5000):
        writer.tree.link(directory, b"%05d" % number * (1 + number % 40), writer.tree.add(FILE))


@needs_root
@pytest.mark.root
def test_a_directory_of_many_blocks_is_found_by_name(tmp_path: Path) -> None:
    write_image(tmp_path / "image", _write_many)
    fsck(tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "mount") as root, opened(tmp_path / "image") as reader:
        directory = reader.lookup(reader.root(), b"many")
        assert directory is not None
        for number in range(0, 5000, 37):
            name = b"%05d" % number * (1 + number % 40)
            inode = reader.lookup(directory, name)
            assert inode is not None
            assert (root / "many" / name.decode()).stat().st_nlink == inode.nlink == 1
        assert reader.lookup(directory, b"00000x") is None
        assert reader.lookup(directory, b"") is None
        assert len(list((root / "many").iterdir())) == 5000


def _write_deep(writer: ErofsWriter) -> None:
    tree, inside = writer.tree, ROOT
    for _ in range(2000):
        directory = tree.add(DIRECTORY)
        tree.link(inside, b"d", directory)
        inside = directory


@needs_root
@pytest.mark.root
def test_two_thousand_directories_inside_each_other_are_no_problem(tmp_path: Path) -> None:
    write_image(tmp_path / "image", _write_deep)
    with mounted(tmp_path / "image", tmp_path / "mount"):
        done = subprocess.run(["find", ".", "-name", "d"], cwd=tmp_path / "mount", capture_output=True, check=True)
        assert done.stdout.count(b"\n") == 2000
    with opened(tmp_path / "image") as reader:
        assert max(path.count(b"/") for path, _ in reader.walk()) == 1999


def test_fsck_accepts_an_image_whose_last_inode_ends_a_block(tmp_path: Path) -> None:
    def fill(writer: ErofsWriter) -> None:
        for number in range(51):  # with names of two bytes, the last inode ends at offset 4,096
            writer.tree.link(ROOT, b"%02d" % number, writer.tree.add(FILE))

    write_image(tmp_path / "image", fill)
    with opened(tmp_path / "image") as reader:
        assert max(inode.xattrs_at for _, inode in reader.walk()) % 4096 == 0
    fsck(tmp_path / "image")


def test_the_same_tree_gives_the_same_bytes_whatever_the_order_of_names(tmp_path: Path) -> None:
    def fill(order: int) -> Callable[[ErofsWriter], None]:
        def write(writer: ErofsWriter) -> None:
            numbers = {name: writer.tree.add(FILE) for name in (b"a", b"b", b"c")}
            for name in sorted(numbers, reverse=bool(order)):
                writer.tree.link(ROOT, name, numbers[name])

        return write

    for order in (0, 1):
        write_image(tmp_path / str(order), fill(order))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


_IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from test_writer import _write_all_kinds
from erofs_images import write_image
write_image(Path(sys.argv[3]), _write_all_kinds)
"""


@pytest.mark.parametrize("seed", ["0", "7"])
def test_another_process_writes_the_same_bytes(seed: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, here.parent, here, tmp_path / "other"]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": seed, "LC_ALL": "C", "TZ": "Asia/Tokyo"}, umask=0o077)
    write_image(tmp_path / "own", _write_all_kinds)
    assert (tmp_path / "own").read_bytes() == (tmp_path / "other").read_bytes()


def test_unlinked_files_are_not_in_the_image(tmp_path: Path) -> None:
    def fill(writer: ErofsWriter) -> None:
        tree = writer.tree
        gone = tree.add(DIRECTORY)
        tree.link(gone, b"inside", tree.add(FILE))
        tree.link(ROOT, b"gone", gone)
        tree.unlink(ROOT, b"gone")
        tree.unlink(ROOT, b"never there")

    write_image(tmp_path / "image", fill)
    with opened(tmp_path / "image") as reader:
        assert [path for path, _ in reader.walk()] == [b""]


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0", b"n" * 256])
def test_invalid_names_are_refused(name: bytes) -> None:
    tree = ErofsWriter(_Nowhere()).tree
    with pytest.raises(PermanentError, match="not the name of a file"):
        tree.link(ROOT, name, tree.add(FILE))


@pytest.mark.parametrize(
    ("attributes", "target", "words"),
    [
        (Attributes(0o644), b"", "not a known file type"),
        (Attributes(stat.S_IFLNK | 0o777), b"", "symbolic link"),
        (Attributes(stat.S_IFLNK | 0o777), b"t" * 4096, "symbolic link"),
        (Attributes(stat.S_IFCHR, rdev=(4096, 0)), b"", "device number"),
        (Attributes(stat.S_IFBLK, rdev=(0, 2**20)), b"", "device number"),
        (Attributes(stat.S_IFREG, uid=2**32), b"", "owner"),
        (Attributes(stat.S_IFREG, gid=-1), b"", "owner"),
        (Attributes(stat.S_IFREG, xattrs={b"user.a": bytes(65536)}), b"", "extended attribute"),
        (Attributes(stat.S_IFREG, xattrs={b"other.a": b""}), b"", "extended attribute"),
        (Attributes(stat.S_IFREG, xattrs={b"user.%d" % n: bytes(65000) for n in range(5)}), b"", "more than EROFS"),
    ],
)
def test_what_an_image_cannot_hold_is_refused_by_name(attributes: Attributes, target: bytes, words: str) -> None:
    with pytest.raises(PermanentError, match=words):
        ErofsWriter(_Nowhere()).tree.add(attributes, target=target)


def test_an_image_cannot_be_finished_inside_a_file() -> None:
    writer = ErofsWriter(_Nowhere())
    writer.write(b"half")
    with pytest.raises(PermanentError, match="without the end of its last file"):
        writer.finish()


class _Nowhere:
    def write(self, data: bytes | memoryview) -> None:
        """Discard it."""
