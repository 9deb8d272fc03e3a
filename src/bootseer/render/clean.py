"""Make text from logs safe to show: it must not drive a terminal, hide, or read as something else.

Decides and touches nothing.
"""

from __future__ import annotations

import re

from bootseer.trace.event import encodable

# Controls would be invisible, and direction marks could make a name read as another one.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def clean(text: object) -> str:
    """Printable text that every output can encode; what is not becomes U+FFFD."""
    return encodable(_UNPRINTABLE.sub("\ufffd", str(text)))
