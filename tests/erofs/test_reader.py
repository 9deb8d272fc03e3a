"""The reader with damaged and malicious images."""

from __future__ import annotations

import contextlib
import io
import stat
import struct
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.erofs.format import BLOCK, DIRENT, INODE, Attributes, Superblock, file_type
from bootseer.erofs.merged import Layer, MergedLayers
from bootseer.erofs.reader import ErofsReader
from bootseer.erofs.writer import ROOT, ErofsWriter
from bootseer.errors import BootseerError, CorruptError, PermanentError


@cache
def _image() -> bytes:
    file = io.BytesIO(bytes(BLOCK))
    file.seek(BLOCK)
    writer = ErofsWriter(file)
    tree = writer.tree
    writer.write(b"content" * 1000)
    extent = writer.end_file()
    plain = Attributes(stat.S_IFREG | 0o644, xattrs={b"user.a": b"1", b"trusted.b": b"22"})
    tree.link(ROOT, b"file", tree.add(plain, size=extent.size, first_block=extent.block))
    tree.link(ROOT, b"link", tree.add(Attributes(stat.S_IFLNK | 0o777), target=b"file"))
    directory = tree.add(Attributes(stat.S_IFDIR | 0o755))
    tree.link(ROOT, b"directory", directory)
    for number in range(300):
        tree.link(directory, b"name %d" % number, tree.add(Attributes(stat.S_IFREG | 0o600)))
    file.getbuffer()[:BLOCK] = writer.finish()
    return file.getvalue()


def _reader(image: bytes | bytearray) -> ErofsReader:
    return ErofsReader(lambda offset, length: bytes(image[offset : offset + length]))


def _read_all(image: bytes | bytearray) -> int:
    reader = _reader(image)
    read = 0
    for _, inode in reader.walk():
        reader.xattrs(inode)
        if stat.S_ISREG(inode.mode):
            read += sum(map(len, reader.read(inode)))
        elif stat.S_ISLNK(inode.mode):
            read += len(reader.readlink(inode))
        elif stat.S_ISDIR(inode.mode):
            reader.lookup(inode, b"name 7")
    return read


def test_a_good_image_is_read_whole() -> None:
    assert _read_all(_image()) == 7004


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=12))
def test_any_damage_is_an_error_or_a_tree_but_never_a_crash(damage: list[tuple[int, int]]) -> None:
    image = bytearray(_image())
    for place, value in damage:
        image[BLOCK + place % (len(image) - BLOCK)] = value
    with contextlib.suppress(CorruptError):
        _read_all(image)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=128, max_size=128))
def test_any_superblock_is_an_error_or_read(raw: bytes) -> None:
    image = bytearray(_image())
    image[1024:1152] = raw
    with contextlib.suppress(BootseerError):
        _read_all(image)


@pytest.mark.parametrize("place", [*range(1024, 1144, 3), 2000, 4095])
def test_a_superblock_with_one_wrong_bit_is_refused(place: int) -> None:
    image = bytearray(_image())
    image[place] ^= 1
    with pytest.raises(PermanentError, match="EROFS"):
        _reader(image)


def test_an_image_that_ends_early_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="bytes read at"):
        _read_all(_image()[:-BLOCK])


def test_an_empty_file_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        _reader(b"")


def _meta(image: bytes) -> int:
    return Superblock.parse(image[:BLOCK]).meta_block * BLOCK


def _root_directory(image: bytes) -> int:
    """The offset of the root's entries, which follow its inode."""
    return _meta(image) + INODE.size


def test_a_directory_that_contains_itself_is_corrupt() -> None:
    image = bytearray(_image())
    at = _root_directory(image)
    position = [name for name, _, _ in _names(image)].index(b"directory")
    DIRENT.pack_into(image, at + position * DIRENT.size, 0, *DIRENT.unpack_from(image, at + position * DIRENT.size)[1:])
    with pytest.raises(CorruptError, match="contains itself"):
        _read_all(image)


def _names(image: bytes | bytearray) -> list[tuple[bytes, int, int]]:
    from bootseer.erofs.format import decode_directory_block

    at = _root_directory(bytes(image))
    size = INODE.unpack_from(image, _meta(bytes(image)))[4]
    return list(decode_directory_block(bytes(image[at : at + size])))


def test_an_entry_of_another_type_than_its_file_is_corrupt() -> None:
    image = bytearray(_image())
    place = _root_directory(image) + [name for name, _, _ in _names(image)].index(b"file") * DIRENT.size
    number, offset, _ = DIRENT.unpack_from(image, place)
    DIRENT.pack_into(image, place, number, offset, file_type(stat.S_IFIFO))
    root = MergedLayers([Layer(_reader(image), "layer")]).root
    assert root is not None
    with pytest.raises(CorruptError, match="differ"):
        root.child(b"file")
    with pytest.raises(CorruptError, match="differ"):
        list(root.children())


@pytest.mark.parametrize("size", [2**63, 2**40, 1 << 30])
def test_a_file_larger_than_its_image_is_corrupt(size: int) -> None:
    image = bytearray(_image())
    numbers = {name: number for name, number, _ in _names(image)}
    struct.pack_into("<Q", image, _meta(bytes(image)) + numbers[b"file"] * 32 + 8, size)
    with pytest.raises(CorruptError, match="outside"):
        _read_all(image)


def test_entries_out_of_order_are_corrupt() -> None:
    image = bytearray(_image())
    at = image.index(b"name 1name 10")
    image[at : at + 6] = b"name 9"
    with pytest.raises(CorruptError, match="not in order"):
        _read_all(image)


@pytest.mark.parametrize("place", [b"a1\0", b"file\0"])
def test_a_zero_byte_in_the_name_of_an_attribute_or_in_a_target_is_corrupt(place: bytes) -> None:
    """No system call takes one: unpacking would end in a `ValueError`."""
    image = bytearray(_image())
    image[image.rindex(place)] = 0
    with pytest.raises(CorruptError):
        _read_all(image)
