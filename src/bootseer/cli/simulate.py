"""`bootseer simulate`: starts of a job in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.cli.command import json_option
from bootseer.cli.output import Output, table
from bootseer.errors import PermanentError, UsageError

if TYPE_CHECKING:
    from bootseer.sim.start import Outcome


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from bootseer.sim.scenario import shipped
    from bootseer.sim.start import ARMS

    return [name for name in (shipped() if param.name == "scenario" else ARMS) if name.startswith(incomplete)]


@click.command("simulate")
@click.argument("scenario", default="moe", metavar="[SCENARIO]", shell_complete=_complete)
@click.option("--nodes", metavar="N,...", help="Instead of the scenario's numbers.")
@click.option("--arm", "arms", multiple=True, metavar="NAME", shell_complete=_complete,
              help="today, lazy, bootseer, 'without peers' and the like; may be repeated.  [default: all]")  # fmt: skip
@click.option("--what-if", "changes", multiple=True, metavar="TABLE.FIELD=VALUE",
              help="Another value of the scenario, such as links.node-gbit=100; may be repeated.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=0, show_default=True, help="Of all that is random.")
@click.option("--events", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Write the event lines of each start there, for `bootseer report` and the service.")  # fmt: skip
@json_option("bootseer.simulation/1")
def simulate_command(
    scenario: str,
    nodes: str | None,
    arms: tuple[str, ...],
    changes: tuple[str, ...],
    seed: int,
    events: Path | None,
    output: Output,
) -> None:
    """Show how starts of a job would go, in virtual time: fetching and peers decide as they do on real nodes, links,
    processors and servers are a model. SCENARIO is a TOML file or one of those shipped: moe (the default), dense,
    diffusion, install-1440.

    \b
    bootseer simulate
    bootseer simulate moe --nodes 16,64 --arm lazy --arm bootseer
    bootseer simulate my-cluster.toml --what-if links.registry-gbit=100 --json
    """
    from bootseer.sim.scenario import read_scenario
    from bootseer.sim.start import ARMS, simulate

    wanted = read_scenario(scenario, [*changes, *([f"nodes=[{nodes}]"] if nodes is not None else [])])
    for arm in arms:
        if arm not in ARMS:
            raise UsageError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    plan = [(number, arm) for number in wanted.nodes for arm in arms or ARMS]
    done: list[Outcome] = []
    for at, (number, arm) in enumerate(plan):
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{at + 1} of {len(plan)}: {arm}, {number} nodes ", nl=False, err=True)
        outcome = simulate(wanted, number, arm, seed)
        done.append(outcome)
        if events is not None:
            _write(events, outcome, wanted.name)
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    columns = ("image", "env", "imports", "ckpt", "start s", "registry GB", "peers GB")
    rows = table("nodes", "arm", *columns, right=("nodes", *columns))
    names = ("image_loading", "environment_setup", "model_initialization.imports", "model_initialization.checkpoint")
    for outcome in done:
        stages = outcome.stages()
        figures = [*(stages[name]["max_s"] for name in names), outcome.began_s]
        figures += [outcome.registry_bytes / 1e9, outcome.peer_bytes / 1e9]
        rows.add_row(str(outcome.nodes), outcome.arm, *(f"{figure:,.1f}" for figure in figures))
    said = f"Simulated: parameters {wanted.digest}, seed {seed}. Seconds of the slowest node."
    document = {"simulated": True, "scenario": wanted.name, "parameters": wanted.digest, "seed": seed}
    output({**document, "starts": [outcome.as_json() for outcome in done]}, rows, said)


def _write(folder: Path, outcome: Outcome, name: str) -> None:
    from bootseer.trace.event import encode

    job = f"simulated-{name}-{outcome.arm.replace(' ', '-')}-{outcome.nodes}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{job}.events").open("wb") as file:
            for event in outcome.events(job):
                file.write(encode(event))
    except OSError as error:
        raise PermanentError(f"{folder}: {error.strerror}") from error
