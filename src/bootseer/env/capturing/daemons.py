"""Record the processes that a setup left running, so that a restore can start them again.

Only the topmost process of each tree is recorded, as it starts its children itself: program, arguments, environment,
working folder, user, and what shows its readiness (listening sockets and pid files). A process that cannot be started
again makes the setup not snapshot-safe: a part of the setup script, one that has changed its arguments, one with other
privileges than the setup, one with secrets or node-specific values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG

from bootseer.env.capturing import exports
from bootseer.env.capturing.leftovers import EMPTIED
from bootseer.env.capturing.reads import Reads
from bootseer.env.capturing.secrets import is_secret_variable
from bootseer.env.document import Daemon
from bootseer.env.processes import Process, below, listening, open_files, pid_in, processes, sockets_of
from bootseer.io import proc
from bootseer.io.files import lines_of

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "fish", "busybox"))
_NAMESPACES = ("pid", "net", "ipc", "uts")
_PRIVILEGES = ("CapBnd", "NoNewPrivs", "Seccomp")
_ANY_HOST = re.compile(r"(tcp|udp) (0\.0\.0\.0|127\.[0-9.]+|\[::\]|\[::1\]|\[::ffff:127\.[0-9.]+\]):(\d+)")
_MAX_ARGV = 128 << 10
_MAX_FOLDERS = 5000


@dataclass(frozen=True, slots=True)
class SetupContext:
    """Facts about the setup that left the processes."""

    env: Mapping[str, str]
    """Its environment, with the mark."""
    mark: tuple[str, str]
    """The environment variable that all its processes have."""
    scripts: tuple[str, ...]
    node: str
    paths: tuple[str, ...] = ()
    """Files that it wrote and that are left out of snapshots."""
    ended_s: float = 0.0
    """On the monotonic clock: the end of the setup, when all sockets were there."""
    privileges: Mapping[str, str] = field(default_factory=dict)
    report: Callable[[str, float, float], object] = lambda *_: None
    """Called with the name of each process, and when it was started and ready (monotonic clock), if that is known."""


class _NotRestartable(Exception):  # noqa: N818 - carries the reason
    pass


def find_restartable(pids: Mapping[int, str], setup: SetupContext, reads: Reads) -> tuple[list[Daemon], list[str]]:
    """The restartable processes among these, in order of their start, and the reasons why others are not."""
    table = processes()
    tops = [table[pid] for pid in pids if pid in table and table[pid].parent not in pids]
    addresses = listening()
    found, reasons = [], []
    for top in sorted(tops, key=lambda one: (one.began_s, one.pid)):
        family = {top.pid, *below(top.pid, table)}
        own = {number: addresses[number] for number in sockets_of(family) & addresses.keys()}
        times = [reads.listening.get(number, 0.0) for number, address in own.items() if not _is_client(address)]
        try:
            found.append(_describe(top, family, {*own.values()}, setup, reads))
            times += [_written_s(Path(f"/proc/{top.pid}"), path) for path in found[-1].pid_files]
        except _NotRestartable as why:
            reasons.append(f"it left a process running: {top.name} ({top.pid}), which is not started again: {why}")
        except OSError:
            if Path(f"/proc/{top.pid}").exists():  # it has not ended just now
                reasons.append(f"it left a process running: {top.name} ({top.pid}), which cannot be looked at")
        if times and all(times):
            setup.report(top.name, top.began_s, max(times))
    return found, reasons


def privileges(pid: int | str) -> dict[str, str]:
    """The restrictions of a process's privileges."""
    status = proc.status(pid)
    return {name: status[name] for name in _PRIVILEGES if status.get(name)}


def _describe(top: Process, family: set[int], own: set[str], setup: SetupContext, reads: Reads) -> Daemon:
    at = Path(f"/proc/{top.pid}")
    program = os.readlink(at / "exe")  # noqa: PTH115 - a name
    argv = [os.fsdecode(word) for word in (at / "cmdline").read_bytes().split(b"\0")[:-1]]
    env, status = proc.environment(top.pid), proc.status(top.pid)
    if env.get(setup.mark[0]) != setup.mark[1] or not argv:
        raise _NotRestartable("it changed its arguments or its environment, so its command line is not known")
    if program.endswith(" (deleted)") or _is_transient(program):
        raise _NotRestartable(f"its program {program} is not kept")
    name = program.rpartition("/")[2]
    if any(os.path.realpath(word) in setup.scripts for word in argv) or (top.forked and name in _SHELLS):
        raise _NotRestartable("it is a part of a script; let the script start a program of its own")
    uid, gid = _id(status.get("Uid", "")), _id(status.get("Gid", ""))
    _check_privileges(at, uid, setup)
    left = exports.difference(setup.env, env, node_words=[setup.node])
    if reason := next(iter((*left.unsafe, *_argument_problems(argv, setup.node))), ""):
        raise _NotRestartable(reason.replace("it exports", "it has"))
    known = {*re.findall(r"\d+", " ".join((*argv, *(export.value for export in left.exports))))}
    sockets = sorted(text for text in own if _shows_readiness(text, known))
    pid_files = _pid_files(at, family, argv, (*reads.outside_writes, *setup.paths))
    cwd = os.readlink(at / "cwd")  # noqa: PTH115 - a name
    output = _output(at)
    passing = {*pid_files, *(text.removeprefix("unix ") for text in sockets), output}
    if gone := [path for path in _paths(argv, at) if _is_transient(path) and path not in passing]:
        raise _NotRestartable(f"it uses {gone[0]}, which is not kept")
    times = [*(setup.ended_s for _ in sockets), *(_written_s(at, path) for path in pid_files)]
    return Daemon(
        name=top.name,
        program=program,
        argv=tuple(argv),
        env=left.exports,
        cwd=cwd,
        user=_user(at, uid),
        uid=uid,
        gid=gid,
        nice=os.getpriority(os.PRIO_PROCESS, top.pid) - os.getpriority(os.PRIO_PROCESS, 0),
        umask=int(status.get("Umask", "022"), 8),
        output=output,
        sockets=tuple(sockets),
        pid_files=pid_files,
        ready_s=round(max(at_s - top.began_s for at_s in (*times, top.began_s)), 3),
    )


