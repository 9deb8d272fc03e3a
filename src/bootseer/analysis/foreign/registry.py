"""All parsers of foreign logs, fresh for one file.

Called by `analysis.scan`. Decides and touches nothing.

Every distinct needle is one pass over the bytes (`analysis.search` tells how fast), paid by gigabytes of log that hold
none of them, so the needles of all parsers together are eight:

    ` nranks `            all of NCCL, in any version
    `torch/distributed/`  all lines of torchrun, also those of one message's many lines
    `elastic.`            torchrun's events, and the lines of older versions
    `Successful`          `Successfully assigned`, `pulled image`, `installed`; the reason `SuccessfulCreate`
    ` image \\`            `Pulling`, `Failed to pull`, `already present`, containerd's `Pulled`: where they have a time
    `PullImage`           containerd's begin and end of a pull
    ` package`            all of uv, whose numbers may be singular; pip's `Installing collected packages`
    `Collecting `         pip's begin

Left out, because a ninth pass tells less than it costs: pip's `Requirement already satisfied` and `Downloading`, the
kubelet's `Created` and `Started` container, `Pulling image` in the table of `kubectl get events`, which has no times.
"""

from __future__ import annotations

from bootseer.analysis.foreign.installers import PipParser, UvParser
from bootseer.analysis.foreign.kubernetes import ContainerdParser, KubernetesParser
from bootseer.analysis.foreign.nccl import NcclParser
from bootseer.analysis.foreign.parser import Parser
from bootseer.analysis.foreign.torchelastic import TorchElasticParser


def parsers() -> list[Parser]:
    """One new parser of each kind. Parsers share needles: look for each distinct one once."""
    return [TorchElasticParser(), NcclParser(), KubernetesParser(), ContainerdParser(), PipParser(), UvParser()]
