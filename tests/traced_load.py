"""Load a checkpoint with one tensor, traced: `traced_load.py TRACE URI NUMBER`, where the tensor is `range(NUMBER)`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

from bootseer.checkpoint.dcp import StripedReader
from call_trace import CallTrace

warnings.filterwarnings("ignore", "torch.distributed is disabled")
folder, uri, number = sys.argv[1:]
target = {"weight": torch.zeros(int(number))}
trace = CallTrace(Path(folder))
trace.follow()
with trace.recording():
    dcp.load(target, storage_reader=StripedReader(uri))
assert torch.equal(target["weight"], torch.arange(int(number), dtype=torch.float32))
