"""Pickles that may name nothing but what is known: who writes a checkpoint runs no code where it is read.

Called by `metadata` and `saved`, each with the names that its kind of pickle has.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch


class ForeignName(pickle.UnpicklingError):
    """The pickle names a class or function that does not belong to its kind."""


class Restricted(pickle.Unpickler):
    """Reads one pickle. `names` has what stands for each known name, types of elements are known in any case."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str, /) -> Any:
        """See `pickle.Unpickler.find_class`. Raises `ForeignName`."""
        if (module, name) in self._names:
            return self._names[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ForeignName(f"{module}.{name}")
