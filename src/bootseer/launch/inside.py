"""Restart a command inside its container: the program between the container and the command of `bootseer run --image
--restarts N --warm`.

A container ends with its first program, and a warm parent with its container. Where the command's parent is in the
container, too, both outlive the command, and its restart repeats neither the container's start nor imports. Run by the
image's own Python, so only modules that need nothing but the standard library are imported:

    python3 -I -S inside.py RESTARTS DELAY RUN_SPAN SPOOL PROCESS WORD...

PROCESS is the folder for process snapshots, or empty.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the folder that has the package `bootseer`
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bootseer.launch import supervise
from bootseer.launch.restart import Restarts
from bootseer.launch.session import RunEvents, Unmeasured
from bootseer.trace.event import BEGIN, END, FAILED, OK
from bootseer.trace.tracer import from_environment


def run(max_restarts: int, delay_s: int, span: str, folder: str, process: str, command: list[str]) -> int:
    """Run the command, restarting it as `bootseer run --restarts` does; returns its exit code.

    The events of its first start are written by the run outside.
    """
    supervise.block_signals()
    env = dict(os.environ)
    tracer = from_environment(env) or Unmeasured(env).tracer
    restarts = Restarts(max_restarts, delay_s, command, RunEvents(tracer, span, folder), None, warm=True)
    restarts.tag_environment(env)
    restarts.restore_process(process, command, env)
    own_span = ""
    while True:
        signals: list[int] = []
        try:
            # In this process's group, to which the shim outside sends the container's signals.
            pid = restarts.spawn_warm(env, {}, own_group=False) or supervise.spawn(command, env, own_group=False)
            code = supervise.wait(
                pid,
                own_group=False,
                forwards=False,
                reaps_orphans=True,
                on_signal=signals.append,
                on_restart_request=restarts.request,
            )
        except supervise.StartError as error:
            supervise.say(str(error))
            code = error.code
        if own_span:
            facts = {"exit_code": code}
            tracer.emit("command", END, span=own_span, parent=span, outcome=FAILED if code else OK, attrs=facts)
        ended = restarts.prepare(code, signals, env)
        if ended is not None:
            if ended == 0:
                restarts.record_process(process, command, env)
            restarts.close()
            return ended
        attrs = {"program": os.path.basename(command[0])}
        own_span = tracer.emit("command", BEGIN, parent=span, attrs=attrs)
        env.update(tracer.environment(own_span))


if __name__ == "__main__":
    restarts, delay, span, folder, process, *command = sys.argv[1:]
    sys.exit(run(int(restarts), int(delay), span, folder, process, command))
