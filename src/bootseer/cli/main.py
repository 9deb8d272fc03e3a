"""Entry point of the program; turns errors into exit codes: 0 success, 2 usage, 1 failure.

click is imported only when it is needed (see `cli.options`).
"""

from __future__ import annotations

import gc
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

from bootseer.errors import BootseerError, Interrupted, TransientError, UsageError, limit_of


def main() -> None:
    """Entry point of the `bootseer` program."""
    # Folders that are meant for the job come last: their packages may be of another Python.
    theirs = {os.path.abspath(word) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word}  # noqa: PTH100
    theirs.discard(os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100 - ours, installed by `pip install --target`
    sys.path.sort(key=theirs.__contains__)
    with suppress(OSError):
        # Fill closed standard streams: a file opened later would get the number, and messages would be written to it.
        while (number := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < 3:
            pass
        os.close(number)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names, and the help, have characters that a locale may lack
    try:
        if os.environ.get("BOOTSEER_LOG"):
            set_up_log()
        code = _quick_run(sys.argv[1:])
        if code is None:
            code = _any_verb()
    except BootseerError as error:
        _log_failure()
        _say(f"bootseer: {error}")
        if isinstance(error, UsageError) and error.hint:
            _say(f"hint: {error.hint}")
        code = error.exit_code
    except (Interrupted, KeyboardInterrupt) as error:
        import signal  # not for every verb: it imports `enum`, which takes 2 ms

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends it at once, without a traceback
        _say("bootseer: interrupted")
        code = error.exit_code if isinstance(error, Interrupted) else 130
    except SystemExit as ended:  # a verb that found problems, or whose output has no reader
        code = int(ended.code or 0)
    except OSError as error:  # a path that may not be read, a full disk behind the help, a removed working folder
        _log_failure()
        place, hint = (f"{error.filename}: ", "") if error.filename else ("", " (where: BOOTSEER_LOG=debug)")
        if isinstance(error, FileNotFoundError) and not error.filename and not os.stat(".").st_nlink:  # noqa: PTH116 - without pathlib
            place, hint = "the working folder was removed, change to another one: ", ""
        _say(f"bootseer: {place}{error.strerror or error}{limit_of(error) or hint}")
        code = 1
        try:
            (sys.stdout or io.StringIO()).flush()
        except OSError:  # the interpreter's end would fail in the same way
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _end(code)


def set_up_log() -> None:
    """Set up logging as the environment says, and log versions. Not the arguments: they may contain secrets."""
    import platform

    from bootseer import __version__, logs

    logs.set_up(os.environ)
    ours = (__version__, platform.python_version(), platform.release())
    logs.logger(__name__).info("bootseer %s, Python %s, Linux %s, user %d", *ours, os.geteuid())


def _log_failure() -> None:
    if (logging := sys.modules.get("logging")) is not None:
        logging.getLogger("bootseer.cli").debug("the command failed", exc_info=True)


def _end(code: int) -> NoReturn:
    """End the process.

    After a deadline or Ctrl-C, threads may still be blocked inside a library. If they resumed while the interpreter
    shuts down, those of hdfs-native would abort the process: `os._exit` ends them all. It is also used where the job's
    `PYTHONINSPECT` would start a prompt here.
    """
    supervise = sys.modules.get("bootseer.launch.supervise")
    if supervise is not None and supervise.is_interrupted and code == 130:
        import signal

        # As the command did: a shell's `$?` is 130 all the same, but after an exit its script would go on.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)
    threads = sys.modules.get("threading")
    if sys.flags.inspect or (threads is not None and any(thread.daemon for thread in threads.enumerate())):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # full or closed
                stream.flush()
        os._exit(code)
    gc.freeze()  # or the interpreter collects all modules' objects one by one: an eighth of a start with an image
    sys.exit(code)


def _say(line: str) -> None:
    """Write a message to standard error. It may quote an address that contains a login, which is removed."""
    from bootseer.store.addresses import without_credentials
    from bootseer.trace.event import visible

    if sys.stderr is not None:  # None if it was closed: there is still the exit code
        with suppress(OSError):  # full, or a pipe without reader
            sys.stderr.write(visible(without_credentials(line)) + "\n")


def _quick_run(arguments: list[str]) -> int | None:
    """Run `run` with a plain command line, without click; None for any other command line."""
    if arguments[:1] != ["run"] or "--" not in arguments or "_BOOTSEER_COMPLETE" in os.environ:
        return None
    from bootseer.cli.options import plain
    from bootseer.cli.run_options import OPTIONS, start

    place = arguments.index("--")
    values, command = plain(arguments[1:place], OPTIONS), arguments[place + 1 :]
    return start(values, command) if values is not None and command else None


def _any_verb() -> int:
    import click

    from bootseer.cli.verb_parts import complete_files
    from bootseer.cli.verbs import cli

    if "_BOOTSEER_COMPLETE" in os.environ:
        complete_files()
    try:
        code = cli.main(standalone_mode=False, prog_name="bootseer")
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except RuntimeError as error:
        if limit := limit_of(error):
            raise TransientError(f"{error}{limit}") from error
        raise
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _say(shown.getvalue().rstrip("\n"))
        code = error.exit_code
    return code if isinstance(code, int) else 0
