"""Export this node's events to an OpenTelemetry collector while the command runs.

The spool is the source: what the collector does not take now is still there later. Runs in a thread of `launch.run`,
off the job's path; importing the library takes longer than all the rest of `bootseer run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.trace.event import Event
from bootseer.trace.otlp import CLOSE_S, OtlpExporter
from bootseer.trace.otlp_tail import SpoolTail

_LOOK_EVERY_S = 1.0


def export_spool(
    folder: str,
    owns: Callable[[Event], bool],
    endpoint: str | None,
    ended: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Feed the run's own events to the collector until `ended` is set, then flush within two seconds. Never raises."""
    try:
        exporter = OtlpExporter(endpoint)
    except BootseerError as error:
        hint = getattr(error, "hint", "")
        say(f"no export: {error}{f' ({hint})' if hint else ''}")
        return
    tail = SpoolTail(folder)
    over = False
    while not over:
        over = ended.wait(_LOOK_EVERY_S)
        exporter.feed(filter(owns, tail.poll(last=over)))
    delivered = exporter.close(CLOSE_S)
    if exporter.failed or not delivered:
        lost = exporter.failed + exporter.pending
        why = f" ({exporter.last_error})" if exporter.last_error else ""
        say(f"{lost} spans did not reach the collector{why}; the spool keeps the events: {folder}")
