"""Look up the environment: compute its request key, ask the store, and decide what to do.

This happens in a child process (`background`, `lookup_process`): clients of stores may start threads, and the run must
be able to fork later. Meanwhile the run imports what most decisions need.

The child that holds the builder's lease keeps running and sends its heartbeats. It watches the read end of a pipe whose
write end is inherited by all processes that build: the pipe ends when the last of them has ended, however it ended, and
then the child releases the lease.
"""

from __future__ import annotations

import contextlib
import os

import msgspec
from msgspec import Struct

from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Action, Decision
from bootseer.errors import BootseerError
from bootseer.launch.background import Background, Send, start_background
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say
from bootseer.logs import logger

_KEY_S = 300.0
"""Inputs of a setup may be large, or need a request to a repository. They may also lie on a server that hangs."""
_LOOK_S = 60.0
"""More than all of the child's deadlines up to its decision."""
_SLACK_S = 90.0
_RELEASE_S = 10.0
_MAX_REASON = 1000
_log = logger(__name__)


class LookupResult(Struct):
    """The decision, and the process that holds the lease."""

    decision: Decision
    key: RequestKey
    helper: Background
    """Holds the lease until the last process that has `lease_pipe` closes it."""
    lease_pipe: int

    def release(self, unsafe: str = "") -> None:
        """Release the lease in this process; other processes may still hold it. `unsafe`: why the setup is to be marked
        as not snapshot-safe first."""
        if self.lease_pipe >= 0:
            with contextlib.suppress(OSError):  # the helper has ended
                os.write(self.lease_pipe, unsafe.encode("utf-8", "surrogateescape")[:_MAX_REASON])
            os.close(self.lease_pipe)
            self.lease_pipe = -1

    def close(self) -> None:
        """Wait until the lease is released, so that the next start does not have to."""
        self.release()
        if not self.helper.wait(_RELEASE_S):
            self.helper.stop()


def look_up(task: Task, image: str) -> LookupResult:
    """Look up the environment. Raises `BootseerError` if the child fails or does not answer in time; that the store
    does not answer is no error, but a reason for the decision.

    `image` is the digest of the image to run in; empty without one.
    """
    # Needed by the child and by the run: imported before the fork, they are loaded once.
    import bootseer.artifact.lease
    import bootseer.store.open

    if task.store_uri.startswith("oci://"):
        import bootseer.store.oci

    read_end, write_end = os.pipe2(os.O_CLOEXEC)

    def work(send: Send) -> None:
        from bootseer.launch.environment.lookup_process import LookupProcess

        LookupProcess(task, image, send, read_end, write_end).run()

    try:
        helper = start_background(work, name="bootseer-lease", log=task.folder.path / "lookup.log")
    except BootseerError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    try:
        with task.stage("key") as facts:
            import bootseer.launch.environment.restore  # while the child works

            if task.store_uri.startswith(("hdfs://", "viewfs://")):
                with contextlib.suppress(ImportError):  # then the child has reported it
                    import bootseer.places.hdfs  # noqa: F401 - the children to come need it

            key = msgspec.convert(helper.next_message(_KEY_S), RequestKey)
            facts["key"] = key.digest
        with task.stage("lookup") as facts:
            message = helper.next_message(_LOOK_S)
            facts["code"] = message["code"]
        if message["action"] == Action.WAIT.value:
            say(f"{message['reason']}; waiting for it, {task.options.wait_s:g} s at most (--env-wait)")
            with task.stage("wait") as facts:
                facts["for"] = message["reason"]
                message = helper.next_message(task.options.wait_s + _SLACK_S)
                facts["code"] = message["code"]
        decision = msgspec.convert(message, Decision)
        _log.info("environment %s: %s (%s: %s)", key.digest[:12], decision.action.value, decision.code, decision.reason)
    except BaseException:
        helper.stop()
        os.close(write_end)
        raise
    result = LookupResult(decision, key, helper, write_end)
    if decision.action is not Action.BUILD:
        result.release()
    return result
