"""The document of an environment snapshot: what is to be known before it is mounted.

A store keeps it under `environments/<key>/document`; the format is written down in docs/formats/environment.md. The
bytes of a snapshot are in its block file, digests of its files in the manifest. What comes from a store is checked here
field by field, once; everything else may rely on it. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta

from bootseer.artifact.document import OtherVersionError, decode, encode, printable
from bootseer.blocks.block_file import BlockFile
from bootseer.env.changes import lies_in
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, is_content_name

__all__ = ["Daemon", "EnvironmentDocument", "Export", "LeftOutPath", "OtherVersionError", "document_name", "is_key"]

SCHEMA = "bootseer.environment/1"
SCHEMA_DAEMONS = "bootseer.environment/2"
"""Of a document with daemons: a BootSeer that cannot start them must not use it."""
MAX_BYTES = 1 << 20
"""What stores create in one step."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_COMPONENTS = 1000
MAX_ROOTS = 1000
MAX_PACKAGES = 10_000
MAX_EXPORTS = 1000
MAX_UNACCOUNTED = 100
MAX_LEFT_OUT = 1000
MAX_DAEMONS = 100
MAX_TEXT = 64 << 10
CLOCK_SKEW_S = 3600.0
"""So far in the future may a snapshot of another node be before its age means nothing."""
Trust = Literal["observed", "unobserved", "untrusted"]
"""`observed`: every file that the setup read is in the key; `unobserved`: its reads could not be watched; `untrusted`:
it read files that the key does not know, and a change of them would go unnoticed."""
ExportKind = Literal["set", "prepend", "append", "unset"]
_KEY = re.compile(r"[0-9a-f]{64}")
_NEVER_ROOTS = ("/proc", "/sys", "/dev", "/run")
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]


@dataclass(frozen=True, slots=True)
class Export:
    """A change of the environment that the setup left to the job: `value` replaces, stands before or behind."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,255}\Z")]
    kind: ExportKind
    value: Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=MAX_TEXT)] = ""


_Argument = Annotated[str, Meta(pattern=r"\A[^\0]*\Z", max_length=MAX_TEXT)]
_Path = Annotated[str, Meta(pattern=r"\A/[^\0]*\Z", max_length=4096)]
_Id = Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that the setup left running, as a restore starts it again: as this user, never with more rights."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    program: _Path
    argv: Annotated[tuple[_Argument, ...], Meta(min_length=1, max_length=1000)]
    env: Annotated[tuple[Export, ...], Meta(max_length=MAX_EXPORTS)]
    """In what its environment differs from the job's."""
    cwd: _Path
    user: Annotated[str, Meta(max_length=256)]
    """Name of the user, empty where it has none."""
    uid: _Id
    gid: _Id
    nice: Annotated[int, Meta(ge=-39, le=39)] = 0
    """Added to the run's own."""
    umask: Annotated[int, Meta(ge=0, le=0o777)] = 0o022
    output: Annotated[str, Meta(pattern=r"\A(/[^\0]*)?\Z", max_length=4096)] = ""
    """The file that it writes its output to; empty: none."""
    sockets: Annotated[
        tuple[Annotated[str, Meta(pattern=r"\A(tcp|udp|unix) [^\0]+\Z", max_length=512)], ...], Meta(max_length=100)
    ] = ()
    """Where it listens (`env.processes`)."""
    pid_files: Annotated[tuple[_Path, ...], Meta(max_length=100)] = ()
    ready_s: _Seconds = 0.0
    """How long it took during the setup until it listened and its pid files were there."""


@dataclass(frozen=True, slots=True)
class LeftOutPath:
    """What the setup wrote and the snapshot does not have."""

    path: _Text
    rule: _Text
    reason: _Text
    secret: bool = False
    """Whether a command may have to log in by itself."""


