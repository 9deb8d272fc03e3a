"""Processes that a setup left running, noted so that a restore can start them again.

Noted are those that the setup started and that are no child of another one: these start their children by themselves.
Program, arguments, environment, folder, user, and what shows that it is ready: where it listens, its pid files. What
cannot be started again as it was makes the setup not snapshot-safe, in words: a part of the setup script itself, a
process that changed its arguments, lower rights than the setup's, secrets, what only this node has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG

from bootseer.env.capturing import exports
from bootseer.env.capturing.leftovers import PASSING
from bootseer.env.capturing.secrets import is_secret_variable
from bootseer.env.capturing.watch import Reads
from bootseer.env.document import Daemon
from bootseer.env.processes import Process, below, listening, open_files, pid_in, processes, sockets_of

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "fish", "busybox"))
_NAMESPACES = ("pid", "net", "ipc", "uts")
_RIGHTS = ("CapBnd", "NoNewPrivs", "Seccomp")
_ANYWHERE = re.compile(r"(tcp|udp) (0\.0\.0\.0|127\.[0-9.]+|\[::\]|\[::1\]|\[::ffff:127\.[0-9.]+\]):(\d+)")
_MAX_ARGV = 128 << 10
_MAX_FOLDERS = 5000


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known of the setup that left them."""

    env: Mapping[str, str]
    """What it was started with, mark included."""
    mark: tuple[str, str]
    """The variable that is in the environment of each of its processes."""
    scripts: tuple[str, ...]
    node: str
    paths: tuple[str, ...] = ()
    """Files that it wrote and no snapshot keeps."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """When a socket was first seen to wait for others, by its inode, on the monotonic clock."""
    ended_s: float = 0.0
    """On the same clock: by then all sockets were there."""
    rights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A process that can be started again."""

    daemon: Daemon
    began_s: float
    """On the monotonic clock."""

    @property
    def made(self) -> tuple[str, ...]:
        """Files that it makes each time it starts."""
        daemon = self.daemon
        sockets = [address.removeprefix("unix ") for address in daemon.sockets]
        return (*daemon.pid_files, *(path for path in sockets if path.startswith("/")), daemon.output)


class _Unfit(Exception):  # noqa: N818 - the reason, in words
    pass


def recorded(pids: Mapping[int, str], setup: Setup, reads: Reads) -> tuple[list[Found], list[str]]:
    """The processes among these that can be started again, by the time of their start, and why others cannot."""
    table = processes()
    tops = [table[pid] for pid in pids if pid in table and table[pid].parent not in pids]
    addresses = listening()
    found, reasons = [], []
    for top in sorted(tops, key=lambda one: (one.began_s, one.pid)):
        family = {top.pid, *below(top.pid, table)}
        try:
            found.append(_found(top, family, addresses, setup, reads))
        except _Unfit as why:
            reasons.append(f"it left a process running: {top.name} ({top.pid}), which is not started again: {why}")
        except OSError:
            reasons.append(f"it left a process running: {top.name} ({top.pid}), which cannot be looked at")
    return found, reasons


def rights(pid: int | str) -> dict[str, str]:
    """What limits the rights of a process."""
    return {name: value for name in _RIGHTS if (value := _status(Path(f"/proc/{pid}"), name))}


def _found(top: Process, family: set[int], addresses: Mapping[int, str], setup: Setup, reads: Reads) -> Found:
    at = Path(f"/proc/{top.pid}")
    program = os.readlink(at / "exe")  # noqa: PTH115 - a name
    argv = [os.fsdecode(word) for word in (at / "cmdline").read_bytes().split(b"\0")[:-1]]
    env = _environment(at)
    if env.get(setup.mark[0]) != setup.mark[1] or not argv:
        raise _Unfit("it changed its arguments or its environment, so that what started it is not known")
    if program.endswith(" (deleted)") or _passes(program):
        raise _Unfit(f"its program {program} is not kept")
    name = program.rpartition("/")[2]
    if any(os.path.realpath(word) in setup.scripts for word in argv) or (top.forked and name in _SHELLS):
        raise _Unfit("it is a part of a script; let the script start a program of its own")
    uid, gid = _ids(at)
    _check_rights(at, setup)
    words = [word for word in (setup.node,) if word]
    left = exports.difference(setup.env, env, node_words=words)
    if reason := next(iter((*left.unsafe, *_in_arguments(argv, words))), ""):
        raise _Unfit(reason.replace("it exports", "it has"))
    known = {*re.findall(r"\d+", " ".join((*argv, *(export.value for export in left.exports))))}
    own = {number: addresses[number] for number in sorted(sockets_of(family) & addresses.keys())}
    sockets = {number: text for number, text in own.items() if _stays(text, known)}
    pid_files = _pid_files(at, family, argv, (*reads.outside_writes, *setup.paths))
    cwd = os.readlink(at / "cwd")  # noqa: PTH115 - a name
    output = _output(at)
    passing = {*pid_files, *(text.removeprefix("unix ") for text in sockets.values()), output}
    if gone := [path for path in _paths(argv, at) if _passes(path) and path not in passing]:
        raise _Unfit(f"it uses {gone[0]}, which is not kept")
    stat_fields = (at / "stat").read_text().rpartition(")")[2].split()
    times = [setup.seen.get(str(number), setup.ended_s) for number in sockets]
    times += [_made_s(at, path) for path in pid_files]
    daemon = Daemon(
        name=top.name,
        program=program,
        argv=tuple(argv),
        env=left.exports,
        cwd=cwd,
        user=_user(at, uid),
        uid=uid,
        gid=gid,
        nice=int(stat_fields[16]) - os.getpriority(os.PRIO_PROCESS, 0),
        umask=int(_status(at, "Umask") or "022", 8),
        output=output,
        sockets=tuple(sorted(set(sockets.values()))),
        pid_files=pid_files,
        ready_s=round(max(at_s - top.began_s for at_s in (*times, top.began_s)), 3),
    )
    return Found(daemon, top.began_s)


