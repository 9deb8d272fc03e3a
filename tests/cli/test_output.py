"""Output: progress on terminals, in logs and without a reader; colours; files."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.text import Text

from bootseer.cli import main, output
from bootseer.cli.output import Output, Progress, shown, table, terminal, write_file
from bootseer.errors import PermanentError
from bootseer.launch import supervise


@pytest.fixture
def long_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown from the beginning."""
    monkeypatch.setattr(output, "_LONG_S", 0.0)


@contextlib.contextmanager
def written_to(file: TextIO | None) -> Iterator[None]:
    """Replace standard error. Used in the test itself, as pytest sets its own after the fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield


@contextlib.contextmanager
def screen(columns: int) -> Iterator[Callable[[], str]]:
    """Make standard error a terminal. Yields a function that returns what was written to it."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 10, columns, 0, 0))
    os.set_blocking(here, False)
    with os.fdopen(here, "rb", buffering=0) as reader, os.fdopen(there, "w") as file, written_to(file):

        def seen() -> str:
            # The kernel delivers written data a moment later.
            data, until = b"", time.monotonic() + 60
            while not data.endswith(b"\x1b[K") and time.monotonic() < until:
                data += reader.read(10_000) or b""
            return data.decode()

        yield seen


@pytest.mark.usefixtures("long_at_once")
def test_a_log_gets_one_line_once_it_takes_long() -> None:
    log = io.StringIO()
    with written_to(log):
        with shown("fetching x", "blocks") as heard:
            heard(1, 4)
            heard(2, 4)
        with shown("waiting for y", "") as heard:
            heard(0, 0)
            heard(0, 0)
    assert log.getvalue() == "bootseer: still fetching x 1 of 4 blocks\nbootseer: still waiting for y for 0 s\n"


def test_a_narrow_terminal_breaks_rows_and_not_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 12, 0, 0))
    rows = table("name", "size", "kind")
    rows.add_row("step-1000", "2.9 MiB", "ordinary")
    with os.fdopen(here, "rb", buffering=0) as reader, os.fdopen(there, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        Output("", as_json=False)({}, rows)
        assert b"step-1000  2.9 MiB  ordinary" in reader.read(1000)


def test_short_work_shows_no_progress() -> None:
    log = io.StringIO()
    with written_to(log), shown("fetching x", "bytes") as heard:
        heard(1, 4)
    assert log.getvalue() == ""


@pytest.mark.usefixtures("long_at_once")
def test_verbs_that_show_a_bar_write_nothing_into_a_log() -> None:
    log = io.StringIO()
    with written_to(log), Progress("reading") as bar:
        bar.show_bytes(1, 2)
        bar.wait()
    assert log.getvalue() == ""


def test_a_terminal_shows_a_bar_that_fits_and_goes() -> None:
    with screen(40) as seen:
        with shown("converting registry:5000/team/a-long-name-of-an-image:7", "bytes") as heard:
            heard(1 << 20, 2 << 20)
        begin, *lines, end = seen().split("\r\x1b[K")
    assert (begin, end) == ("", "")
    assert {line.startswith("converting registry") for line in lines} == {True}  # several on a slow machine
    assert {len(line) for line in lines} == {39}


def test_a_message_takes_the_place_of_the_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with screen(80), Progress("reading") as bar:
        supervise.say("before")
        bar.show_bytes(1, 2)
        supervise.say("meanwhile")
    supervise.say("after")
    assert capfd.readouterr().err == "bootseer: before\n\r\x1b[Kbootseer: meanwhile\nbootseer: after\n"


@pytest.mark.usefixtures("long_at_once")
def test_a_terminal_shows_that_something_is_waited_for() -> None:
    with screen(80) as seen:
        with shown("waiting for hdfs://nn/jobs", "") as heard:
            heard(0, 0)
        assert "waiting for hdfs://nn/jobs for 0 s" in seen()


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.usefixtures("long_at_once")
@pytest.mark.parametrize("stderr", [None, _Closed()])
def test_without_a_reader_the_work_continues(stderr: TextIO | None) -> None:
    with written_to(stderr), shown("fetching x", "blocks") as heard:
        heard(1, 4)


def test_piped_output_is_80_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with terminal() as console:
        assert console.width == 80


def test_no_color_turns_colours_off_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not without_colours("auto")
    monkeypatch.setenv("NO_COLOR", "1")
    assert [without_colours(word) for word in ("auto", "never", "always")] == [True, True, False]


def without_colours(wanted: str) -> bool:
    """Whether the console omits colours."""
    with terminal(wanted) as console:
        return console.no_color


def test_names_from_jobs_and_stores_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output.table("node", "state")
    rows.add_row("n1\x1b]0;owned\x07", Text("late\x1b[2J", "red"))
    output.Output("bootseer.x/1", False)({}, "a\x1b[31mline", Text("b\x1b[31mline"), rows)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "n1\ufffd]0;owned" in shown and "late\ufffd[2J" in shown


def test_messages_that_quote_a_service_cannot_change_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    supervise.say("the store says \x1b[2Jgone")
    main._say("hint: \x1b]0;owned\x07 na\u00efve \udc80\n  line 2")
    shown = capfd.readouterr().err
    assert shown == ("bootseer: the store says \\x1b[2Jgone\nhint: \\x1b]0;owned\\x07 na\u00efve \\udc80\n  line 2\n")


def test_a_file_is_replaced_when_its_new_content_is_complete_and_keeps_its_mode_and_links(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    with page.open() as reader:
        write_file(link, "new")
        assert reader.read() == "old"
    assert (link.is_symlink(), page.read_text(), page.stat().st_mode & 0o777) == (True, "new", 0o640)
    write_file(tmp_path / ("long" * 62), b"content")
    assert sorted(tmp_path.iterdir()) == [link, tmp_path / ("long" * 62), page]


def test_a_pipe_and_standard_output_are_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    here = os.open(pipe, os.O_RDWR)
    write_file(pipe, "page")
    assert os.read(here, 100) == b"page"
    os.close(here)
    write_file(Path("/dev/null"), "page")
    assert not Path("/dev/null").is_file()
    with pytest.raises(PermanentError, match="cannot be written: No such file"):
        write_file(tmp_path / "no" / "page", "page")


def test_few_bytes_for_a_full_disk_are_an_error_at_once_and_not_at_exit() -> None:
    """`image hotset export ... - > FILE` left them in the buffer, and the flush at exit failed."""
    program = "from bootseer.cli.output import print_bytes; print_bytes(b'few')"
    with Path("/dev/full").open("wb") as full:
        words, env = [sys.executable, "-c", program], {**os.environ, "PYTHONUNBUFFERED": ""}
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=env, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "PermanentError: standard output: cannot be written" in ended.stderr
    assert "Exception ignored" not in ended.stderr
