"""The gate: may a snapshot be used on this platform?

Equal keys mean that the same was requested. The gate compares platforms: a snapshot may come from an older BootSeer,
from another node, or from a key that was computed elsewhere. Refusal codes are stable: reports, tests and alerts use
them.

Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""Version of the platform facts and of the snapshot format; a later one may use the same names with other meanings."""

Code = Literal[
    "format", "architecture", "libc", "cpu", "python", "prefix", "gpu", "driver", "cuda", "base", "owner-ids"
]


class Refusal(NamedTuple):
    """A refusal: its stable code and a message."""

    code: Code
    message: str


Facts = Mapping[str, Any]
_SAME: Mapping[Code, str] = {
    "architecture": "the processor architecture", "python": "Python", "prefix": "a Python in", "base": "the base",
}  # fmt: skip
_AT_LEAST: Mapping[Code, str] = {"driver": "NVIDIA's driver", "cuda": "a driver for CUDA"}


def check(wanted: Facts, here: Facts) -> Refusal | None:
    """The first reason why a snapshot built on platform `wanted` cannot be used on platform `here`.

    Facts missing in `wanted` are not compared. `wanted` comes from a store: values may have any type.
    """
    found = wanted.get("format")
    if found != here.get("format", FORMAT):
        own = here.get("format", FORMAT)
        return Refusal("format", f"the snapshot has format {_text_of(found)}, this BootSeer reads {own}")
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
    return Refusal(name, f"built for {_SAME[name]} {_text_of(wanted[name])}, here is {_text_of(here.get(name))}")


def _cpu(wanted: Facts, here: Facts) -> Refusal | None:
    """Code compiled for a newer processor may fail with an illegal instruction on an older one."""
    level, own = _level(wanted.get("cpu")), _level(here.get("cpu"))
    if wanted.get("cpu") is None or (level is not None and own is not None and own >= level):
        return None
    if level is None and wanted.get("cpu") == here.get("cpu"):
        return None
    return Refusal(
        "cpu", f"built on a processor of {_text_of(wanted.get('cpu'))}, this one is {_text_of(here.get('cpu'))}"
    )


def _libc(wanted: Facts, here: Facts) -> Refusal | None:
    """The C library is backward compatible: this node's must be at least as new as the builder's."""
    want, found = wanted.get("libc"), here.get("libc")
    if want is None or want == found:
        return None
    name, _, version = str(want).partition(" ")
    our_name, _, our_version = str(found).partition(" ")
    if name == our_name and (_numbers(version) or (9999,)) <= (_numbers(our_version) or (0,)):
        return None
    return Refusal("libc", f"built with {_text_of(want)}, here is {_text_of(found)}")


def _gpu(wanted: Facts, here: Facts) -> Refusal | None:
    """Kernels must have been compiled for each GPU architecture of this node."""
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
    return Refusal(name, f"built with {_AT_LEAST[name]} {_text_of(want)}, here is {_text_of(found)}")


def _owners(wanted: Facts, here: Facts) -> Refusal | None:
    """Owners that do not exist in this user namespace would all appear as `nobody`."""
    for name, ranges, noun in (("uids", "uid_ranges", "user"), ("gids", "gid_ranges", "group")):
        known = here.get(ranges)
        owners = wanted.get(name)
        if not isinstance(owners, list | tuple) or not isinstance(known, list | tuple):
            continue
        for number in owners:
            if not isinstance(number, int) or not any(first <= number < first + count for first, count in known):
                return Refusal(
                    "owner-ids",
                    f"files belong to {noun} {_text_of(number)}, which does not exist in this user namespace",
                )
    return None


def _level(value: Any) -> int | None:
    """The number of an x86-64 level; None for other names."""
    found = re.fullmatch(r"x86-64-v(\d)", str(value))
    return int(found[1]) if found else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text)[:4])


def _texts(value: Any) -> set[str]:
    return {str(item) for item in value} if isinstance(value, list | tuple) else set()


def _gpus(kinds: set[str]) -> str:
    return f"GPUs of compute capability {', '.join(sorted(kinds))}" if kinds else "no GPU"


def _text_of(value: Any) -> str:
    """A document's value for a message: short, on one line."""
    text = "none" if value is None or value == "" else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:100])
