"""The names of the arms of `environment`, and their goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from environment_node import Sample
from harness import Must


class Names:
    """Names of arms."""

    INSTALLED = "installed"
    PIP = "pip"
    PIP_NO_COMPILE = "pip --no-compile"
    UV_COLD = "uv, cold cache"
    UV_WARM = "uv, warm cache"
    TAR = "tar.zst"
    UV_LINK = "uv, cold cache, 1 Gbit/s"
    CAPTURE = "bootseer, capture with pip"
    CAPTURE_UV = "bootseer, capture with uv"
    LOCAL = "bootseer, local store"
    HDFS = "bootseer, HDFS"
    LINK = "bootseer, 1 Gbit/s"
    AGAIN = "bootseer, again"
    DAEMONS = "bootseer, three daemons"
    DAEMONS_SETUP = "three daemons, setup"


SLOW = (Names.PIP, Names.PIP_NO_COMPILE, Names.CAPTURE)
"""Arms that take minutes, which a quick run skips."""
_USABLE_S = 0.5
_FIRST = 1.1
_SECOND = 1.05
_CAPTURE = 0.15
_LINK = 5.0
_DAEMONS = 0.8
Found = Mapping[str, Sequence[Sample]]


def daemons_claim(found: Mapping[str, Sequence[float]]) -> Must:
    """The claim for a setup that leaves processes running, from the seconds by arm."""
    saved = 1 - median(found[Names.DAEMONS]) / median(found[Names.DAEMONS_SETUP])
    return Must(f"{Names.DAEMONS}: less time than the setup, part of it", saved, _DAEMONS, "x", at_least=True)


def claims(found: Found) -> list[Must]:
    """All claims, from the samples by arm."""

    def of(name: str, figure: Callable[[Sample], float]) -> float:
        return median(figure(sample) for sample in found[name])

    starts = (Names.LOCAL, Names.HDFS, Names.LINK, Names.AGAIN)
    musts = [Must(f"{name}: usable", of(name, lambda sample: sample.usable_s), _USABLE_S, "s") for name in starts]
    first, second = (of(Names.INSTALLED, figure) for figure in (lambda each: each.first_s, lambda each: each.second_s))
    for name in starts:
        slower = of(name, lambda sample: sample.first_s) / first
        musts.append(Must(f"{name} / {Names.INSTALLED}: first run", slower, _FIRST, "x"))
    for name in (Names.LOCAL, Names.AGAIN):
        slower = of(name, lambda sample: sample.second_s) / second
        musts.append(Must(f"{name} / {Names.INSTALLED}: second run", slower, _SECOND, "x"))
    if Names.PIP in found:
        more = of(Names.CAPTURE, lambda sample: sample.usable_s) / of(Names.PIP, lambda sample: sample.usable_s) - 1
        musts.append(Must(f"{Names.CAPTURE}: beyond pip, part of pip's time", more, _CAPTURE, "x"))
    faster = of(Names.UV_LINK, lambda sample: sample.imported_s) / of(Names.LINK, lambda sample: sample.imported_s)
    musts.append(Must(f"{Names.UV_LINK} / {Names.LINK}: end of the first run", faster, _LINK, "x", at_least=True))
    return musts
