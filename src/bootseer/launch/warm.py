"""`bootseer run --warm`: records of what earlier starts of this job imported, handed to its launcher and updated after.

The shareable part lies in a file of its own, which travels with the hot set of an image's workload
(`artifact.hotsets`), so that the first start on another node is warm, too.

Records are written by the job's own processes (`hook.programs`): only names of modules and variables are taken from
them. A module because of which a warm parent could not be used is remembered and left to the program next time.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from bootseer.artifact import document
from bootseer.artifact.places import cache_root, containers_folder, own_folder, processes_folder, warm_folder
from bootseer.artifact.workload import workload_key
from bootseer.errors import BootseerError, PermanentError
from bootseer.hook.programs import FACTS, KNOWN, MAX_BYTES, RECORD, SCHEMA, left_out, recorded
from bootseer.io import proc
from bootseer.io.files import open_unfollowed, replace_file
from bootseer.launch.observers import COMMAND_ENDED, StartReport, reporting_errors
from bootseer.launch.process_snapshot import MADE, NEW, PENDING, REFUSED, RESTORED, is_secret
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.artifact.owned_folder import OwnedFolder
    from bootseer.artifact.process_snapshots import ProcessSnapshot
    from bootseer.launch.command import Options

EVENT = "warm_start"
_MAX_RECORDS = 16
_MAX_KEPT = 400
"""Files, two or three for each job; the oldest are deleted."""
_MAX_COLD = 64
_REFUSED_S = 86400.0
"""A process snapshot that cannot be made is tried again after this time: packages may have changed."""
_LATE = ""
"""Among the modules of `Record.cold`: a warm parent did not answer in time."""
_SHORTEST_SECRET = 6
_SHARED = re.compile(r"(?!LD_|GLIBC_|PYTHON)\w+=[\w.,:+-]{0,32}", re.ASCII)
"""Variables that are shared with other nodes: values are short numbers and names, not paths and not secrets, and names
do not include those that load other programs."""

_Name = Annotated[str, Meta(max_length=300)]
_Names = Annotated[tuple[_Name, ...], Meta(max_length=20_000)]


@document.readable
class Record(msgspec.Struct, frozen=True):
    """The record of one program that a launcher starts."""

    program: _Name
    flags: Annotated[tuple[_Name, ...], Meta(max_length=8)]
    modules: _Names
    native: Annotated[dict[_Name, Annotated[str, Meta(max_length=4096)]], Meta(max_length=100)]
    changed: _Names
    telling: Annotated[str, Meta(max_length=64)]
    main: Annotated[str, Meta(max_length=4096)]
    launcher: _Name
    cold: Annotated[dict[_Name, _Name], Meta(max_length=_MAX_COLD)] = {}
    """Modules that are not imported by the warm parent, and why."""
    start: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=8)] = ()
    """The launcher's command line up to its program."""
    start_digest: Annotated[str, Meta(max_length=64)] = ""
    """Of the launcher's start (`hook.programs.start_digest`)."""
    python: Annotated[str, Meta(max_length=4096)] = ""
    """Path of the interpreter of both."""
    never: Annotated[str, Meta(max_length=300)] = ""
    """Why a warm parent with these modules cannot be copied."""


@document.readable
class Known(msgspec.Struct, frozen=True):
    """By launcher: the record of the program that imports most, which are its ranks."""

    launchers: Annotated[dict[_Name, Record], Meta(max_length=_MAX_RECORDS)] = {}


def merge_records(known: Known, records: Iterable[Record], refusals: Iterable[Mapping[str, Any]]) -> Known:
    """The records after a start: the newest of each launcher, with the refusals of its warm parent."""
    launchers = dict(known.launchers)
    for record in records:
        before = launchers.get(record.launcher)
        if before is not None and before.program != record.program and len(before.modules) > len(record.modules):
            continue  # the program that imports most gains most
        launchers[record.launcher] = record
        if before is not None:
            same = (before.modules, before.native) == (record.modules, record.native)
            launchers[record.launcher] = replace(record, cold=before.cold, never=before.never if same else "")
    for refusal in refusals:
        for name, one in launchers.items():
            reason, module = str(refusal.get("why_not") or "")[:300], str(refusal.get("module") or "")[:300]
            late = refusal.get("late") is True
            if one.program != refusal.get("program"):
                continue
            if late and _LATE not in one.cold and len(one.cold) < _MAX_COLD:
                # Its files may have come slowly. The second time an import hangs, for which each start would wait.
                launchers[name] = replace(one, cold={**one.cold, _LATE: reason})
            elif module and len(one.cold) < _MAX_COLD:
                launchers[name] = replace(one, cold={**one.cold, left_out(module, one.cold): reason})
            elif (late or refusal.get("unfit") is True) and not module:
                launchers[name] = replace(one, never=reason)
    return Known(dict(list(launchers.items())[-_MAX_RECORDS:]))


