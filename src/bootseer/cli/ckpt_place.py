"""Which place, and which checkpoint in it: what the verbs of `ckpt` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from bootseer.errors import CorruptError, NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.checkpoint.files import Files


def split(uri: str) -> tuple[str, str]:
    """The address of the folder that a file or checkpoint lies in, and its name there. Raises `UsageError`."""
    scheme, separator, rest = uri.partition("://")
    if not separator and uri and not uri.startswith(("hdfs:", "file:")):
        from pathlib import Path

        scheme, rest = "file", str(Path(uri).absolute())
    folder, slash, name = rest.rstrip("/").rpartition("/")
    if not name or not slash or (scheme != "file" and not folder) or name in (".", ".."):
        raise UsageError(f"{uri!r} names no checkpoint", hint="for example hdfs://namenode/jobs/moe/step-1000")
    return f"{scheme}://{folder}" if scheme != "file" or folder else "file:///", name


@contextmanager
def files_at(uri: str) -> Iterator[Files]:
    """The files of a place."""
    from bootseer.checkpoint.files import Files
    from bootseer.checkpoint.places.open import open_place

    with closing(open_place(uri)) as place:
        yield Files(place)


def resolved(files: Files, name: str) -> str:
    """The checkpoint that `latest` names when that is what was asked for; any other name as it is."""
    from bootseer.checkpoint.latest import LATEST, read_latest

    if name != LATEST or files.stat(name).is_folder:
        return name
    try:
        found = read_latest(files.place, "")
    except CorruptError:
        return name  # a file that is only called so
    if found is None:
        raise NotFoundError(f"{files.place.uri} has no {LATEST}")
    try:
        files.stat(found)
    except NotFoundError:
        raise NotFoundError(
            f"{files.place.uri}: latest names {found}, which is not there; `bootseer ckpt latest` shows what is"
        ) from None
    return found


def number_of_files(count: int) -> str:
    """`1 file`, `12 files`."""
    return f"{count:,} file{'s' * (count != 1)}"