def _id(shown: str) -> int:
    """The user or group; real, effective, saved and of files are the same."""
    ids = {*map(int, shown.split())}
    if len(ids) != 1:
        raise _NotRestartable("it runs as several users")
    return ids.pop()


def _check_privileges(at: Path, uid: int, setup: SetupContext) -> None:
    for kind in _NAMESPACES:
        if os.readlink(at / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115 - names
            raise _NotRestartable(f"it has its own {kind} namespace")
    if setup.privileges and uid == os.getuid() and privileges(at.name) != setup.privileges:
        raise _NotRestartable("its privileges are not those of the setup")


def _argument_problems(argv: list[str], node: str) -> Iterator[str]:
    """Reasons why its arguments cannot be recorded."""
    names = exports.word_patterns([node])
    if sum(map(len, argv)) > _MAX_ARGV:
        yield "its arguments are too long"
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        name = name.strip("-").replace("-", "_").upper()
        # As in `requirepass`, where the secret word is not set off by an underscore.
        name = re.sub(r"(?<=[A-Z])(PASS|PASSWD|SECRET)$", r"_\1", name)
        if is_secret_variable(name, value if equals else following):
            yield "its arguments hold what looks like a secret"
        if reason := exports.reason_not_kept("value", word, names):
            yield f"it has an argument {reason}"


def _shows_readiness(address: str, known: set[str]) -> bool:
    """Whether the process listens on this address at each start, so that it shows readiness."""
    if address.startswith("unix @"):
        return re.fullmatch(r"@[0-9a-f]{5}", address[5:]) is None  # a name assigned by the kernel
    if address.startswith("unix "):
        return True
    found = _ANY_HOST.fullmatch(address)
    is_random = _is_ephemeral(int(address.rpartition(":")[2])) and address.rpartition(":")[2] not in known
    if is_random and address.startswith("udp"):
        return False  # a client socket
    if found is None:
        raise _NotRestartable(f"it listens on an address of this node, {address}")
    if is_random:
        raise _NotRestartable(f"it listens on {address}, which looks like a randomly assigned port")
    return True


def _is_client(address: str) -> bool:
    return address.startswith("udp") and _is_ephemeral(int(address.rpartition(":")[2]))


def _is_ephemeral(port: int) -> bool:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return False
    return low <= port <= high


def _is_transient(path: str) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in EMPTIED))


def _paths(argv: list[str], at: Path) -> list[str]:
    words = [word.rpartition("=")[2] for word in argv]
    return [word for word in words if word.startswith("/") and os.path.lexists(f"{at}/root{word}")]


def _pid_files(at: Path, family: set[int], argv: list[str], written: Iterable[str]) -> tuple[str, ...]:
    root = f"{at}/root"
    paths = {path for path in written if "pid" in path.rpartition("/")[2].lower()}
    folders = (found for folder in EMPTIED for found in os.walk(root + folder))
    for folder, _, names in itertools.islice(folders, _MAX_FOLDERS):
        paths.update(f"{folder.removeprefix(root)}/{name}" for name in names if "pid" in name.lower())
    paths.update(_paths(argv, at), (path for path in open_files(int(at.name)) if path.endswith(".pid")))
    named = (path for path in sorted(paths, reverse=True) if pid_in(f"{root}{path}") in family)
    # One file may have several paths, such as /run/x.pid and /var/run/x.pid: it is named once.
    return tuple(sorted({Path(f"{root}{path}").stat().st_ino: path for path in named}.values()))


def _written_s(at: Path, path: str) -> float:
    with contextlib.suppress(OSError):
        return os.lstat(f"{at}/root{path}").st_mtime - time.time() + time.monotonic()
    return 0.0


def _output(at: Path) -> str:
    """The file that its output goes to, unless that is the run's own."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            path, found = os.readlink(at / "fd" / str(number)), (at / "fd" / str(number)).stat()  # noqa: PTH115
            ours = [os.fstat(stream) for stream in (1, 2)]
            if path.startswith("/") and S_ISREG(found.st_mode) and not any(map(partial(os.path.samestat, found), ours)):
                return "" if path.endswith(" (deleted)") else path
    return ""


def _user(at: Path, uid: int) -> str:
    """The user's name in the view of the process, where the setup may have added it."""
    for fields in (line.split(":") for line in lines_of(f"{at}/root/etc/passwd")):
        if len(fields) > 2 and fields[2] == str(uid):
            return os.fsencode(fields[0]).decode(errors="replace")
    return ""
