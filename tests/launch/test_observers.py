"""What watches a start beside its command."""

import threading

import pytest

from bootseer.launch.observers import COMMAND_ENDED, TRAINING_BEGAN, Observers, StartReport


def test_a_thread_that_cannot_be_started_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    observers = Observers()
    observers.start(lambda ended: None)
    assert observers.finish(0.0)
    assert "not watched to its end: can't start new thread" in capfd.readouterr().err


def test_a_second_report_waits_until_the_first_one_is_written() -> None:
    begun, may_end = threading.Event(), threading.Event()
    written: list[str] = []

    def record(until: str) -> None:
        begun.set()
        assert may_end.wait(30)
        written.append(until)

    report = StartReport(None, record)
    watcher = threading.Thread(target=report.send, args=(TRAINING_BEGAN,))
    watcher.start()
    assert begun.wait(30)
    ender = threading.Timer(0.1, may_end.set)
    ender.start()
    report.send(COMMAND_ENDED)  # what comes next unmounts what the first report reads
    assert written == [TRAINING_BEGAN]
    watcher.join()
    ender.join()
