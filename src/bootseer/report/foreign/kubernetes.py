"""Kubernetes events: waiting for a node, pulling the image.

The same messages come in four wrappings: JSON objects of `kubectl get events -o json` one to a line
(`jq -c '.items[]'`), the table of `kubectl get events` or `kubectl events` (ages only, so facts only), the events of
`kubectl describe pod`, and the kubelet's or an event exporter's klog lines in old and new form. `describe` states ages
too, but also when the pod was assigned to its node (`Start Time`): so its events have times, as exact as the ages are
(`precision_s`).

    Created pod: moe-0                                   begin of `queue`
    Successfully assigned train/moe-0 to gpu-17          its end, and the instant `bound`
    Pulling image "registry.example/moe:1"               begin of `image_loading.pull`
    Successfully pulled image "registry.example/moe:1" in 58s (1m2s including waiting). Image size: 123 bytes.
    Container image "registry.example/moe:1" already present on machine

The pod is the node of its events, as it is the host name that the job itself sees; the machine is the attribute `host`.
`Created` and `Started` follow `Pulled` within milliseconds and are ignored.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bootseer.report.foreign import parser as make
from bootseer.report.foreign.parser import Builder, Findings, Line, Parser, Place
from bootseer.report.foreign.times import DURATION, LATEST_NS, line_time, parse_duration
from bootseer.report.search import Clue
from bootseer.trace.event import FAILED, OK
from bootseer.units import NS_PER_S

PULL = "image_loading.pull"
QUEUE = "queue"

_POD_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_CREATED = re.compile(rf"Created pod: ({_POD_NAME})(?![\w.-])", re.ASCII)
# Before 1.11 without the namespace, and so only where the line names its pod elsewhere too.
_ASSIGNED = re.compile(rf"Successfully assigned (?:({_POD_NAME})/)?({_POD_NAME}) to ({_POD_NAME})(?![\w.-])", re.ASCII)
_PULLING = re.compile(r'(?<!-off )\b[Pp]ulling image "([^"\s]{1,512})"')
_PULLED = re.compile(
    r'Successfully pulled image "([^"\s]{1,512})"'
    rf"(?: in ({DURATION}))?(?:\s*\(({DURATION}) including waiting\))?"
    r"(?:\. Image size: (\d{1,15}) bytes)?"
)
_PRESENT = re.compile(r'Container image "([^"\s]{1,512})" already present on machine')
_FAILED = re.compile(r'Failed to pull image "([^"\s]{1,512})"')
_TABLE_POD = re.compile(rf"\b[Pp]od/({_POD_NAME})\s")
_KLOG_POD = re.compile(
    rf'\bobject="(?:{_POD_NAME}/)?({_POD_NAME})"'
    rf'|Event\(v1\.ObjectReference\{{Kind:"Pod",[^}}\n]{{0,300}} Name:"({_POD_NAME})"'
)
_STARTED = re.compile(r"^Start Time:\s+\w{3}, (\d\d) (\w{3}) (\d{4}) (\d\d:\d\d:\d\d) ([+-]\d{4})", re.ASCII)
_DESCRIBED = re.compile(
    r"^ +(?:Normal|Warning) +\w+ +((?:\d{1,5}[dhms]){1,2})(?: \(x\d+ over \w+\))? +[\w-]+(?:, \S+)? +\S", re.ASCII
)
_WORST_S = 60
"""Ages of hours are too coarse for a startup."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

# In the order in which they happen within one second, which is as fine as the times of most events are.
_KINDS = {
    "created": _CREATED,
    "assigned": _ASSIGNED,
    "pulling": _PULLING,
    "pulled": _PULLED,
    "present": _PRESENT,
    "failed": _FAILED,
}
_ORDER = list(_KINDS)


@dataclass(slots=True)
class _Moment:
    """One event: its message, pod and time."""

    line: Line
    message: str
    pod: str
    host: str
    wall_ns: int | None
    kind: str = ""
    age_s: int = -1
    """How long before the log was printed, if only that is known, in units of `precision_s`; else -1."""
    precision_s: int = 0
    took_s: int = -1
    """The difference of two ages, where no time is known."""


