from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.layout import make_ready, parity_chunk, xor_into

make_ready()


@given(st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=6), st.data())
def test_any_chunk_of_a_row_can_be_rebuilt_from_the_others_and_the_parity(
    chunks: list[bytes], data: st.DataObject
) -> None:
    parity = parity_chunk(chunks, max(map(len, chunks)))
    missing = data.draw(st.integers(0, len(chunks) - 1))
    others = chunks[:missing] + chunks[missing + 1 :]
    rebuilt = bytearray(parity)
    xor_into(rebuilt, *others)
    assert rebuilt.startswith(chunks[missing])
    assert not any(rebuilt[len(chunks[missing]) :])


def test_data_longer_than_its_target_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        xor_into(bytearray(3), b"four")


def test_the_result_is_the_same_without_numpy() -> None:
    row = [os.urandom(1000), os.urandom(999), b"", os.urandom(1)]
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from bootseer.checkpoint.layout import make_ready, parity_chunk\n"
        "make_ready()\n"
        f"row = {row!r}\n"
        "sys.stdout.buffer.write(parity_chunk(row, 1024))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == parity_chunk(row, 1024)
