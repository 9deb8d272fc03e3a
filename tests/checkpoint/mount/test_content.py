"""The content of one open file, with readers controlled by the test."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.mount.content import Content, MountContext
from bootseer.checkpoint.mount.nodes import Nodes
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.filesystem import Data
from bootseer.places.folder import FolderPlace
from bootseer.places.place import Entry

DATA = b"0123456789"


class Version(CheckpointFile):
    """A reader of `DATA`; `before` is called before each asynchronous read."""

    def __init__(self, before: Callable[[], None]) -> None:
        shared = SimpleNamespace(path="f", size_bytes=len(DATA), version="1")
        super().__init__(shared, self._ended)
        self._before = before
        self.is_open = True
        self.answer = DATA

    def read(self, offset: int, length: int) -> bytes:
        return self.answer[offset : offset + length]

    def read_async(
        self,
        offset: int,
        length: int,
        done: Callable[[Data | BootseerError], None],
        room: memoryview | None = None,
    ) -> None:
        self._before()
        done(self.read(offset, length) if self.is_open else PermanentError("f: this file was closed"))

    def _ended(self) -> None:
        self.is_open = False


class Read:
    """A content, its readers, and the answers to the kernel."""

    def __init__(self, folder: Path) -> None:
        self.before: Callable[[], object] = lambda: None
        self.versions: list[Version] = []
        self.answers: list[Data | int] = []
        self.said: list[str] = []
        info = FileInfo(Entry("f", False, len(DATA), 0, 0o644, "o", "g", "1"), len(DATA), is_striped=False)
        context = MountContext(
            files=Files(FolderPlace(folder)),
            open=self._open,
            begin=_refuse,
            rewrite_bytes=0,
            on_error=self.said.append,
            on_read=lambda path, offset, length: None,
        )
        nodes = Nodes(info)
        self.content = Content(nodes.acquire("f", info), context, nodes.detach)

    def _open(self, path: str) -> Version:
        self.versions.append(Version(self._before))
        return self.versions[-1]

    def _before(self) -> None:
        before, self.before = self.before, lambda: None
        before()

    def read(self) -> None:
        self.content.read(2, 4, self.answers.append, memoryview(bytearray(4)))


def _refuse(path: str, mode: int) -> NoReturn:
    raise AssertionError(f"{path} is not written")


@pytest.fixture
def one(tmp_path: Path) -> Read:
    return Read(tmp_path)


def test_a_read_that_begins_while_the_file_is_opened_again_is_answered(one: Read) -> None:
    one.content.begin_reading()
    one.before = one.content.begin_reading
    one.read()
    assert one.answers == [DATA[2:6]]
    assert [version.is_open for version in one.versions] == [False, True], "the unused reader is closed"
    one.read()
    assert one.answers == [DATA[2:6]] * 2
    one.content.close()
    assert not one.versions[-1].is_open
    assert one.said == []


def test_a_read_that_begins_while_the_last_one_closes_the_file_is_answered(one: Read) -> None:
    one.content.begin_reading()
    one.before = one.content.close
    one.read()
    assert one.answers == [DATA[2:6]]
    assert not one.versions[0].is_open


def test_an_answer_of_the_wrong_length_is_logged_and_eio(one: Read) -> None:
    one.content.begin_reading()
    one.versions[0].answer = DATA[:4]
    one.read()
    assert one.answers == [errno.EIO]
    assert one.said == ["reading f: 2 bytes in place of 4"]
