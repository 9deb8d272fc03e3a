"""The last look at all that is about to be published: a snapshot with a secret in it is refused, however it got there.

Before this, rules leave paths out of the changes (`capturing.exclude`). Here everything is judged that goes to a store:
paths by the same rules; contents, links and attributes, the document, by form and by value.

- *By value:* credentials of this machine, those that the setup wrote, and the secret variables that it was given. A
  copy or another name of such a file is found, and a random word of one in any other file.
- *By form:* keys and tokens by the rules of kingfisher (some 500, kept up by its makers), the rest by
  `capturing.secrets`. Forms do not count in what is published already: files of packages as their records have them,
  and of the system.

What cannot be looked at is refused. Not looked into: archives and other compressed files, bytecode (it says what its
source says), and large files behind their first 16 MiB.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.env.capturing import secrets
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.exclude import Kind as PathKind
from bootseer.env.changes import Change
from bootseer.env.installing.packages import published_files
from bootseer.env.keys.settings import looks_secret
from bootseer.errors import PermanentError, UsageError
from bootseer.logs import logger

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

LOOKED_AT_BYTES = 16 << 20
"""Of a large file."""
_OVERLAP = 4096
_MAX_CREDENTIALS_BYTES = 1 << 20
_MAX_CREDENTIALS_FILES = 200
"""Of one folder."""
_MIN_COPY = 6
"""Bytes: an empty JSON object is not a secret."""
_SCAN_S = 60.0
_MAX_NAMED = 3
_WORD = re.compile(rb"[A-Za-z0-9_+=~-]{16,}")
_MAX_WORDS = 800
"""With their forms in base64."""
# Addresses with a user in them are judged by `secrets`, which knows examples.
_NOT_THEIRS = frozenset({"betterleaks.generic-credential-uri"})
_PRIVATE_KEY = "betterleaks.private-key"
_log = logger(__name__)


class SecretCheck:
    """Judges one snapshot. All answers are words about what was found, empty for nothing; threads may ask at once."""

    def __init__(
        self,
        exclusions: Exclusions,
        *,
        withheld: Collection[Change] = (),
        variables: Mapping[str, str] | None = None,
        rules: Sequence[str] = (),
        cache: Path | None = None,
    ) -> None:
        """`variables` is the environment of the setup, `rules` are files with further rules, `cache` is a folder of
        this user where compiled rules are kept. Raises `UsageError` for rules that cannot be read, and `PermanentError`
        where nothing can be judged."""
        self.seconds = 0.0
        """What looking into files took so far, all threads together."""
        self._counting = threading.Lock()
        self._exclusions = exclusions
        began = time.monotonic()
        self._scanner = _scanner(tuple(rules), cache)
        _log.info("rules of the secret check were ready after %.2f s", time.monotonic() - began)
        self._published: Mapping[str, tuple[int, str]] = {}
        self._copies: dict[str, str] = {}
        self._words: dict[bytes, str] = {}
        for change in withheld:
            if change.source:
                self._learn(change.path, change.source)
        for place in exclusions.credentials:
            for path in (place, *_files_in(place)):
                self._learn(path, path)
        for name, value in (variables or {}).items():
            self._learn_variable(name, value)

    def paths(self, found: Iterable[tuple[str, PathKind, int]], read: Callable[[str], bytes]) -> list[str]:
        """What is wrong with these paths (kind, size) of the snapshot; `read` gives the content of one."""
        rows = list(found)
        self._published = published_files({path for path, kind, _ in rows if kind == "file"}, read)
        wrong = []
        for path, kind, size in rows:
            rule = self._exclusions.forbids(path, kind=kind, size=size)
            if rule is not None:
                wrong.append(f"{path} ({rule.name})")
            elif (whose := self._value_in(path.encode("utf-8", "surrogateescape"))) and not self._exclusions.keeps(
                path
            ):
                wrong.append(f"a name ({whose})")
        return wrong

    def content(self, path: str, data: bytes, *, size: int | None = None) -> str:
        """Judge a file's content, or a piece of one with `size` bytes in all."""
        began = time.monotonic()
        try:
            return self._content(path, data, size)
        finally:
            with self._counting:
                self.seconds += time.monotonic() - began

    def _content(self, path: str, data: bytes, size: int | None) -> str:
        if self._exclusions.keeps(path) or self._is_published(path, data, len(data) if size is None else size):
            return ""
        if size is None and (copy := self._copies.get(hashlib.sha256(data).hexdigest())):
            return f"{path} (a copy of {copy})"
        kind = self._value_in(data)
        if not kind and not secrets.is_published(path):
            kind = (secrets.find(path, data) if size is None else None) or self._form_of(path, data)
        return f"{path} ({kind})" if kind else ""

    def large(self, path: str, size: int) -> Callable[[bytes], str]:
        """The same for the pieces of a large file, in their order."""
        seen, rest = 0, b""

        def judge(piece: bytes) -> str:
            nonlocal seen, rest
            if seen >= LOOKED_AT_BYTES:
                return ""
            found = self.content(path, rest + piece, size=size)
            seen, rest = seen + len(piece), piece[-_OVERLAP:]
            return found

        return judge

    def text(self, label: str, data: bytes) -> str:
        """Judge what is not a file: names, links, attributes, the document."""
        kind = self._value_in(data) or self._form_of("", data) or secrets.value_kind(data.decode("utf-8", "replace"))
        return f"{label} ({kind})" if kind else ""

    def _learn(self, path: str, source: str) -> None:
        """Know the content of a credentials file again; one that is closed to us is closed to the setup as well."""
        with contextlib.suppress(OSError):
            if not os.path.isfile(source) or not _MIN_COPY <= os.path.getsize(source) <= _MAX_CREDENTIALS_BYTES:  # noqa: PTH113, PTH202
                return
            data = Path(source).read_bytes()
            self._copies[hashlib.sha256(data).hexdigest()] = path
            for word in _WORD.findall(data):
                if len(self._words) < _MAX_WORDS and secrets.is_random(word.decode()):
                    self._know(word, f"a word of {path}")

    def _learn_variable(self, name: str, value: str) -> None:
        kind = secrets.value_kind(value)
        if kind is None and not (looks_secret(name) and secrets.is_random(value)):
            return
        for word in secrets.passwords_in(value) or [value]:
            self._know(word.encode("utf-8", "surrogateescape"), f"the value of {name}")

    def _know(self, word: bytes, whose: str) -> None:
        self._words[word] = whose
        # In base64, as headers and settings have logins: it begins at one of three places of a letter group. Letters
        # that hold bits of what is in front or behind are left out.
        for before, first in ((0, 0), (1, 2), (2, 3)):
            text = base64.b64encode(bytes(before) + word)[first : (before + len(word)) * 8 // 6]
            self._words[text] = f"{whose}, in base64"

    def _is_published(self, path: str, data: bytes, size: int) -> bool:
        known = self._published.get(path)
        if known is None or known[0] != size:
            return False
        # A piece of a large file has no digest of its own.
        return len(data) != size or _record_digest(data) == known[1]

    def _value_in(self, data: bytes) -> str:
        return next((whose for word, whose in self._words.items() if word in data), "")

    def _form_of(self, path: str, data: bytes) -> str:
        try:
            findings = self._scanner.scan(data, timeout=_SCAN_S)
        except (RuntimeError, TimeoutError, ValueError) as error:
            return f"it could not be looked into: {error}"
        for finding in findings:
            rule = str(finding.rule_id)
            if finding.visible and rule not in _NOT_THEIRS and not (rule == _PRIVATE_KEY and secrets.is_example(path)):
                return f"it matches the rule {rule}"
        return ""


def refuse(found: Sequence[str]) -> None:
    """Raise `PermanentError` when something was found."""
    if found:
        _log.warning("refused: %d places look secret, the first %s", len(found), found[0])
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        raise PermanentError(
            f"it would hold what looks secret: {', '.join(found[:_MAX_NAMED])}{more}; "
            "--env-leave-out PATH leaves it out, --env-keep PATH says that it is not a secret"
        )


def _files_in(folder: str) -> Iterator[str]:
    files = (f"{above}/{name}" for above, _, names in os.walk(folder) for name in names)
    return itertools.islice(files, _MAX_CREDENTIALS_FILES)


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@functools.lru_cache(maxsize=2)
def _scanner(rules: tuple[str, ...], cache: Path | None) -> Scanner:
    try:
        from kingfisher_sdk import Rules, Scanner
    except ImportError as error:
        raise PermanentError(f"nothing can be looked into for secrets here: {error}") from error
    try:
        # Compiling them takes seconds, which each node spends once.
        place = None if os.environ.get("KF_RULE_CACHE_DIR") else cache
        known = Rules(rules, cache=cache is not None, cache_dir=place)
        return Scanner(known, base64=False, redact=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the rules for secrets cannot be used: {error}", hint="see --env-secret-rules") from error
