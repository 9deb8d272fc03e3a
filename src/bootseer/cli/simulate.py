"""`bootseer simulate`: starts of a job in virtual time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click

from bootseer.cli.output import Output, Progress, table, write_file
from bootseer.cli.verb_parts import Count, json_option
from bootseer.errors import PermanentError, UsageError, os_errors_as
from bootseer.sim.calibration import calibrated, read_report, toml
from bootseer.sim.figures import figures_of, page
from bootseer.sim.job_start import ARMS, MORE_ARMS, Outcome, simulate
from bootseer.sim.month import Times, policies, simulate_month
from bootseer.sim.scenario import Month, Scenario, read_scenario
from bootseer.trace.event import encode
from bootseer.units import plural


@click.command("simulate")
@click.argument("scenario", default="moe", metavar="[SCENARIO]")
@click.option("--nodes", metavar="N,...", help="Numbers of nodes (default: the scenario's).")
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME",
    help="Variant to simulate: today, lazy, bootseer, 'without peers', ...; may be repeated.  [default: all]",
)
@click.option("--what-if", "changes", multiple=True, metavar="TABLE.FIELD=VALUE",
              help="Change a value of the scenario, such as links.node-gbit=100, or compare several: "
                   "checkpoint.stripes=1,4,8; may be repeated.")  # fmt: skip
@click.option("--seed", type=Count(0, 1 << 31), default=0, show_default=True, help="Seed of random numbers.")
@click.option("--seeds", type=Count(1, 1000), default=1, show_default=True, help="Number of seeds, from --seed.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write figures as HTML.")
@click.option(
    "--calibrate",
    "reports",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="REPORT",
    help="Print the scenario, fitted to a real start (output of `bootseer report --json`); may be repeated.",
)
@click.option(
    "--events",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the event lines of each start to this folder, for `bootseer report`.",
)
@json_option("bootseer.simulation/1")
def simulate_command(
    scenario: str,
    nodes: str | None,
    arms: tuple[str, ...],
    changes: tuple[str, ...],
    seed: int,
    seeds: int,
    html: Path | None,
    reports: tuple[Path, ...],
    events: Path | None,
    output: Output,
) -> None:
    """Simulate startups of a job in virtual time. Fetching and peers use the same code as on real nodes; links,
    processors and servers are a model.

    SCENARIO is a TOML file or a shipped scenario: moe (the default), dense, diffusion, install-1440, buckets, month (30
    days of a cluster, for different cache sizes and ages of snapshots), restarts-26.

    \b
    bootseer simulate
    bootseer simulate moe --nodes 16,64 --arm lazy --arm bootseer --seeds 5 --html figures.html
    bootseer simulate --calibrate monday.json --calibrate tuesday.json > my-cluster.toml
    bootseer simulate my-cluster.toml --what-if links.registry-gbit=100 --json
    """
    numbers = [] if nodes is None else [f"nodes=[{_numbers(nodes)}]"]
    variants = [(label, read_scenario(scenario, [*chosen, *numbers])) for label, chosen in _variants(changes, *numbers)]
    wanted = variants[0][1]
    month = wanted.month if nodes is None else None
    if len(variants) > 1 and (reports or events or month):
        raise UsageError("several values can be compared only for starts, without --calibrate and --events")
    if (reports or month) and (arms or html is not None or events is not None):
        raise UsageError("--arm, --html and --events are for starts, not for --calibrate or a month without --nodes")
    if reports:
        _calibrate(wanted, reports, output)
        return
    if month is not None:
        _month(wanted, month, range(seed, seed + seeds), output)
        return
    for arm in arms:
        if arm not in ARMS and arm not in MORE_ARMS:
            raise UsageError(f"no arm {arm!r}; choose from {', '.join([*ARMS, *MORE_ARMS])}")
    if html is not None and not html.parent.is_dir():
        raise UsageError(f"{html.parent}: no such folder")
    if events is not None:  # before the simulation, which can take minutes
        _make_folder(events, wanted.name)
    done = _simulated([
        (label, variant, number, arm, one)
        for number in dict.fromkeys(wanted.nodes) for arm in dict.fromkeys(arms or ARMS) for label, variant in variants
        for one in range(seed, seed + seeds)
    ])  # fmt: skip
    if events is not None:
        for outcome in done:
            _write(events, outcome, wanted.name + (f"-seed{outcome.seed}" if seeds > 1 else ""))
    columns = ("image", "env", "imports", "ckpt", "start", "registry", "peers")
    rows = table("nodes", "arm", *columns, right=("nodes", *columns))
    names = ("image_loading", "environment_setup", "model_initialization.imports", "model_initialization.checkpoint")
    for outcome in done:
        stages = outcome.stages()
        figures = [*(stages[name]["max_s"] for name in names), outcome.began_s]
        figures += [outcome.registry_bytes / 1e9, outcome.peer_bytes / 1e9]
        rows.add_row(str(outcome.nodes), outcome.arm, *(f"{figure:,.1f}" for figure in figures))
    drawn = _seeds(range(seed, seed + seeds))
    digests = dict.fromkeys(variant.digest for _, variant in variants)
    caption = f"Simulated: parameters {', '.join(digests)}; {drawn}. Seconds of the slowest node; GB sent by registry "
    caption += "and peers."
    document = {"simulated": True, "scenario": wanted.name, "parameters": wanted.digest, "seed": seed}
    document["starts"] = [outcome.as_json() for outcome in done]
    if html is not None:
        _draw(html, document, [variant for _, variant in variants])
    output(document, rows, caption)


def _simulated(plan: list[tuple[str, Scenario, int, str, int]]) -> list[Outcome]:
    done: list[Outcome] = []
    with Progress("simulating") as progress:
        for label, variant, number, arm, seed in plan:
            progress.show(len(done), len(plan), f"{arm}, {number} nodes")
            done.append(outcome := simulate(variant, number, arm, seed))
            outcome.arm += f", {label}" if label else ""
    return done


def _month(scenario: Scenario, month: Month, seeds: range, output: Output) -> None:
    columns = ("cache GB", "days", "starts", "hits %", "restored %", "store GB", "GPU-h", "%", "today", "%")
    rows = table(*columns, right=columns)
    done = []
    times: Times = {}
    for policy in policies(month):
        for seed in seeds:
            done.append(found := simulate_month(scenario, month, policy, times, seed))
            hours, shares = found["gpu_hours"], found["gpu_share"]
            stored = found["days"][-1]["store_gb"] if found["days"] else 0.0
            rows.add_row(f"{policy.cache_gb:g}", f"{policy.max_age_days:g}" if policy.max_age_days else "any",
                         str(found["starts"]), f"{100 * found['hit_rate']:.1f}", f"{100 * found['snapshot_rate']:.1f}",
                         f"{stored:,.1f}", f"{hours['bootseer']:,.0f}", f"{100 * shares['bootseer']:.2f}",
                         f"{hours['today']:,.0f}", f"{100 * shares['today']:.2f}")  # fmt: skip
    caption = f"Simulated: parameters {scenario.digest}, {month.days:g} days on {month.nodes} nodes, {_seeds(seeds)}. "
    caption += "Days: maximum age of snapshots. GPU-hours of starts, and their share of the total."
    document = {"simulated": True, "scenario": scenario.name, "parameters": scenario.digest, "policies": done}
    output(document, rows, caption)


def _seeds(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _calibrate(scenario: Scenario, reports: tuple[Path, ...], output: Output) -> None:
    fitted, basis = calibrated(scenario, [read_report(path) for path in reports])
    text = toml(fitted, [f"Calibrated with {plural(len(reports), 'report')}; otherwise as in {scenario.name}.", *basis])
    output(
        {"scenario": scenario.name, "parameters": fitted.digest, "calibrated": basis, "toml": text}, *text.splitlines()
    )


def _numbers(nodes: str) -> str:
    """The list of `--nodes`, as a value of TOML."""
    numbers = [one.strip() for one in nodes.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", one) for one in numbers):
        raise UsageError(f"--nodes {nodes!r}: expected numbers of nodes, such as 16,64")
    return ",".join(str(int(one)) for one in numbers)


def _variants(changes: tuple[str, ...], *others: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """All combinations of the values to compare, each with a label; without any, one with an empty label.

    `others`: changes by other options. Each value is changed once: the label of a combination would otherwise name a
    value that a later change replaces.
    """
    several = []
    for change in changes:
        path, separator, value = change.partition("=")
        values = value.split(",") if separator and value.lstrip()[:1] not in ("[", "{", '"', "'") else [value]
        several.append((path.strip(), [f"{path}{separator}{one}" for one in values]))
    paths = [path for path, _ in several]
    for path in paths:
        if [*paths, *(one.partition("=")[0] for one in others)].count(path) > 1:
            raise UsageError(f"{path} is given more than once")
    compared = [path for path, values in several if len(values) > 1]
    last = [path.rpartition(".")[2] for path in compared]
    names = {path: name if last.count(name) == 1 else path for path, name in zip(compared, last, strict=True)}
    for chosen in product(*(values for _, values in several)):
        given = (one.partition("=")[2] for one in chosen)
        labels = [f"{names[path]}={value}" for path, value in zip(paths, given, strict=True) if path in names]
        yield ", ".join(labels), chosen


def _draw(html: Path, document: dict[str, Any], variants: list[Scenario]) -> None:
    parameters = {f"{one.name} ({one.digest})": one.text for one in variants}
    document = {**document, "parameters": ", ".join(dict.fromkeys(one.digest for one in variants))}
    write_file(html, page(f"Simulated starts: {variants[0].name}", figures_of(document), parameters))


def _make_folder(events: Path, name: str) -> None:
    """Create the folder for the events of a scenario, whose name is part of the names of the files."""
    if "/" in name or "\0" in name:
        raise UsageError(f"{name!r} cannot be part of a file name", hint="--what-if 'name=\"NAME\"'")
    with os_errors_as(PermanentError, events):
        events.mkdir(parents=True, exist_ok=True)


def _write(folder: Path, outcome: Outcome, name: str) -> None:
    job = f"simulated-{name}-{outcome.arm.replace(' ', '-')}-{outcome.nodes}"
    with os_errors_as(PermanentError, folder), (folder / f"{job}.events").open("wb") as file:
        for event in outcome.events(job):
            file.write(encode(event))
