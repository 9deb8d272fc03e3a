"""After a signal, what was begun is undone, and quickly."""

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
    with interruptible(once=True):
        wait()
except Interrupted:
    print("ended", flush=True)
    sys.exit(3)
"""


def started(program: str) -> subprocess.Popen[str]:
    """A process inside the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", program + BLOCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize("program", [DEAF, CLEANING.replace("sleep(1)", "sleep(100)")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_process_after_a_first_signal(program: str, number: signal.Signals) -> None:
    with started(program) as process:
        assert process.stdout is not None
        process.send_signal(number)
        if program is not DEAF:
            assert process.stdout.readline() == "cleaning\n"
        until = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_begun_is_undone_whatever_other_signals_follow(number: signal.Signals) -> None:
    with started(CLEANING) as process:
        assert process.stdout is not None
        process.send_signal(number)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=100)
    assert (process.returncode, out) == (3, "clean\nended\n")
    assert said == "bootseer: interrupted: cleaning up; Ctrl-C ends it at once\n"


def test_a_block_leaves_nothing_behind() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for once in (False, True):
        with interruptible(once=once):
            pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def _hand_over_work(begin: Callable[[Callable[[], object]], None]) -> None:
    """Hand work over until a signal comes. In a `with` block of its caller, not in one of its own: Python 3.13.0 does
    not cover the jump to the begin of a loop that ends the block, so an exception there would not reach `__exit__`."""
    # With a limit: Python drops exceptions in callbacks of its garbage collector, and Hypothesis has one.
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        begin(int)


@pytest.mark.parametrize("begin", [Executor("test-pool", 2).submit, partial(Timer("test-timer").after, 0.0)])
def test_a_signal_while_work_is_handed_over_leaves_no_lock_held(begin: Callable[[Callable[[], object]], None]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        for number in range(300):
            with suppress(Interrupted), interruptible():
                signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number))
                _hand_over_work(begin)
            done = threading.Event()
            threading.Thread(target=begin, args=[done.set], daemon=True).start()
            assert done.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
