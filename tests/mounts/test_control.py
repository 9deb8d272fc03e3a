"""The line between a daemon and the rest, without a daemon."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bootseer.errors import PermanentError
from bootseer.mounts import control


@pytest.mark.parametrize("said", [RuntimeError("can't start new thread"), {"figure": object()}])
def test_an_answer_that_goes_wrong_is_told_and_does_not_end_the_daemon(
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
            control.ask(tmp_path, "status")
        assert control.ask(tmp_path, "else") == {"fine": True}
        daemon.join(120)
