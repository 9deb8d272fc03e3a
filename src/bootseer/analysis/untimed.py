"""The report of logs that tell facts and no time: what was said, and that nothing else was observed.

The usual case is the output of an installer that somebody kept. Called by `analysis.report`.
Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.analysis import model
from bootseer.analysis.lanes import UNOBSERVED
from bootseer.analysis.prepare import Options
from bootseer.analysis.stages import STAGES

_NO_JOB = "unnamed"


def untimed(options: Options, facts: Sequence[model.Fact], read: model.Input) -> model.Report:
    """A report without any node."""
    told = sorted({fact.stage.partition(".")[0] for fact in facts if fact.stage})
    stages = f" about {', '.join(told)}" if told else ""
    count = f"{len(facts)} fact{'s' if len(facts) != 1 else ''}"
    return model.Report(
        startup=model.Startup(
            job=options.job or _NO_JOB,
            attempt=0,
            restart=0,
            kind="full",
            zero_ns=0,
            outcome=UNOBSERVED,
            ended_by="last_event",
            num_nodes=0,
            num_ranks=0,
            num_gpus=None,
            scale="",
        ),
        verdict=f"Nothing in these logs has a time, so no startup can be measured; they tell {count}{stages}.",
        headlines=[
            "Nodes, order, waiting and cost are unobserved: collect logs with time stamps, or start the job with "
            "`bootseer run`."
        ],
        overhead=model.Overhead(
            None, None, None, None, None, None, None, None, None, None, options.price_per_gpu_hour, options.currency
        ),
        stages=[],
        nodes=[],
        ranks=[],
        critical_chain=[],
        stragglers=[],
        straggler_groups=[],
        coverage=model.Coverage(0, None, 0, None, 0, 0),
        clock=model.Clock("", 0.0, None, 0, []),
        unobserved=[stage for stage in STAGES if stage not in told],
        images=[],
        environments=[],
        checkpoints=[],
        facts=list(facts),
        share=None,
        startups=[],
        input=read,
    )
