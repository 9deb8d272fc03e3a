"""Snapshots for tests: real objects in a store, and documents with their names."""

from __future__ import annotations

import hashlib
from typing import Any

from msgspec.structs import replace

from bootseer.blocks.block_file import BlockFile
from bootseer.env.document import EnvironmentDocument, Export
from bootseer.env.snapshot.secret_check import SecretCheck
from bootseer.store.store import Store, Stored

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
BUILT_S = 1_800_000_000.0


class NoSecrets(SecretCheck):
    """A check whose only secret is `hunter2`."""

    def __init__(self) -> None:
        pass

    def check_text(self, label: str, data: bytes) -> str:
        return f"{label} (forbidden)" if b"hunter2" in data else ""


def digest_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def document(key: str = KEY, content: str = "content", **changes: Any) -> EnvironmentDocument:
    """A document with the names of the objects that `store_objects` stores for this `content`."""
    index, stripe, manifest = (f"{part} of {content}" for part in ("index", "stripe", "manifest"))
    made = EnvironmentDocument(
        key=key,
        components={"script": "a" * 64, "python": "3.11.7\n"},
        file=BlockFile(
            index_name=digest_of(index),
            index_bytes=len(index),
            identity=digest_of(content).removeprefix("sha256:"),
            size_bytes=1 << 20,
            stored_bytes=len(stripe),
            stripes=(Stored(digest_of(stripe), len(stripe)),),
        ),
        manifest=Stored(digest_of(manifest), len(manifest)),
        digest=digest_of(f"digest of {content}"),
        roots=("/opt/venv", "/usr"),
        num_loose=2,
        num_files=42_007,
        size_bytes=1_760_000_000,
        packages=("numpy==2.0", "torch==2.15"),
        exports=(Export("PATH", "prepend", "/opt/venv/bin"), Export("LANG", "unset")),
        platform={"architecture": "x86_64", "libc": ["glibc", "2.36"], "gpus": []},
        trust="observed",
        unaccounted=(),
        builder="node-1",
        version="1.0",
        built_s=BUILT_S,
        setup_s=115.25,
        job="job-7",
        what="requirements.txt",
    )
    return replace(made, **changes)


def store_objects(store: Store, content: str = "content") -> list[str]:
    """Store the objects that `document` names. Returns their names in the store."""
    return [_put(store, f"{part} of {content}") for part in ("index", "stripe", "manifest")]


def _put(store: Store, text: str) -> str:
    upload = store.upload()
    upload.write(text.encode())
    return upload.commit().name
