"""Process snapshots: the memory images of a process that has done the imports of a job, on this node and in a store.

A snapshot is one object, of the same form in both places: a line with a document, then the files as one zstd frame
(docs/formats/process-snapshot.md). So a store replaces both at once, and no reader gets the document of one snapshot
with the files of another. The document may be signed. What was fetched is verified at each start; what this node made
needs no signature here. Each node of a job reads the document from the store. The frame, which is large, comes from
the job's other nodes if they have it or are getting it (`peers.shared_objects`).

A start works without a snapshot, so problems are reported as a line and never raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import zstandard
from blake3 import blake3
from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer import __version__
from bootseer.artifact.child import Child, result_of, start_child
from bootseer.artifact.document import decode, encode, readable
from bootseer.artifact.objects import offer
from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import Signatures, is_signed, stored_limit
from bootseer.errors import (
    AccessError,
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    SignatureError,
    TooShortError,
)
from bootseer.io.retry import retrying
from bootseer.mounts.process import readable as await_readable
from bootseer.store.open import open_store
from bootseer.store.store import Store, Stored

if TYPE_CHECKING:
    from bootseer.peers.shared_objects import OfferedObject

SCHEMA = "bootseer.process/1"
FETCHED = "fetched"
"""The folder that appears beside the unpacked files' one when the snapshot has come too late for this start."""
MAX_STORED_BYTES = 2 << 30
"""Of the compressed files."""
_MAX_BYTES = 16 << 30
"""Of the files."""
_MAX_LINE = 1 << 20
_MAX_KEPT = 8
_FETCH_S = 60.0
_WAIT_S = 4.0
"""A start waits no longer for a snapshot that is still being fetched, and so long again until it is unpacked."""
_ABANDONED_S = 3600.0
"""A temporary file of this age belongs to a process that was killed."""
_PIECE = 1 << 20
_PART = 4 << 20
"""What nodes send each other at once, too (`peers.protocol.MAX_RANGE`)."""
_HEAD = 1 << 14
"""Most documents have fewer bytes."""
_LEVEL = 3
_MAX_WINDOW = 8 << 20
_MAX_THREADS = 4
_CPU = (
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)

