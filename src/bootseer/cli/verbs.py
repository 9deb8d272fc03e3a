"""The verbs of the command line: a static table, each verb in a module that is imported only when it is called."""

from __future__ import annotations

import os

import click

from bootseer import __version__
from bootseer.cli.command import Group

_VERBS = {
    "run": ("run", "Run a command and measure its startup."),
    "stage": ("run", "Mark a stage from a shell script."),
    "report": ("report", "Show where a startup's time went."),
    "diff": ("diff", "Compare two startups."),
    "image": ("image", "Container images that start before they are here."),
    "env": ("env", "Environments that are installed once and mounted everywhere."),
    "ckpt": ("ckpt", "Checkpoints that are read from all nodes of the storage at once."),
    "cache": ("cache", "What this node keeps of images."),
    "serve": ("serve", "The starts of all jobs in one place, while they happen."),
    "ship": ("ship", "Send spools and logs to the service."),
    "fleet": ("fleet", "What starting costs over weeks, on all nodes."),
    "history": ("fleet", "A job's starts, and when they became slower."),
    "watch": ("fleet", "Who is missing at a job's start, now."),
    "agent": ("agent", "Look after this node: the cache's limit, figures for Prometheus."),
    "snapshotter": ("snapshotter", "Lazy images for containerd and Kubernetes: a proxy snapshotter."),
    "simulate": ("simulate", "How starts would go on more nodes, or with other links."),
    "doctor": ("doctor", "Say what works on this machine, and why not."),
    "bench": ("run", "Measure the claims on this machine."),
}


@click.command(
    cls=Group, verbs=_VERBS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("-v", "--verbose", is_flag=True, help="Log what is done, to standard error (BOOTSEER_LOG=info).")
@click.option("--debug", is_flag=True, help="Log everything, with tracebacks of errors (BOOTSEER_LOG=debug).")
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
