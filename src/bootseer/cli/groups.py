"""The groups of verbs. They import no verb, so that their help and completion in the shell are quick."""

from __future__ import annotations

import click

from bootseer.cli.verb_parts import Group

_IMAGE_VERBS = {
    "convert": ("image_convert", "Convert an image for lazy loading."),
    "run": ("image", "Run a command in an image."),
    "mount": ("image", "Mount an image's file system on a folder."),
    "umount": ("image", "Unmount an image."),
    "list": ("image", "List mounted images and their health."),
    "inspect": ("image", "Show a converted image and its layers."),
    "remove": ("image_store", "Remove the converted form of images."),
    "prune": ("image_store", "Delete the files of removed images from a store."),
    "hotset": ("groups", "Show, merge and export the blocks that starts need first."),
}


@click.command("image", cls=Group, verbs=_IMAGE_VERBS)
def image_command() -> None:
    """Container images whose files are fetched when they are read.

    \b
    bootseer image convert registry:5000/team/train:7     # once, after the image is pushed
    bootseer image run registry:5000/team/train:7 -- python train.py
    bootseer image list
    """


_HOTSET_VERBS = {
    "show": ("image_hotset", "List an image's hot sets on this node and in its store."),
    "merge": ("image_hotset", "Merge hot sets from files and publish the result."),
    "export": ("image_hotset", "Write a hot set to a file."),
}


@click.command("hotset", cls=Group, verbs=_HOTSET_VERBS)
def hotset_command() -> None:
    """Hot sets: the blocks that earlier starts of an image needed. The next start prefetches them.

    \b
    bootseer image hotset show registry:5000/team/train:7
    bootseer image hotset export registry:5000/team/train:7 train.py-0123456789ab hot.bin
    bootseer image hotset merge other:5000/team/train:7 hot.bin
    """


_ENV_VERBS = {
    "key": ("env", "Explain the request key of a setup, and what changed in it."),
    "capture": ("env", "Run a setup and publish a snapshot of its result."),
    "restore": ("env", "Copy a snapshot's files to a folder, or run a command with them."),
    "verify": ("env", "Verify a snapshot against its digests or a fresh installation."),
    "list": ("env_store", "List the snapshots of a store."),
    "show": ("env_store", "Show the details of a snapshot."),
    "remove": ("env_store", "Remove snapshots, so that no start uses them."),
    "prune": ("env_store", "Delete the files of removed and expired snapshots."),
    "lock": ("env", "Resolve requirements to pinned versions with digests."),
}


@click.command("env", cls=Group, verbs=_ENV_VERBS)
def env_command() -> None:
    """Environment snapshots: the setup runs once, later starts mount its result.

    \b
    bootseer run --requirements requirements.txt --store /shared/bootseer -- python train.py
    bootseer env list --store /shared/bootseer
    bootseer env key --requirements requirements.txt
    """


_CKPT_VERBS = {
    "mount": ("ckpt_mount", "Mount a folder of checkpoints."),
    "umount": ("ckpt_mount", "Unmount a folder of checkpoints."),
    "mounted": ("ckpt_mount", "List mounted folders and their health."),
    "put": ("ckpt", "Upload a checkpoint and publish it."),
    "get": ("ckpt", "Download a checkpoint."),
    "list": ("ckpt_jobs", "List the checkpoints of a job."),
    "latest": ("ckpt_jobs", "Show or set the checkpoint to resume from."),
    "stat": ("ckpt_jobs", "Show the parts of a file and the nodes that store them."),
    "verify": ("ckpt", "Verify a checkpoint against its digests."),
    "remove": ("ckpt_jobs", "Remove checkpoints."),
    "clean": ("ckpt_jobs", "Remove leftovers of killed writers."),
    "policy": ("ckpt_jobs", "Show or set how new files of a folder are striped."),
}


@click.command("ckpt", cls=Group, verbs=_CKPT_VERBS)
def ckpt_command() -> None:
    """Checkpoints, with files striped over the nodes of the storage or ordinary ones.

    Locations are hdfs://host:port/dir, s3://bucket/dir (also gs, az), file:///dir or a path. A job is a folder of
    checkpoints.

    \b
    bootseer ckpt mount hdfs://namenode/jobs/moe /ckpt        # for unmodified training code
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe
    bootseer ckpt list s3://checkpoints/moe
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    """


_CACHE_VERBS = {
    "show": ("cache", "List cached files, most recently used first."),
    "verify": ("cache", "Verify all cached blocks against their digests."),
    "prune": ("cache", "Free space, starting with files that were not used for the longest time."),
}


@click.command("cache", cls=Group, verbs=_CACHE_VERBS)
def cache_command() -> None:
    """This node's cache: blocks of images, environments and checkpoints that were fetched once and are verified on use.

    \b
    bootseer cache show
    bootseer cache prune --to 200g
    """


_AGENT_VERBS = {
    "run": ("agent", "Run the agent until a signal ends it."),
    "status": ("agent", "Show the state of this node's agent."),
}


@click.command("agent", cls=Group, verbs=_AGENT_VERBS)
def agent_command() -> None:
    """The node's agent: keeps the cache within its limit and serves metrics to Prometheus.

    It is optional: jobs run without it, and are not affected if it is killed.

    \b
    bootseer agent run --cache-limit 500g --listen 127.0.0.1:9464
    bootseer agent run --ship-to https://service:8765 --spool /var/spool/bootseer
    bootseer agent status
    """
