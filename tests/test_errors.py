"""Errors of the system and of libraries are converted to BootSeer's."""

from __future__ import annotations

import pytest

from bootseer.errors import UsageError, needs_extra


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'x'", name="x"), "a signature needs x, which is not installed"),
        (ImportError("libc.so.6: too old", name="x.native"), "a signature is not possible: libc.so.6: too old"),
    ],
)
def test_a_library_may_be_missing_or_impossible_to_load(error: ImportError, said: str) -> None:
    with pytest.raises(UsageError) as caught, needs_extra("sign", "a signature"):
        raise error
    assert (str(caught.value), caught.value.hint) == (said, "pip install 'bootseer[sign]'")
