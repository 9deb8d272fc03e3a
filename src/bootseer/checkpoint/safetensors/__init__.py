"""safetensors files read without a mount: the header first, then only the bytes that are asked for.

```
from bootseer.checkpoint.safetensors import load_file, load_sharded, safe_open

tensors = load_file("hdfs://namenode/models/m/model.safetensors")
tensors = load_sharded("hdfs://namenode/models/m", device="cuda")
with safe_open("hdfs://namenode/models/m/model.safetensors") as file:
    rows = file.get_slice("embedding.weight")[1000:2000]
```
"""

from bootseer.checkpoint.safetensors.model import TensorSlice, load_file, load_sharded, safe_open

__all__ = ["TensorSlice", "load_file", "load_sharded", "safe_open"]
