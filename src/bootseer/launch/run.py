"""`bootseer run`: prepare and run a command, and record what can be seen from outside.

The order lets the command start early: identity and spool first (a few system calls), then the setup, then the
command; scheduler times and export run beside it. Nothing here may fail the job: without a spool the command runs
unmeasured, with a message.

Imported before every job: what only some runs need is imported where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from bootseer.errors import BootseerError, Interrupted, UsageError
from bootseer.launch import supervise
from bootseer.launch.command import Options, run_command
from bootseer.launch.session import Session, Unmeasured
from bootseer.launch.supervise import say

_POD_SOCKET = "/run/bootseer/starts/socket"
"""Of the node's snapshotter (`snapshotter.starts`), where pods mount its folder."""


def run(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """Run the command; returns the exit code to end with. Raises `BootseerError` before the command was started."""
    measured = env.get("BOOTSEER_DISABLE") != "1"
    if options.setup or options.requirements:
        from bootseer.launch.environment.plain import check_files

        check_files(options.setup, options.requirements)
    if not measured and options.checkpoint is None and options.image is None:
        return _run_unmeasured(command, options, env)
    if not measured:
        from msgspec.structs import replace

        environment = options.environment and replace(options.environment, mode="bypass")
        options = options._replace(restarts=None, warm="off", peers=None, environment=environment)
    supervise.block_signals()
    session = _session(command, options, env) if measured else Unmeasured(env)
    code = 1
    try:
        with ExitStack() as parts:
            if options.warm != "off":
                _start_warm(command, options, session, env, parts)
            variables: dict[str, str] = {}
            if options.peers is not None:
                from bootseer.launch.peers import PeersStart

                session.peers = PeersStart(options.peers, session, env)
                variables |= parts.enter_context(session.peers)
            if options.image is None and os.path.exists(_POD_SOCKET):
                _report_to_node(options, session, env, parts)
            if options.checkpoint is not None:
                from bootseer.launch.checkpoint import CheckpointStart

                variables |= parts.enter_context(CheckpointStart(options.checkpoint, session, options.show))
            code = _run_measured(command, options, env, session, variables)
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted} before the command was started")
        code = interrupted.exit_code
    except BootseerError as error:
        code = error.exit_code
        if isinstance(error, UsageError):
            session.quiet = True  # nothing ran, so there is nothing to report
        raise
    finally:
        session.close(code)
    return code


def _session(command: Sequence[str], options: Options, env: Mapping[str, str]) -> Session:
    try:
        return Session(command, options, env)
    except OSError as error:
        why = f"{error.filename or 'the spool'}: {error.strerror}; name another folder with --spool"
    except BootseerError as error:
        why = f"{error}; {error.hint}" if isinstance(error, UsageError) else str(error)
    say(f"events cannot be written ({why}); the command runs unmeasured")
    return Unmeasured(env, command)


def _run_measured(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session,
    extra_env: Mapping[str, str],
) -> int:
    """Run the command in the image, in the environment, or directly. `extra_env` names its checkpoints and peers."""
    if options.image is not None:
        from bootseer.launch.image.start import run_in_image

        return run_in_image(options.image, command, options, env, session, extra_env)
    child_env = {**session.child_env(env, hook=options.hook), **extra_env}
    if options.environment is None:
        return run_command(command, options, child_env, session)
    from bootseer.launch.environment.start import run_in_environment

    return run_in_environment(command, options, child_env, session, own_env=env)


def _start_warm(
    command: Sequence[str], options: Options, session: Session, env: Mapping[str, str], parts: ExitStack
) -> None:
    """Record imports, and let the command's launcher have a warm parent if earlier starts have recorded them."""
    from bootseer.launch.warm import WarmStart

    image = str(options.image.request.reference) if options.image is not None else ""
    environment = "\0".join((image, options.setup or "", *options.requirements))
    try:
        if not options.hook or env.get("BOOTSEER_HOOK") == "0":
            raise UsageError("the hook is off, which records imports")
        if "spool" not in session.sinks:
            raise UsageError("there is no spool to record imports in")
        session.warm = parts.enter_context(WarmStart(session, command, env, environment, options))
    except (BootseerError, OSError) as error:  # there is no folder for records
        say(f"not warm: {error}")


def _report_to_node(options: Options, session: Session, env: Mapping[str, str], parts: ExitStack) -> None:
    from bootseer.launch.observers import PodStart

    has_hook = options.hook and env.get("BOOTSEER_HOOK") != "0"
    if "spool" not in session.sinks or not (has_hook or options.began_pattern is not None):
        return  # this run does not learn when training begins
    try:
        parts.callback(PodStart(session, _POD_SOCKET).close)
    except ConnectionRefusedError:  # the snapshotter was killed
        pass
    except OSError as error:
        say(f"the node's snapshotter does not learn when training begins: {error}")


def _run_unmeasured(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """BOOTSEER_DISABLE: run the setup, which is part of the job, and exec the command."""
    if options.environment is not None:
        from bootseer.launch.environment.setup import run_setup

        supervise.block_signals()
        # Its exports are dropped, as by a wrapper script that calls the setup.
        code, _ = run_setup(options, env, Unmeasured(env), exports=False)
        if code:
            return code
        supervise.unblock_signals()
    return supervise.replace_process(command, env)
