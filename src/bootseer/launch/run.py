"""`bootseer run`: set the stage for a command, run it, and write down what can be seen from outside.

The order is chosen so that the command starts as early as it can: identity and spool first (they cost a few system
calls), then the setup, then the command; what the scheduler knows and the export to a collector happen beside it.
Nothing here may fail the job: without a spool the command runs unmeasured, and one line says so.

Imported in front of every job: what only some runs need is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from bootseer.errors import BootseerError, Interrupted, UsageError
from bootseer.launch import supervise
from bootseer.launch.command import Options, run_command
from bootseer.launch.session import Session
from bootseer.launch.supervise import say


def run(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """Run the command; returns the exit code to end with. Raises `BootseerError` before the command was started."""
    measured = env.get("BOOTSEER_DISABLE") != "1"
    if (options.setup or options.requirements) and options.image is None:
        from bootseer.launch.environment.plain import check_files

        check_files(options.setup, options.requirements)
    if not measured and options.checkpoint is None and options.image is None:
        return _unmeasured(command, options, env)
    supervise.block_signals()
    session = Session.opened(command, options, env) if measured else None
    code = 1
    try:
        with (
            _warm(command, options, session, env),
            _peers(options, session, env) as peers,
            _checkpoint(options, session) as where,
        ):
            code = _start(command, options, env, session, {**peers, **where})
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted} before the command was started")
        code = interrupted.exit_code
    except BootseerError as error:
        code = error.exit_code
        if session is not None and isinstance(error, UsageError):
            session.quiet = True  # nothing ran that a report could tell of
        raise
    finally:
        if session is not None:
            session.close(code)
    return code


def _start(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session | None,
    where: Mapping[str, str],
) -> int:
    """In the image, in the environment, or as it is; `where` tells the command of its checkpoints and peers."""
    own_group = not supervise.in_foreground()
    if options.image is not None:
        from bootseer.launch.image.start import run_in_image

        return run_in_image(options.image, command, options, env, session, where, own_group=own_group)
    child_env = {**(session.child_env(env, hook=options.hook) if session is not None else env), **where}
    if not options.setup and not options.requirements:
        return run_command(command, options, child_env, session, own_group=own_group)
    if options.environment is not None and options.environment.mode != "bypass" and session is not None:
        from bootseer.launch.environment.start import run_in_environment

        return run_in_environment(command, options, child_env, session, own_env=env, own_group=own_group)
    from bootseer.launch.environment.plain import run_after_setup

    came = {"mode": "bypassed", "code": "bypass"}
    return run_after_setup(command, options, child_env, session, own_group=own_group, came=came)


def _warm(
    command: Sequence[str], options: Options, session: Session | None, env: Mapping[str, str]
) -> AbstractContextManager[object]:
    """Has a warm parent for the programs that the command starts, where earlier starts say what it is to import."""
    if options.warm == "off" or session is None or "spool" not in session.sinks:
        return nullcontext()
    from bootseer.launch.warm import WarmStart

    image = str(options.image.request.reference) if options.image is not None else ""
    about = "\0".join((image, options.setup or "", *options.requirements))
    session.warm = WarmStart(session, command, env, about, options.warm)
    return session.warm


def _peers(
    options: Options, session: Session | None, env: Mapping[str, str]
) -> AbstractContextManager[Mapping[str, str]]:
    """Serves the job's other nodes while it lasts, and gives the variable that tells the command of them."""
    if options.peers is None or session is None:
        return nullcontext({})
    from bootseer.launch.peers import PeersStart

    session.peers = PeersStart(options.peers, session, env)
    return session.peers


def _checkpoint(options: Options, session: Session | None) -> AbstractContextManager[Mapping[str, str]]:
    """Has the checkpoints mounted while it lasts, and gives the variable that tells the command where they are."""
    if options.checkpoint is None:
        return nullcontext({})
    from bootseer.launch.checkpoint import CheckpointStart

    return CheckpointStart(options.checkpoint, session, options.show)


def _unmeasured(command: Sequence[str], options: Options, env: Mapping[str, str]) -> int:
    """Without BootSeer: the setup is part of the job and still runs, then the command takes our place."""
    if options.setup or options.requirements:
        from bootseer.launch.environment.plain import run_setup

        supervise.block_signals()
        # What it exports ends with it, as it does for a wrapper script that calls the setup.
        code, _ = run_setup(options, env, None, own_group=not supervise.in_foreground(), exports=False)
        if code:
            return code
        supervise.unblock_signals()
    return supervise.replace_process(command, env)