_Name = Annotated[str, Meta(max_length=100, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*\Z")]
_Size = Annotated[int, Meta(ge=0, le=_MAX_BYTES)]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


@readable
class _Document(Struct, frozen=True):
    name: Annotated[str, Meta(max_length=512)]
    """Of the object in the store; empty if this node has made it."""
    stored_bytes: Annotated[int, Meta(ge=1, le=MAX_STORED_BYTES)]
    parts: Annotated[tuple[_Digest, ...], Meta(max_length=MAX_STORED_BYTES // _PART)]
    """BLAKE3 of each 4 MiB of the compressed files, which nodes pass on while they receive the rest."""
    files: Annotated[tuple[tuple[_Name, _Size], ...], Meta(min_length=1, max_length=4096)]
    """Names and sizes, in the order of the files."""

    def __post_init__(self) -> None:
        if len({name for name, _ in self.files}) < len(self.files):
            raise ValueError("two files have the same name")
        if self.size_bytes > _MAX_BYTES:
            raise ValueError(f"the files have {self.size_bytes} bytes, at most {_MAX_BYTES} are allowed")
        if len(self.parts) != math.ceil(self.stored_bytes / _PART):
            raise ValueError(f"{self.stored_bytes} bytes do not have {len(self.parts)} parts")

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)


def process_name(digest: str, key: str) -> str:
    """The name of a snapshot in a store, for an image's or environment's digest, and a key of workload and machine."""
    return f"processes/{digest.replace(':', '-')}/{key}"


def machine_key() -> str:
    """16 hexadecimal digits, equal on machines whose processes may have the same snapshot.

    The C library, interpreter and libraries are not included: CRIU compares the files that a process has mapped.
    """
    system = os.uname()
    with open("/proc/cpuinfo", "rb", buffering=0) as file:  # noqa: PTH123
        # Not all of it: the kernel interrupts each processor to get its frequency.
        first = file.read(1 << 13).decode(errors="replace").partition("\n\n")[0]
    fields = {
        name.strip(): sorted(words.split()) for name, _, words in (row.partition(":") for row in first.split("\n"))
    }
    facts = [
        *(__version__, system.machine, *system.release.split(".")[:2], os.sysconf("SC_PAGE_SIZE")),
        *(os.cpu_count(), len(os.sched_getaffinity(0)), *(fields.get(name) for name in _CPU)),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


class _Shared(Struct, frozen=True):
    """Where a snapshot is shared."""

    name: str
    digest: str
    store_uri: str
    plain_http: bool
    signatures: Signatures
    publish: bool

    def open_store(self, *, mirrored: bool = False) -> Store:
        return open_store(self.store_uri, plain_http=self.plain_http, mirrored=mirrored)


class ProcessSnapshot:
    """The snapshot of one job on this node. For one thread, and for the process that calls `fetch`."""

    def __init__(self, path: Path, into: Path, say: Say) -> None:
        """`path`: the compressed snapshot, in a folder that has nothing else. `into`: the folder that its files are
        unpacked to, which is created when they are complete. `say` gets a line for each problem."""
        self._path = path
        self._into = into
        self._say = say
        self._shared: _Shared | None = None
        self._child: Child | None = None

    def fetch(
        self, *, digest: str, workload: str, store_uri: str, plain_http: bool, signatures: Signatures, publish: bool
    ) -> None:
        """Remember where the snapshot is shared, and start a child process that fetches it, if this node has none, and
        unpacks it.

        Call it while this process has one thread. Later calls do nothing.
        """
        if self._shared is not None:
            return
        try:
            name = process_name(digest, f"{workload}-{machine_key()}")
            self._shared = _Shared(name, digest, store_uri, plain_http, signatures, publish)
            self._child = start_child(partial(_obtain, self._shared, self._path, self._into), alone=True)
        except OSError as error:
            self._say(f"no process snapshot: {error}")

    def unpack(self) -> bool:
        """Complete the folder of unpacked files; returns whether there is one. Waits a few seconds for the child.

        If that is still fetching, it goes on for later starts, and will not unpack anything.
        """
        child, self._child = self._child, None
        try:
            if child is not None and not await_readable([child.answer], _WAIT_S) and _claim(self._into):
                os.close(child.answer)
                self._say("the process snapshot is still being fetched: a later start on this node uses it")
            elif child is not None:
                for line in result_of(child, deadline_s=_WAIT_S):
                    self._say(line)
            elif not self._into.exists():
                _obtain(None, self._path, self._into)
        except NotFoundError:
            pass
        except (BootseerError, OSError) as error:
            self._say(f"no process snapshot: {error}")
        return self._into.is_dir()

    def keep(self, folder: Path) -> None:
        """Compress the files of `folder`, replace this node's snapshot, and publish it if `fetch` was told so.

        The store's client may have threads afterwards.
        """
        try:
            with _new_file(self._path) as file:
                _pack(folder, file)
        except (BootseerError, OSError, zstandard.ZstdError) as error:
            self._say(f"the process snapshot was not kept: {error}")
            return
        if self._shared is not None and self._shared.publish:
            try:
                with closing(self._shared.open_store()) as store:
                    self._publish(self._shared, store)
            except (BootseerError, OSError) as error:
                refused = "; it is kept on this node" if isinstance(error, AccessError) else ""
                self._say(f"the process snapshot was not published: {error}{refused}")

    def _publish(self, shared: _Shared, store: Store) -> None:
        # Unsigned, it would replace one that nodes which require signatures use, and take it away from them.
        signatures = shared.signatures
        if not signatures.signing and (signatures.trusted or _has_signed(store, shared.name)):
            self._say("the process snapshot was not published: it must be signed, and there is no key")
            return
        upload = store.upload()
        try:
            with self._path.open("rb") as file:
                document = _parse(file.readline(_MAX_LINE), str(self._path))
                line = signatures.seal(shared.name, encode(replace(document, name=shared.name), SCHEMA))
                upload.write(line + b"\n")
                while data := file.read(_PIECE):
                    upload.write(data)
            try:
                # With the image as its subject, a registry deletes the snapshot with it.
                upload.commit(shared.name, subject=shared.digest)
            except NotFoundError:  # a store that does not have the image itself
                upload.commit(shared.name)
        finally:
            upload.abort()  # no effect after a commit


def _has_signed(store: Store, name: str) -> bool:
    try:
        with closing(store.read(name)) as pieces:
            return is_signed(next(pieces, b""))
    except NotFoundError:
        return False


def _unfinished(into: Path) -> Path:
    return into.with_name(f".{into.name}")


def _claim(into: Path) -> bool:
    """Whether the caller may unpack: a child that fetches, or the start which waits for it no longer."""
    try:
        _unfinished(into).mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _obtain(shared: _Shared | None, path: Path, into: Path) -> list[str]:
    """Copy the store's snapshot to this node, if it has none, and unpack it. Files and folder get their names when they
    are complete and verified. Returns messages for the user. Raises `BootseerError` and `OSError`."""
    said: list[str] = []
    if shared is not None and not path.exists():
        with closing(shared.open_store(mirrored=True)) as store:
            _copy(shared, store, path, said.append)
    own_folder(path.parent, make=False)
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise NotFoundError("there is none") from error
    unfinished = _unfinished(into)
    with file:
        if shared is not None:
            _offer(file.readline(stored_limit(_MAX_LINE)), os.fstat(file.fileno()).st_size, path)
            file.seek(0)
        if not _claim(into):
            unfinished.rename(into.with_name(FETCHED))
            return said
        try:
            _unpack(file, unfinished, shared)
            unfinished.rename(into)
        except (CorruptError, SignatureError) as error:
            path.unlink(missing_ok=True)  # the next start gets the store's
            raise type(error)(f"{path}: {error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    os.utime(path)  # the oldest are deleted
    return said


def _copy(shared: _Shared, store: Store, path: Path, say: Say) -> None:
    """Copy a snapshot to this node: its line from the store, and its frame from the job's other nodes, or from the
    store what these do not send. `say` gets a line for each node that sent wrong bytes."""
    until_s = time.monotonic() + _FETCH_S
    line = retrying(lambda left_s: _read_line(shared, store, left_s), deadline_s=_FETCH_S)
    document = _verified(line.removesuffix(b"\n"), shared, store.uri)
    size_bytes = len(line) + document.stored_bytes
    with _new_file(path) as file:
        file.write(line)

        def keep(part: bytearray | memoryview) -> bool:
            number = (file.tell() - len(line)) // _PART
            if (blake3(part).hexdigest(),) != document.parts[number : number + 1]:
                return False
            file.write(part)
            file.flush()  # for other nodes
            return True

        def read(left_s: float) -> None:
            wrong = CorruptError(f"{store.uri}: {shared.name}: its bytes do not have the digests in its document")
            part = bytearray()
            with closing(store.read(shared.name, file.tell(), timeout_s=left_s)) as pieces:
                for piece in pieces:
                    part += piece
                    while part and len(part) >= (length := min(size_bytes - file.tell(), _PART)):
                        if not keep(part[:length]):
                            raise wrong
                        del part[:length]
            if file.tell() < size_bytes:
                raise wrong

        file.flush()
        offered = _offer(line, size_bytes, path, Path(file.name))
        try:
            if offered is not None:
                offered.copy(len(line), keep, say)
            if file.tell() < size_bytes:
                retrying(read, deadline_s=until_s - time.monotonic())
        except BaseException:
            if offered is not None:
                offered.withdraw()
            raise


def _offer(line: bytes, size_bytes: int, path: Path, growing: Path | None = None) -> OfferedObject | None:
    """Offer a snapshot to the job's other nodes, by the digest of its line, which has those of the frame."""
    return offer(Stored(f"sha256:{hashlib.sha256(line).hexdigest()}", size_bytes), path, growing)


def _read_line(shared: _Shared, store: Store, timeout_s: float) -> bytes:
    """The line of the store's snapshot, and not much more."""
    head, limit = b"", stored_limit(_MAX_LINE)
    while b"\n" not in head:
        at = len(head)
        try:
            head += b"".join(store.read(shared.name, at, max(at, _HEAD), timeout_s=timeout_s))
        except TooShortError:  # it ends before
            head += b"".join(store.read(shared.name, at, timeout_s=timeout_s))
        if at > limit or len(head) == at:
            raise CorruptError(f"{store.uri}: {shared.name} does not begin with a document")
    return head[: head.index(b"\n") + 1]


def _verified(sealed: bytes, shared: _Shared, where: str) -> _Document:
    """The document of a snapshot from a store."""
    document = _parse(shared.signatures.open(shared.name, sealed, where), where)
    if document.name != shared.name:
        raise CorruptError(f"{where}: {shared.name} is of another image, environment, workload or machine")
    return document


def _parse(line: bytes, where: str) -> _Document:
    return decode(line, _Document, f"{where}: process snapshot", limit=_MAX_LINE, schema=SCHEMA)


def _pack(folder: Path, file: BinaryIO) -> None:
    """Write a snapshot of the files of `folder`."""
    files = tuple(sorted((path.name, path.stat(follow_symlinks=False).st_size) for path in folder.iterdir()))
    size_bytes = sum(size for _, size in files)
    most_parts = min(math.ceil(size_bytes * 1.01 / _PART) + 1, MAX_STORED_BYTES // _PART)
    zeros = _Document("", most_parts * _PART, ("0" * 64,) * most_parts, files)
    # Replaced at the end, when size and digests are known: by a line of this length, which ends with spaces.
    length = len(encode(zeros, SCHEMA))
    _parse(encode(zeros, SCHEMA), str(folder))
    file.write(b" " * length + b"\n")
    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, threads=threads).compressobj()
    stored_bytes = 0
    compressed = map(packer.compress, _contents(folder, files))
    for data in chain(compressed, (packer.flush() for _ in (None,))):
        stored_bytes += file.write(data)
        if stored_bytes > MAX_STORED_BYTES:
            raise PermanentError(f"it has more than {MAX_STORED_BYTES} bytes")
    file.seek(length + 1)
    parts = tuple(blake3(part).hexdigest() for part in iter(partial(file.read, _PART), b""))
    document = _Document("", stored_bytes, parts, files)
    file.seek(0)
    file.write(encode(document, SCHEMA).ljust(length))


def _contents(folder: Path, files: tuple[tuple[str, int], ...]) -> Iterator[bytes]:
    for name, size in files:
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            while data := file.read(_PIECE):
                size -= len(data)  # noqa: PLW2901
                yield data
        if size:
            raise PermanentError(f"{folder / name} has changed while it was read")


def _unpack(file: BinaryIO, folder: Path, shared: _Shared | None) -> None:
    line = file.readline(stored_limit(_MAX_LINE) + 1)
    where = "on this node"
    document = None if is_signed(line) else _parse(line, where)
    if document is None or document.name:
        if shared is None:
            raise PermanentError("it comes from a store, and this start has none")
        document = _verified(line.removesuffix(b"\n"), shared, where)
    if os.fstat(file.fileno()).st_size != len(line) + document.stored_bytes:
        raise CorruptError("it is not complete")
    disk = os.statvfs(folder)
    if document.size_bytes > disk.f_bavail * disk.f_frsize:
        raise PermanentError(f"{folder} has no space for its {document.size_bytes} bytes")
    buffer = memoryview(bytearray(_PIECE))
    # By descriptor: a container's user may put a link in this folder's place.
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(file, read_size=_PIECE) as reader:
            for name, size in document.files:
                with open(name, "xb", opener=partial(os.open, mode=0o600, dir_fd=place)) as out:
                    while size > 0:
                        read = reader.readinto(buffer[:size])
                        if not read:
                            raise CorruptError("its files end too early")
                        out.write(buffer[:read])
                        size -= read  # noqa: PLW2901
            if reader.read(1):  # reads the checksum, too
                raise CorruptError("its files are larger than its document says")
    except zstandard.ZstdError as error:
        raise CorruptError(f"it cannot be decompressed: {error}") from error
    finally:
        os.close(place)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name at the end of the block. Deletes the oldest files of its folder."""
    folder = own_folder(path.parent)
    temporary = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(temporary, "x+b", opener=partial(os.open, mode=0o600)) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        files = sorted((found.stat().st_mtime, found) for found in folder.iterdir())
        whole = [found for _, found in files if not found.name.startswith(".")]
        abandoned = [found for changed_s, found in files if time.time() - changed_s > _ABANDONED_S]
        for found in (*whole[:-_MAX_KEPT], *(one for one in abandoned if one.name.startswith("."))):
            found.unlink(missing_ok=True)
