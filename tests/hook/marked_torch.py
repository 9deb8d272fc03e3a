"""PyTorch, imported with the hook's marks, like in a warm parent. Jobs run in copies of a process with this import, and
begin with `START`: an import of PyTorch and its compiler takes 3 s of processor time."""

import gc
import importlib

from bootseer.hook import watch

watch.prepare()
for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict"):  # a job imports the first in its first step
    importlib.import_module(name)
gc.freeze()