class KubernetesParser(Parser):
    """Kubernetes events of pods."""

    name = "kubelet"
    clues = (
        Clue(b"Created pod: ", rb"[a-z0-9]"),
        Clue(b"Successfully assigned ", rb"[a-z0-9.-]{1,260}(?:/[a-z0-9.-]{1,260})? to [a-z0-9]"),
        Clue(b"Pulling image ", rb'\\*"'),
        Clue(b"pulling image ", rb'\\*"(?<!-off pulling image ")'),
        Clue(b"Successfully pulled image ", rb'\\*"'),
        Clue(b"Container image ", rb'\\*"[^"\s]+" already present'),
        Clue(b"Failed to pull image ", rb'\\*"'),
        Clue(b"Start Time: ", rb" +\w{3}, \d"),
    )

    def __init__(self) -> None:
        self._builder = Builder(self.name)
        self._moments: list[tuple[_Moment, re.Match[str]]] = []
        self._created: dict[str, _Moment] = {}
        self._pulling: dict[tuple[str, str], _Moment] = {}
        self._started_ns: int | None = None
        self._described: list[_Moment] = []
        """The events of the pod that is being described."""

    def feed(self, line: Line) -> None:
        if started := _STARTED.match(make.plain(line.text)):
            self._end_description()
            day, month, year, clock, zone = started.groups()
            self._started_ns = _rfc_1123(day, month, year, clock, zone)
            return
        moment = _moment(line)
        for kind, pattern in _KINDS.items():
            if found := pattern.search(moment.message):
                if kind == "assigned" and not (found[1] or moment.pod):
                    continue
                moment.kind = kind
                self._moments.append((moment, found))
                if moment.age_s >= 0:
                    if kind == "assigned":
                        moment.pod = found[2]
                        if any(other.kind == kind for other in self._described):
                            self._end_description()
                    self._described.append(moment)
                return

    def _end_description(self) -> None:
        """Give the events of a described pod their times: when it was assigned is known, and how long before."""
        described, started_ns = self._described, self._started_ns
        self._started_ns, self._described = None, []
        assigned = next((moment for moment in described if moment.kind == "assigned"), None)
        if assigned is None:
            return
        pulling: _Moment | None = None
        for moment in described:
            moment.pod = assigned.pod
            if max(moment.precision_s, assigned.precision_s) > _WORST_S:
                continue
            if started_ns is not None:
                moment.wall_ns = started_ns + (assigned.age_s - moment.age_s) * NS_PER_S
            elif moment.kind == "pulling":
                pulling = moment
            elif moment.kind == "pulled" and pulling is not None:
                moment.took_s = max(pulling.age_s - moment.age_s, 0)

    def _bound(self, moment: _Moment, pod: str, host: str) -> None:
        attrs = {"host": host, **_precision(moment)}
        self._builder.instant(moment.line, "bound", moment.wall_ns, place=Place(pod), attrs=attrs)
        created = self._created.pop(pod, None)
        if created is not None and moment.wall_ns is not None:
            self._builder.span(created.line, QUEUE, created.wall_ns, moment.wall_ns, place=Place(pod), attrs=attrs)

    def _pulled(self, moment: _Moment, pulled: re.Match[str]) -> None:
        begun = self._pulling.pop((moment.pod, pulled[1]), None)
        pull_ns = parse_duration(pulled[2]) if pulled[2] else None
        whole_ns = parse_duration(pulled[3]) if pulled[3] else pull_ns
        attrs: dict[str, Any] = {"bytes": int(pulled[4])} if pulled[4] else {}
        attrs.update(_precision(moment))
        if whole_ns is not None and pull_ns is not None and whole_ns > pull_ns:
            attrs["queued_s"] = (whole_ns - pull_ns) / 1e9
        if moment.wall_ns is not None:
            # Events have whole seconds, durations milliseconds: the duration is the better begin.
            begun_ns = begun.wall_ns if begun is not None else None
            begin_ns = begun_ns if whole_ns is None else moment.wall_ns - whole_ns
            if self._span(begun or moment, pulled[1], begin_ns, moment.wall_ns, attrs=attrs):
                return
        image = make.image_reference(pulled[1]) or "image"
        if whole_ns is not None:
            self._builder.fact(moment.line, PULL, f"{image} pulled", whole_ns, node=moment.pod)
        elif moment.took_s >= 0:
            text = f"{image} pulled, by ages of events: to {moment.precision_s} s"
            self._builder.fact(moment.line, PULL, text, moment.took_s * NS_PER_S, node=moment.pod)

    def _span(
        self,
        moment: _Moment,
        image: str,
        begin_ns: int | None,
        end_ns: int | None,
        *,
        outcome: str = OK,
        attrs: dict[str, Any] | None = None,
    ) -> bool:
        known = {"image": make.image_reference(image), "host": moment.host}
        fields: dict[str, Any] = {key: value for key, value in known.items() if value}
        fields.update(attrs or {})
        place = Place(moment.pod)
        return self._builder.span(moment.line, PULL, begin_ns, end_ns, place=place, outcome=outcome, attrs=fields)

    def finish(self) -> Findings:
        self._end_description()
        # `kubectl get events` promises no order.
        self._moments.sort(key=lambda each: (each[0].wall_ns or 0, _ORDER.index(each[0].kind)))
        for moment, found in self._moments:
            self._record(moment, found)
        for pod, created in self._created.items():
            self._builder.span(created.line, QUEUE, created.wall_ns, None, place=Place(pod))
        for (_, image), begun in self._pulling.items():
            self._span(begun, image, begun.wall_ns, None)
        return self._builder.finish()

    def _record(self, moment: _Moment, found: re.Match[str]) -> None:
        match moment.kind:
            case "created" if moment.wall_ns is not None:
                self._created[found[1]] = moment
            case "assigned":
                self._bound(moment, found[2], found[3])
            case "pulling" if moment.wall_ns is not None:
                self._pulling[moment.pod, found[1]] = moment
            case "pulled":
                self._pulled(moment, found)
            case "present":
                image = make.image_reference(found[1]) or "image"
                self._builder.fact(moment.line, PULL, f"{image} was already on the machine", 0, node=moment.pod)
            case "failed":
                begun = self._pulling.pop((moment.pod, found[1]), None)
                if begun is not None:
                    self._span(begun, found[1], begun.wall_ns, moment.wall_ns, outcome=FAILED)


