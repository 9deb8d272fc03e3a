"""`bootseer env key`: what a setup's snapshot is found by, what is in it, and which part of it changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.command import with_options
from bootseer.cli.env_find import STORE
from bootseer.cli.env_options import KEY, SETUP

if TYPE_CHECKING:
    from bootseer.env.keys.key import Difference, RequestKey

SCHEMA = "bootseer.environment-key/1"
_MAX_LINES = 3


@click.command("key", short_help="What a setup's snapshot is found by, and what changed.")
@with_options(SETUP)
@with_options(KEY)
@with_options(STORE)
@click.option("--image", metavar="REF", help="Of a setup that runs in this container image.")
@click.option("--diff", "old", metavar="KEY|FILE", help="Tell what changed since this snapshot, or this JSON output.")
@click.option("--all", "show_all", is_flag=True, help="All that is in each part, not only the first lines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environment-key/1).")
def command(
    store: str | None,
    plain_http: bool,
    image: str | None,
    old: str | None,
    show_all: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Explain the request key of a setup: equal keys share a snapshot. The exit code is 1 when none can be used.

    \b
    bootseer env key --requirements requirements.txt
    bootseer env key --requirements uv.lock
    bootseer env key --setup setup.sh --env-input data/vocab --diff 3fa9
    bootseer env key -r requirements.txt --json > key.json; ...; bootseer env key -r requirements.txt --diff key.json
    """
    from bootseer.cli.printing import print_json
    from bootseer.env.keys.key import difference

    key = key_of(values, image, plain_http)
    changed = None
    if old is not None:
        components, details = _old(old, store, plain_http)
        changed = difference(components, key, details)
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "key": key.digest,
                "components": dict(key.components),
                "details": {name: list(lines) for name, lines in key.details.items()},
                "accounted": list(key.accounted),
                "unpinned": list(key.unpinned),
                "problems": list(key.problems),
                "platform": dict(key.platform),
                **({} if changed is None else {"changed": [row._asdict() for row in changed]}),
            }
        )
    else:
        _print(key, changed, _MAX_LINES if not show_all else None)
    if key.problems:
        raise SystemExit(1)


def key_of(values: Mapping[str, Any], image: str | None, plain_http: bool) -> RequestKey:
    """The key of the setup that the options name. Raises `UsageError` when they name none."""
    from bootseer.env.keys.request_key import request_key
    from bootseer.errors import UsageError
    from bootseer.launch.environment.plain import check_files
    from bootseer.launch.environment.seek import ask_for, base_of_image

    if not values["setup"] and not values["requirements"]:
        raise UsageError("no setup", hint="give --setup SCRIPT or --requirements FILE")
    check_files(values["setup"], values["requirements"])  # files that are not there are told of in the same words
    from bootseer.cli.env_options import wanted

    asked = wanted(values, {"plain_http": plain_http}, os.environ)
    base = None if image is None else base_of_image(_request(image, plain_http))
    return request_key(ask_for(values["setup"], values["requirements"], asked, os.environ, base=base))


def _request(image: str, plain_http: bool) -> Any:
    from bootseer.cli.image_options import request

    return request(image, {"store": None, "plain_http": plain_http, "loading": "auto", "fallback": "none"})


def _old(old: str, store: str | None, plain_http: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Components and details of a key that was printed, or of a snapshot."""
    import json

    from bootseer.cli.env_find import catalog_of, document_of
    from bootseer.errors import UsageError

    path = Path(old)
    if not path.is_file():
        with catalog_of(store, plain_http) as catalog:
            return dict(document_of(catalog, old).components), {}
    try:
        value = json.loads(path.read_text())
        if value["schema"] != SCHEMA:
            raise ValueError
        components = {str(name): str(part) for name, part in value["components"].items()}
        return components, {str(name): list(map(str, lines)) for name, lines in value["details"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{old}: is not a key", hint="give what bootseer env key --json printed, or a key") from error


def _print(key: RequestKey, changed: list[Difference] | None, limit: int | None) -> None:
    from rich.text import Text

    from bootseer.cli.printing import terminal
    from bootseer.env.keys.key import explain

    with terminal() as console:
        if changed is not None:
            for row in changed:
                console.print(Text(f"{row.name}: {row.words}", "bold"), soft_wrap=True)
            console.print(
                "nothing changed" if not changed else f"{len(changed)} part{'s' * (len(changed) > 1)} changed"
            )
            return
        console.print(Text(key.digest, "bold"))
        for name, value, lines in explain(key):
            shown = lines if limit is None or len(lines) <= limit + 1 else lines[:limit]
            console.print(Text.assemble((name, "bold"), f"  {value}"), soft_wrap=True)
            for line in shown:
                console.print(Text(f"    {line}", "dim"), soft_wrap=True)
            if len(shown) < len(lines):
                console.print(Text(f"    and {len(lines) - len(shown):,} more (--all)", "dim"), soft_wrap=True)
        if key.unpinned:
            named = ", ".join(key.unpinned if limit is None else key.unpinned[:limit])
            more = f" and {len(key.unpinned) - limit} more" if limit is not None and len(key.unpinned) > limit else ""
            console.print(
                Text(f"not pinned: {named}{more}; snapshots of it have an age limit", "yellow"), soft_wrap=True
            )
        for problem in key.problems:
            console.print(Text(f"no snapshot can be used: {problem}", "red"), soft_wrap=True)
