"""Mark reads of checkpoints: torch.load, torch.distributed.checkpoint.load, safetensors and BootSeer's reader of it.

A read within another one (DCP uses torch.load) is part of the outer one. File names are not recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

from bootseer.hook.state import STAGE
from bootseer.hook.wrap import Describe, Picklable, replace, spanned

_MAX_FILES = 64
"""No sizes are requested for larger checkpoints: a sharded one has files of each rank and is read by each rank, which
would cost requests to the file server in proportion to the square of the number of ranks."""


def _describe_read(api: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    attrs: dict[str, Any] = {"api": api}
    for place in (*args[:1], *(kwargs.get(key) for key in ("f", "filename", "checkpoint_id"))):
        if not isinstance(place, (str, os.PathLike)):
            continue
        path = os.fsdecode(place)
        if os.path.isfile(path):
            attrs["bytes"] = os.path.getsize(path)
        elif os.path.isdir(path):
            with os.scandir(path) as entries:
                some = list(islice(entries, _MAX_FILES + 1))
            if len(some) <= _MAX_FILES:
                attrs["bytes"] = sum(entry.stat().st_size for entry in some if entry.is_file())
    return attrs


def mark_reads(*names: str, api: str) -> Callable[[ModuleType], None]:
    """A function that marks calls of these functions of a module as `checkpoint_read`; `api` is the name in events."""

    def mark(module: ModuleType) -> None:
        for name in names:
            describe = partial(_describe_read, f"{api}.{name}")

            def make(original: Callable[..., Any], describe: Describe = describe) -> Picklable:
                return Picklable(spanned(STAGE + "checkpoint_read", describe, original))

            replace(module, name, make)

    return mark
