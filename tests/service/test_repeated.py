"""The service's background threads."""

from __future__ import annotations

import threading

import pytest

from bootseer.service.repeated import Repeated
from waiting import until


def test_an_error_without_text_is_logged_too_and_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) < 4:
            raise EOFError

    thread = Repeated("look", call, 0.001, retry_s=0.001)
    thread.start()
    until(lambda: len(calls) > 4, "errors ended the thread")
    thread.close(60)
    assert [record.message for record in caplog.records] == ["look: "]
    assert caplog.records[0].exc_info


def test_the_end_waits_only_so_long_and_the_last_call_is_made(caplog: pytest.LogCaptureFixture) -> None:
    may_end, calls = threading.Event(), []
    slow = Repeated("slow", lambda: may_end.wait(60), 1e6)
    last = Repeated("last", lambda: calls.append(last.ended.is_set()), 1e6, first_s=1e6, once_more=True)
    never = Repeated("never", lambda: calls.append(None), 1e6)
    slow.start()
    last.start()
    never.close()  # never started
    slow.close(0.01)
    last.close(60)
    assert slow.thread.is_alive()
    assert calls == [True]
    may_end.set()
    slow.thread.join(60)
    assert not slow.thread.is_alive()
