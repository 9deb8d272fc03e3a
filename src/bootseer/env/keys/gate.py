"""The gate: may a snapshot be used on this platform?

A platform has facts that are in the request key as well, so an honest document under an equal key has the same ones:
they are compared in case a document was moved, edited, or written by a BootSeer with another key. Of NVIDIA's driver
only the branch is in the key, as the last numbers differ between equal nodes; here the whole version counts. Refusal
codes are stable: reports, tests and alerts use them.

Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""Version of the platform facts and of the snapshot format; a later one may use the same names with other meanings."""

Code = Literal["format", "architecture", "libc", "cpu", "python", "prefix", "gpu", "driver", "cuda", "base"]


class Refusal(NamedTuple):
    """A refusal: its stable code and a message."""

    code: Code
    message: str


Facts = Mapping[str, Any]
_SAME: tuple[tuple[str, Code, str], ...] = (
    ("architecture", "architecture", "the processor architecture"),
    ("libc", "libc", "the C library"),
    ("cpu", "cpu", "a processor of"),
    ("python", "python", "Python"),
    ("prefix", "prefix", "a Python in"),
    ("gpus", "gpu", "GPUs of compute capability"),
    ("cuda", "cuda", "CUDA"),
    ("base", "base", "the base"),
)
"""Facts that must be equal: name, code, and the words before the value."""


def check(wanted: Facts, here: Facts) -> Refusal | None:
    """The first reason why a snapshot built on platform `wanted` cannot be used on platform `here`.

    Facts missing in `wanted` are not compared. `wanted` comes from a store: values may have any type.
    """
    found, own = wanted.get("format"), here.get("format", FORMAT)
    if found != own:
        return Refusal("format", f"the snapshot has format {_text_of(found)}, this BootSeer reads {own}")
    for name, code, words in _SAME:
        if wanted.get(name) is not None and wanted[name] != here.get(name):
            return Refusal(code, f"built for {words} {_text_of(wanted[name])}, here is {_text_of(here.get(name))}")
    driver, own_driver = wanted.get("driver"), here.get("driver")
    if driver and not _numbers(own_driver) >= (_numbers(driver) or (9999,)):
        return Refusal("driver", f"built with NVIDIA's driver {_text_of(driver)}, here is {_text_of(own_driver)}")
    return None


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", str(version))[:4])


def _text_of(value: Any) -> str:
    """A document's value for a message: short, on one line."""
    text = "none" if value in (None, "", []) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:100])
