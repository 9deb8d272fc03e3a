"""The verbs of `bootseer env` that make and use snapshots; `env_store` has those about the content of a store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bootseer.artifact.places import cache_root
from bootseer.cli.env_options import CAPTURE, KEY, SETUP, wanted
from bootseer.cli.env_store import STORE, catalog_of, document_of
from bootseer.cli.image_options import TRUST, request_of_verb
from bootseer.cli.output import Output, Progress, styled
from bootseer.cli.verb_parts import MayHaveCommand, json_option, with_options
from bootseer.env.keys.key import Difference, RequestKey, difference, shortened
from bootseer.env.keys.lock import resolve
from bootseer.env.keys.request_key import request_key
from bootseer.errors import UsageError
from bootseer.launch.environment.lookup_process import key_request
from bootseer.launch.environment.plain import check_files
from bootseer.launch.environment.snapshot import SavedSnapshot, make_snapshot
from bootseer.launch.interrupt import interruptible
from bootseer.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from rich.text import Text

    from bootseer.image.mounting.request import Request


@click.command("capture")
@with_options(SETUP)
@with_options(KEY)
@with_options(CAPTURE)
@with_options(STORE)
@with_options(TRUST)
@click.option("--refresh", is_flag=True, help="Make a new snapshot even if there is one.")
@json_option("bootseer.environment-capture/1")
def capture_command(
    setup: str | None, requirements: tuple[str, ...], refresh: bool, output: Output, **values: Any
) -> None:
    """Run a setup as `bootseer run` would, without a job, and publish its snapshot, so that even the first job can use
    it.

    Does nothing if there already is one. The exit code is 1 if no snapshot can be published, and the setup's own if it
    fails.

    \b
    bootseer env capture --requirements requirements.txt --env-import torch --store /shared/bootseer
    """
    _check_setup(setup, requirements)
    asked = wanted({**values, "env_mode": "refresh" if refresh else "auto"}, values)
    made = make_snapshot(setup, requirements, asked, os.environ)
    size = f"{plural(made.num_files, 'file')}, {format_bytes(made.size_bytes)}, in {format_seconds(made.seconds)}"
    output(asdict(made), made.key or "no key", size if made.published else made.why_not)
    if made.code or not (made.published or made.was_there):
        raise SystemExit(made.code or 1)


def _check_setup(setup: str | None, requirements: Sequence[str]) -> None:
    """Raise `UsageError` if no setup is given, or its files do not exist."""
    if not setup and not requirements:
        raise UsageError("no setup given", hint="give --setup SCRIPT or --requirements FILE")
    check_files(setup, requirements)


def _image_digest(image: Request) -> str:
    """The digest of the image that a setup runs in."""
    from bootseer.image.sources.source import open_source  # only this option needs it

    with closing(open_source(image.reference, platform=image.platform, plain_http=image.plain_http)) as source:
        if not source.digest:
            raise UsageError(
                f"{image.reference} has no digest yet", hint="convert it, and name the digest: bootseer image convert"
            )
        return source.digest


KEY_SCHEMA = "bootseer.environment-key/1"
_MAX_LINES = 3


@click.command("key")
@with_options(SETUP)
@with_options(KEY)
@with_options(STORE)
@click.option("--image", metavar="REF", help="Container image that the setup runs in.")
@click.option("--diff", "old", metavar="KEY|FILE", help="Show what changed since this snapshot or this JSON output.")
@click.option("--all", "show_all", is_flag=True, help="Show all lines of each part, not only the first.")
@json_option(KEY_SCHEMA)
def key_command(image: str | None, old: str | None, show_all: bool, output: Output, **values: Any) -> None:
    """Explain the request key of a setup: setups with equal keys share a snapshot. The exit code is 1 if no snapshot
    can be used for it.

    \b
    bootseer env key --requirements requirements.txt
    bootseer env key --requirements uv.lock
    bootseer env key --setup setup.sh --env-input data/vocab --diff 3fa9
    bootseer env key -r requirements.txt --json > key.json; ...; bootseer env key -r requirements.txt --diff key.json
    """
    _check_setup(values["setup"], values["requirements"])
    asked = wanted(values, {"plain_http": values["plain_http"]})
    digest = "" if image is None else _image_digest(request_of_verb(image, None, values["plain_http"]))
    key = request_key(key_request(values["setup"], values["requirements"], asked, os.environ, image=digest))
    changed = None
    if old is not None:
        components, details = _old_key(old, values)
        changed = difference(components, key, details)
    output(
        {
            "key": key.digest,
            "components": dict(key.components),
            "details": {name: list(lines) for name, lines in key.details.items()},
            "accounted": list(key.accounted),
            "unpinned": list(key.unpinned),
            "problems": list(key.problems),
            "platform": dict(key.platform),
            **({} if changed is None else {"changed": [row._asdict() for row in changed]}),
        },
        *(_changes(changed) if changed is not None else _explained(key, None if show_all else _MAX_LINES)),
        failed=bool(key.problems),
    )


def _old_key(old: str, source: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Components and details of a key printed earlier, or of a snapshot's key."""
    path = Path(old)
    if not path.is_file():
        with catalog_of(source) as catalog:
            return dict(document_of(catalog, old).components), {}
    try:
        value = json.loads(path.read_text())
        if value["schema"] != KEY_SCHEMA:
            raise ValueError
        components = {str(name): str(part) for name, part in value["components"].items()}
        return components, {str(name): list(map(str, lines)) for name, lines in value["details"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{old}: not a key", hint="give the output of bootseer env key --json, or a key") from error


def _changes(changed: Sequence[Difference]) -> Iterator[Text | str]:
    for row in changed:
        yield styled(f"{row.name}: {row.words}", "bold")
    yield f"{plural(len(changed), 'part')} changed" if changed else "nothing changed"


def _explained(key: RequestKey, limit: int | None) -> Iterator[Text]:
    """The parts of the key and what was left out of it, each with at most `limit` lines."""
    yield styled(key.digest, "bold")
    for name in dict.fromkeys((*key.components, *key.details)):
        lines = key.details.get(name, ())
        shown = lines if limit is None or len(lines) <= limit + 1 else lines[:limit]
        yield styled(name, "bold").append(f"  {shortened(key.components.get(name, ''))}", "not bold")
        for line in shown:
            yield styled(f"    {line}", "dim")
        if len(shown) < len(lines):
            yield styled(f"    and {len(lines) - len(shown):,} more (--all)", "dim")
    if key.unpinned:
        named = ", ".join(key.unpinned[:limit])
        more = f" and {len(key.unpinned) - limit} more" if limit is not None and len(key.unpinned) > limit else ""
        yield styled(f"not pinned: {named}{more}; so its snapshots have an age limit", "yellow")
    for problem in key.problems:
        yield styled(f"no snapshot can be used: {problem}", "red")


@click.command("restore", cls=MayHaveCommand)
@click.argument("key", metavar="KEY")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@with_options(STORE)
@with_options(TRUST)
@json_option("bootseer.environment-restored/1")
@click.pass_context
def restore_command(ctx: click.Context, /, key: str, folder: Path | None, output: Output, **source: Any) -> int:
    """Write the files of the snapshot KEY below the new folder DIR, or run COMMAND with them in place.

    DIR gets a copy for inspection: paths below it are those of the setup, and files deleted by the setup are ignored.

    \b
    bootseer env restore 3fa9 /tmp/look
    bootseer env restore 3fa9 -- python -c 'import torch'
    """
    words: tuple[str, ...] = ctx.meta.get("command", ())
    if (folder is None) == (not words):
        raise UsageError("give either a folder or a command", hint="name a folder, or put a command after --")
    if words and output.as_json:
        raise UsageError("standard output is that of the command", hint="leave out --json")
    plain_http = source["plain_http"]
    with catalog_of(source) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(
            document, catalog.store.uri, cache_root(), os.environ, plain_http=plain_http, signatures=catalog.signatures
        )
    if folder is None:
        return snapshot.run(words)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: not an empty folder", hint="name a new folder")
    num_files = snapshot.copy_to(folder)
    result = {"key": document.key, "target": str(folder.absolute()), "num_files": num_files}
    output(result, f"{folder}: {plural(num_files, 'path')} of {document.key[:12]}")
    return 0


_MAX_SHOWN = 20


@click.command("verify")
@click.argument("key", metavar="KEY")
@with_options(STORE)
@with_options(TRUST)
@with_options(SETUP)
@click.option(
    "--tier",
    type=click.Choice(("quick", "full", "oracle")),
    default="full",
    show_default=True,
    help="What to compare, see above.",
)
@json_option("bootseer.environment-verified/1")
def verify_command(
    key: str,
    setup: str | None,
    requirements: tuple[str, ...],
    tier: Literal["quick", "full", "oracle"],
    output: Output,
    **source: Any,
) -> None:
    """Verify the snapshot whose key begins with KEY. The exit code is 1 if something differs.

    \b
    --tier quick    kinds, sizes, modes, owners and links of all paths, against the snapshot's manifest
    --tier full     also the digest of each file
    --tier oracle   runs the setup again with the snapshot's versions, in a sandbox that does not change this machine,
                    and compares every file with the result

    The oracle takes as long as the setup. It needs the setup as it was given to `bootseer run`, in the same folder, and
    root or a user namespace. Differences that are normal between two installations of the same packages are ignored:
    times, bytecode, names of the installer.

    \b
    bootseer env verify 3fa9
    bootseer env verify 3fa9 --tier quick --json
    bootseer env verify 3fa9 --tier oracle --requirements requirements.txt
    bootseer env verify 3fa9 --tier oracle --setup prepare.sh
    """
    if tier == "oracle" and not setup and not requirements:
        raise UsageError("--tier oracle needs a setup to run", hint="give --setup SCRIPT or --requirements FILE")
    if tier != "oracle" and (setup or requirements):
        raise UsageError("only --tier oracle runs a setup", hint="give --tier oracle too")
    with catalog_of(source) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(document, catalog.store.uri, cache_root(), os.environ, plain_http=source["plain_http"])
    with Progress("verifying") as progress:
        if tier == "oracle":
            found = snapshot.compare_with_fresh(setup, requirements)
        else:
            found = snapshot.check(tier, lambda done, of: progress.show(done, of, "paths"))
    left = len(found.differences) - _MAX_SHOWN
    output(
        {"key": document.key, "tier": tier, **found.as_json()},
        *(f"{path}: {words}" for path, words in found.differences[:_MAX_SHOWN]),
        *([f"and {left} more (--json shows all)"] if left > 0 else []),
        f"{document.key[:12]}: {found.num_paths:,} paths compared, {len(found.differences)} differ",
        failed=bool(found.differences),
    )


@click.command("lock")
@click.argument("requirements", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    "lock",
    default="requirements.lock",
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lock file to write.",
)
@click.option("--python", metavar="PYTHON", help="Interpreter to resolve for (default: python3 on PATH).")
@click.option("--uv", metavar="PROGRAM", help="uv to use (default: on PATH, or the one installed with BootSeer).")
@json_option("bootseer.environment-lock/1")
def lock_command(requirements: tuple[str, ...], lock: Path, python: str | None, uv: str | None, output: Output) -> None:
    """Resolve requirement FILEs once, where the job is submitted, and write a lock file with versions and digests.

    \b
    bootseer env lock requirements.in -o requirements.txt
    bootseer env lock pyproject.toml
    bootseer run --requirements requirements.txt -- python train.py
    """
    program = python or shutil.which("python3") or shutil.which("python")
    with interruptible():
        path = resolve(requirements, program, lock, env=os.environ, uv=uv)
    text = path.read_text(encoding="utf-8")
    pins = [line.split()[0] for line in text.splitlines() if "==" in line and not line.lstrip().startswith(("#", "--"))]
    output({"file": str(path.absolute()), "packages": pins}, f"{path}: {plural(len(pins), 'package')}")
