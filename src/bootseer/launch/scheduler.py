"""When the scheduler got the job, and when it gave it the node: what cannot be seen from inside.

Slurm tells by `sacct`, by `scontrol` where no accounting runs, or the start alone by its environment. Only the job's
first task asks: a thousand nodes asking in the same second would be a load on the controller. Kubernetes tells when its
node saw the pod by an annotation that the downward API shows; the submission it does not tell, so that whoever submits
may put it into `BOOTSEER_SUBMITTED`. What nobody tells stays unobserved.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from bootseer.launch.session import PODINFO
from bootseer.units import NS_PER_S

_DEADLINE_S = 10.0
_SACCT = re.compile(r"(?P<submit>[\dT:-]{19})\|(?P<eligible>[^|]*)\|(?P<start>[^|\s]*)\s*\Z")
_SCONTROL = re.compile(
    r"SubmitTime=(?P<submit>\S+).*?EligibleTime=(?P<eligible>\S+).*?StartTime=(?P<start>\S+)", re.DOTALL
)
_CONFIG_SEEN = re.compile(r'^kubernetes\.io/config\.seen="([^"]+)"', re.MULTILINE)


class Times(NamedTuple):
    """Moments of the scheduler, unix ns; None is unobserved."""

    submitted_ns: int | None = None
    started_ns: int | None = None
    """The node was given to the job."""
    source: str = ""


def asks_slurm(env: Mapping[str, str]) -> bool:
    """Whether `times` would run a program, which belongs off the path of the job."""
    return bool(env.get("SLURM_JOB_ID")) and not env.get("BOOTSEER_SUBMITTED")


def times(env: Mapping[str, str]) -> Times:
    """What the schedulers around us tell; never raises, takes at most ten seconds."""
    given = parse_time(env.get("BOOTSEER_SUBMITTED", ""))
    podinfo = Path(env.get("BOOTSEER_PODINFO", PODINFO))
    found = _slurm(env) if env.get("SLURM_JOB_ID") else _kubernetes(podinfo)
    found = found._replace(submitted_ns=given or found.submitted_ns)
    # A job cannot start before it was submitted, nor after now: such a pair comes from two clocks.
    if found.submitted_ns and found.started_ns and not found.submitted_ns <= found.started_ns <= time.time_ns():
        return Times()
    return found


def parse_time(text: str) -> int | None:
    """ISO 8601 (the local zone when it names none) or unix seconds, as unix ns; None for anything else."""
    text = text.strip()
    try:
        if re.fullmatch(r"\d{9,11}(\.\d{1,9})?", text, re.ASCII):
            whole, _, fraction = text.partition(".")
            return int(whole) * NS_PER_S + int(fraction.ljust(9, "0") or 0)
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
        return int(moment.timestamp() * 1e6) * 1000
    except (ValueError, OverflowError, OSError):
        return None


def _slurm(env: Mapping[str, str]) -> Times:
    job = env["SLURM_JOB_ID"]
    if env.get("SLURM_PROCID", "0") in ("", "0"):
        for source, command, form in (
            ("sacct", ["sacct", "-X", "-n", "-P", "-j", job, "-o", "Submit,Eligible,Start"], _SACCT),
            ("scontrol", ["scontrol", "-o", "show", "job", job], _SCONTROL),
        ):
            match = form.search(_answer(command, env))
            if match is None:
                continue
            submit, eligible, start = (parse_time(match[name]) for name in ("submit", "eligible", "start"))
            # A requeued job waits again from the moment that it became eligible again.
            requeued = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
            if submit or start:
                return Times(eligible if requeued and eligible else submit, start, source)
    started = parse_time(env.get("SLURM_JOB_START_TIME", ""))
    return Times(None, started, "slurm environment" if started else "")


def _answer(command: list[str], env: Mapping[str, str]) -> str:
    clean = {**env, "SLURM_TIME_FORMAT": "standard"}  # another format would change what we parse
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S / 2, env=clean, check=True
        ).stdout[-65536:]
    except (OSError, subprocess.SubprocessError):
        return ""


def _kubernetes(podinfo: Path) -> Times:
    try:
        annotations = (podinfo / "annotations").read_text(errors="replace")[: 1 << 20]
    except OSError:
        return Times()
    match = _CONFIG_SEEN.search(annotations)
    seen = parse_time(match[1]) if match else None
    return Times(None, seen, "kubernetes" if seen else "")
