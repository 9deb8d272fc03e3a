"""The mapping of errors of hdfs-native and of NameNodes. The rest of `native` is tested through its users."""

from __future__ import annotations

import pytest

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    NoSpaceError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)

native = pytest.importorskip("bootseer.hdfs.native", reason="extra hdfs")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("/a"), NotFoundError),
        (FileExistsError("/a for client 127.0.0.1 already exists"), AlreadyExistsError),
        (RuntimeError('RPCError("org.apache.hadoop.security.AccessControlException", "denied")'), AccessError),
        (
            RuntimeError('RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "full")'),
            NoSpaceError,
        ),
        (
            RuntimeError('RPCError("java.io.IOException", "rename destination directory is not empty: /b")'),
            NotEmptyError,
        ),
        (
            RuntimeError('RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "wait")'),
            TransientError,
        ),
        (
            RuntimeError('RPCError("org.apache.hadoop.hdfs.protocol.SnapshotException", "/a has snapshots")'),
            PermanentError,
        ),
        (
            RuntimeError('RPCError("java.lang.IllegalStateException", "Current inode is not a directory: a")'),
            NotFolderError,
        ),
        (OSError("Connection refused (os error 111)"), TransientError),
        (RuntimeError("PanicException: Cannot read past end of the file"), TransientError),
        (CorruptError("one of ours"), CorruptError),
    ],
)
def test_errors_are_mapped_and_name_the_file(error: BaseException, kind: type[BootseerError]) -> None:
    with pytest.raises(BootseerError) as raised, native.mapping("hdfs://host/a"):
        raise error
    assert type(raised.value) is kind
    assert "hdfs://host/a" in str(raised.value) or isinstance(error, BootseerError)


def test_a_java_stack_trace_is_removed() -> None:
    for text in ("gone\n\tat org.apache.hadoop.Code", 'RPCError("x", "gone\\n\\tat org.apache.hadoop.Code")'):
        assert "org.apache.hadoop.Code" not in str(native.mapped(RuntimeError(text), "hdfs://host/a"))


def test_an_answer_of_the_server_is_shown_without_the_librarys_quotes() -> None:
    text = r'RPCError("org.apache.hadoop.security.AccessControlException", "denied: inode=\"/a\":me\n\tat org.Code(x)")'
    for answer in (text, r'RPCError("org.apache.hadoop.security.AccessControlException", "denied: inode=\"/a\":me")'):
        assert str(native.mapped(RuntimeError(answer), "/a")) == '/a: AccessControlException: denied: inode="/a":me'


def test_other_exceptions_are_not_mapped() -> None:
    with pytest.raises(KeyboardInterrupt), native.mapping("hdfs://host/a"):
        raise KeyboardInterrupt
