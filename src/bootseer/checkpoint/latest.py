"""The file `latest` of a job: one line with the name of the checkpoint to resume from.

Its format is that of training code that keeps such a file itself. It is moved when a checkpoint is published, never
before, and never backwards: of two writers, the higher step wins. Users may set it to any published checkpoint.

Moving it means reading, comparing and writing, which no place does atomically: a lock file in the folder's `.attempts`
serializes it. The lock of a dead process is stale after a minute.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.checkpoint.attempts import lease_bytes
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import ATTEMPTS, is_hidden
from bootseer.errors import (
    BootseerError,
    CorruptError,
    IsFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.logs import logger
from bootseer.places.place import Entry, Place, folder_of, join, make_folder_like_parent, name_of

_LOG = logger(__name__)

LATEST = "latest"
LOCK_S = 60.0
"""A lock is held for a few small requests; an older one is stale."""
_MAX_BYTES = 4096
_MAX_NAME_BYTES = 255
"""The limit of file systems."""
_POLL_S = 0.1
_LOCK = re.compile(rf"{LATEST}\.lock(?:-([0-9]{{1,9}}))?")
"""Earlier versions have one lock, without a number."""
# step-100, global_step100, iter_0000100, epoch=3-step=100.ckpt, step-100.tar.gz. Not hf2, v2 or llama3.pt: there the
# number is a part of the word.
_STEP_WORDS = "(?:global_?)?step|iter|iteration|epoch|ckpt|checkpoint|batch"
_STEP = re.compile(rf"(?:^|[-_=]|(?<![a-z])(?:{_STEP_WORDS}))\d*?(\d{{1,18}})(?:\.[a-z]\w*)*$", re.IGNORECASE)
STEP_NAME = re.compile(rf"(?:{_STEP_WORDS})[-_=]?\d", re.IGNORECASE)
"""What the names of folders of steps begin with, as `step-9`; not `rank-9`."""


def step_of(name: str) -> int | None:
    """The number at the end of a checkpoint's name, before file endings; None without one.

    It stands alone: after one of `-_=` or after a word for it, as in `step100`.
    """
    found = _STEP.search(name)
    return int(found[1]) if found else None


def can_be_checkpoint(name: str) -> bool:
    """Whether a checkpoint may have this name: it must be readable from the one line of `latest`."""
    fits = name == name.strip() and name.isprintable() and "/" not in name and len(name.encode()) <= _MAX_NAME_BYTES
    return fits and name not in ("", ".", "..", LATEST) and not is_hidden(name)


def read_latest(place: Place, folder: str) -> str | None:
    """The name in `latest`; None if there is no such file, or a user's folder of this name.

    Raises `CorruptError` if it contains no valid name.
    """
    path = join(folder, LATEST)
    try:
        data = place.read_first(path, _MAX_BYTES + 1)
    except (NotFoundError, IsFolderError):
        return None
    text = data.decode("utf-8", "replace").strip()
    if len(data) > _MAX_BYTES or not can_be_checkpoint(text):
        raise CorruptError(f"{place.uri}/{path} names no checkpoint: {text[:80]!r}; `bootseer ckpt latest` sets it")
    return text


def latest_or_none(place: Place, folder: str) -> str | None:
    """As `read_latest`; None also for a file that contains no valid name."""
    with contextlib.suppress(CorruptError):
        return read_latest(place, folder)
    return None


def move_latest(files: Files, folder: str, name: str) -> str:
    """Let `latest` name a just published checkpoint, unless it names a later one; returns the name it holds now."""
    _check_published(files, folder, name)
    try:
        with _locked(files.place, folder):
            current = latest_or_none(files.place, folder)
            if current is not None and current != name and not _is_later(files, folder, name, current):
                return current
            _write(files.place, folder, name)
    except BootseerError as error:
        what = f"{files.place.uri}/{join(folder, name)}"
        raise PermanentError(f"{what} is published, but `latest` does not name it: {error}") from error
    return name


def set_latest(files: Files, folder: str, name: str) -> None:
    """Let `latest` name any published checkpoint. Raises `NotFoundError`."""
    _check_published(files, folder, name)
    with _locked(files.place, folder):
        _write(files.place, folder, name)


def drop_latest(files: Files, folder: str, name: str | None, other: str | None) -> None:
    """If `latest` names `name` (None: nothing), let it name `other`, or remove it for None."""
    with _locked(files.place, folder):
        if read_latest(files.place, folder) != name:
            return
        if other is not None:
            _write(files.place, folder, other)
        else:
            files.place.delete(join(folder, LATEST))


def _is_later(files: Files, folder: str, name: str, current: str) -> bool:
    try:
        current_info = files.stat(join(folder, current))
    except NotFoundError:
        return True  # removed by another program, perhaps because training went back to an earlier step
    step, other_step = step_of(name), step_of(current)
    if step is not None and other_step is not None and step != other_step:
        return step > other_step
    return files.stat(join(folder, name)).entry.mtime_ns >= current_info.entry.mtime_ns


def _check_published(files: Files, folder: str, name: str) -> None:
    if not can_be_checkpoint(name):
        raise PermanentError(f"{name!r} is not a name that `latest` can hold in {files.place.uri}/{folder}".rstrip("/"))
    files.stat(join(folder, name))


def check_no_link(place: Place, *paths: str) -> None:
    """Refuse to replace a user's symbolic link (`latest -> step-100`), which a place that is a folder does not show."""
    for path in paths:
        if place.is_local and Path("/", place.uri.removeprefix("file://"), path).is_symlink():
            raise PermanentError(f"{place.uri}/{path} is a symbolic link, which is not replaced; remove it first")


def _write(place: Place, folder: str, name: str) -> None:
    check_no_link(place, join(folder, LATEST))
    _LOG.info("%s/%s: `latest` names %s", place.uri, folder, name)
    place.write_bytes(join(folder, LATEST), f"{name}\n".encode())


@contextlib.contextmanager
def _locked(place: Place, folder: str) -> Iterator[None]:
    attempts = join(folder, ATTEMPTS)
    mark = lease_bytes(secrets.token_hex(8))
    make_folder_like_parent(place, attempts)
    until = time.monotonic() + 2 * LOCK_S
    while (lock := _free_lock(place, attempts)) is None or not place.create_bytes(lock, mark):
        if time.monotonic() > until:
            raise TransientError(f"{place.uri}/{folder}: another process keeps moving `latest`; try again")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        # A lock that cannot be removed becomes stale.
        with contextlib.suppress(BootseerError):
            if place.read_bytes(lock, _MAX_BYTES) == mark:
                place.delete(lock)


def _free_lock(place: Place, attempts: str) -> str | None:
    """The path of the lock to be created; None while another process holds one.

    Locks are numbered, and the highest counts. A stale one stays until `collect` removes it, and the next number takes
    its place: if it were removed here, the slower one of two processes could remove the new lock of the faster one.
    """
    found = ((_LOCK.fullmatch(name_of(entry.path)), entry) for entry in place.list(attempts))
    locks = {int(match[1] or 0): entry for match, entry in found if match}
    last = max(locks, default=0)
    is_free = last not in locks or _is_old(place, locks[last])
    return f"{attempts}/{LATEST}.lock-{last + 1}" if is_free else None


def _is_old(place: Place, lock: Entry) -> bool:
    return place.now_s(folder_of(lock.path)) - lock.mtime_ns / 1e9 > LOCK_S
