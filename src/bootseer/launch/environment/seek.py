"""Find out what is to be done about the environment: its key, and what follows from the store's answer.

All of it happens in a child (`background`, `seeker`): clients of stores may have threads, and the run must be able to
fork later. Meanwhile the run imports what most answers lead to, which takes as long.
The child that holds the lease stays, shows that the builder is alive, and gives the lease back when the last process
that builds has ended, however it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bootseer.env.document import EnvironmentDocument
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import DOCUMENTS, Action, Decision
from bootseer.errors import BootseerError, TransientError
from bootseer.launch.background import Background, Tell, start_background
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say
from bootseer.logs import logger

if TYPE_CHECKING:
    from bootseer.env.keys.request_key import Base

_KEY_S = 900.0
"""What a setup names may be large, or lie in a repository that has to be asked."""
_LOOK_S = 60.0
"""More than all the child's own deadlines until it answers for the first time."""
_SLACK_S = 90.0
_RELEASE_S = 10.0
_log = logger(__name__)


@dataclass(slots=True)
class Election:
    """What was decided, and the process that holds the lease."""

    decision: Decision
    key: RequestKey | None = None
    """What the setup asks for; None when that could not be found out."""
    helper: Background | None = None
    """Holds the lease until `release`, or the end of all processes that have `held`."""
    held: int = -1

    def release(self) -> None:
        """Give the lease back, as far as we have it: other processes may still have it."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def close(self) -> None:
        """Wait until the lease is given back: the next start would have to wait for it."""
        self.release()
        if self.helper is not None and not self.helper.ended(_RELEASE_S):
            self.helper.stop()


def seek(task: Task, base: Callable[[], Base] | None, *, damaged: str = "") -> Election:
    """Decide what is done. Nothing that goes wrong with the key or the store is an error: then the setup runs.

    `base` tells of an image, and is called in a child. `damaged` says what is wrong with the snapshot that was found
    before: it is to be made anew.
    """
    # The child and the run need these alike: imported before the fork, they are paid once.
    import bootseer.artifact.lease
    import bootseer.env.life.quarantine
    import bootseer.store.open

    if task.store_uri.startswith("oci://"):  # the client of HDFS imports numpy, which starts threads
        import bootseer.store.oci

    stay, held = os.pipe2(os.O_CLOEXEC)

    def work(tell: Tell) -> None:
        from bootseer.launch.environment.seeker import Seeker

        Seeker(task, base, tell, stay, held, damaged).seek()

    try:
        helper = start_background(work, name="bootseer-lease", log=task.folder.path / "seek.log")
    except BootseerError:
        os.close(held)
        raise
    finally:
        os.close(stay)
    mode = task.wanted.mode
    election = Election(Decision(Action.INSTALL, "failed", ""), None, helper, held)
    try:
        with task.stage("key") as facts:
            import bootseer.launch.environment.restore  # noqa: F401 - see above

            key = election.key = msgspec.convert(_answer(helper, _KEY_S), RequestKey)
            facts["key"] = key.digest
        with task.stage("lookup") as facts:
            message = _answer(helper, _LOOK_S)
            facts["code"] = message["code"]
        if message["action"] == Action.WAIT.value:
            say(f"{message['words']}; waiting for it, {task.wanted.wait_s:g} s at most (--env-wait)")
            with task.stage("wait") as facts:
                facts["for"] = message["words"]
                message = _answer(helper, task.wanted.wait_s + _SLACK_S)
                facts["code"] = message["code"]
        decision = _decoded(message)
        _log.info("environment %s: %s (%s: %s)", key.digest[:12], decision.action.value, decision.code, decision.words)
    except TransientError as error:
        helper.stop()
        decision = Decision(Action.FAIL if mode == "require" else Action.INSTALL, "failed", str(error), mode=mode)
    except BaseException:
        helper.stop()
        election.release()
        raise
    election.decision = decision
    if decision.action is not Action.BUILD:
        election.release()
    return election


def _answer(helper: Background, timeout_s: float) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    message = helper.answer(timeout_s)
    while "say" in message:
        say(message["say"])
        message = helper.answer(until - time.monotonic())
    if "error" in message:
        raise TransientError(message["error"])
    return message


def _decoded(message: Mapping[str, Any]) -> Decision:
    documents = {
        name: EnvironmentDocument.parse(message[name].encode()) for name in DOCUMENTS if message[name] is not None
    }
    return Decision(**{**message, **documents, "action": Action(message["action"])})
