"""The document of an environment snapshot: what is to be known before it is mounted.

A store keeps it under `environments/<key>/document`; the format is written down in docs/formats/environment.md. The
bytes of a snapshot are in its block file, digests of its files in the manifest. What comes from a store is checked here
field by field, once; everybody else may rely on it. Decides and touches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, cast, get_args

from bootseer.artifact.document import OtherVersionError
from bootseer.blocks.block_file import BlockFile
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, is_content_name

SCHEMA = "bootseer.environment/1"
MAX_BYTES = 1 << 20
"""What stores create in one step."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_COMPONENTS = 1000
MAX_ROOTS = 1000
MAX_PACKAGES = 10_000
MAX_EXPORTS = 1000
MAX_UNACCOUNTED = 100
MAX_LEFT_OUT = 1000
MAX_TEXT = 64 << 10
CLOCK_SKEW_S = 3600.0
"""So far in the future may a snapshot of another node be before its age means nothing."""
Trust = Literal["observed", "unobserved", "untrusted"]
"""`observed`: every file that the setup read is in the key; `unobserved`: nobody could watch; `untrusted`: it read
files that the key does not know, and a change of them would go unnoticed."""
ExportKind = Literal["set", "prepend", "append", "unset"]
_KEY = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_NEVER_ROOTS = ("/proc", "/sys", "/dev", "/run")
_MAX_SECONDS = 1e11
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class Export:
    """A change of the environment that the setup left to the job: `value` replaces, stands before or behind."""

    name: str
    kind: ExportKind
    value: str = ""


@dataclass(frozen=True, slots=True)
class LeftOutPath:
    """What the setup wrote and the snapshot does not have."""

    path: str
    rule: str
    reason: str
    secret: bool = False
    """Whether a command may have to log in by itself."""


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
    loose: Stored | None = None
    """A manifest of what each restore has to look at: paths outside of `roots`, and those inside where a mount might
    hide what somebody wrote on its machine. None where that is nothing."""
    left_out: tuple[LeftOutPath, ...] = ()
    """The first paths of each rule that kept some out; of secrets all."""
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
        """JSON; the same document gives the same bytes. Raises `PermanentError` for one that nobody could read."""
        value: dict[str, Any] = dict(self.more)
        for one in fields(self):
            if one.name != "more":
                value[one.name] = getattr(self, one.name)
        value |= {
            "schema": SCHEMA,
            "file": self.file.as_json(),
            "manifest": [self.manifest.name, self.manifest.size_bytes],
            "loose": None if self.loose is None else [self.loose.name, self.loose.size_bytes],
            "exports": [asdict(export) for export in self.exports],
            "left_out": [asdict(one) for one in self.left_out],
            "components": dict(self.components),
            "platform": dict(self.platform),
        }
        try:
            data = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
            EnvironmentDocument.parse(data)
        except (TypeError, ValueError, CorruptError) as error:
            raise PermanentError(f"the document of environment {self.key[:12]} cannot be written: {error}") from error
        return data

    @classmethod
    def parse(cls, data: bytes) -> EnvironmentDocument:
        """Read a document. Raises `CorruptError`, or `OtherVersionError`."""
        value = _json_object(data)
        if value.pop("schema", None) != SCHEMA:
            raise OtherVersionError(f"environment document: another version, this BootSeer reads {SCHEMA}")
        value.setdefault("left_out", [])
        max_age, loose = value.pop("max_age_s", None), value.pop("loose", None)
        _check_shown(value, loose)
        return cls(
            key=_matching(value, "key", _KEY),
            components=_components(value),
            file=BlockFile.from_json(value.pop("file", None)),
            manifest=_stored(value.pop("manifest", None), "manifest"),
            digest=_matching(value, "digest", _DIGEST),
            roots=_roots(value),
            num_loose=_count(value, "num_loose"),
            num_files=_count(value, "num_files"),
            size_bytes=_count(value, "size_bytes"),
            packages=_texts(value, "packages", MAX_PACKAGES),
            exports=tuple(_export(row) for row in _rows(value, "exports", MAX_EXPORTS)),
            platform=_object(value, "platform"),
            trust=_trust(value),
            unaccounted=_texts(value, "unaccounted", MAX_UNACCOUNTED),
            builder=_text(value, "builder"),
            version=_text(value, "version"),
            built_s=_seconds(value.pop("built_s", None), "built_s"),
            setup_s=_seconds(value.pop("setup_s", None), "setup_s"),
            max_age_s=None if max_age is None else _seconds(max_age, "max_age_s"),
            job=_text(value, "job", ""),
            what=_text(value, "what", ""),
            loose=None if loose is None else _stored(loose, "loose"),
            left_out=tuple(_left_out(row) for row in _rows(value, "left_out", MAX_LEFT_OUT)),
            more=value,
        )