def _environment(at: Path) -> dict[str, str]:
    words = (os.fsdecode(word).partition("=") for word in (at / "environ").read_bytes().split(b"\0"))
    return {name: value for name, equals, value in words if equals}


def _status(at: Path, name: str) -> str:
    lines = (line.partition(":") for line in (at / "status").read_text().splitlines())
    return next((value.strip() for field, _, value in lines if field == name), "")


def _ids(at: Path) -> tuple[int, int]:
    uids, gids = ({*map(int, _status(at, name).split())} for name in ("Uid", "Gid"))
    if len(uids) != 1 or len(gids) != 1:
        raise _Unfit("it runs as several users")
    return uids.pop(), gids.pop()


def _check_rights(at: Path, setup: Setup) -> None:
    for kind in _NAMESPACES:
        if os.readlink(at / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115 - names
            raise _Unfit(f"it has a {kind} namespace of its own")
    if setup.rights and _status(at, "Uid").split()[0] == str(os.getuid()) and rights(at.name) != setup.rights:
        raise _Unfit("its rights are not those of the setup")


def _in_arguments(argv: list[str], node_words: list[str]) -> Iterator[str]:
    """Why its arguments cannot be kept."""
    if sum(map(len, argv)) > _MAX_ARGV:
        yield "its arguments are too long"
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        name = name.strip("-").replace("-", "_").upper()
        # `requirepass` and the like are one word with what they name.
        name = re.sub(r"(?<=[A-Z])(PASS|PASSWD|SECRET)$", r"_\1", name)
        if is_secret_variable(name, value if equals else following):
            yield "its arguments hold what looks like a secret"
        if reason := exports.why_not_kept(word, node_words):
            yield f"it has an argument {reason}"


def _stays(address: str, known: set[str]) -> bool:
    """Whether it shows that the process is ready, each time it starts."""
    if address.startswith("unix @"):
        return re.fullmatch(r"@[0-9a-f]{5}", address[5:]) is None  # the kernel chose it
    if address.startswith("unix "):
        return True
    found = _ANYWHERE.fullmatch(address)
    by_chance = _is_ephemeral(int(address.rpartition(":")[2])) and address.rpartition(":")[2] not in known
    if by_chance and address.startswith("udp"):
        return False  # what it asks others with
    if found is None:
        raise _Unfit(f"it listens on an address of this node, {address}")
    if by_chance:
        raise _Unfit(f"it listens on {address}, a port that looks drawn by chance")
    return True


def _is_ephemeral(port: int) -> bool:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return False
    return low <= port <= high


def _passes(path: str) -> bool:
    return any(path.startswith(f"{folder}/") for folder in PASSING if folder not in ("/dev", "/proc", "/sys")) or (
        path.startswith("/dev/shm/")  # noqa: S108 - compared
    )


def _paths(argv: list[str], at: Path) -> list[str]:
    """What its arguments name and is there."""
    words = [word.rpartition("=")[2] for word in argv]
    return [word for word in words if word.startswith("/") and os.path.lexists(f"{at}/root{word}")]


def _pid_files(at: Path, family: set[int], argv: list[str], written: Iterable[str]) -> tuple[str, ...]:
    root = f"{at}/root"
    paths = {path for path in written if "pid" in path.rpartition("/")[2].lower()}
    folders = (
        found for folder in PASSING if folder not in ("/dev", "/proc", "/sys") for found in os.walk(root + folder)
    )
    for folder, _, names in itertools.islice(folders, _MAX_FOLDERS):
        paths.update(f"{folder.removeprefix(root)}/{name}" for name in names if "pid" in name.lower())
    paths.update(_paths(argv, at), (path for path in open_files(int(at.name)) if path.endswith(".pid")))
    return tuple(sorted(path for path in paths if pid_in(f"{root}{path}") in family))


def _made_s(at: Path, path: str) -> float:
    with contextlib.suppress(OSError):
        return os.lstat(f"{at}/root{path}").st_mtime - time.time() + time.monotonic()
    return 0.0


def _output(at: Path) -> str:
    """The file that it writes its output to, unless that is the run's own."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            path, found = os.readlink(at / "fd" / str(number)), (at / "fd" / str(number)).stat()  # noqa: PTH115
            ours = [os.fstat(stream) for stream in (1, 2)]
            if path.startswith("/") and S_ISREG(found.st_mode) and not any(map(partial(os.path.samestat, found), ours)):
                return "" if path.endswith(" (deleted)") else path
    return ""


def _user(at: Path, uid: int) -> str:
    """The name of a user where the process runs: the setup may have added it."""
    with contextlib.suppress(OSError):
        for line in Path(f"{at}/root/etc/passwd").read_text(errors="replace").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2] == str(uid):
                return fields[0]
    return ""