def _moment(line: Line) -> _Moment:
    text = make.plain(line.text)
    start = text.find("{")
    if start >= 0:
        try:
            record = json.JSONDecoder().raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            return _json_moment(line, record)
    text = text.replace('\\"', '"')
    pod = _TABLE_POD.search(text) or _KLOG_POD.search(text)
    moment = _Moment(line, text, (pod[1] or pod[pod.lastindex or 1]) if pod else "", "", line.wall_ns)
    if line.wall_ns is None and (row := _DESCRIBED.match(text)):
        parts = [(int(part[:-1]), _UNITS_S[part[-1]]) for part in re.findall(r"\d+[dhms]", row[1])]
        moment.age_s, moment.precision_s = sum(count * unit for count, unit in parts), parts[-1][1]
    return moment


def _precision(moment: _Moment) -> dict[str, Any]:
    return {"precision_s": moment.precision_s} if moment.precision_s else {}


def _rfc_1123(day: str, month: str, year: str, clock: str, zone: str) -> int | None:
    try:
        at = datetime.strptime(f"{day} {month} {year} {clock} {zone}", "%d %b %Y %H:%M:%S %z")
    except ValueError:
        return None
    return int(at.timestamp()) * NS_PER_S


def _json_moment(line: Line, record: dict[str, Any]) -> _Moment:
    target = record.get("involvedObject") or record.get("regarding")
    source = record.get("source") or record.get("deprecatedSource")
    named = target.get("name") if isinstance(target, dict) and target.get("kind") == "Pod" else None
    host = source.get("host") if isinstance(source, dict) else None
    times = (record.get(key) for key in ("eventTime", "lastTimestamp", "firstTimestamp", "deprecatedLastTimestamp"))
    walls = (line_time(text, reference_ns=LATEST_NS - 1) for text in times if isinstance(text, str))
    wall_ns = next((wall for wall in walls if wall is not None), line.wall_ns)
    pod = make.name(named) if isinstance(named, str) else ""
    return _Moment(line, record["message"], pod, make.name(host) if isinstance(host, str) else "", wall_ns)
