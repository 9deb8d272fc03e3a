"""Shared by the verbs of `ckpt`: opening a storage place, resolving a checkpoint's name, options for striping."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.latest import LATEST, read_latest
from bootseer.checkpoint.layout import MAX_REPLICATION, MAX_STRIPES, Policy
from bootseer.cli.options import COUNT, FLAG, Option, parse_size
from bootseer.errors import AccessError, CorruptError, NotFolderError, NotFoundError, UsageError
from bootseer.launch.supervise import say
from bootseer.places import HDFS, check_slashes, open_place
from bootseer.units import listed

STRIPES = (
    Option("--stripes", "Number of nodes to stripe a file over.", COUNT, "N", least=1, most=MAX_STRIPES),
    Option("--parity --no-parity", "Add a parity part, so that any one part may be lost.", FLAG),
    Option("--part-size", "Maximum size of a part, such as 64m.", metavar="SIZE", dest="part_bytes"),
    Option("--replication", "Copies of each part.", COUNT, "N", least=1, most=MAX_REPLICATION),
)
_LONG_S = 2.5
"""A wait for the storage is told after this time."""


def split(uri: str) -> tuple[str, str]:
    """The address of the folder that contains a file or checkpoint, and its name there. Raises `UsageError`."""
    check_slashes(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator and uri:
        scheme, rest = "file", str(Path(uri).absolute())
    folder, slash, name = rest.rstrip("/").rpartition("/")
    if not name or not slash or (scheme not in ("file", *HDFS) and not folder) or name in (".", ".."):
        raise UsageError(
            f"{uri!r} is not the address of a checkpoint", hint="for example hdfs://namenode/jobs/moe/step-1000"
        )
    return f"{scheme}://{folder or '/'}", name


@contextmanager
def files_at(uri: str) -> Iterator[Files]:
    """The files of a place, which is a folder or does not exist yet. A long wait for the storage is shown."""
    with closing(open_place(uri)) as place:
        notice = threading.Timer(_LONG_S, say, (f"still waiting for {place.uri}",))
        notice.daemon = True
        notice.start()
        try:
            is_folder = place.stat("").is_folder
        except NotFolderError:
            is_folder = False
        except (AccessError, NotFoundError):  # each verb reports that in its own way
            is_folder = True
        finally:
            notice.cancel()
        if not is_folder:
            is_latest = place.uri.endswith("/latest")
            hint = "`bootseer ckpt latest` prints the checkpoint that it names" if is_latest else "name its folder"
            raise UsageError(f"{place.uri} is not a folder", hint=hint, exit_code=1)
        yield Files(place)


def tell_fallback(place: Mapping[str, object]) -> str:
    """Report a fallback to hdfs-native, and unverified reads, by a place's statistics. Returns the former's reason."""
    reason = str(place.get("fallback", ""))
    if reason:
        say(f"reads use hdfs-native and are slower: {reason}")
    if unchecked := place.get("unchecked"):
        say(f"{unchecked} ranges of ordinary files were read without checksums: no DataNode in reach has HDFS's")
    return reason


def tell_left_out(files: Files, name: str) -> None:
    """Report what a place that is a folder does not show of a checkpoint: a copy of it lacks these files."""
    if files.place.is_local:
        top = Path("/", files.place.uri.removeprefix("file://"), name)
        below = [Path(path, one) for path, folders, names in os.walk(top) for one in (*folders, *names)]
        if left_out := sorted(str(one) for one in below if one.is_symlink() or not (one.is_dir() or one.is_file())):
            say(f"symbolic links and special files are left out: {listed(left_out)}")


def resolved(files: Files, name: str) -> str:
    """The name, with `latest` replaced by the checkpoint that it points at."""
    if name != LATEST or files.stat(name).is_folder:
        return name
    try:
        found = read_latest(files.place, "")
    except CorruptError:
        return name  # some other file called `latest`
    if found is None:
        raise NotFoundError(f"{files.place.uri} has no {LATEST}")
    try:
        files.stat(found)
    except NotFoundError:
        raise NotFoundError(
            f"{files.place.uri}: latest names {found}, which does not exist; see `bootseer ckpt latest`"
        ) from None
    return found


def changed(policy: Policy, given: Mapping[str, object]) -> Policy | None:
    """The policy with the given values; None if none are given. Raises `UsageError`."""
    values = {name: value for name, value in given.items() if value is not None}
    if "part_bytes" in values:
        values["part_bytes"] = parse_size(str(values["part_bytes"]), "--part-size")
    return replace(policy, **values) if values else None  # type: ignore[arg-type]