def _check_shown(value: dict[str, Any], loose: object) -> None:
    """On a machine, a document that leads to none of its files: nothing would be there, and the job would find out."""
    platform = value.get("platform")
    on_machine = isinstance(platform, dict) and str(platform.get("base", "")).startswith("host")
    if on_machine and value.get("num_files") and not value.get("roots") and loose is None:
        raise _wrong("roots")


def is_key(text: str) -> bool:
    """Whether this may be a request key."""
    return _KEY.fullmatch(text) is not None


def document_name(key: str) -> str:
    """Where a store keeps the document of the snapshot of this request key."""
    return f"environments/{key}/document"


def _json_object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise CorruptError(f"environment document: {len(data)} bytes, more than the {MAX_BYTES} that are read")
    try:
        value = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"environment document: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptError("environment document: not a JSON object")
    return value


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _wrong(name: str) -> CorruptError:
    return CorruptError(f"environment document: {name} is missing or impossible")


def _matching(value: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    found = value.pop(name, None)
    if not isinstance(found, str) or not pattern.fullmatch(found):
        raise _wrong(name)
    return found


def _text(value: dict[str, Any], name: str, default: str | None = None) -> str:
    return _words(value.pop(name, default), name)


def _words(found: object, name: str) -> str:
    """A text for people: whatever it is printed on must survive it."""
    if not isinstance(found, str) or len(found) > MAX_TEXT:
        raise _wrong(name)
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in found)


def _count(value: dict[str, Any], name: str) -> int:
    found = value.pop(name, None)
    if type(found) is not int or not 0 <= found <= _MAX_COUNT:
        raise _wrong(name)
    return found


def _seconds(found: object, name: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _wrong(name)
    if not 0 <= found <= _MAX_SECONDS:
        raise _wrong(name)
    return float(found)


def _rows(value: dict[str, Any], name: str, limit: int) -> list[Any]:
    found = value.pop(name, None)
    if not isinstance(found, list) or len(found) > limit:
        raise _wrong(name)
    return found


def _texts(value: dict[str, Any], name: str, limit: int) -> tuple[str, ...]:
    return tuple(_words(row, name) for row in _rows(value, name, limit))


def _object(value: dict[str, Any], name: str) -> dict[str, Any]:
    found = value.pop(name, None)
    if not isinstance(found, dict):
        raise _wrong(name)
    return found


def _components(value: dict[str, Any]) -> dict[str, str]:
    found = _object(value, "components")
    if len(found) > MAX_COMPONENTS:
        raise _wrong("components")
    if not all(isinstance(text, str) and len(name) + len(text) <= MAX_TEXT for name, text in found.items()):
        raise _wrong("components")
    return found  # to the letter: they are compared with those of other keys


def _stored(row: object, field: str) -> Stored:
    if not isinstance(row, list) or len(row) != 2:
        raise _wrong(field)
    name, size_bytes = row
    if not isinstance(name, str) or not is_content_name(name):
        raise _wrong(field)
    if type(size_bytes) is not int or not 0 <= size_bytes <= MAX_MANIFEST_BYTES:
        raise _wrong(field)
    return Stored(name, size_bytes)


def _roots(value: dict[str, Any]) -> tuple[str, ...]:
    """Folders that will be mounted over: each must be one, none of the kernel's, and none inside another."""
    found = _rows(value, "roots", MAX_ROOTS)
    for path in found:
        if not isinstance(path, str) or not _is_plain_path(path) or _is_below(path, _NEVER_ROOTS):
            raise _wrong("roots")
    folders = sorted(f"{path}/" for path in found)
    if any(inner.startswith(outer) for outer, inner in pairwise(folders)):
        raise _wrong("roots")
    return tuple(found)


def _is_plain_path(path: str) -> bool:
    steps = path.split("/")
    return (
        len(path) <= 4096
        and steps[0] == ""
        and len(steps) > 1
        and "\0" not in path
        and not any(step in ("", ".", "..") for step in steps[1:])
    )


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _export(row: object) -> Export:
    if not isinstance(row, dict):
        raise _wrong("exports")
    name, kind, text = row.get("name"), row.get("kind"), row.get("value", "")
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name) or kind not in get_args(ExportKind):
        raise _wrong("exports")
    if not isinstance(text, str) or "\0" in text or len(text) > MAX_TEXT:
        raise _wrong("exports")
    return Export(name, cast(ExportKind, kind), text)


def _left_out(row: object) -> LeftOutPath:
    if not isinstance(row, dict) or not isinstance(row.get("secret"), bool):
        raise _wrong("left_out")
    path, rule, reason = (_words(row.get(name), "left_out") for name in ("path", "rule", "reason"))
    return LeftOutPath(path, rule, reason, secret=row["secret"])


def _trust(value: dict[str, Any]) -> Trust:
    found = value.pop("trust", None)
    if found not in get_args(Trust):
        raise _wrong("trust")
    return cast(Trust, found)
