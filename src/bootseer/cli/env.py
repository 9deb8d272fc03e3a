"""`bootseer env`: snapshots of what environment setups make, mounted instead of made again.

The verbs that make snapshots and use them; those about what a store has are in `env_store`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bootseer.cli.command import Group, MayHaveCommand, json_option, with_options
from bootseer.cli.env_options import CAPTURE, KEY, SETUP, wanted
from bootseer.cli.env_store import STORE, cache, catalog_of, document_of
from bootseer.cli.image_options import TRUST
from bootseer.cli.output import Output, Progress
from bootseer.errors import UsageError
from bootseer.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from rich.text import Text

    from bootseer.env.keys.key import Difference, RequestKey


_VERBS = {
    "key": ("env", "What a setup's snapshot is found by, and what changed."),
    "capture": ("env", "Run a setup and keep a snapshot of what it did."),
    "restore": ("env", "Show a snapshot on a folder, or run a command on it."),
    "verify": ("env", "Compare a snapshot with its digests, or with a fresh installation."),
    "list": ("env_store", "The snapshots of a store."),
    "show": ("env_store", "What is known of a snapshot."),
    "remove": ("env_store", "Let no start use a snapshot any more."),
    "prune": ("env_store", "Delete what no snapshot needs."),
    "lock": ("env", "Resolve requirements to pinned versions with digests."),
}


@click.command("env", cls=Group, verbs=_VERBS)
def env_command() -> None:
    """Snapshots of environments: the setup runs once, later starts mount what it did.

    \b
    bootseer run --requirements requirements.txt --store /shared/bootseer -- python train.py
    bootseer env list --store /shared/bootseer
    bootseer env key --requirements requirements.txt
    """


@click.command("capture")
@with_options(SETUP)
@with_options(KEY)
@with_options(CAPTURE)
@with_options(STORE)
@with_options(TRUST)
@click.option("--refresh", is_flag=True, help="Make it anew when there is one.")
@json_option("bootseer.environment-capture/1")
def capture_command(
    setup: str | None,
    requirements: tuple[str, ...],
    store: str | None,
    plain_http: bool,
    refresh: bool,
    output: Output,
    **values: Any,
) -> None:
    """Run a setup as `bootseer run` would, without a job, and keep its snapshot: the first job finds it.

    Nothing happens when there is one. The exit code is 1 when none can be kept, and the setup's when that failed.

    \b
    bootseer env capture --requirements requirements.txt --env-import torch --store /shared/bootseer
    """
    from dataclasses import asdict

    from bootseer.launch.environment.snapshot import make_snapshot

    _check_setup(setup, requirements)
    source = {**values, "store": store, "plain_http": plain_http}
    asked = wanted({**values, "env_mode": "refresh" if refresh else "auto"}, source, os.environ)
    made = make_snapshot(setup, requirements, asked, os.environ)
    size = f"{made.num_files:,} files, {format_bytes(made.size_bytes)}, kept in {format_seconds(made.seconds)}"
    output(asdict(made), made.key or "no key", size if made.published else made.why_not)
    if made.code or not (made.published or made.was_there):
        raise SystemExit(made.code or 1)


def _check_setup(setup: str | None, requirements: Sequence[str]) -> None:
    """Raise `UsageError` when no setup is named, or one that is not there."""
    from bootseer.launch.environment.plain import check_files

    if not setup and not requirements:
        raise UsageError("no setup", hint="give --setup SCRIPT or --requirements FILE")
    check_files(setup, requirements)


KEY_SCHEMA = "bootseer.environment-key/1"
_MAX_LINES = 3


@click.command("key")
@with_options(SETUP)
@with_options(KEY)
@with_options(STORE)
@click.option("--image", metavar="REF", help="Of a setup that runs in this container image.")
@click.option("--diff", "old", metavar="KEY|FILE", help="Tell what changed since this snapshot, or this JSON output.")
@click.option("--all", "show_all", is_flag=True, help="All that is in each part, not only the first lines.")
@json_option(KEY_SCHEMA)
def key_command(
    store: str | None,
    plain_http: bool,
    image: str | None,
    old: str | None,
    show_all: bool,
    output: Output,
    **values: Any,
) -> None:
    """Explain the request key of a setup: equal keys share a snapshot. The exit code is 1 when none can be used.

    \b
    bootseer env key --requirements requirements.txt
    bootseer env key --requirements uv.lock
    bootseer env key --setup setup.sh --env-input data/vocab --diff 3fa9
    bootseer env key -r requirements.txt --json > key.json; ...; bootseer env key -r requirements.txt --diff key.json
    """
    from bootseer.cli.image_options import request
    from bootseer.env.keys.key import difference
    from bootseer.env.keys.request_key import request_key
    from bootseer.launch.environment.seeker import ask_for, base_of_image

    _check_setup(values["setup"], values["requirements"])
    base = None
    asked = wanted(values, {"plain_http": plain_http}, os.environ)
    if image is not None:
        source = {"store": None, "plain_http": plain_http, "loading": "auto", "fallback": "none"}
        base = base_of_image(request(image, source))
    key = request_key(ask_for(values["setup"], values["requirements"], asked, os.environ, base=base))
    changed = None
    if old is not None:
        components, details = _old_key(old, store, plain_http)
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
    )
    if key.problems:
        raise SystemExit(1)


def _old_key(old: str, store: str | None, plain_http: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Components and details of a key that was printed, or of a snapshot."""
    path = Path(old)
    if not path.is_file():
        with catalog_of(store, plain_http) as catalog:
            return dict(document_of(catalog, old).components), {}
    try:
        value = json.loads(path.read_text())
        if value["schema"] != KEY_SCHEMA:
            raise ValueError
        components = {str(name): str(part) for name, part in value["components"].items()}
        return components, {str(name): list(map(str, lines)) for name, lines in value["details"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{old}: is not a key", hint="give what bootseer env key --json printed, or a key") from error


def _changes(changed: Sequence[Difference]) -> Iterator[Text | str]:
    from rich.text import Text

    for row in changed:
        yield Text(f"{row.name}: {row.words}", "bold")
    yield f"{plural(len(changed), 'part')} changed" if changed else "nothing changed"


def _explained(key: RequestKey, limit: int | None) -> Iterator[Text]:
    """What is in the key, at most `limit` lines of each part."""
    from rich.text import Text

    from bootseer.env.keys.key import explain

    yield Text(key.digest, "bold")
    for name, value, lines in explain(key):
        shown = lines if limit is None or len(lines) <= limit + 1 else lines[:limit]
        yield Text.assemble((name, "bold"), f"  {value}")
        for line in shown:
            yield Text(f"    {line}", "dim")
        if len(shown) < len(lines):
            yield Text(f"    and {len(lines) - len(shown):,} more (--all)", "dim")
    if key.unpinned:
        named = ", ".join(key.unpinned[:limit])
        more = f" and {len(key.unpinned) - limit} more" if limit is not None and len(key.unpinned) > limit else ""
        yield Text(f"not pinned: {named}{more}; snapshots of it have an age limit", "yellow")
    for problem in key.problems:
        yield Text(f"no snapshot can be used: {problem}", "red")


@click.command("restore", cls=MayHaveCommand)
@click.argument("key", metavar="KEY")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@with_options(STORE)
@with_options(TRUST)
@json_option("bootseer.environment-restored/1")
@click.pass_context
def restore_command(
    ctx: click.Context,
    /,
    key: str,
    folder: Path | None,
    store: str | None,
    plain_http: bool,
    output: Output,
    **trust: Any,
) -> int:
    """Write the files of the snapshot KEY below the new folder DIR, or run COMMAND with them in their places.

    What lies below DIR is a copy to look at: paths are those of the setup, deletions are left out.

    \b
    bootseer env restore 3fa9 /tmp/look
    bootseer env restore 3fa9 -- python -c 'import torch'
    """
    from bootseer.launch.environment.snapshot import SavedSnapshot

    words: tuple[str, ...] = ctx.meta.get("command", ())
    if (folder is None) == (not words):
        raise UsageError("what shall be done with it?", hint="name a folder, or a command behind --")
    with catalog_of(store, plain_http, trust) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(
            document, catalog.store.uri, cache(), os.environ, plain_http=plain_http, signatures=catalog.signatures
        )
    if folder is None:
        return snapshot.run(words)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: not empty", hint="name a new folder")
    num_files = snapshot.copy_to(folder)
    result = {"key": document.key, "target": str(folder.absolute()), "num_files": num_files}
    output(result, f"{folder}: {num_files:,} files of {document.key[:12]}")
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
    help="How much is compared, see above.",
)
@json_option("bootseer.environment-verified/1")
def verify_command(
    key: str,
    store: str | None,
    plain_http: bool,
    setup: str | None,
    requirements: tuple[str, ...],
    tier: Literal["quick", "full", "oracle"],
    output: Output,
    **trust: Any,
) -> None:
    """Verify the snapshot whose key begins with KEY. The exit code is 1 when something differs.

    \b
    --tier quick    kinds, sizes, modes, owners and links of all paths, against the snapshot's manifest
    --tier full     also the digest of each file
    --tier oracle   runs the setup once more, for real, with the versions that the snapshot has, in a capture that
                    leaves this machine as it is, and compares file by file what a job could tell apart

    The oracle takes as long as the setup. It needs the setup as it was given to `bootseer run`, in the same folder, and
    root or a user namespace. What two installations of the same packages may differ in is left out: times, bytecode,
    names of the installer.

    \b
    bootseer env verify 3fa9
    bootseer env verify 3fa9 --tier quick --json
    bootseer env verify 3fa9 --tier oracle --requirements requirements.txt
    bootseer env verify 3fa9 --tier oracle --setup prepare.sh
    """
    from bootseer.launch.environment.snapshot import SavedSnapshot

    if tier == "oracle" and not setup and not requirements:
        raise UsageError("the oracle has no setup to run", hint="give --setup SCRIPT or --requirements FILE")
    with catalog_of(store, plain_http, trust) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(document, catalog.store.uri, cache(), os.environ, plain_http=plain_http)
    with Progress("verifying") as progress:
        if tier == "oracle":
            found = snapshot.compare_with_fresh(setup, requirements)
        else:
            found = snapshot.check(tier, lambda done, of: progress.show(done, of, "paths"))
    left = len(found.differences) - _MAX_SHOWN
    output(
        {"key": document.key, "tier": tier, **found.as_json()},
        *(f"{path}: {words}" for path, words in found.differences[:_MAX_SHOWN]),
        *([f"and {left} more (--json has all)"] if left > 0 else []),
        f"{document.key[:12]}: {found.num_paths:,} paths compared, {len(found.differences)} differ",
    )
    if found.differences:
        raise SystemExit(1)


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
    help="Where the lock goes.",
)
@click.option("--python", metavar="PYTHON", help="For this interpreter (default: python3 on PATH).")
@click.option("--uv", metavar="PROGRAM", help="This uv (default: on PATH, or the one installed with BootSeer).")
@json_option("bootseer.environment-lock/1")
def lock_command(requirements: tuple[str, ...], lock: Path, python: str | None, uv: str | None, output: Output) -> None:
    """Resolve requirement FILEs once, where the job is submitted, and write a lock with versions and digests.

    \b
    bootseer env lock requirements.in -o requirements.txt
    bootseer env lock pyproject.toml
    bootseer run --requirements requirements.txt -- python train.py
    """
    import shutil

    from bootseer.env.keys.lock import resolve

    program = python or shutil.which("python3") or shutil.which("python")
    path = resolve(requirements, program, lock, env=os.environ, uv=uv)
    text = path.read_text(encoding="utf-8")
    pins = [line.split()[0] for line in text.splitlines() if "==" in line and not line.lstrip().startswith(("#", "--"))]
    output({"file": str(path.absolute()), "packages": pins}, f"{path}: {plural(len(pins), 'package')}")
