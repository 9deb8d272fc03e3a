"""`bootseer image`: container images as block files, mounted before they are here."""

from __future__ import annotations

from typing import ClassVar

import click

from bootseer.cli.group import Group, Verb


class _Verbs(Group):
    verbs: ClassVar = {
        "convert": Verb("image_convert", "Make an image ready for lazy starts."),
        "run": Verb("image_run", "Run a command in an image."),
        "mount": Verb("image_mount", "Mount an image's tree on a folder.", "mount"),
        "umount": Verb("image_mount", "Undo a mount.", "umount"),
        "list": Verb("image_mount", "What is mounted, and whether it works.", "mounted"),
        "inspect": Verb("image_inspect", "What is known of an image."),
        "hotset": Verb("image_hotset", "What starts of an image need, and when."),
    }


@click.command("image", cls=_Verbs, short_help="Container images that start before they are here.")
def command() -> None:
    """Container images whose files arrive when they are read.

    \b
    bootseer image convert registry:5000/team/train:7     once, after the image was pushed
    bootseer image run registry:5000/team/train:7 -- python train.py
    bootseer image list
    """
