"""`bootseer ckpt`: checkpoints in striped files, and ordinary ones."""

from __future__ import annotations

from typing import ClassVar

import click

from bootseer.cli.group import Group, Verb


class _Verbs(Group):
    verbs: ClassVar = {
        "mount": Verb("ckpt_mount", "Mount a folder of checkpoints on a local folder.", "mount"),
        "umount": Verb("ckpt_mount", "Undo a mount.", "umount"),
        "mounted": Verb("ckpt_mount", "What is mounted, and whether it works.", "mounted"),
        "put": Verb("ckpt_put", "Copy a checkpoint into the storage, and publish it."),
        "get": Verb("ckpt_get", "Copy a checkpoint to a local folder."),
        "list": Verb("ckpt_list", "The checkpoints of a job."),
        "latest": Verb("ckpt_latest", "Show or set the checkpoint to resume from."),
        "stat": Verb("ckpt_stat", "What a file consists of, and on which nodes it lies."),
        "verify": Verb("ckpt_verify", "Read a checkpoint and compare it with its digests."),
        "remove": Verb("ckpt_remove", "Remove checkpoints."),
        "policy": Verb("ckpt_policy", "Show or set how new files of a folder are striped."),
    }


@click.command("ckpt", cls=_Verbs, short_help="Checkpoints that are read from all nodes of the storage at once.")
def command() -> None:
    """Checkpoints whose files are spread over the nodes of the storage, and ordinary ones.

    A place is hdfs://host:port/dir, file:///dir or the path of a folder. A job is a folder with checkpoints in it.

    \b
    bootseer ckpt mount hdfs://namenode/jobs/moe /ckpt        for training code as it is
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe
    bootseer ckpt list hdfs://namenode/jobs/moe
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    """
