"""Clean up behind a `bootseer` that was killed: a container must not outlive the command that it runs for.

SIGKILL cannot be caught, and runc's container is no child that dies with us. So this script waits beside, in a session
of its own, for its standard input to end: with a word (all is cleaned up) it leaves, without one it runs the commands
that it was given, each for at most a minute. Run as a script with `-I -S`: it imports the standard library alone.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

_DEADLINE_S = 60


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a scheduler that ends the whole job must not keep the mounts
    commands = json.loads(sys.argv[1])
    if os.read(0, 1):
        return
    for command in commands:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_DEADLINE_S,
                check=False,
            )


if __name__ == "__main__":
    main()
