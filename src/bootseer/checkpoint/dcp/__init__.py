"""PyTorch's distributed checkpoints (DCP), read and written without a mount.

```
from torch.distributed import checkpoint as dcp
from bootseer.checkpoint.dcp import StripedReader, StripedWriter

dcp.save(state, storage_writer=StripedWriter("hdfs://namenode/job/step-8"))
dcp.load(state, storage_reader=StripedReader("hdfs://namenode/job/step-8"))
```
"""

from bootseer.checkpoint.dcp.load import LoadSettings
from bootseer.checkpoint.dcp.reader import StripedReader
from bootseer.checkpoint.dcp.writer import StripedWriter

__all__ = ["LoadSettings", "StripedReader", "StripedWriter"]
