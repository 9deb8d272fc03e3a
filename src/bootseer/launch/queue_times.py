"""When the job was submitted, and when the scheduler allocated the node.

Slurm: `sacct`, `scontrol` where no accounting runs, or only the start time from the environment. Only the job's first
task runs these programs, to spare the controller. Kubernetes: an annotation in the downward API has the time at which
the node saw the pod; the API server has its creation time, for pods that may read themselves. Otherwise the submitting
program may set `BOOTSEER_SUBMITTED`. Unknown times stay unobserved.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from bootseer.launch.supervise import log
from bootseer.units import NS_PER_S

KUBERNETES = "kubernetes"
_DEADLINE_S = 5.0
_POLL_S = 0.1
_API_S = 2.0
_MAX_POD = 4 << 20
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_STALE_NS = 3600 * NS_PER_S
_SACCT = re.compile(r"(?P<submit>[\dT:-]{19})\|(?P<eligible>[^|]*)\|(?P<start>[^|\s]*)\s*\Z")
_SCONTROL = re.compile(
    r"SubmitTime=(?P<submit>\S+).*?EligibleTime=(?P<eligible>\S+).*?StartTime=(?P<start>\S+)", re.DOTALL
)
_CONFIG_SEEN = re.compile(r'^kubernetes\.io/config\.seen="([^"]+)"', re.MULTILINE)


class Times(NamedTuple):
    """Times of the scheduler, unix ns, and their sources; None is unobserved."""

    submitted_ns: int | None = None
    started_ns: int | None = None
    """The node was allocated to the job."""
    submitted_by: str = ""
    started_by: str = ""


def times(env: Mapping[str, str], ended: threading.Event) -> Times:
    """The scheduler's times; never raises. Runs in a thread, at most until `ended` is set."""
    found = _slurm(env, ended) if env.get("SLURM_JOB_ID") else _kubernetes(env)
    if found is None:
        return Times()
    given = parse_time(env.get("BOOTSEER_SUBMITTED", ""))
    if given is not None:
        found = found._replace(submitted_ns=given, submitted_by="BOOTSEER_SUBMITTED")
    # Neither before the submission nor in the future: such a pair comes from two clocks that disagree.
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


def _slurm(env: Mapping[str, str], ended: threading.Event) -> Times:
    job = env["SLURM_JOB_ID"]
    if env.get("SLURM_PROCID", "0") in ("", "0"):
        for source, command, form in (
            ("sacct", ["sacct", "-X", "-n", "-P", "-j", job, "-o", "Submit,Eligible,Start"], _SACCT),
            ("scontrol", ["scontrol", "-o", "show", "job", job], _SCONTROL),
        ):
            match = form.search(_output_of(command, env, ended))
            if match is None:
                continue
            submit, eligible, start = (parse_time(match[name]) for name in ("submit", "eligible", "start"))
            # The wait of a requeued job begins when it becomes eligible again.
            requeued = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
            if submit or start:
                return Times(eligible if requeued and eligible else submit, start, source, source)
    started = parse_time(env.get("SLURM_JOB_START_TIME", ""))
    return Times(None, started, "", "slurm environment")


def _output_of(command: list[str], env: Mapping[str, str], ended: threading.Event) -> str:
    """A program's output; empty if it fails, takes too long, or the run ends first."""
    clean = {**env, "SLURM_TIME_FORMAT": "standard"}  # the format that is parsed
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean
        )
    except OSError as error:
        log(__name__, "%s: %s", command[0], error)
        return ""
    with process:
        for _ in range(round(_DEADLINE_S / _POLL_S)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                answer, _ = process.communicate(timeout=_POLL_S)
                # 0 also if the main thread has reaped it, as PID 1 and a subreaper do: `answer` is matched in full.
                log(__name__, "%s ended with exit code %d", command[0], process.returncode)
                return answer[-65536:].decode("utf-8", "replace") if process.returncode == 0 else ""
            if ended.is_set():
                break
        process.kill()
    log(__name__, "%s did not answer within %g s, or the command ended before", command[0], _DEADLINE_S)
    return ""


def _kubernetes(env: Mapping[str, str]) -> Times | None:
    """The pod's times; None in a container that is known to be restarted: they are those of its first start."""
    found = _pod_times(env)
    if found is None:
        return None
    try:
        with (Path(env["BOOTSEER_PODINFO"]) / "annotations").open(errors="replace") as file:
            match = _CONFIG_SEEN.search(file.read(1 << 20))
    except (KeyError, OSError):
        return found
    seen = parse_time(match[1]) if match else None
    # Long ago: the container may be restarted.
    if seen is None or time.time_ns() - seen > _STALE_NS:
        return found
    return found._replace(started_ns=seen, started_by=KUBERNETES)


def _pod_times(env: Mapping[str, str]) -> Times | None:
    """When this pod was created and when it was scheduled, if the API server is accessible; None if a container of the
    pod was restarted."""
    if "KUBERNETES_SERVICE_HOST" not in env or not (ACCOUNT / "token").exists():
        return Times()
    import http.client
    import json
    import ssl

    name = env.get("POD_NAME") or env.get("HOSTNAME", "")
    try:
        token, namespace = ((ACCOUNT / each).read_text().strip() for each in ("token", "namespace"))
        link = http.client.HTTPSConnection(
            env["KUBERNETES_SERVICE_HOST"],
            int(env.get("KUBERNETES_SERVICE_PORT", "443")),
            timeout=_API_S,
            context=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
        )
        with contextlib.closing(link):
            # resourceVersion=0 reads the API server's cache: a thousand pods may ask in the same second.
            path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}?resourceVersion=0"
            link.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": "application/json"})
            answer = link.getresponse()
            log(__name__, "the pod's times: the API server answers %d", answer.status)
            pod = json.loads(answer.read(_MAX_POD)) if answer.status == HTTPStatus.OK else {}
        if env.get("POD_UID") and env["POD_UID"] != pod.get("metadata", {}).get("uid"):
            return Times()
        status = pod.get("status", {})
        if any(each["restartCount"] for each in status.get("containerStatuses", ())):
            return None
        at = [each["lastTransitionTime"] for each in status.get("conditions", ()) if each["type"] == "PodScheduled"]
        created = parse_time(pod.get("metadata", {}).get("creationTimestamp", ""))
        scheduled = parse_time(at[0]) if at else None
        return Times(created, scheduled, "kubernetes api" if created else "", KUBERNETES if scheduled else "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException) as error:
        log(__name__, "the pod's times: %s", error)
        return Times()
