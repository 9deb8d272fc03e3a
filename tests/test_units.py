"""Units as text."""

from __future__ import annotations

import pytest

from bootseer.units import plural


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (1440, "batch", "1,440 batches"),
        (0, "run", "0 runs"),
    ],
)
def test_a_counted_noun_has_its_plural(number: int, noun: str, text: str) -> None:
    assert plural(number, noun) == text
