"""Which images of a repository are new: its tags, asked for again and again.

A webhook needs the registry's operator and an open port; tags need only the right to read. So a webhook is heard where
there is one (`woken`), and says no more than that it is time to look. What was converted is remembered in a file, by
digest, so that a restart asks for nothing twice and a tag that moves is noticed. What failed is tried again, after
pauses that grow.

    {"schema": "bootseer.watch/1", "converted": ["sha256:...", ...]}
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, PermanentError, UsageError
from bootseer.io.locks import flocked
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.logs import logger
from bootseer.store.registry import Registry

_LOG = logger(__name__)
_SCHEMA = "bootseer.watch/1"
_OTHERS = re.compile(r"bootseer-|sha(256|512)-[0-9a-f]{64}")
"""Tags of objects of ours, and of lists of referrers and signatures."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_THREADS = 8
_CALL_S = 5.0
_MAX_BYTES = 1 << 20
_PAUSE_S, _MAX_PAUSE_S = 60.0, 3600.0


class Watch:
    """The new images of one repository. Used by one thread."""

    def __init__(self, registry: Registry, state: Path, patterns: Sequence[str] = ()) -> None:
        """`patterns` are those of tags, as a shell's; none: all. Raises `UsageError` for a file that is no state."""
        self._registry = registry
        self._state = state
        self._patterns = patterns or ("*",)
        self._converted = _read(state)
        self._failed: dict[str, tuple[int, float]] = {}
        """By digest, or by tag where that is unknown: how often, and when it may be tried again."""
        self.unknown: dict[str, BootseerError] = {}
        """Tags of which the registry did not tell the digest in the last look, and why."""

    def new(self) -> list[tuple[str, str]]:
        """Tags and digests of what is to be converted now, each digest once.

        Raises what the registry raises when it tells nothing; where it tells of some tags, the others are in `unknown`.
        """
        tags = sorted(
            tag
            for tag in retrying(lambda left_s: list(self._registry.tags(timeout_s=left_s)))
            if not _OTHERS.match(tag) and any(fnmatchcase(tag, pattern) for pattern in self._patterns)
        )
        now_s = time.monotonic()
        asked = [tag for tag in tags if self._failed.get(tag, (0, now_s))[1] <= now_s]
        with Tasks("bootseer-watch", min(_THREADS, len(asked) or 1)) as pool:
            answers = dict(zip(asked, pool.map(self._digest, asked), strict=True))
        self.unknown = {tag: answer for tag, answer in answers.items() if isinstance(answer, BootseerError)}
        if self.unknown and len(self.unknown) == len(tags):
            raise self.unknown[tags[0]]
        found = {answer: tag for tag, answer in reversed(answers.items()) if isinstance(answer, str) and answer}
        self._failed = {name: tried for name, tried in self._failed.items() if name in found or name in tags}
        gone = self._converted - found.keys()
        if gone and len(asked) == len(tags) and not self.unknown:
            self._converted -= gone
            self._write()
        return [
            (tag, digest)
            for digest, tag in reversed(found.items())
            if digest not in self._converted and self._failed.get(digest, (0, now_s))[1] <= now_s
        ]

    def converted(self, digest: str) -> None:
        """This one is not to be converted again. Raises `PermanentError` where that cannot be written."""
        self._failed.pop(digest, None)
        self._converted.add(digest)
        self._write()

    def failed(self, name: str) -> float:
        """This digest, or tag that is `unknown`, is to be tried again; in how many seconds."""
        tries = self._failed.get(name, (0, 0.0))[0] + 1
        pause_s = min(_PAUSE_S * 2.0 ** min(tries - 1, 10), _MAX_PAUSE_S)
        self._failed[name] = (tries, time.monotonic() + pause_s)
        return pause_s

    def _digest(self, tag: str) -> str | BootseerError:
        try:
            return retrying(partial(self._ask, tag))
        except NotFoundError:
            return ""  # removed since
        except BootseerError as error:  # of this tag alone, perhaps
            return error

    def _ask(self, tag: str, left_s: float) -> str:
        return self._registry.manifest_digest(tag, timeout_s=left_s)

    def _write(self) -> None:
        new = self._state.with_name(f"{self._state.name}.new")
        try:
            with new.open("w") as file:
                json.dump({"schema": _SCHEMA, "converted": sorted(self._converted)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._state)
        except OSError as error:
            raise PermanentError(f"{self._state}: what was converted cannot be kept: {error.strerror}") from error


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Keep other processes from the same state. Raises `TransientError` where one has it, `PermanentError`."""
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        with flocked(state.with_name(f"{state.name}.lock"), deadline_s=1.0):
            yield
    except OSError as error:
        raise PermanentError(f"{state}: cannot be used: {error.strerror}") from error


class _Handler(BaseHTTPRequestHandler):
    timeout = _CALL_S
    """Calls are answered one at a time: one that hangs delays the others, and the next look comes by itself."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        body = self.rfile.read(min(int(length), _MAX_BYTES)) if length.isascii() and length.isdecimal() else b""
        if not _is_of_pulls(body):
            self.server.called.set()  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class calls it so
        _LOG.debug("webhook: " + format, *arguments)


def _is_of_pulls(body: bytes) -> bool:
    """Whether a registry tells of nothing but pulls: those that a look is, too, which would never end."""
    try:
        return all(event["action"] == "pull" for event in json.loads(body)["events"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


class _Hook(HTTPServer):
    called: threading.Event

    def handle_error(self, request: object, client_address: object) -> None:
        _LOG.debug("a webhook's call broke off", exc_info=True)


class _Hook6(_Hook):
    address_family = socket.AF_INET6


@contextmanager
def woken(listen: tuple[str, int] | None) -> Iterator[threading.Event]:
    """Set by each POST to an address that may tell of a push. Raises `UsageError` for an address that cannot be had."""
    called = threading.Event()
    if listen is None:
        yield called
        return
    try:
        hook = (_Hook6 if ":" in listen[0] else _Hook)(listen, _Handler)
    except OSError as error:
        raise UsageError(f"cannot listen on {listen[0]} port {listen[1]}: {error.strerror or error}") from error
    hook.called = called
    threading.Thread(target=hook.serve_forever, name="bootseer-webhook", daemon=True).start()
    try:
        yield called
    finally:
        hook.shutdown()
        hook.server_close()


def _read(state: Path) -> set[str]:
    hint = "remove it: all images are looked at again, converted layers are kept"
    try:
        document = json.loads(state.read_bytes())
        if document["schema"] == _SCHEMA and all(map(_DIGEST.fullmatch, document["converted"])):
            return set(document["converted"])
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UsageError(f"{state}: not the state of a watch", hint=hint, exit_code=1)
