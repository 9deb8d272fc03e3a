"""PyTorch, imported with the hook's marks as in a warm parent. Jobs run in copies of a process that has imported this,
and begin with `START`: an import of PyTorch and its compiler takes 3 s of processor time."""

import gc

from bootseer.hook import watch

watch.prepare()


gc.freeze()
