"""Which place, which checkpoint in it, and how it is striped: what the verbs of `ckpt` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bootseer.checkpoint.layout import MAX_REPLICATION, MAX_STRIPES
from bootseer.cli.image_options import parse_size
from bootseer.cli.options import COUNT, FLAG, Option
from bootseer.cli.output import Progress
from bootseer.errors import AccessError, CorruptError, NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.checkpoint.files import Files
    from bootseer.checkpoint.layout import Policy


STRIPES = (
    Option("stripes", ("--stripes",), "Nodes that a file is spread over.", COUNT, "N", least=1, most=MAX_STRIPES),
    Option("parity", ("--parity", "--no-parity"), "One part more, so that any one may be missing.", FLAG),
    Option("part_bytes", ("--part-size",), "Most bytes of a part, as 64m.", metavar="SIZE"),
    Option("replication", ("--replication",), "Copies of each part.", COUNT, "N", least=1, most=MAX_REPLICATION),
)
_TICK_S = 0.5


def split(uri: str) -> tuple[str, str]:
    """The address of the folder that a file or checkpoint lies in, and its name there. Raises `UsageError`."""
    scheme, separator, rest = uri.partition("://")
    if not separator and uri and not uri.startswith(("hdfs:", "viewfs:", "file:")):
        from pathlib import Path

        scheme, rest = "file", str(Path(uri).absolute())
    folder, slash, name = rest.rstrip("/").rpartition("/")
    if not name or not slash or (scheme not in ("file", "hdfs", "viewfs") and not folder) or name in (".", ".."):
        raise UsageError(f"{uri!r} names no checkpoint", hint="for example hdfs://namenode/jobs/moe/step-1000")
    return f"{scheme}://{folder or '/'}", name


@contextmanager
def files_at(uri: str) -> Iterator[Files]:
    """The files of a place, which is a folder or not there yet. A wait for it is shown, with the reason."""
    from bootseer.checkpoint.files import Files
    from bootseer.places import open_place
    from bootseer.places.place import NotFolderError

    with closing(open_place(uri)) as place:
        with _patience(f"waiting for {place.uri}"):
            try:
                is_folder = place.stat("").is_folder
            except NotFolderError:
                is_folder = False
            except (AccessError, NotFoundError):  # each verb has its own words for that
                is_folder = True
        if not is_folder:
            raise UsageError(f"{place.uri} is not a folder", hint="name the folder that it lies in", exit_code=1)
        yield Files(place)


@contextmanager
def _patience(label: str) -> Iterator[None]:
    """Say what is waited for while the block lasts, where it lasts."""
    import threading

    ended = threading.Event()
    with Progress(label, line=True) as progress:

        def watch() -> None:
            while not ended.wait(_TICK_S):
                progress.wait()

        watching = threading.Thread(target=watch, name="patience", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join(_TICK_S)  # a terminal that takes no output must not hold us up


def tell_fallback(place: Mapping[str, object]) -> str:
    """Say why bytes went the slow way, and which could not be checked, from a place's figures; returns the reason of
    the first, "" where they did not."""
    from bootseer.launch.supervise import say

    reason = str(place.get("fallback", ""))
    if reason:
        say(f"slower than it could be, through hdfs-native alone: {reason}")
    if unchecked := place.get("unchecked"):
        say(
            f"{unchecked} ranges of ordinary files were read unchecked: no DataNode that could be asked has HDFS's "
            "checksums of them; compare the copy with its source if you have it"
        )
    return reason


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


def changed(policy: Policy, given: Mapping[str, object]) -> Policy | None:
    """The policy with what was given changed; None when nothing was. Raises `UsageError`."""
    values = {name: value for name, value in given.items() if value is not None}
    if "part_bytes" in values:
        values["part_bytes"] = parse_size(str(values["part_bytes"]), "--part-size")
    return replace(policy, **values) if values else None  # type: ignore[arg-type]
