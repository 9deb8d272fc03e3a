"""Run one command as a stage: what `bootseer stage` does in a shell script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bootseer.launch import supervise
from bootseer.launch.supervise import say
from bootseer.trace.tracer import from_environment


def run_stage(name: str, attrs: Mapping[str, object], command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command between a begin and an end event; returns its exit code. Without tracing, become the command."""
    tracer = from_environment(env)
    if tracer is None:
        return supervise.replace_process(command, env)
    supervise.block_signals()
    own_group = not supervise.in_foreground()
    with tracer.span(name, attrs) as span:
        try:
            pid = supervise.spawn(command, {**env, **tracer.environment()}, own_group=own_group)
            code = supervise.wait(pid, own_group=own_group, tracer=tracer)
        except supervise.CannotStart as error:
            say(str(error))
            code = error.code
        if code:
            span.fail(f"exit code {code}")
    return code
