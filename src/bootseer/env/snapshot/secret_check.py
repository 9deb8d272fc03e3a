"""The final check before publication: a snapshot that contains a secret is refused.

Rules have already left paths out of the changes (`capturing.exclude`). Here everything that goes to a store is checked:
paths by the same rules; contents, links, attributes and the document by value and by form.

- *By value:* credentials of this machine, those that the setup wrote, and its secret variables. Copies and other names
  of such files are found, and random words of them in any other file.
- *By form:* keys and tokens by the rules of kingfisher (some 500, maintained upstream), the rest by
  `capturing.secrets`. Published content is exempt: files of packages as listed in their records, and system files.

A file that cannot be checked is refused. Not searched: archives and other compressed files, bytecode (its source is),
and large files beyond their first 16 MiB.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.env.capturing import secrets
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.exclude import Kind as PathKind
from bootseer.env.changes import Change
from bootseer.env.installing.packages import published_files
from bootseer.env.keys.key_settings import looks_secret
from bootseer.env.life.unsafe import UnsafeError
from bootseer.errors import PermanentError, UsageError
from bootseer.logs import logger
from bootseer.units import listed

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

LOOKED_AT_BYTES = 16 << 20
"""Of a large file."""
_OVERLAP = 4096
_MAX_CREDENTIALS_BYTES = 1 << 20
_MAX_CREDENTIALS_FILES = 200
"""Of one folder."""
_MIN_COPY = 6
"""Minimum size in bytes: an empty JSON object is not a secret."""
_SCAN_S = 60.0
_WORD = re.compile(rb"[A-Za-z0-9_+=~-]{16,}")
_NAMES = re.compile(
    rb"(?<![\w.-])(?:machine\s+\S+|(?:[a-z0-9-]+\.)+[a-z]{2,24}(?![\w.-])"
    rb"|(?:quota_)?projects?(?:_id)?[\"\s:=/]{1,6}[a-z][a-z0-9-]+(?![\w-]))"
)
"""Names of servers and projects in credentials files: `artifactory-prod-01.example` looks random."""
_PASSWORD_NAME = re.compile(r"(^|_)PASS(WD|PHRASE)?$|PASSWORD$", re.IGNORECASE)
_PASSWORD = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[^\s/]{8,}")
"""A password that a person chose, in a variable that is called so."""
_MAX_WORDS = 800
"""Including their base64 forms."""
# Addresses with a user are checked by `secrets`, which exempts examples.
_OWN_RULES = frozenset({"betterleaks.generic-credential-uri"})
_PRIVATE_KEY = "betterleaks.private-key"
_log = logger(__name__)


class SecretCheck:
    """Checks one snapshot. Results are descriptions of what was found, empty for nothing. Thread-safe."""

    def __init__(
        self,
        exclusions: Exclusions,
        *,
        withheld: Collection[Change] = (),
        variables: Mapping[str, str] | None = None,
        rules: Sequence[str] = (),
        cache: Path | None = None,
    ) -> None:
        """`variables` is the environment of the setup, `rules` are files with additional rules, `cache` is a folder of
        this user for compiled rules. Raises `UsageError` for invalid rules, and `PermanentError` without the
        scanner."""
        self._exclusions = exclusions
        began = time.monotonic()
        # Compiling the rules takes seconds, once for each node.
        folder = None if os.environ.get("KF_RULE_CACHE_DIR") else cache
        self._scanner = _scanner(tuple(rules), is_cached=cache is not None, folder=folder)
        _log.info("rules of the secret check were ready after %.2f s", time.monotonic() - began)
        self._published: Mapping[str, tuple[int, str]] = {}
        self._copies: dict[str, str] = {}
        self._words: dict[bytes, str] = {}
        for change in withheld:
            if change.source:
                self._learn_file(change.path, change.source)
        # Single files first: folders of programs may have more words than are remembered.
        for place in sorted(exclusions.places(lambda rule: rule.secret), key=os.path.isdir):
            files = (f"{above}/{name}" for above, _, names in os.walk(place) for name in names)
            for path in (place, *itertools.islice(files, _MAX_CREDENTIALS_FILES)):
                self._learn_file(path, path)
        for name, value in (variables or {}).items():
            self._learn_variable(name, value)

    def check_paths(self, rows: Sequence[tuple[str, PathKind, int, bytes]], read: Callable[[str], bytes]) -> list[str]:
        """Check paths, with kinds, sizes and other texts (link target, attributes); `read` returns a file's content."""
        self._published = published_files({path for path, kind, *_ in rows if kind == "file"}, read)
        wrong = []
        for path, kind, size, attributes in rows:
            rule = self._exclusions.forbidding_rule(path, kind=kind, size=size)
            if rule is not None:
                wrong.append(f"{path} ({rule.name})")
            elif self._exclusions.is_kept(path):
                continue
            elif origin := self._known_value_in(path.encode("utf-8", "surrogateescape")):
                wrong.append(f"a name ({origin})")
            elif attributes and (found := self.check_text(path, attributes)):
                wrong.append(found)
        return wrong

    def check_content(self, path: str, data: bytes, *, size: int | None = None) -> str:
        """Check a file's content, or a piece of a file that has `size` bytes in all."""
        if self._exclusions.is_kept(path) or self._is_published(path, data, len(data) if size is None else size):
            return ""
        if size is None and (copy := self._copies.get(hashlib.sha256(data).hexdigest())):
            return f"{path} (a copy of {copy})"
        kind = self._known_value_in(data)
        if not kind and not secrets.is_published(path):
            kind = secrets.find_secret(path, data) or self._matching_rule(path, data)
        return f"{path} ({kind})" if kind else ""

    def check_large(self, path: str, size: int) -> Callable[[bytes], str]:
        """A function that checks the pieces of a large file, in order."""
        seen, rest = 0, b""

        def judge(piece: bytes) -> str:
            nonlocal seen, rest
            if seen >= LOOKED_AT_BYTES:
                return ""
            found = self.check_content(path, rest + piece, size=size)
            seen, rest = seen + len(piece), piece[-_OVERLAP:]
            return found

        return judge

    def check_text(self, label: str, data: bytes) -> str:
        """Check other texts, such as the document."""
        kind = (
            self._known_value_in(data)
            or self._matching_rule("", data)
            or secrets.secret_kind(data.decode("utf-8", "replace"))
        )
        return f"{label} ({kind})" if kind else ""

    def _learn_file(self, path: str, source: str) -> None:
        """Remember the content of a credentials file; an unreadable one is unreadable for the setup, too."""
        with contextlib.suppress(OSError):
            if not os.path.isfile(source) or not _MIN_COPY <= os.path.getsize(source) <= _MAX_CREDENTIALS_BYTES:  # noqa: PTH113, PTH202
                return
            data = Path(source).read_bytes()
            self._copies[hashlib.sha256(data).hexdigest()] = path
            for word in _WORD.findall(_NAMES.sub(b" ", data)):
                if len(self._words) < _MAX_WORDS and secrets.is_random(word.decode()):
                    self._remember(word, f"a word of {path}")

    def _learn_variable(self, name: str, value: str) -> None:
        kind = secrets.secret_kind(value)
        is_password = _PASSWORD_NAME.search(name) and _PASSWORD.fullmatch(value)
        if kind is None and not is_password and not (looks_secret(name) and secrets.is_random(value)):
            return
        # The path of a working folder or a socket often looks random, as /scratch/user1234/job_5678.
        if name == "PWD" or (value.startswith("/") and os.path.exists(value)):  # noqa: PTH110
            return
        for word in secrets.passwords_in(value) or [value]:
            self._remember(word.encode("utf-8", "surrogateescape"), f"the value of {name}")

    def _remember(self, word: bytes, origin: str) -> None:
        self._words[word] = origin
        self._words[json.dumps(word.decode("utf-8", "surrogateescape"))[1:-1].encode()] = origin
        # Also in base64, as in headers and settings: the word may begin at any of three offsets within a group of
        # three bytes. Characters that depend on the bytes before or after the word are left out.
        for before, first in ((0, 0), (1, 2), (2, 3)):
            text = base64.b64encode(bytes(before) + word)[first : (before + len(word)) * 8 // 6]
            self._words[text] = f"{origin}, in base64"

    def _is_published(self, path: str, data: bytes, size: int) -> bool:
        known = self._published.get(path)
        if known is None or known[0] != size:
            return False
        if len(data) != size:  # a piece of a large file has no digest of its own
            return True
        return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() == known[1]

    def _known_value_in(self, data: bytes) -> str:
        return next((origin for word, origin in self._words.items() if word in data), "")

    def _matching_rule(self, path: str, data: bytes) -> str:
        try:
            findings = self._scanner.scan(data, timeout=_SCAN_S)
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise PermanentError(f"{path or 'a text'} could not be checked for secrets: {error}") from error
        for finding in findings:
            rule = str(finding.rule_id)
            if finding.visible and rule not in _OWN_RULES and not (rule == _PRIVATE_KEY and secrets.is_example(path)):
                return f"it matches the rule {rule}"
        return ""


def raise_if_secret(found: Sequence[str]) -> None:
    if found:
        _log.warning("refused: %d possible secrets, the first %s", len(found), found[0])
        raise UnsafeError(
            f"it would contain what looks like a secret: {listed(found)}; "
            "--env-leave-out PATH leaves it out, --env-keep PATH declares that it is not a secret"
        )


@functools.lru_cache(maxsize=2)
def _scanner(rules: tuple[str, ...], *, is_cached: bool, folder: Path | None) -> Scanner:
    try:
        from kingfisher_sdk import Rules, Scanner
    except ImportError as error:
        raise PermanentError(f"the secret scanner is not available: {error}") from error
    try:
        known = Rules(rules, cache=is_cached, cache_dir=folder)
        return Scanner(known, base64=False, redact=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the rules for secrets cannot be used: {error}", hint="see --env-secret-rules") from error
