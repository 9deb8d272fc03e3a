"""The document of an environment snapshot: everything needed before it is mounted.

A store keeps it under `environments/<key>/document`; docs/formats/environment.md specifies the format. The content of a
snapshot is in its block file, the digests of its files in the manifest. Documents from a store are validated here,
field by field; other code relies on that. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode, printable, readable
from bootseer.blocks.block_file import BlockFile
from bootseer.env.changes import lies_in
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, is_content_name

SCHEMA = "bootseer.environment/1"
SCHEMA_DAEMONS = "bootseer.environment/2"
"""Schema of a document with daemons: a BootSeer that cannot start them must not use it."""
MAX_BYTES = 1 << 20
"""Limit of a store's atomic creation."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_EXPORTS = 1000
MAX_LEFT_OUT = 1000
MAX_TEXT = 64 << 10
CLOCK_SKEW_S = 3600.0
"""A snapshot with a later time than this is regarded as expired, since its age is unknown."""
Trust = Literal["observed", "unobserved", "untrusted"]
"""`observed`: every file that the setup read is in the key; `unobserved`: its reads could not be watched; `untrusted`:
it read files that the key does not cover, so that changes of them would go unnoticed."""
ExportKind = Literal["set", "prepend", "append", "unset"]
_KEY = re.compile(r"[0-9a-f]{64}")
_NEVER_ROOTS = ("/proc", "/sys", "/dev", "/run")
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]


class Export(Struct, frozen=True):
    """An environment variable that the setup changed: `value` replaces the old one, or is prepended or appended."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,255}\Z")]
    kind: ExportKind
    value: Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=MAX_TEXT)] = ""


def apply_exports(exports: Iterable[Export], env: Mapping[str, str]) -> dict[str, str]:
    """The environment `env` with the exports applied. Pure."""
    result = dict(env)
    for export in exports:
        present = result.get(export.name, "")
        if export.kind == "unset":
            result.pop(export.name, None)
        elif export.kind == "set" or not present:
            result[export.name] = export.value
        else:
            pair = (export.value, present) if export.kind == "prepend" else (present, export.value)
            result[export.name] = ":".join(pair)
    return result


_Argument = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=MAX_TEXT)]
_NAMES = r"(/(?!\.{1,2}(/|\Z))[^/\0]+)+"
_Path = Annotated[str, Meta(pattern=rf"\A{_NAMES}\Z", max_length=4096)]
"""Absolute, without `.` and `..`."""
_Id = Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]


class Daemon(Struct, frozen=True):
    """A daemon left running by the setup, as a restore starts it: as the same user, never with more privileges."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    program: _Path
    argv: Annotated[tuple[_Argument, ...], Meta(min_length=1, max_length=1000)]
    env: Annotated[tuple[Export, ...], Meta(max_length=MAX_EXPORTS)]
    """Differences between its environment and the job's."""
    cwd: Annotated[str, Meta(pattern=rf"\A(/|{_NAMES})\Z", max_length=4096)]
    user: Annotated[str, Meta(max_length=256)]
    """Name of the user; empty without one."""
    uid: _Id
    gid: _Id
    nice: Annotated[int, Meta(ge=-39, le=39)] = 0
    """Added to the nice value of the run."""
    umask: Annotated[int, Meta(ge=0, le=0o777)] = 0o022
    output: Annotated[str, Meta(pattern=rf"\A({_NAMES})?\Z", max_length=4096)] = ""
    """The file for its output; empty without one."""
    sockets: Annotated[
        tuple[Annotated[str, Meta(pattern=r"\A(tcp|udp|unix) [^\0]+\Z", max_length=512)], ...], Meta(max_length=100)
    ] = ()
    """Addresses on which it listens (`env.processes`)."""
    pid_files: Annotated[tuple[_Path, ...], Meta(max_length=100)] = ()
    ready_s: _Seconds = 0.0
    """How long it took during the setup until its pid files existed, and to the end of the setup if it listens."""

    @property
    def runtime_files(self) -> tuple[str, ...]:
        """Pid files and sockets, which it creates at each start."""
        return (*self.pid_files, *(text[5:] for text in self.sockets if text.startswith("unix /")))


class LeftOutPath(Struct, frozen=True):
    """A path that the setup wrote and that is not in the snapshot."""

    path: _Text
    rule: _Text
    reason: _Text
    secret: bool = False
    """A command may have to log in again."""


