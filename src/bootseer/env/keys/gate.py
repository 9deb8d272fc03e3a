"""The gate: may a snapshot that was built there be used here?

The key says that the same was asked for. The gate compares what the platforms are: a snapshot may come from an older
BootSeer, from another node, or lie under a key that was computed elsewhere. Codes are stable: reports, tests and
alerts name them. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""Of the platform's facts and of the snapshot; a later one may mean something else by the same names."""

Code = Literal[
    "format", "architecture", "libc", "cpu", "python", "prefix", "gpu", "driver", "cuda", "base", "owner-ids"
]


class Refusal(NamedTuple):
    """Why not."""

    code: Code
    message: str


Facts = Mapping[str, Any]
_SAME: Mapping[Code, str] = {
    "architecture": "the processor architecture", "python": "Python", "prefix": "a Python in", "base": "the base",
}  # fmt: skip
_AT_LEAST: Mapping[Code, str] = {"driver": "NVIDIA's driver", "cuda": "a driver for CUDA"}


def check(wanted: Facts, here: Facts) -> Refusal | None:
    """The first reason why a snapshot with the platform `wanted` cannot be used where the platform is `here`.

    Facts that the snapshot does not name are not asked for. `wanted` comes from a store: any type may be in it.
    """
    found = wanted.get("format")
    if found != here.get("format", FORMAT):
        own = here.get("format", FORMAT)
        return Refusal("format", f"the snapshot has format {_told(found)}, this BootSeer reads {own}")
    return (
        _same(wanted, here, "architecture")
        or _libc(wanted, here)
        or _cpu(wanted, here)
        or _same(wanted, here, "python")
        or _same(wanted, here, "prefix")
        or _gpu(wanted, here)
        or _at_least(wanted, here, "driver")
        or _at_least(wanted, here, "cuda")
        or _same(wanted, here, "base")
        or _owners(wanted, here)
    )


def _same(wanted: Facts, here: Facts, name: Code) -> Refusal | None:
    if wanted.get(name) is None or wanted[name] == here.get(name):
        return None
    return Refusal(name, f"built for {_SAME[name]} {_told(wanted[name])}, here is {_told(here.get(name))}")


def _cpu(wanted: Facts, here: Facts) -> Refusal | None:
    """Code that was compiled on a newer processor may end with an illegal instruction on an older one."""
    level, own = _level(wanted.get("cpu")), _level(here.get("cpu"))
    if wanted.get("cpu") is None or (level is not None and own is not None and own >= level):
        return None
    if level is None and wanted.get("cpu") == here.get("cpu"):
        return None
    return Refusal("cpu", f"built on a processor of {_told(wanted.get('cpu'))}, this one is {_told(here.get('cpu'))}")


def _libc(wanted: Facts, here: Facts) -> Refusal | None:
    """The C library is compatible upwards: newer than the builder's is as good."""
    want, found = wanted.get("libc"), here.get("libc")
    if want is None or want == found:
        return None
    name, _, version = str(want).partition(" ")
    our_name, _, our_version = str(found).partition(" ")
    if name == our_name and (_numbers(version) or (9999,)) <= (_numbers(our_version) or (0,)):
        return None
    return Refusal("libc", f"built with {_told(want)}, here is {_told(found)}")


def _gpu(wanted: Facts, here: Facts) -> Refusal | None:
    """Each kind of GPU here must have been there when kernels were compiled."""
    if wanted.get("gpus") is None:
        return None
    built, own = _texts(wanted["gpus"]), _texts(here.get("gpus"))
    if own <= built and bool(own) == bool(built):
        return None
    return Refusal("gpu", f"built for {_gpus(built)}, here: {_gpus(own)}")


def _at_least(wanted: Facts, here: Facts, name: Code) -> Refusal | None:
    want, found = wanted.get(name), here.get(name)
    if not want:
        return None
    least, own = _numbers(str(want)), _numbers(str(found or ""))
    if least and own and own >= least:
        return None
    return Refusal(name, f"built with {_AT_LEAST[name]} {_told(want)}, here is {_told(found)}")


def _owners(wanted: Facts, here: Facts) -> Refusal | None:
    """Owners of the snapshot's files that this user namespace does not know would all belong to `nobody`."""
    for name, ranges, noun in (("uids", "uid_ranges", "user"), ("gids", "gid_ranges", "group")):
        known = here.get(ranges)
        owners = wanted.get(name)
        if not isinstance(owners, list | tuple) or not isinstance(known, list | tuple):
            continue
        for number in owners:
            if not isinstance(number, int) or not any(first <= number < first + count for first, count in known):
                return Refusal(
                    "owner-ids", f"files belong to {noun} {_told(number)}, which does not exist in this user namespace"
                )
    return None


def _level(value: Any) -> int | None:
    """The number of a level of x86-64; None for other names."""
    found = re.fullmatch(r"x86-64-v(\d)", str(value))
    return int(found[1]) if found else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text)[:4])


def _texts(value: Any) -> set[str]:
    return {str(item) for item in value} if isinstance(value, list | tuple) else set()


def _gpus(kinds: set[str]) -> str:
    return f"GPUs of compute capability {', '.join(sorted(kinds))}" if kinds else "no GPU"


def _told(value: Any) -> str:
    """A value of a document in a message: short, and on one line."""
    text = "none" if value is None or value == "" else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:100])
