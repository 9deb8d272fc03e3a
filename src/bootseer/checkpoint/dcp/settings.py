"""How a checkpoint is loaded: bounds on memory, threads and time."""

from __future__ import annotations

from dataclasses import dataclass

from bootseer.checkpoint.spans import GAP_BYTES


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The defaults suit a node with a few GB of free memory for each rank."""

    threads: int = 16
    """Reads in flight, each of up to `span_bytes`; the threads that wait for them decode too."""
    span_bytes: int = 32 << 20
    """Neighbours are joined to reads of at most so many bytes."""
    gap_bytes: int = GAP_BYTES
    """Neighbours with no more than this between them are joined."""
    buffer_bytes: int = 512 << 20
    """Memory for what cannot be read straight into a tensor. One object that is larger is read all the same, alone."""
    direct_bytes: int = 128 << 10
    """Smaller tensors are read together with their neighbours and copied: that is cheaper than checking each."""
    stall_s: float = 300.0
    """When nothing at all has arrived for so long, the load fails. Each read has a shorter deadline of its own."""
