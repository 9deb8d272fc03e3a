"""What one `bootseer.stage` costs in the user's program, with tracing off and on."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable

from harness import Benchmark, Outcome, alternate

import bootseer
from bootseer.trace import tracer as tracing
from bootseer.trace.tracer import Tracer, from_environment

_Context = contextlib.AbstractContextManager[object]
_USES_OFF = 20_000
_USES_ON = 2_000


def measure(quick: bool) -> Outcome:
    rounds = 10 if quick else 50
    with tempfile.TemporaryDirectory() as spool:
        tracer = from_environment({"BOOTSEER_TRACE": f"spool:{spool}", "BOOTSEER_JOB": "bench"})
        assert tracer is not None
        samples = alternate(
            {
                "contextlib.nullcontext": lambda: _ns_per_use(contextlib.nullcontext, _USES_OFF, None),
                "stage, tracing off": lambda: _ns_per_use(_stage, _USES_OFF, None),
                "stage, tracing to a spool": lambda: _ns_per_use(_stage, _USES_ON, tracer),
            },
            rounds,
        )
        assert tracer.sink.lost == 0
        tracing._tracer = None
    return Outcome(
        parameters={"rounds": rounds, "uses_off": _USES_OFF, "uses_on": _USES_ON, "events_per_use": 2},
        samples=samples,
        unit="ns per use",
        baselines={arm: "contextlib.nullcontext" for arm in samples if arm.startswith("stage")},
    )


def _stage() -> _Context:
    return bootseer.stage("environment_setup.install", packages=12)


def _ns_per_use(
    make: Callable[[], contextlib.AbstractContextManager[object]], uses: int, tracer: Tracer | None
) -> float:
    tracing._tracer, tracing._resolved = tracer, True
    start = time.perf_counter_ns()
    for _ in range(uses):
        with make():
            pass
    return (time.perf_counter_ns() - start) / uses


BENCHMARK = Benchmark("tracing_cost", "What does one `bootseer.stage` cost?", measure)
