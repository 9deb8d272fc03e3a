"""The control connection of a daemon, without a daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import PermanentError, TransientError
from bootseer.mounts import control
from waiting import until


@pytest.mark.parametrize("said", [RuntimeError("can't start new thread"), {"figure": object()}])
def test_a_failed_answer_is_reported_and_does_not_end_the_daemon(
    tmp_path: Path, said: Exception | control.Answer
) -> None:
    def answer(question: str) -> control.Answer:
        if question == "status":
            if isinstance(said, Exception):
                raise said
            return said
        return {"fine": True}

    def serve() -> None:
        for _ in range(2):
            control.serve_one(listener, answer)

    with control.listen(tmp_path) as listener:
        daemon = threading.Thread(target=serve, daemon=True)
        daemon.start()
        with pytest.raises(PermanentError, match=r"RuntimeError: can't start|TypeError: "):
            control.send_request(tmp_path, "status")
        assert control.send_request(tmp_path, "else") == {"fine": True}
        daemon.join(120)


@pytest.fixture
def drip():
    """Sends single bytes until the test ends or the peer closes the connection."""
    over, threads = threading.Event(), []

    def begin(link: socket.socket) -> None:
        def work() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.01):
                    link.sendall(b" ")

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield begin
    over.set()
    for thread in threads:
        thread.join(120)


def test_a_client_that_sends_its_question_slowly_does_not_hold_up_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drip: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(control, "_CLIENT_TIMEOUT_S", 0.2)
    with control.listen(tmp_path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / control.NAME))
        drip(client)
        daemon = threading.Thread(target=control.serve_one, args=(listener, lambda question: {}), daemon=True)
        daemon.start()
        daemon.join(60)
        assert not daemon.is_alive()
        assert b"malformed request" in client.recv(1000)


def test_a_daemon_that_answers_slowly_is_given_up(tmp_path: Path, drip: Callable[[socket.socket], None]) -> None:
    def serve() -> None:
        link, _ = listener.accept()
        links.append(link)
        drip(link)

    links: list[socket.socket] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            control.send_request(tmp_path, "status", timeout_s=0.2)
        except TransientError as error:
            errors.append(error)

    with control.listen(tmp_path) as listener:
        for work in (serve, ask):
            threading.Thread(target=work, daemon=True).start()
        until(lambda: errors)
    assert "did not answer in 0.2 s" in str(errors[0])
    links[0].close()
