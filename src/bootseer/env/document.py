"""The document of an environment snapshot: what is to be known before it is mounted.

A store keeps it under `environments/<key>/document`; the format is written down in docs/formats/environment.md. The
bytes of a snapshot are in its block file, digests of its files in the manifest. Decides and touches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bootseer.blocks.block_file import BlockFile
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, is_content_name

SCHEMA = "bootseer.environment/1"
MAX_BYTES = 16 << 20
Trust = Literal["observed", "unobserved", "untrusted"]
"""`observed`: every file that the setup read is in the key; `unobserved`: nobody could watch; `untrusted`: it read files
that the key does not know, and a change of them would go unnoticed."""
ExportKind = Literal["set", "prepend", "append", "unset"]
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Export:
    """A change of the environment that the setup left to the job: `value` replaces, stands before or behind."""

    name: str
    kind: ExportKind
    value: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentDocument:
    """One snapshot."""

    key: str
    """The request key: 64 hex digits."""
    components: Mapping[str, str]
    """What the key was made of: name to digest or value, without secrets."""
    file: BlockFile
    """EROFS, with whiteouts and opaque directories in overlayfs' form, every path where the setup saw it."""
    manifest: Stored
    """Digests of all files (see `snapshot.manifest`), compressed."""
    digest: str
    """Of the snapshot's canonical content: equal for equal files, whoever built it and when. `sha256:<hex>`."""
    roots: tuple[str, ...]
    """Folders that are shown by mounting (`restoring.roots`), each an absolute path."""
    num_loose: int
    """Paths outside of them, which are written to the node as the setup would."""
    num_files: int
    size_bytes: int
    """Of all files."""
    packages: tuple[str, ...]
    """What is installed now and was not before, as `name==version`, sorted."""
    exports: tuple[Export, ...]
    platform: Mapping[str, Any]
    """What the gate compares (`keys.gate`)."""
    trust: Trust
    unaccounted: tuple[str, ...]
    """The first few paths that made it untrusted."""
    builder: str
    """Node that made it."""
    version: str
    """BootSeer's."""
    built_s: float
    """Seconds since 1970."""
    setup_s: float
    """How long the setup took."""
    max_age_s: float | None = None
    """From when on it is not used any more; None where all versions are pinned and none was asked for."""
    job: str = ""
    what: str = ""
    """The setup, for people: names of its files."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Unknown keys of later versions, kept."""

    @property
    def name(self) -> str:
        """What the document is called in a store."""
        return document_name(self.key)

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that the snapshot needs."""
        return (*self.file.objects, self.manifest)

    def expired(self, now_s: float) -> bool:
        """Whether it is too old."""
        return self.max_age_s is not None and now_s - self.built_s > self.max_age_s


def document_name(key: str) -> str:
    """Where a store keeps the document of the snapshot of this request key."""
    return f"environments/{key}/document"
