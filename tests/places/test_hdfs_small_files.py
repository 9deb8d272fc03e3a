"""Small files in HDFS, with a NameNode that fails meanwhile."""

from __future__ import annotations

from contextlib import closing

import pytest

pytest.importorskip("google_crc32c", reason="extra hdfs")

from bootseer.errors import TransientError
from bootseer.hdfs.protobuf import Message, field
from bootseer.places import open_place
from hdfs.peers import FakeNameNode

FILE = b"".join(
    field(number, value) for number, value in ((1, 2), (3, 0), (4, field(1, 0o644)), (5, "me"), (6, "us"), (7, 1))
)
EXISTS = ("org.apache.hadoop.fs.FileAlreadyExistsException", "it is there already")


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_small_file_that_could_not_be_completed_is_written_again(failures: int) -> None:
    names: set[str] = set()
    left = [failures]

    def create(request: Message) -> bytes | tuple[str, str]:
        if request.text(1) in names:
            return EXISTS
        names.add(request.text(1))
        return field(1, FILE)

    def complete(_: Message) -> bytes | tuple[str, str]:
        left[0] -= 1
        return ("java.io.IOException", "the journal is slow") if left[0] >= 0 else field(1, True)

    def rename(request: Message) -> bytes:
        names.remove(request.text(1))
        names.add(request.text(2))
        return b""

    with FakeNameNode() as namenode:
        namenode.answers |= {
            "create": create,
            "complete": complete,
            "rename2": rename,
            "getFileInfo": lambda _: field(1, FILE),
            "delete": lambda _: ("java.io.IOException", "the journal is slow"),
            "getServerDefaults": lambda _: field(
                1, field(1, 1 << 27) + field(2, 512) + field(4, 1) + field(6, False) + field(8, 2)
            ),
        }
        with closing(open_place(f"hdfs://127.0.0.1:{namenode.port}/folder")) as place:
            if failures == 3:
                with pytest.raises(TransientError, match="the journal is slow"):
                    place.create_bytes("a", b"")
                assert "/folder/a" not in names
            else:
                assert place.create_bytes("a", b"")
                assert "/folder/a" in names
