"""The names of the arms of `checkpoint`, and their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from harness import Must


class Names:
    """Names of arms. Those for one layout begin with its name."""

    LINKS = "the links (4 plain streams)"
    NATIVE = "hdfs-native, stream"
    RANGES = "hdfs-native, 16 threads"
    PYARROW = "pyarrow with libhdfs, stream"
    WEBHDFS = "WebHDFS, stream"
    FSSPEC = "FsspecReader, hdfs-native"
    FSSPEC_PYARROW = "FsspecReader, pyarrow"
    WRITE_ONE = "write: hdfs-native, 1 file"
    WRITE_FOUR = "write: hdfs-native, 4 files"
    FUSE_WARM = "4 stripes: FUSE, warm node cache"


class Layouts:
    """How a checkpoint is stored in HDFS, and the prefix of the names of its arms."""

    ORDINARY = "ordinary"
    REPLICAS = "ordinary, 2 replicas"
    STRIPED = "4 stripes"
    PARITY = "4+1 stripes"


PLAIN = (Names.NATIVE, Names.RANGES, Names.PYARROW, Names.WEBHDFS)
"""Readers without BootSeer."""
PLAIN_DCP = (Names.FSSPEC, Names.FSSPEC_PYARROW)
"""Loads without BootSeer."""
Found = Mapping[str, Sequence[float]]
"""MiB/s by arm."""


def unshaped(name: str) -> str:
    """The name of an arm with unlimited links."""
    return f"{name}, no limit"


def ranks(number: int) -> str:
    """The name of the arm in which this number of processes read one part each."""
    return f"4 stripes: {number} ranks"


def stripes(number: int) -> str:
    """The name of the arm that reads a file with this number of stripes."""
    return f"curve: {number} stripes"


CLAIMED = frozenset(
    [
        *(Names.LINKS, *PLAIN_DCP, unshaped(Names.FUSE_WARM), unshaped(f"{Layouts.STRIPED}: direct")),
        *(unshaped(name) for name in PLAIN),
        *(f"{layout}: {way}" for layout in (Layouts.STRIPED, Layouts.PARITY) for way in ("direct", "FUSE")),
        *(f"{layout}: direct" for layout in (Layouts.ORDINARY, Layouts.REPLICAS)),
        *(f"write: {layout}" for layout in (Layouts.STRIPED, Layouts.PARITY)),
        f"{Layouts.STRIPED}: DCP",
    ]
)
"""The arms used by `claims`. The others, and the curves, are measured for comparison."""


def claims(found: Found, placement: float) -> list[Must]:
    """All claims. `placement`: the share of the links that the ordinary file can use, given where its blocks are."""

    def part(name: str, of: str) -> float:
        return median(found[name]) / median(found[of])

    def must(what: str, value: float, limit: float, unit: str = "x") -> Must:
        return Must(what, value, limit, unit, at_least=True)

    musts = []
    for layout in (Layouts.STRIPED, Layouts.PARITY):
        musts.append(must(f"{layout}: direct / links", part(f"{layout}: direct", Names.LINKS), 0.95))
        musts.append(must(f"{layout}: FUSE / links", part(f"{layout}: FUSE", Names.LINKS), 0.9))
    replicas = part(f"{Layouts.REPLICAS}: direct", Names.LINKS)
    ordinary = part(f"{Layouts.ORDINARY}: direct", Names.LINKS) / placement
    musts.append(must(f"{Layouts.REPLICAS}: direct / links", replicas, 0.8))
    musts.append(must(f"{Layouts.ORDINARY}: direct / what its placement allows", ordinary, 0.8))
    dcp = _best(found, PLAIN_DCP)
    musts.append(must(f"{Layouts.STRIPED}: DCP / {dcp}", part(f"{Layouts.STRIPED}: DCP", dcp), 3.0))
    for layout in (Layouts.STRIPED, Layouts.PARITY):
        name = f"write: {layout}"
        musts.append(must(f"{name} / links", part(name, Names.LINKS), 0.9))
    musts.append(must(unshaped(Names.FUSE_WARM), median(found[unshaped(Names.FUSE_WARM)]), 1024, "MiB/s"))
    direct, best = unshaped(f"{Layouts.STRIPED}: direct"), _best(found, [unshaped(name) for name in PLAIN])
    musts.append(must(f"{direct} / {best}", part(direct, best), 1.2))
    return musts


def _best(found: Found, names: Sequence[str]) -> str:
    """The fastest of those that were measured."""
    return max((name for name in names if name in found), key=lambda name: median(found[name]))
