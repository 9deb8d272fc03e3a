"""`bootseer env lock`: requirements with every version and digest pinned, so that a snapshot of them never ages."""

from __future__ import annotations

import os
from pathlib import Path

import click

SCHEMA = "bootseer.environment-lock/1"


@click.command("lock", short_help="Resolve requirements to pinned versions with digests.")
@click.argument("requirements", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--output", "-o", default="requirements.lock", show_default=True, type=click.Path(path_type=Path), metavar="FILE",
    help="Where the lock goes.",
)  # fmt: skip
@click.option("--python", metavar="PYTHON", help="For this interpreter (default: python3 on PATH).")
@click.option("--uv", metavar="PROGRAM", help="This uv (default: on PATH, or the one installed with BootSeer).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environment-lock/1).")
def command(requirements: tuple[str, ...], output: Path, python: str | None, uv: str | None, as_json: bool) -> None:
    """Resolve requirement FILEs once, where the job is submitted, and write a lock with versions and digests.

    \b
    bootseer env lock requirements.in -o requirements.txt
    bootseer env lock pyproject.toml
    bootseer run --requirements requirements.txt -- python train.py
    """
    import shutil

    from bootseer.cli.printing import print_json, terminal
    from bootseer.env.keys.lock import resolve
    from bootseer.units import plural

    program = python or shutil.which("python3") or shutil.which("python")
    path = resolve(requirements, program, output, env=os.environ, uv=uv)
    text = path.read_text(encoding="utf-8")
    pins = [line.split()[0] for line in text.splitlines() if "==" in line and not line.lstrip().startswith(("#", "--"))]
    if as_json:
        print_json({"schema": SCHEMA, "file": str(path.absolute()), "packages": pins})
    else:
        with terminal() as console:
            console.print(f"{path}: {plural(len(pins), 'package')}", soft_wrap=True)
