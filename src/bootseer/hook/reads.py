"""Mark what reads checkpoints: torch.load, torch.distributed.checkpoint.load, safetensors.

A read inside another one (DCP uses torch.load) belongs to the outer one. Names of files are not recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bootseer.hook.state import STAGE, keep_undo
from bootseer.hook.wrap import Describe, Picklable, replace, spanned


def _describe_read(api: str) -> Describe:
    def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        attrs: dict[str, Any] = {"api": api}
        for place in (*args[:1], *(kwargs.get(key) for key in ("f", "filename", "checkpoint_id"))):
            if not isinstance(place, (str, os.PathLike)):
                continue
            path = os.fsdecode(place)
            if os.path.isfile(path):
                attrs["bytes"] = os.path.getsize(path)
            elif os.path.isdir(path):
                attrs["bytes"] = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        return attrs

    return describe


def mark_reads(*names: str, api: str) -> Callable[[ModuleType], None]:
    def mark(module: ModuleType) -> None:
        for name in names:
            marked = spanned(STAGE + "checkpoint_read", _describe_read(f"{api}.{name}"))

            def make(original: Callable[..., Any], marked: Callable[..., Any] = marked) -> Picklable:
                return Picklable(marked(original))

            keep_undo(replace(module, name, make))

    return mark