@readable
class EnvironmentDocument(Struct, frozen=True):
    """The document of one snapshot."""

    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """The request key: 64 hex digits."""
    components: Annotated[Mapping[str, str], Meta(max_length=1000)]
    """Components of the key: name to digest or value, without secrets."""
    file: BlockFile
    """EROFS, with whiteouts and opaque directories as in overlayfs; paths are those of the setup."""
    manifest: Stored
    """Digests of all files (see `snapshot.manifest`), compressed."""
    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    """Digest of the snapshot's canonical content, equal for equal files: `sha256:<hex>`."""
    roots: Annotated[tuple[_Path, ...], Meta(max_length=1000)]
    """Folders that a restore mounts (`restoring.roots`), as absolute paths."""
    num_loose: _Count
    """Number of paths outside of `roots`, which a restore writes to the node."""
    num_files: _Count
    size_bytes: _Count
    """Total size of the files."""
    packages: Annotated[tuple[_Text, ...], Meta(max_length=10_000)]
    """Packages installed by the setup, as `name==version`, sorted."""
    exports: Annotated[tuple[Export, ...], Meta(max_length=MAX_EXPORTS)]
    platform: Mapping[str, Any]
    """Facts about the builder; `keys.key.gate` compares format and driver."""
    trust: Trust
    unaccounted: Annotated[tuple[_Text, ...], Meta(max_length=100)]
    """The first paths that made it untrusted."""
    builder: _Text
    """Name of the node that built it."""
    version: _Text
    """BootSeer's version."""
    built_s: _Seconds
    """Seconds since 1970."""
    setup_s: _Seconds
    """Duration of the setup."""
    max_age_s: _Seconds | None = None
    """Age at which it expires; None if all versions are pinned and no limit was requested."""
    job: _Text = ""
    what: _Text = ""
    """Name of the setup for messages: its files."""
    loose: Stored | None = None
    """Manifest of the paths that each restore handles singly: those outside of `roots`, and those inside whose mount
    could hide a user's changes on that machine. None if there are none."""
    left_out: Annotated[tuple[LeftOutPath, ...], Meta(max_length=MAX_LEFT_OUT)] = ()
    """The first excluded paths of each rule; all of those with secrets."""
    daemons: Annotated[tuple[Daemon, ...], Meta(max_length=100)] = ()
    """Daemons in the order of their starts."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Unknown keys of later versions, preserved."""

    @property
    def name(self) -> str:
        return document_name(self.key)

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that the snapshot needs."""
        return (*self.file.objects, self.manifest, *([self.loose] if self.loose is not None else []))

    def expired(self, now_s: float) -> bool:
        """Whether it is too old, or has an unknown age because its time is in the future."""
        if self.max_age_s is None:
            return False
        return not -CLOCK_SKEW_S <= now_s - self.built_s <= self.max_age_s

    def encode(self) -> bytes:
        """JSON; equal documents give equal bytes. Raises `PermanentError` for a document that could not be parsed."""
        try:
            data = encode(self, SCHEMA_DAEMONS if self.daemons else SCHEMA, platform=dict(self.platform))
            EnvironmentDocument.parse(data)
        except (TypeError, ValueError, CorruptError) as error:
            raise PermanentError(f"the document of environment {self.key[:12]} cannot be written: {error}") from error
        return data

    @classmethod
    def parse(cls, data: bytes) -> EnvironmentDocument:
        """Read a document. Raises `CorruptError`, or `OtherVersionError`."""
        found = decode(data, cls, "environment document", limit=MAX_BYTES, schema=(SCHEMA, SCHEMA_DAEMONS))
        found._check()
        texts = {name: printable(getattr(found, name)) for name in ("builder", "version", "job", "what")}
        return replace(
            found,
            **texts,
            packages=tuple(map(printable, found.packages)),
            unaccounted=tuple(map(printable, found.unaccounted)),
            left_out=tuple(
                replace(one, path=printable(one.path), rule=printable(one.rule), reason=printable(one.reason))
                for one in found.left_out
            ),
            daemons=tuple(replace(one, name=printable(one.name)) for one in found.daemons),
        )

    def _check(self) -> None:
        # Compared without normalisation: components must equal those of other keys exactly.
        if any(len(name) + len(text) > MAX_TEXT for name, text in self.components.items()):
            raise _wrong("components")
        for name, stored in (("manifest", self.manifest), ("loose", self.loose)):
            if stored and not (is_content_name(stored.name) and 0 <= stored.size_bytes <= MAX_MANIFEST_BYTES):
                raise _wrong(name)
        # Folders to be mounted over: none of the kernel's, and none nested in another.
        folders = sorted(f"{path}/" for path in self.roots)
        if any(lies_in(path, _NEVER_ROOTS) for path in self.roots) or any(
            inner.startswith(outer) for outer, inner in pairwise(folders)
        ):
            raise _wrong("roots")
        # A host's document that refers to none of its files would restore nothing, which only the job would notice.
        on_machine = str(self.platform.get("base", "")).startswith("host")
        if on_machine and self.num_files and not self.roots and self.loose is None:
            raise _wrong("roots")


def is_key(text: str) -> bool:
    """Whether a text has the form of a request key."""
    return _KEY.fullmatch(text) is not None


def document_name(key: str) -> str:
    """The name of a key's document in a store."""
    return f"environments/{key}/document"


def _wrong(name: str) -> CorruptError:
    return CorruptError(f"environment document: {name} is missing or impossible")