@dataclass(frozen=True, slots=True)
class EnvironmentDocument:
    """One snapshot."""

    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """The request key: 64 hex digits."""
    components: Annotated[Mapping[str, str], Meta(max_length=MAX_COMPONENTS)]
    """What the key was made of: name to digest or value, without secrets."""
    file: BlockFile
    """EROFS, with whiteouts and opaque directories in overlayfs' form, every path where the setup saw it."""
    manifest: Stored
    """Digests of all files (see `snapshot.manifest`), compressed."""
    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    """Of the snapshot's canonical content: equal for equal files, whenever it was built. `sha256:<hex>`."""
    roots: Annotated[tuple[str, ...], Meta(max_length=MAX_ROOTS)]
    """Folders that are shown by mounting (`restoring.roots`), each an absolute path."""
    num_loose: _Count
    """Paths outside of them, which are written to the node as the setup would."""
    num_files: _Count
    size_bytes: _Count
    """Of all files."""
    packages: Annotated[tuple[_Text, ...], Meta(max_length=MAX_PACKAGES)]
    """What is installed now and was not before, as `name==version`, sorted."""
    exports: Annotated[tuple[Export, ...], Meta(max_length=MAX_EXPORTS)]
    platform: Mapping[str, Any]
    """What the gate compares (`keys.gate`)."""
    trust: Trust
    unaccounted: Annotated[tuple[_Text, ...], Meta(max_length=MAX_UNACCOUNTED)]
    """The first few paths that made it untrusted."""
    builder: _Text
    """Node that made it."""
    version: _Text
    """BootSeer's."""
    built_s: _Seconds
    """Seconds since 1970."""
    setup_s: _Seconds
    """How long the setup took."""
    max_age_s: _Seconds | None = None
    """From when on it is not used any more; None where all versions are pinned and none was asked for."""
    job: _Text = ""
    what: _Text = ""
    """The setup, for people: names of its files."""
    loose: Stored | None = None
    """A manifest of what each restore has to look at: paths outside of `roots`, and those inside where a mount might
    hide what was written on that machine. None where that is nothing."""
    left_out: Annotated[tuple[LeftOutPath, ...], Meta(max_length=MAX_LEFT_OUT)] = ()
    """The first paths of each rule that kept some out; of secrets all."""
    daemons: Annotated[tuple[Daemon, ...], Meta(max_length=MAX_DAEMONS)] = ()
    """What the setup left running, in the order of their starts."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Unknown keys of later versions, kept."""

    @property
    def name(self) -> str:
        """What the document is called in a store."""
        return document_name(self.key)

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that the snapshot needs."""
        return (*self.file.objects, self.manifest, *([self.loose] if self.loose is not None else []))

    def expired(self, now_s: float) -> bool:
        """Whether it is too old, or its age cannot be known because it was made in the future."""
        if self.max_age_s is None:
            return False
        return not -CLOCK_SKEW_S <= now_s - self.built_s <= self.max_age_s

    def encode(self) -> bytes:
        """JSON; the same document gives the same bytes. Raises `PermanentError` for one that could not be read."""
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
        return replace(
            found,
            packages=tuple(map(printable, found.packages)),
            unaccounted=tuple(map(printable, found.unaccounted)),
            builder=printable(found.builder),
            version=printable(found.version),
            job=printable(found.job),
            what=printable(found.what),
            left_out=tuple(
                LeftOutPath(printable(one.path), printable(one.rule), printable(one.reason), secret=one.secret)
                for one in found.left_out
            ),
            daemons=tuple(replace(one, name=printable(one.name)) for one in found.daemons),
        )

    def _check(self) -> None:
        """What the types of the fields do not say."""
        # Not cleaned: components are compared with those of other keys, to the letter.
        if any(len(name) + len(text) > MAX_TEXT for name, text in self.components.items()):
            raise _wrong("components")
        for name, stored in (("manifest", self.manifest), ("loose", self.loose)):
            if stored and not (is_content_name(stored.name) and 0 <= stored.size_bytes <= MAX_MANIFEST_BYTES):
                raise _wrong(name)
        # Folders that will be mounted over: none of the kernel's, and none inside another.
        folders = sorted(f"{path}/" for path in self.roots)
        if not all(_is_plain_path(path) and not lies_in(path, _NEVER_ROOTS) for path in self.roots) or any(
            inner.startswith(outer) for outer, inner in pairwise(folders)
        ):
            raise _wrong("roots")
        paths = [path for one in self.daemons for path in (one.program, one.output, *one.pid_files) if path]
        if not all(map(_is_plain_path, paths)) or not all(
            one.cwd == "/" or _is_plain_path(one.cwd) for one in self.daemons
        ):
            raise _wrong("daemons")
        # On a machine, a document that leads to none of its files: nothing would be there, and the job would find out.
        on_machine = str(self.platform.get("base", "")).startswith("host")
        if on_machine and self.num_files and not self.roots and self.loose is None:
            raise _wrong("roots")


def is_key(text: str) -> bool:
    """Whether this may be a request key."""
    return _KEY.fullmatch(text) is not None


def document_name(key: str) -> str:
    """Where a store keeps the document of the snapshot of this request key."""
    return f"environments/{key}/document"


def _wrong(name: str) -> CorruptError:
    return CorruptError(f"environment document: {name} is missing or impossible")


def _is_plain_path(path: str) -> bool:
    steps = path.split("/")
    return (
        len(path) <= 4096
        and steps[0] == ""
        and len(steps) > 1
        and "\0" not in path
        and not any(step in ("", ".", "..") for step in steps[1:])
    )
