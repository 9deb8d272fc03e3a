"""Container Device Interface: files that describe what a container needs to use a device, such as a GPU.

`nvidia-ctk cdi generate` and similar tools write one file for a kind of device (`nvidia.com/gpu`): device nodes,
libraries to mount, variables, hooks. They are in `/etc/cdi` and `/var/run/cdi`; the latter has precedence. The
machine's administrator owns the files: they are trusted, but may be malformed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from bootseer.errors import PermanentError, UsageError, os_errors_as
from bootseer.machine import check

NVIDIA = "nvidia.com/gpu"
CDI_FOLDERS = tuple(map(Path, check.CDI_FOLDERS))
_MAX_BYTES = 16 << 20


class Edits(Struct):
    """The changes to a container that the named devices need: `containerEdits` of the CDI specification."""

    nodes: list[Mapping[str, Any]] = field(default_factory=list)
    mounts: list[Mapping[str, Any]] = field(default_factory=list)
    env: list[str] = field(default_factory=list)
    hooks: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def add(self, edits: object) -> None:
        """Add one `containerEdits` object; unknown parts are ignored."""
        if not isinstance(edits, dict):
            return
        for name, target in (("deviceNodes", self.nodes), ("mounts", self.mounts), ("hooks", self.hooks)):
            target.extend(item for item in _list(edits.get(name)) if isinstance(item, dict) and item not in target)
        self.env.extend(item for item in _list(edits.get("env")) if isinstance(item, str) and "=" in item)
        self.groups.extend(item for item in _list(edits.get("additionalGids")) if isinstance(item, int) and item > 0)


def gpu_names(text: str) -> list[str]:
    """The CDI names for `--gpus all` or `--gpus 0,1`; full CDI names are kept. Raises `UsageError`."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    if not names:
        raise UsageError("--gpus names no GPU", hint="--gpus all, or --gpus 0,1")
    return [name if "=" in name else f"{NVIDIA}={name}" for name in names]


def describes_gpus() -> bool:
    """Whether a CDI file describes GPUs under the name `all`."""
    return any(device.get("name") == "all" for spec in _specs(CDI_FOLDERS).get(NVIDIA, ()) for device in _devices(spec))


def edits_for(names: Sequence[str], folders: Sequence[Path] = CDI_FOLDERS) -> Edits:
    """The edits for these devices (`vendor.com/class=name`). Raises `UsageError` for one that no file describes."""
    edits = Edits()
    specs = _specs(folders) if names else {}
    general: set[int] = set()
    for name in names:
        kind, _, device = name.partition("=")
        # The last match wins: later folders have precedence.
        found = [(spec, each) for spec in specs.get(kind, ()) for each in _devices(spec) if each.get("name") == device]
        if not found:
            raise _unknown(name, specs, folders)
        spec, chosen = found[-1]
        if id(spec) not in general:
            general.add(id(spec))
            edits.add(spec.get("containerEdits"))
        edits.add(chosen.get("containerEdits"))
    return edits


def _unknown(name: str, specs: Mapping[str, Sequence[Mapping[str, Any]]], folders: Sequence[Path]) -> UsageError:
    kind = name.partition("=")[0]
    known = sorted({str(each.get("name")) for spec in specs.get(kind, ()) for each in _devices(spec)})
    where = " and ".join(str(folder) for folder in folders)
    if known:
        return UsageError(f"no device {name!r}", hint=f"{kind} has: {', '.join(known[:20])}")
    tool = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" if kind == NVIDIA else "the vendor's tool"
    return UsageError(f"no CDI file for {kind} in {where}", hint=f"generate one with {tool}")


def _specs(folders: Iterable[Path]) -> dict[str, list[Mapping[str, Any]]]:
    """All files, by kind of device. Raises `PermanentError` for a file that cannot be read or parsed."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for folder in folders:
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".yml"))
        except OSError:
            continue
        for path in paths:
            spec = _read(path)
            if isinstance(spec.get("kind"), str):
                found.setdefault(spec["kind"], []).append(spec)
    return found


def _read(path: Path) -> Mapping[str, Any]:
    with os_errors_as(PermanentError, f"{path}: cannot be read"), path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise PermanentError(f"{path}: not a CDI file: larger than 16 MiB")
    try:
        spec = json.loads(text) if path.suffix == ".json" else importlib.import_module("yaml").safe_load(text)
    except Exception as error:  # each parser has its own
        raise PermanentError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    return spec if isinstance(spec, dict) else {}


def _devices(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [device for device in _list(spec.get("devices")) if isinstance(device, dict)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
