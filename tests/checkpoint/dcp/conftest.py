"""Each test of the adapters has its own node cache and file systems."""

from __future__ import annotations

from checkpoint_process import own_file_systems

__all__ = ["own_file_systems"]
