"""Recording the output of torch.save without copying it."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bootseer.checkpoint.dcp.writer import RecordedFile  # noqa: E402

pytestmark = pytest.mark.torch


def test_saved_data_is_replayed_from_any_offset() -> None:
    tensor = torch.randn(300, 200)
    recorded, plain = RecordedFile(), io.BytesIO()
    recorded.write(b"before")
    recorded.save(tensor, recorded)  # type: ignore[arg-type] # it has a method write
    torch.save(tensor, plain)
    everything = recorded.replay(0, recorded.size_bytes)
    loaded = torch.load(io.BytesIO(everything[6:]))
    assert torch.equal(loaded, tensor)
    assert len(everything) == 6 + len(plain.getvalue())
    for offset, length in ((0, 1), (5, 3), (700, 100_000), (len(everything) - 9, 9), (17, 0)):
        assert recorded.replay(offset, length) == everything[offset : offset + length]


def test_elements_are_not_copied() -> None:
    tensor = torch.zeros(1000, 1000)
    recorded = RecordedFile()
    recorded.save(tensor, recorded)  # type: ignore[arg-type]
    tensor.fill_(1.0)  # shows that the tensor's own memory is read
    loaded = torch.load(io.BytesIO(recorded.replay(0, recorded.size_bytes)))
    assert torch.equal(loaded, tensor)


def test_a_small_tensor_is_one_piece() -> None:
    class Counted(io.BytesIO):
        num_writes = 0

        def write(self, data: Any, /) -> int:
            self.num_writes += 1
            return super().write(data)

    to = Counted()
    RecordedFile().save(torch.zeros(10), to)
    assert to.num_writes == 1  # torch.save makes some forty of them
    assert not torch.load(io.BytesIO(to.getvalue())).any()


def test_small_tensors_are_copied() -> None:
    tensor = torch.zeros(10)
    recorded = RecordedFile()
    recorded.save(tensor, recorded)  # type: ignore[arg-type]
    tensor.fill_(1.0)
    assert not torch.load(io.BytesIO(recorded.replay(0, recorded.size_bytes))).any()
