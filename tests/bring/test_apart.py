"""Work in a process of its own: its answers, and its end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.bring.apart import do_apart
from bootseer.errors import TransientError


def test_a_store_that_hangs_is_given_up_and_the_process_is_gone(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def hang() -> None:
        pid.write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(TransientError, match="has not answered"):
        do_apart(hang, deadline_s=1.0)
    assert not Path("/proc", pid.read_text()).exists()
