"""The verbs of the command line: a static table, each verb in a module that is imported only when it is called."""

from __future__ import annotations

import os

import click

from bootseer import __version__
from bootseer.cli.verb_parts import Group

_VERBS = {
    "run": ("run", "Run a command and measure its startup."),
    "stage": ("run", "Mark a stage from a shell script."),
    "restart": ("restart", "Start a running job's command again in place, after a change of its code."),
    "report": ("report", "Show where a startup's time went."),
    "diff": ("diff", "Compare two startups."),
    "image": ("groups", "Convert, run and mount container images that load lazily."),
    "env": ("groups", "Manage environment snapshots: installed once, mounted everywhere."),
    "ckpt": ("groups", "Copy, mount and check checkpoints that are striped over storage nodes."),
    "cache": ("groups", "Show, verify or shrink this node's block cache."),
    "serve": ("serve", "Run the service that collects the starts of all jobs."),
    "ship": ("ship", "Send spools and logs to the service."),
    "fleet": ("fleet", "Show what startups cost over time, across all nodes."),
    "history": ("fleet", "Show a job's past starts, and when they became slower."),
    "watch": ("fleet", "Show which nodes a starting job is still waiting for."),
    "agent": ("groups", "Run the node's agent: cache limit, Prometheus metrics."),
    "snapshotter": ("snapshotter", "Run the containerd proxy snapshotter: lazy images for Kubernetes."),
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
