"""What BootSeer logs, where, and how much: `logging` below `bootseer`, silent unless it is asked for.

    BOOTSEER_LOG=debug                  everything
    BOOTSEER_LOG=fetch=debug,hdfs=info  some packages
    BOOTSEER_LOG_FORMAT=json            one JSON object per line

A module logs to `logger(__name__)`. Lines of the program go to standard error; those of a daemon to a file
of its own, which always has what is worth knowing (`info`) and is bounded. Logins in addresses and values that are
called secrets are removed from every line.

Imported only where something is logged: `logging` takes 4 ms, and a job's start waits for `bootseer run`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bootseer.errors import UsageError

LEVELS: Final = ("debug", "info", "warning", "error")
FILE_BYTES: Final = 1 << 20
"""Of a daemon's log; one older file of this size is kept beside it."""
_ROOT: Final = logging.getLogger("bootseer")
_LOGIN = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_SECRET = re.compile(
    # Each word is tried from its beginning alone: a path of many short names would take seconds.
    r"(?i)((?<![a-z0-9_.-])[a-z0-9_.-]*(?:token|secret|passw(?:or)?d|passphrase|signature|credentials?|jwt|sig|(?:api|access|"
    r"account|private|secret)[._-]?key(?:\.[a-z0-9.-]{1,60})?)\b[\"']?\s*[=:]\s*[\"']?"
    r"|\b(?<=--)(?<![\w-]--)[a-z0-9-]*(?:token|secret|passw(?:or)?d|passphrase|-key)(?:[\"'],)?\s+[\"']?(?!-)"
    r"|\b(?:basic|bearer) (?=[a-z0-9+/=._~-]{16})"
    r"|\bauthorization[\"']?\s*[=:]\s*(?:\w+ )?)[^\s&,;'\"]+"
)


# Where nothing was set up, and in the user's own programs, Python would write warnings to standard error.
_ROOT.addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """The logger of a module, by its `__name__`."""
    return logging.getLogger(name)


def without_secrets(text: str) -> str:
    """The text without logins of addresses and without values whose names say that they are secret."""
    return _SECRET.sub(r"\1***", _LOGIN.sub("***", text))


class _Lines(logging.Formatter):
    """One line per record: time, level, module, process and thread, message. Tracebacks follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        text = without_secrets(message).replace("\n", "\n    ")
        name = record.name.removeprefix("bootseer.")
        where = f"{name} [{record.process} {record.threadName}]"
        return f"{_time(record)} {record.levelname.lower():7} {where} {text}"


class _Json(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "thread": record.threadName,
            "message": without_secrets(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line)


class _File(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error of a daemon, which is the file `path`: a full one becomes `path.1`, in place of an older one.

    The interpreter's own last words go there, too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(sys.stderr)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        try:
            if os.fstat(2).st_size + len(line) > FILE_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                for stream in (1, 2):
                    os.dup2(file, stream)
                os.close(file)
            os.write(2, line)
        except OSError:
            pass  # a full disk must not end what the daemon serves


def set_up(environ: Mapping[str, str], *, file: Path | None = None) -> None:
    """Log what `BOOTSEER_LOG` says, to standard error; `file` is where that leads in a daemon, which logs `info`
    on its own. Raises `UsageError` for a level that does not exist."""
    wanted = environ.get("BOOTSEER_LOG", "")
    if not wanted and file is None:
        return
    levels = _parsed(wanted)
    handler = logging.StreamHandler(sys.stderr) if file is None else _File(file)
    handler.setFormatter(_Json() if environ.get("BOOTSEER_LOG_FORMAT") == "json" else _Lines())
    _ROOT.handlers = [handler]
    _ROOT.propagate = False
    _ROOT.setLevel(logging.WARNING if file is None else logging.INFO)
    for name, level in levels.items():
        logging.getLogger(f"bootseer.{name}" if name else "bootseer").setLevel(level.upper())


def _parsed(wanted: str) -> dict[str, str]:
    """Levels by package; the name of all is empty."""
    levels = {}
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        name, _, level = part.rpartition("=")
        if level.lower() not in LEVELS:
            raise UsageError(
                f"BOOTSEER_LOG: {level!r} is not a level", hint=f"{', '.join(LEVELS)}; for some packages fetch=debug"
            )
        levels[name.strip().removeprefix("bootseer.")] = level.lower()
    return levels


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
