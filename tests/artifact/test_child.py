"""Work in a child process, and its progress display: answers, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.artifact import progress
from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.errors import AccessError, TransientError, UsageError
from hung_mount import hung_mount, needs_fuse
from waiting import until


def test_a_store_that_hangs_is_given_up_and_the_process_is_gone(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def hang() -> None:
        pid.write_text(str(os.getpid()))
        time.sleep(600)

    shown: list[None] = []
    with pytest.raises(TransientError, match="has no result after"):
        run_in_child(hang, deadline_s=1.0, waiting=lambda: shown.append(None))
    assert shown
    assert not Path("/proc", pid.read_text()).exists()


@needs_fuse
def test_a_process_that_cannot_be_killed_is_left_behind(tmp_path: Path) -> None:
    with hung_mount(tmp_path / "hung") as path, pytest.raises(TransientError, match="has no result after"):
        run_in_child(path.stat, deadline_s=0.5)
    os.wait()


def test_a_store_whose_client_a_fork_would_break_is_asked_by_a_child(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    run_in_child(lambda: pids.write_text(str(os.getpid())))
    assert int(pids.read_text()) != os.getpid()

    def refused() -> None:
        raise AccessError("the store refuses")

    def misused() -> None:
        raise UsageError("no such thing", hint="name another one")

    with pytest.raises(AccessError, match="the store refuses"):
        run_in_child(refused)
    with pytest.raises(UsageError) as caught:
        run_in_child(misused)
    assert caught.value.hint == "name another one"
    with pytest.raises(TransientError, match="ZeroDivisionError"):
        run_in_child(lambda: 1 // 0)
    assert all(breaks_forks(f"{scheme}://a/b") for scheme in ("s3", "gs", "az", "hdfs", "viewfs"))
    assert not any(breaks_forks(uri) for uri in ("oci://h/r", "file:///folder", "/folder", None))


def test_a_wait_is_shown_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK_S", 0.001)
    shown: list[tuple[str, int, int]] = []

    @contextmanager
    def show(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append((label, done, total))

    with progress.shown_while(show, "waiting for it"):
        until(lambda: shown, "it is shown")
    num_shown = len(shown)
    time.sleep(0.01)
    assert shown == [("waiting for it", 0, 0)] * num_shown
