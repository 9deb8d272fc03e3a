"""Watch a repository for new images by polling its tags.

Listing tags needs only read access, where a webhook would need the registry's operator and an open port. Digests of
converted images are recorded in a state file, so that a restart converts nothing twice and a moved tag is detected.
Failures are retried with exponential backoff.

    {"schema": "bootseer.watch/1", "converted": ["sha256:...", ...]}
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, PermanentError, UsageError, os_errors_as
from bootseer.io.files import replace_file
from bootseer.io.locks import flocked
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.store.registry import Registry
from bootseer.store.store import is_content_name

_SCHEMA = "bootseer.watch/1"
_OWN_TAGS = re.compile(r"bootseer-|sha(256|512)-[0-9a-f]{64}")
"""Tags of BootSeer's objects, lists of referrers and signatures: not user images."""
_THREADS = 8
_PAUSE_S, _MAX_PAUSE_S = 60.0, 3600.0


class Watch:
    """The new images of one repository. Used by one thread."""

    def __init__(self, registry: Registry, state: Path, patterns: Sequence[str] = ()) -> None:
        """`patterns` are shell patterns of tags; empty: all tags. Raises `UsageError` for an unreadable state file."""
        self._registry = registry
        self._state = state
        self._patterns = patterns or ("*",)
        self._converted = _read(state)
        self._failed: dict[str, tuple[int, float]] = {}
        """Number of failures and monotonic time of the next try, by digest, or by tag if its digest is unknown."""

    def find_new(self) -> list[tuple[str, str | BootseerError]]:
        """Poll once. Returns the tags that cannot be resolved with their errors, and tag and digest of each image to
        convert now, each digest once. Raises the registry's error if no tag can be resolved.
        """
        tags = sorted(
            tag
            for tag in retrying(lambda left_s: list(self._registry.tags(timeout_s=left_s)))
            if not _OWN_TAGS.match(tag) and any(fnmatchcase(tag, pattern) for pattern in self._patterns)
        )
        now_s = time.monotonic()
        asked = [tag for tag in tags if self._failed.get(tag, (0, now_s))[1] <= now_s]
        with Tasks("bootseer-watch", min(_THREADS, len(asked) or 1)) as pool:
            answers = dict(zip(asked, pool.map(self._digest, asked), strict=True))
        unresolved = {tag: answer for tag, answer in answers.items() if isinstance(answer, BootseerError)}
        if unresolved and len(unresolved) == len(tags):
            raise unresolved[tags[0]]
        found = {answer: tag for tag, answer in reversed(answers.items()) if isinstance(answer, str) and answer}
        self._failed = {name: tried for name, tried in self._failed.items() if name in found or name in tags}
        # Forget digests without a tag, but only after every tag was resolved.
        gone = self._converted - found.keys()
        if gone and len(asked) == len(tags) and not unresolved:
            self._converted -= gone
            self._write()
        new = [
            (tag, digest)
            for digest, tag in reversed(found.items())
            if digest not in self._converted and self._failed.get(digest, (0, now_s))[1] <= now_s
        ]
        return [*unresolved.items(), *new]

    def record_converted(self, digest: str) -> None:
        """Record the image as converted. Raises `PermanentError` when the state file cannot be written."""
        self._failed.pop(digest, None)
        self._converted.add(digest)
        self._write()

    def record_failed(self, name: str) -> float:
        """Record a failure of this digest, or unresolved tag; returns the seconds until it is tried again."""
        tries = self._failed.get(name, (0, 0.0))[0] + 1
        pause_s = min(_PAUSE_S * 2.0 ** min(tries - 1, 10), _MAX_PAUSE_S)
        self._failed[name] = (tries, time.monotonic() + pause_s)
        return pause_s

    def _digest(self, tag: str) -> str | BootseerError:
        try:
            return retrying(lambda left_s: self._registry.manifest_digest(tag, timeout_s=left_s))
        except NotFoundError:
            return ""  # removed since
        except BootseerError as error:  # may concern this tag alone
            return error

    def _write(self) -> None:
        text = json.dumps({"schema": _SCHEMA, "converted": sorted(self._converted)}, indent=1)
        with os_errors_as(PermanentError, f"{self._state}: cannot be written"):
            replace_file(self._state, text.encode(), mode=0o666, durable=True)


@contextmanager
def lock_state(state: Path) -> Iterator[None]:
    """Lock the state file. Raises `TransientError` if another process holds it, `PermanentError` without access."""
    with ExitStack() as held:
        with os_errors_as(PermanentError, f"{state}: cannot be used"):
            state.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(flocked(state.with_name(f"{state.name}.lock"), deadline_s=1.0))
        yield


def _read(state: Path) -> set[str]:
    hint = "remove it: all images are then checked again; converted layers are reused"
    try:
        document = json.loads(state.read_bytes())
        if document["schema"] == _SCHEMA and all(map(is_content_name, document["converted"])):
            return set(document["converted"])
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UsageError(f"{state}: not a valid watch state file", hint=hint, exit_code=1)
