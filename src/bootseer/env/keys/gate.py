"""The gate: may the snapshot that a store has under a request key be used for it, on this node?

The components of an honest document are those of its key, as the key is their digest: they are compared in case the
document was edited, or lies under another key. Of NVIDIA's driver only the branch is a component, as the last numbers
differ between equal nodes; here the whole version counts. Refusal codes are stable: reports, tests and alerts use them.

Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.env.keys.key import RequestKey, difference

FORMAT = 1
"""Version of the platform facts and of the snapshot format; a later one may use the same names with other meanings."""


class Refusal(NamedTuple):
    """A refusal: its stable code and a message."""

    code: str
    """`format`, `driver`, or the first word of the component that differs: `architecture`, `libc`, `file`, ..."""
    message: str


def check(components: Mapping[str, str], platform: Mapping[str, Any], key: RequestKey) -> Refusal | None:
    """The first reason why a snapshot with these components, built on `platform`, cannot be used for `key`.

    Both come from a store: values of the platform may have any type.
    """
    found, own = platform.get("format"), key.platform.get("format", FORMAT)
    if found != own:
        return Refusal("format", f"the snapshot has format {_text_of(found)}, this BootSeer reads {own}")
    for changed in difference(components, key):
        name = _text_of(changed.name)
        return Refusal(name.partition(" ")[0], f"the snapshot has another key, {name}: {_text_of(changed.words)}")
    driver, own_driver = platform.get("driver"), key.platform.get("driver")
    if driver and not _numbers(own_driver) >= (_numbers(driver) or (9999,)):
        return Refusal("driver", f"built with NVIDIA's driver {_text_of(driver)}, here is {_text_of(own_driver)}")
    return None


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", str(version))[:4])


def _text_of(value: Any) -> str:
    """A document's value for a message: short, on one line."""
    text = "none" if value in (None, "") else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:160])
