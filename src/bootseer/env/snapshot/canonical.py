"""Irrelevant differences between two installations of the same packages, for `env verify --oracle`.

Snapshots are not changed by these rules: they are written as they are, apart from times and headers of bytecode. Each
rule has a reason; files without a rule must be the same, byte for byte.

Does no I/O.
"""

from __future__ import annotations

import json
import marshal
import re
import struct
from collections.abc import Callable, Sequence
from importlib.util import MAGIC_NUMBER

from bootseer.env.snapshot.bytecode import HEADER_BYTES

_IGNORED: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern, re.DOTALL), reason)
    for pattern, reason in (
        (r"/var/log/.*", "a log"),
        (r"/var/cache/ldconfig/aux-cache", "inode numbers and times of libraries, which are compared themselves"),
        (r"/etc/ld\.so\.cache", "made from the libraries, which are compared themselves"),
        (r"/var/cache/fontconfig/.*", "times of folders"),
        (r"/var/cache/man/.*", "made from the pages, which are compared themselves"),
        (r"/usr/lib/locale/locale-archive", "its order is that in which locales were added"),
        (r"/var/lib/dpkg/(status-old|available-old|diversions-old|statoverride-old)", "what was before the last step"),
        (r".*/\.git/(?!HEAD$|packed-refs$|refs/).*", "packing and times of Git; HEAD and the references are compared"),
        (r".*/\.ninja_(log|deps)", "times of a build"),
        (r".*/conda-meta/history", "times of installations"),
        (r".*\.dist-info/(INSTALLER|REQUESTED)", "who installed, and whether it was asked for or needed by another"),
        (r".*\.dist-info/uv_cache\.json", "the time of a local source"),
    )
)


def ignored_reason(path: str) -> str:
    """Why two installations may differ in this file; empty if they must not."""
    return next((reason for pattern, reason in _IGNORED if pattern.fullmatch(path)), "")


def canonical(path: str, data: bytes) -> bytes:
    """The part of a file's content that must be equal, in a canonical form."""
    for pattern, rule in _RULES:
        if pattern.fullmatch(path):
            return rule(data)
    return _elf(data) if data.startswith(b"\x7fELF") else data


def _bytecode(data: bytes) -> bytes:
    """The code without the header, which has the time of the source. It is written in version 2 of the marshal format:
    later versions mark shared objects, depending on what the compiling process had done before."""
    magic, body = data[:4], data[HEADER_BYTES:]
    if magic == MAGIC_NUMBER:
        try:
            return magic + marshal.dumps(marshal.loads(body), 2)  # noqa: S302 - code that a job runs anyway
        except (EOFError, ValueError, TypeError):
            return data  # damaged: compared as it is
    return magic + body


def _record(data: bytes) -> bytes:
    """The sorted list of installed files, without bytecode (uv does not list it) and ignored files."""
    lines = data.splitlines()
    return b"\n".join(sorted(line for line in lines if not _UNCOMPARED.search(line)))


def _paragraphs(data: bytes) -> bytes:
    """Packages sorted by their text: dpkg keeps the order of installation."""
    return b"\n\n".join(sorted(data.strip(b"\n").split(b"\n\n")))


def _json(data: bytes) -> bytes:
    """JSON in one format: pip and uv format it differently."""
    try:
        return json.dumps(json.loads(data), sort_keys=True).encode()
    except (ValueError, RecursionError):
        return data


def _elf(data: bytes) -> bytes:
    """A program or library without debugging sections and build id, which depend on the random build folder."""
    try:
        return b"\0".join(_sections(data))
    except (struct.error, ValueError, IndexError):
        return data


def _sections(data: bytes) -> list[bytes]:
    if data[4:6] != b"\x02\x01":
        raise ValueError("not of 64 bits, little-endian")
    offset, size, count, names = (
        struct.unpack_from(form, data, at)[0] for form, at in (("<Q", 40), ("<H", 58), ("<H", 60), ("<H", 62))
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + number * size) for number in range(count)]
    strings = data[headers[names][4] : headers[names][4] + headers[names][5]]
    found = [data[16:20]]  # kind of file, machine
    for name_at, kind, flags, address, begin, length, *_ in headers:
        name = strings[name_at : strings.index(b"\0", name_at)]
        if name.startswith(_DEBUG) or name in {b".note.gnu.build-id", b".gnu_debuglink", b".shstrtab"}:
            continue
        content = b"" if kind == _NO_BITS else data[begin : begin + length]
        found += [name, struct.pack("<IQQQ", kind, flags, address, length), content]
    return found


_NO_BITS = 8
_DEBUG = (b".debug", b".zdebug")
_UNCOMPARED = re.compile(rb"\.pyc,|\.dist-info/(INSTALLER|REQUESTED|uv_cache\.json|direct_url\.json),")
_RULES: Sequence[tuple[re.Pattern[str], Callable[[bytes], bytes]]] = (
    (re.compile(r".*\.pyc", re.DOTALL), _bytecode),
    (re.compile(r".*\.dist-info/RECORD", re.DOTALL), _record),
    (re.compile(r".*\.dist-info/direct_url\.json", re.DOTALL), _json),
    (re.compile(r"/var/lib/dpkg/(status|available)|/var/lib/apt/extended_states"), _paragraphs),
)
