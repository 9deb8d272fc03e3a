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
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bootseer.report.foreign import parser as make
from bootseer.report.foreign.parser import Findings, Line
from bootseer.report.foreign.rules import BEGIN, END, FAIL, MARK, Rule, TableParser
from bootseer.report.foreign.times import DURATION, LATEST_NS, line_time
from bootseer.report.search import Clue
from bootseer.units import NS_PER_S

_PULL = "image_loading.pull"
_QUEUE = "queue"
_BOUND = "bound"

_POD_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
# Before 1.11 without the namespace, and so only where the line names its pod elsewhere too.
_ASSIGNED = rf"(?:(?P<namespace>{_POD_NAME})/)?(?P<host>(?P<key>{_POD_NAME})) to (?P<machine>{_POD_NAME})(?![\w.-])"
_IMAGE = r"(?P<image>[^\"\s\\]{1,512})\\*\""
_IN_TIME = (
    rf"\\*\"{_IMAGE}(?: in (?P<pull>{DURATION}))?(?:\s*\((?P<took>{DURATION}) including waiting\))?"
    r"(?:\. Image size: (?P<bytes>\d{1,15}) bytes)?"
)
# In the order in which they happen within one second, which is as fine as the times of most events are.
_RULES = (
    # An earlier pod of this name may have been deleted.
    Rule(BEGIN, _QUEUE, "Created pod: ", rf"(?P<host>(?P<key>{_POD_NAME}))(?![\w.-])", restarts=True),
    Rule(MARK, _BOUND, "Successfully assigned ", _ASSIGNED),
    Rule(END, _QUEUE, "Successfully assigned ", _ASSIGNED),
    Rule(BEGIN, _PULL, "Pulling image ", rf"\\*\"{_IMAGE}", restarts=True),
    Rule(BEGIN, _PULL, "pulling image ", rf"\\*\"(?<!-off pulling image \"){_IMAGE}", restarts=True),
    Rule(END, _PULL, "Successfully pulled image ", _IN_TIME, says="pulled"),
    Rule(
        END, _PULL, "Container image ", rf"\\*\"{_IMAGE} already present on machine", says="was already on the machine"
    ),
    Rule(FAIL, _PULL, "Failed to pull image ", rf"\\*\"{_IMAGE}"),
)
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


@dataclass(slots=True)
class _Moment:
    """One event: a line with its message and time, and its pod."""

    line: Line
    pod: str
    host: str = ""
    uid: str = ""
    found: list[tuple[Rule, dict[str, str]]] = field(default_factory=list)
    age_s: int = -1
    """How long before the log was printed, if only that is known, in units of `precision_s`; else -1."""
    precision_s: int = 0

    @property
    def is_assigned(self) -> bool:
        return any(rule.stage == _BOUND for rule, _ in self.found)


class KubernetesParser(TableParser):
    """Kubernetes events of pods, from which the wrapping is removed and which are put in order."""

    def __init__(self) -> None:
        super().__init__("kubelet", _RULES)
        self.clues = (*self.clues, Clue(b"Start Time: ", rb" +\w{3}, \d"))
        self._moments: list[_Moment] = []
        self._started_ns: int | None = None
        self._described: list[_Moment] = []
        """The events of the pod that is being described."""

    def feed(self, line: Line) -> None:
        if started := _STARTED.match(make.plain(line.text)):
            self._end_description()
            self._started_ns = _rfc_1123(*started.groups())
            return
        moment = _moment(line)
        for rule, fields in self._matches(moment.line.text):
            if "machine" not in fields or "namespace" in fields or moment.pod:
                moment.found.append((rule, fields))
        if moment.found:
            self._moments.append(moment)
        if moment.found and moment.age_s >= 0:
            if moment.is_assigned:
                moment.pod = moment.found[0][1]["host"]
                if any(other.is_assigned for other in self._described):
                    self._end_description()
            self._described.append(moment)

    def _end_description(self) -> None:
        """Give the events of a described pod their times: when it was assigned is known, and how long before."""
        described, started_ns = self._described, self._started_ns
        self._started_ns, self._described = None, []
        assigned = next((moment for moment in described if moment.is_assigned), None)
        if assigned is None:
            return
        for moment in described:
            moment.pod = assigned.pod
            if started_ns is not None and max(moment.precision_s, assigned.precision_s) <= _WORST_S:
                wall_ns = started_ns + (assigned.age_s - moment.age_s) * NS_PER_S
                moment.line = moment.line._replace(wall_ns=wall_ns)

    def finish(self) -> Findings:
        self._end_description()
        found = [(moment, rule, fields) for moment in self._moments for rule, fields in moment.found]
        # `kubectl get events` promises no order.
        for moment, rule, fields in sorted(found, key=lambda one: (one[0].line.wall_ns or 0, _RULES.index(one[1]))):
            known = {"machine": moment.host, "uid": moment.uid, "precision_s": str(moment.precision_s or "")}
            groups = {name: value for name, value in known.items() if value} | fields
            if rule.stage == _PULL:
                groups["key"] = f"{moment.pod} {fields['image']}"
            self._record(moment.line._replace(node=moment.pod or moment.line.node), rule, groups)
        return super().finish()


def _moment(line: Line) -> _Moment:
    text = make.plain(line.text)
    start = text.find("{")
    if start >= 0:
        try:
            record = json.JSONDecoder().raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            record = None
        message = (record.get("message") or record.get("note")) if isinstance(record, dict) else None
        if isinstance(message, str):
            return _json_moment(line._replace(text=message), record)
    text = text.replace('\\"', '"')
    pod = _TABLE_POD.search(text) or _KLOG_POD.search(text)
    moment = _Moment(line._replace(text=text), (pod[1] or pod[pod.lastindex or 1]) if pod else "")
    if line.wall_ns is None and (row := _DESCRIBED.match(text)):
        parts = [(int(part[:-1]), _UNITS_S[part[-1]]) for part in re.findall(r"\d+[dhms]", row[1])]
        moment.age_s, moment.precision_s = sum(count * unit for count, unit in parts), parts[-1][1]
    return moment


def _rfc_1123(day: str, month: str, year: str, clock: str, zone: str) -> int | None:
    try:
        at = datetime.strptime(f"{day} {month} {year} {clock} {zone}", "%d %b %Y %H:%M:%S %z")
    except ValueError:
        return None
    return int(at.timestamp()) * NS_PER_S


def _json_moment(line: Line, record: dict[str, Any]) -> _Moment:
    target = record.get("involvedObject") or record.get("regarding")
    source = record.get("source") or record.get("deprecatedSource")
    about = target if isinstance(target, dict) and target.get("kind") == "Pod" else {}
    named = about.get("name")
    host = source.get("host") if isinstance(source, dict) else None
    times = (record.get(key) for key in ("eventTime", "lastTimestamp", "firstTimestamp", "deprecatedLastTimestamp"))
    walls = (line_time(text, reference_ns=LATEST_NS - 1) for text in times if isinstance(text, str))
    wall_ns = next((wall for wall in walls if wall is not None), line.wall_ns)
    pod = make.name(named) if isinstance(named, str) else ""
    at = line._replace(wall_ns=wall_ns)
    return _Moment(at, pod, make.name(host) if isinstance(host, str) else "", make.name(str(about.get("uid", ""))))
