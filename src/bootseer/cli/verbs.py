"""The verbs of the command line: static tables, each verb in a module that is imported only when it is called. So help
and completion in the shell are quick."""

from __future__ import annotations

import os

import click

from bootseer import __version__
from bootseer.cli.verb_parts import Group

_VERBS = {
    "run": ("run", "Run a command and measure its startup."),
    "stage": ("run", "Mark a stage from a shell script."),
    "restart": ("run", "Start a running job's command again in place, after a change of its code."),
    "report": ("report", "Show where a startup's time went."),
    "diff": ("report", "Compare two startups."),
    "image": ("verbs", "Convert, run and mount container images that load lazily."),
    "env": ("verbs", "Manage environment snapshots: installed once, mounted everywhere."),
    "ckpt": ("verbs", "Copy, mount and check checkpoints that are striped over storage nodes."),
    "cache": ("verbs", "Show, verify or shrink this node's block cache."),
    "serve": ("serve", "Run the service that collects the starts of all jobs."),
    "ship": ("ship", "Send spools and logs to the service."),
    "fleet": ("fleet", "Show what startups cost over time, across all nodes."),
    "history": ("fleet", "Show a job's past starts, and when they became slower."),
    "watch": ("fleet", "Show which nodes a starting job is still waiting for."),
    "agent": ("verbs", "Run the node's agent: cache limit, Prometheus metrics."),
    "snapshotter": ("agent", "Run the containerd proxy snapshotter: lazy images for Kubernetes."),
    "simulate": ("simulate", "Simulate startups on more nodes or with faster links."),
    "doctor": ("doctor", "Check what works on this machine, and explain what does not."),
    "bench": ("run", "Run the benchmarks on this machine."),
}


@click.command(
    cls=Group, verbs=_VERBS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("-v", "--verbose", is_flag=True, help="Log progress to standard error (BOOTSEER_LOG=info).")
@click.option("--debug", is_flag=True, help="Log everything, including tracebacks (BOOTSEER_LOG=debug).")
@click.version_option(__version__, "--version", prog_name="bootseer", message="%(prog)s %(version)s")
def cli(verbose: bool, debug: bool) -> None:
    """Measure the startup of GPU training jobs, from submission to the first step, and shorten it.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py
    bootseer run --requirements requirements.txt -- torchrun train.py
    bootseer run --image registry:5000/team/train:7 -- torchrun train.py
    bootseer report train
    """
    if verbose or debug:
        from bootseer.cli.main import set_up_log

        os.environ["BOOTSEER_LOG"] = "debug" if debug else "info"  # for the daemons, too
        set_up_log()


_IMAGE_VERBS = {
    "convert": ("image_convert", "Convert an image for lazy loading."),
    "run": ("image", "Run a command in an image."),
    "mount": ("image", "Mount an image's file system on a folder."),
    "umount": ("image", "Unmount an image."),
    "list": ("image", "List mounted images and their health."),
    "inspect": ("image", "Show a converted image and its layers."),
    "remove": ("image_store", "Remove the converted form of images."),
    "prune": ("image_store", "Delete the files of removed images from a store."),
    "hotset": ("verbs", "Show, merge and export the blocks that starts need first."),
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
    "show": ("image_store", "List an image's hot sets on this node and in its store."),
    "merge": ("image_store", "Merge hot sets from files and publish the result."),
    "export": ("image_store", "Write a hot set to a file."),
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
