"""`bootseer env`: snapshots of what environment setups make, mounted instead of made again."""

from __future__ import annotations

from typing import ClassVar

import click

from bootseer.cli.group import Group, Verb


class _Verbs(Group):
    verbs: ClassVar = {
        "key": Verb("env_key", "What a setup's snapshot is found by, and what changed."),
        "capture": Verb("env_capture", "Run a setup and keep a snapshot of what it did."),
        "restore": Verb("env_restore", "Show a snapshot on a folder, or run a command on it."),
        "verify": Verb("env_verify", "Compare a snapshot with its digests, or with a fresh installation."),
        "list": Verb("env_list", "The snapshots of a store.", "listed"),
        "show": Verb("env_list", "What is known of a snapshot.", "show"),
        "remove": Verb("env_remove", "Let no start use a snapshot any more.", "remove"),
        "prune": Verb("env_remove", "Delete what no snapshot needs.", "prune"),
        "lock": Verb("env_lock", "Resolve requirements to pinned versions with digests."),
    }


@click.command("env", cls=_Verbs, short_help="Environments that are installed once and mounted everywhere.")
def command() -> None:
    """Snapshots of environments: the setup runs once, later starts mount what it did.

    \b
    bootseer run --requirements requirements.txt --store /shared/bootseer -- python train.py
    bootseer env list --store /shared/bootseer
    bootseer env key --requirements requirements.txt
    """
