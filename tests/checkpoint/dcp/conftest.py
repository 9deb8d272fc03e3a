"""The adapters' tests use file systems of their own."""

from __future__ import annotations

from checkpoint_process import own_file_systems

__all__ = ["own_file_systems"]
