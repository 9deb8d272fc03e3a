"""What was begun is undone when a signal comes, and nobody waits long for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from bootseer.errors import Interrupted
from bootseer.io.executor import Executor
from bootseer.io.timer import Timer
from bootseer.launch.interrupt import interruptible

DEAF = """
import contextlib, ctypes
from bootseer.errors import Interrupted
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
def wait():
    # No signal ends it, and no handler of Python runs meanwhile. One that comes before it ends the first of them.
    with contextlib.suppress(Interrupted):
        print("waits", flush=True)
        libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
CLEANING = """
import time
def wait():
    try:
        print("waits", flush=True)
        time.sleep(100)
    finally:
        print("cleaning", flush=True)
        time.sleep(1)
        print("clean", flush=True)
"""
BLOCK = """
import sys
from bootseer.errors import Interrupted
from bootseer.launch.interrupt import interruptible
try:
    with interruptible(float(sys.argv[1]), "what is left is removed later"):
        wait()
except Interrupted:
    print("ended", flush=True)
    sys.exit(3)
"""


def started(program: str, grace_s: float) -> subprocess.Popen[str]:
    """A process in its block."""
    process = subprocess.Popen(
        [sys.executable, "-c", program + BLOCK, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_main_thread_that_hears_no_signal_ends_with_its_process(number: signal.Signals) -> None:
    with started(DEAF, 0.5) as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert said == "\nbootseer: ended while servers did not answer; what is left is removed later\n"


def test_what_is_undone_in_time_is_undone_whatever_signals_follow() -> None:
    with started(CLEANING, 100.0) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        out, said = process.communicate(timeout=100)
    assert (process.returncode, out, said) == (3, "clean\nended\n", "")


def test_what_is_not_undone_in_time_is_left() -> None:
    with started(CLEANING.replace("sleep(1)", "sleep(100)"), 0.3) as process:
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=90)
    assert (process.returncode, out) == (130, "cleaning\n")
    assert "ended while servers did not answer" in said


def test_a_block_leaves_nothing_behind() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for _ in range(3):
        with interruptible(0.1):
            pass
    for thread in threading.enumerate():
        if thread.name == "bootseer-patience":
            thread.join(60)  # it ends a moment after the block
            assert not thread.is_alive()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    time.sleep(0.3)  # nothing ends this process


@pytest.mark.parametrize("begin", [Executor("test-pool", 2).submit, partial(Timer("test-timer").after, 0.0)])
def test_a_signal_while_work_is_handed_over_leaves_no_lock_held(begin: Callable[[Callable[[], object]], None]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        for number in range(300):
            with suppress(Interrupted), interruptible():
                signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number))
                # Not forever: Python drops an exception in a callback of its garbage collector, as Hypothesis has one.
                until = time.monotonic() + 0.1
                while time.monotonic() < until:
                    begin(int)
            done = threading.Event()
            threading.Thread(target=begin, args=[done.set], daemon=True).start()
            assert done.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
