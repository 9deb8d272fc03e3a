"""The threads that observe a start while its command runs."""

import os
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.launch.observers import COMMAND_ENDED, TRAINING_BEGAN, Observers, Shipping, StartReport
from bootseer.launch.session import RunEvents, Unmeasured, _run_attributes
from bootseer.trace.event import Event
from bootseer.trace.identity import Identity
from bootseer.trace.sinks import FanOut
from bootseer.trace.tracer import Tracer, new_span
from bootseer.units import NS_PER_S


def test_a_thread_that_cannot_be_started_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    observers = Observers()
    observers.start(lambda ended: None)
    observers.finish()
    assert "not watched to its end: can't start new thread" in capfd.readouterr().err


def test_python_does_not_warn_that_the_last_sender_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONWARNINGS=default or PYTHONDEVMODE=1 it would at the end of each job."""
    (tmp_path / "sender").write_text("#!/bin/sh\n")
    (tmp_path / "sender").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sender"))
    shipping = Shipping(str(tmp_path), "http://127.0.0.1:9", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shipping.finish()
    assert not caught


def test_a_second_report_waits_until_the_first_one_is_written() -> None:
    begun, may_end = threading.Event(), threading.Event()
    written: list[str] = []

    def record(until: str) -> None:
        begun.set()
        assert may_end.wait(30)
        written.append(until)

    report = StartReport(Unmeasured({}), record)
    watcher = threading.Thread(target=report.send, args=(TRAINING_BEGAN,))
    watcher.start()
    assert begun.wait(30)
    ender = threading.Timer(0.1, may_end.set)
    ender.start()
    report.send(COMMAND_ENDED)  # the next step unmounts the files that the first report reads
    assert written == [TRAINING_BEGAN]
    watcher.join()
    ender.join()


@pytest.mark.parametrize(("devices", "gpus"), [(["null", "nvidia0", "nvidiactl"], 1), (["null"], 0), (["kfd"], None)])
def test_gpus_that_are_not_counted_are_unknown(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], gpus: int | None
) -> None:
    """If the number were 0 on nodes with AMD GPUs, reports would show starts without any GPU-hours."""
    monkeypatch.setattr(os, "listdir", lambda path: devices)
    options: Any = SimpleNamespace(hook=True, requirements=())
    assert _run_attributes(["true"], Identity(job="moe", node="a"), options, {})["gpus"] == gpus


def test_a_run_owns_its_events_although_the_clock_was_set_back_and_none_of_before_a_boot() -> None:
    run = RunEvents(Tracer(FanOut([]), Identity(job="moe", node="a"), trace=""), new_span(), "")
    event = Event(wall_ns=run.began_ns, mono_ns=time.monotonic_ns(), job="moe", node="a", stage="x", phase="instant",
                  span=new_span())  # fmt: skip
    minute_ns = 60 * NS_PER_S
    assert run.owns(event)
    assert run.owns(event._replace(wall_ns=event.wall_ns - 5 * minute_ns))
    assert not run.owns(event._replace(wall_ns=event.wall_ns - minute_ns, mono_ns=event.mono_ns - minute_ns))
    assert not run.owns(event._replace(wall_ns=event.wall_ns - 100 * minute_ns, mono_ns=event.mono_ns + minute_ns))
    assert not run.owns(event._replace(wall_ns=event.wall_ns - 9 * minute_ns, mono_ns=event.mono_ns + 999 * minute_ns))
    assert not run.owns(event._replace(node="b"))