def shared(known: Known) -> Known:
    """The part that may be shared with, and taken from, other nodes."""
    launchers = {}
    for name, one in known.launchers.items():
        native = {
            key: value for key, value in one.native.items() if recorded(key) and _SHARED.fullmatch(f"{key}={value}")
        }
        # No programs to start; and from the digest, whose input is all variables, a short password can be guessed.
        launchers[name] = replace(one, native=native, start=(), start_digest="", python="")
    return Known(launchers)


class WarmStart:
    """One start with a warm parent, if there is a record of what to import."""

    def __init__(
        self, session: Session, command: Sequence[str], env: Mapping[str, str], environment: str, options: Options
    ) -> None:
        """`environment` distinguishes environments in which the same command runs. Raises `BootseerError` and
        `OSError` if there is no folder for records."""
        self._session = session
        os.makedirs(session.warm_folder, mode=0o700, exist_ok=True)  # noqa: PTH103 - as in the spool
        # By descriptor: a container's user may write to the spool, and put a link in this folder's place later.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._folder = Path(f"/proc/self/fd/{os.open(session.warm_folder, flags)}")
        self._mode = options.warm
        self._env = env
        name = f"{workload_key(command, setup=environment)}.json"
        self._path = warm_folder(cache_root(env)) / name
        self.shared_path = self._path.with_suffix(".shared")
        """The part shared with other nodes."""
        self._refused = self._path.with_suffix(".refused")
        self.report = StartReport(session, self._save)
        """Saves what this start imported."""
        self.process: ProcessSnapshot | None = None
        """Where process snapshots are kept and shared; None without them."""
        self.is_pending = False
        """Whether the snapshot is to be unpacked beside the start of the command's container."""
        self._process_folder: OwnedFolder | None = None
        if options.process_snapshot:
            # Imported here: other warm starts need neither.
            from bootseer.artifact.owned_folder import OwnedFolder
            from bootseer.artifact.process_snapshots import ProcessSnapshot, machine_key

            self._process_folder = OwnedFolder.made(containers_folder(cache_root(env)), "process-", _end_criu)
            with suppress(FileNotFoundError):
                if time.time() - self._refused.stat().st_mtime > _REFUSED_S:
                    self._refused.unlink()
                (self._process_folder.path / REFUSED).write_bytes(self._refused.read_bytes())
            path = processes_folder(cache_root(env)) / f"{self._path.stem}-{machine_key()}"
            self.process = ProcessSnapshot(path, self._process_folder.path / RESTORED, say)

    def __enter__(self) -> WarmStart:
        return self

    def unpack(self) -> None:
        """Unpack the process snapshot, if there is one. Never raises."""
        with reporting_errors("no process snapshot is restored"):
            try:
                if self.process is not None:
                    self.process.unpack()
            finally:
                Path(self.process_folder, PENDING).unlink(missing_ok=True)

    @property
    def process_folder(self) -> str:
        """The folder of this run for process snapshots (`launch.process_snapshot`); empty without them."""
        return str(self._process_folder.path) if self._process_folder is not None else ""

    def hand_over(self, *, in_container: bool) -> None:
        """Write the record, and the process snapshot, where the launcher finds it. Never raises.

        In a container, what restores the snapshot waits for it (`unpack`) after its own start."""
        if self.process is not None and in_container:
            with reporting_errors("no process snapshot is restored"):
                Path(self.process_folder, PENDING).touch()
                self.is_pending = True
        elif self.process is not None:
            self.unpack()
        with reporting_errors("the start is not warm"):
            known = self._known()
            if known.launchers:
                self._give(known)
                return
            (self._folder / KNOWN).unlink(missing_ok=True)
            if self._mode == "on":
                say("not warm: no earlier start of this command is known on this node; this one is recorded")

    def __exit__(self, *_: object) -> None:
        self.report.send(COMMAND_ENDED)
        if self._process_folder is not None:
            with reporting_errors("the process snapshot was not kept"):
                self._keep_process()
            self._process_folder.remove()

    def _keep_process(self) -> None:
        """Store the process snapshot that this run made, unless it contains a secret, or that none can be made."""
        made = Path(self.process_folder, MADE)
        with suppress(FileNotFoundError):
            refused = _read(Path(self.process_folder, REFUSED))
            if not self._refused.exists() or refused != self._refused.read_bytes():
                replace_file(self._refused, refused)
        if self.process is None or made.is_symlink() or not made.is_dir():
            return
        secrets = [(name, value) for name, value in self._env.items() if is_secret(name, value)]
        for pages in made.glob("pages-*.img"):
            with open_unfollowed(pages) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                for name, value in secrets:
                    if len(value) >= _SHORTEST_SECRET and memory.find(os.fsencode(value)) >= 0:
                        basis = msgspec.json.decode(_read(made / FACTS))["basis"]
                        replace_file(self._refused, msgspec.json.encode(basis))
                        raise PermanentError(f"it contains the value of {name}")
        self.process.keep(made)

    def _known(self) -> Known:
        for path in (self._path, self.shared_path):
            try:
                text = path.read_bytes()
                known = document.decode(text, Known, "record of imports", limit=4 * MAX_BYTES, schema=SCHEMA)
                return known if path is self._path else shared(known)
            except FileNotFoundError:
                continue
            except (BootseerError, OSError) as error:
                say(f"what earlier starts imported is not known: {error}")
        return Known()

    def _save(self, until: str) -> None:
        events = [event for event in self._session.tail().poll(last=True) if event.stage == EVENT]
        refusals = [event.attrs for event in events if "why_not" in event.attrs]
        if self._mode == "on":
            if len(events) > len(refusals):
                say(f"{plural(len(events) - len(refusals), 'Python program')} started warm")
            for reason in dict.fromkeys(str(attrs["why_not"]) for attrs in refusals):
                say(f"not warm: {reason}")
        known = self._known()
        after = merge_records(known, self._records(), refusals)
        if after != known:
            folder = own_folder(self._path.parent)
            for path, content in ((self._path, after), (self.shared_path, shared(after))):
                replace_file(path, _text(content).encode())
            self._give(after)  # to the launcher of a restart
            # Without the temporary files of other runs.
            for path in sorted(folder.glob("[!.]*"), key=lambda path: -path.stat().st_mtime_ns)[_MAX_KEPT:]:
                path.unlink(missing_ok=True)

    def _give(self, known: Known) -> None:
        """Write a record where launchers find it, also a container's. A link in its place is not followed."""
        replace_file(self._folder / KNOWN, _text(known).encode(), mode=0o644)

    def _records(self) -> list[Record]:
        found = []
        for path in sorted(self._folder.glob(f"{RECORD}*.json"))[:_MAX_RECORDS]:
            try:
                found.append(document.decode(_read(path), Record, "record of imports", limit=MAX_BYTES, schema=SCHEMA))
                path.unlink()
            except (BootseerError, OSError) as error:
                say(f"what the program imported is not recorded: {error}")
        return found


def _read(path: Path) -> bytes:
    with open_unfollowed(path) as file:
        return file.read(MAX_BYTES + 1)


def _end_criu(folder: Path) -> None:
    """End what CRIU has left in the folder of a run that was killed: a process that waits to be restored, and stopped
    children, which tried out what the kernel can do. They have open files there. Others only have its lock open."""
    places = tuple(f"{folder}/{name}" for name in (RESTORED, NEW))
    for pid in proc.pids():
        with suppress(OSError):
            names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - numbers, not paths
            if any(proc.link(pid, f"fd/{name}").startswith(places) for name in names):
                os.kill(pid, signal.SIGKILL)


def _text(known: Known) -> str:
    import json

    return json.dumps({"schema": SCHEMA, **msgspec.to_builtins(known)})
