"""What was found in logs; and to which job, attempt, restart and node the lines of other programs belong."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from bootseer.report.foreign.parser import FOREIGN, NODES, UNKNOWN_JOB
from bootseer.report.model import Fact, Input
from bootseer.trace.event import BEGIN, Event
from bootseer.trace.identity import expand_hosts
from bootseer.units import NS_PER_S

_LAUNCHER = "torchelastic"
_WITHIN = frozenset({_LAUNCHER, "nccl", "megatron", "transformers", "steps"})
"""Programs whose lines are written while the command runs."""
_OF_MACHINE = frozenset({"containerd", "crio", "docker", "pip", "uv", "conda", "ray"})
"""Programs whose logs are about all jobs of a machine, maybe for months, and name none."""
_OF_JOB = frozenset({"kubeflow", "slurm"})
"""Programs with lines about a job that name no node: it waits for some."""
_SLACK_NS = 60 * NS_PER_S
_MAX_LISTED = 1 << 19
"""Nodes of a scheduler's lists: a short line can name thousands."""
_APART_NS = 900 * NS_PER_S
"""What they did longer than this before or after the job's other events belongs to another job."""


@dataclass(slots=True)
class Scanned:
    """What was found in the logs."""

    events: list[Event] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    hosts: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """The nodes that are named by their files; for each, the hosts that NCCL names in these."""
    files: int = 0
    bytes: int = 0
    lines: int = 0

    def input(self) -> Input:
        """The counters, for the report."""
        return Input(self.files, self.bytes, self.lines, len(self.events), 0, dict(sorted(self.skipped.items())))


def name_jobs(result: Scanned, chosen: str | None) -> None:
    """Assign events of foreign logs to the job, if there is just one; drop stages that BootSeer itself observed, and
    what other jobs did on its machines."""
    own = [event for event in result.events if not _foreign(event)]
    if len(own) == len(result.events):
        return
    # A scheduler's log is about all jobs of a cluster, by numbers that need not be in the job's own name.
    of_scheduler = {event.job for event in result.events if event.attrs.get(FOREIGN) == "slurm"}
    jobs = {event.job for event in own or result.events} - {UNKNOWN_JOB}
    jobs = jobs - of_scheduler or jobs & {chosen or ""} or jobs
    # In Slurm, `bootseer run` calls a job NAME-NUMBER.
    others = of_scheduler - jobs - {job.rpartition("-")[2] for job in jobs}
    if len(jobs) == 1 and others and (others != of_scheduler or len(others) > 1):
        before = len(result.events)
        result.events = [event for event in result.events if event.job not in others]
        result.skipped["other_job"] += before - len(result.events)
    if not own:
        _name_nodes(result, jobs)
    if len(jobs) < 2:
        _assign(result, own, min(jobs, default=UNKNOWN_JOB))
    earlier = _of_earlier_pods(result.events)
    result.skipped["earlier_pod"] += len(earlier)
    result.events = [event for event in result.events if event.span not in earlier]
    other = _of_other_runs(result.events)  # what an earlier pod did is not around the job
    result.skipped["other_run"] += len(other)
    result.events = [event for event in result.events if event.span not in other]
    result.skipped = +result.skipped  # without zeros


def _assign(result: Scanned, own: Sequence[Event], job: str) -> None:
    """Assign events of foreign logs to the job, and drop stages that BootSeer itself observed."""
    stages = {event.stage for event in own}
    # Foreign logs have only the bare name of a pod or host.
    nodes = {event.node.partition("/")[0]: event.node for event in own}
    # NCCL and the names of files have no domain.
    hosts = Counter(name.partition(".")[0] for name in nodes)
    nodes |= {host: node for name, node in nodes.items() if hosts[host := name.partition(".")[0]] == 1}
    uids = {event.node.partition("/")[2]: event.node for event in own}
    nodes |= {event.node: uids[uid] for event in result.events if (uid := event.attrs.get("pod_uid")) in uids}
    # A list of events of a whole cluster includes pods of other jobs.
    told = {event.node for event in result.events if event.attrs.get(FOREIGN) == "kubelet"}
    others = set() if told.isdisjoint(nodes) else told - nodes.keys()
    only = set(nodes.values())

    def is_of_all(event: Event) -> bool:
        """Whether it is about the job, and its node is only the name of its file."""
        return event.stage == "queue" and event.attrs[FOREIGN] in _OF_JOB and event.node in result.hosts

    with_node = own or [one for one in result.events if one.attrs[FOREIGN] not in _OF_MACHINE and not is_of_all(one)]
    first = min(with_node, key=lambda event: event.wall_ns, default=None)
    events = []
    for event in result.events:
        if not _foreign(event):
            events.append(event)
        # The hook's events are more accurate, but the user's own patterns take precedence.
        elif event.stage not in stages or event.attrs[FOREIGN] == "pattern":
            lone = next(iter(only)) if len(only) == 1 and event.node not in others else ""
            node = nodes.get(event.node, lone or ("" if own else event.node))
            if first is not None and is_of_all(event):
                node = first.node
            if node:
                attrs = event.attrs
                if own:  # own events show the job's nodes better than the scheduler's list
                    attrs = {key: value for key, value in attrs.items() if key != NODES}
                events.append(event._replace(job=job, node=node, attrs=attrs))
            else:
                result.skipped["other_node"] += 1
    events = _in_their_starts(events, own)
    wrong = _of_another_zone(events)
    result.events = [event for event in events if (event.node, event.attrs.get(FOREIGN)) not in wrong]
    if wrong:
        result.skipped["other_zone"] += len(events) - len(result.events)


def _name_nodes(result: Scanned, jobs: set[str]) -> None:
    """Name the nodes that only have the name of a file: a host would be counted, and billed, once more under it.

    Of the hosts in a log of several, the first is taken; of a job in a scheduler's log, which lists all of its nodes,
    the node of the batch script.
    """
    pods = defaultdict(set)  # with the host's network, NCCL names a pod's machine, without its domain
    for event in result.events:
        if event.stage == "bound" and isinstance(machine := event.attrs.get("host"), str):
            for name in (machine, machine.partition(".")[0]):
                pods[name].add(event.node)
    by_slurm = [event for event in result.events if event.attrs[FOREIGN] == "slurm"] if len(jobs) == 1 else []
    # slurmd's lines are named by their file, and so are slurmctld's about a job that waits.
    listing = [one for one in by_slurm if one.stage != "bound" and (NODES in one.attrs or one.node not in result.hosts)]
    lists = dict.fromkeys(event.attrs.get(NODES, event.node) for event in listing or by_slurm)
    of_job = dict.fromkeys(islice((node for names in lists for node in expand_hosts(names)), _MAX_LISTED))

    def named(node: str) -> str:
        hosts = result.hosts.get(node, {node: None}) or of_job
        host = node if node in hosts else next(iter(hosts), node)
        return min(pods[host]) if len(pods.get(host, ())) == 1 else host

    result.events = [event._replace(node=named(event.node)) for event in result.events]


def _of_other_runs(events: Sequence[Event]) -> set[str]:
    """The spans in logs of whole machines that belong to other jobs: those far from the job's other events on the node.

    A span at most `_SLACK_NS` from one that counts belongs to the job: pull and installation may take half an hour.
    """
    around: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    spans: dict[tuple[str, int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        of_job = event.job, event.attempt
        if _foreign(event) and event.attrs[FOREIGN] in _OF_MACHINE:
            spans[*of_job, event.node][event.span].append(event.wall_ns)
        elif event.stage != "queue":  # then other jobs have the machine
            around[*of_job, event.node].append(event.wall_ns)
            around[*of_job, ""].append(event.wall_ns)
    found = set()
    for (job, attempt, node), of_node in spans.items():
        known = around.get((job, attempt, node)) or around.get((job, attempt, "")) or max(of_node.values(), key=max)
        first_ns, last_ns = min(known), max(known)
        from_ns, until_ns = first_ns - _APART_NS, last_ns + _APART_NS
        for span, times in sorted(of_node.items(), key=lambda one: -max(one[1])):
            if max(times) < min(first_ns - _SLACK_NS, from_ns):
                found.add(span)
            else:
                first_ns = min(first_ns, *times)
        for span, times in sorted(of_node.items(), key=lambda one: min(one[1])):
            if min(times) > max(last_ns + _SLACK_NS, until_ns):
                found.add(span)
            else:
                last_ns = max(last_ns, *times)
    return found


def _of_earlier_pods(events: Sequence[Event]) -> set[str]:
    """Kubernetes' spans and instants before a pod was assigned for the last time before its own first line: an earlier
    pod had its name, as in a job that was created again."""
    first: dict[tuple[str, int, str], int] = {}
    pods: dict[tuple[str, int, str], list[Event]] = defaultdict(list)
    for event in events:
        pod = event.job, event.attempt, event.node
        if event.attrs.get(FOREIGN) == "kubelet":
            pods[pod].append(event)
        elif event.stage != "queue" and event.attrs.get(FOREIGN) not in _OF_MACHINE:
            first[pod] = min(first.get(pod, event.wall_ns), event.wall_ns)
    found = set()
    for pod, of_pod in pods.items():
        assigned = [e.wall_ns for e in of_pod if e.stage == "bound" and e.wall_ns <= first.get(pod, e.wall_ns)]
        latest = {event.span: event.wall_ns for event in sorted(of_pod, key=lambda event: event.wall_ns)}
        found |= {span for span, wall_ns in latest.items() if wall_ns < max(assigned, default=0)}
    return found


def _of_another_zone(events: Sequence[Event]) -> set[tuple[str, str]]:
    """Nodes and programs with lines that seem to be from before or after all runs on the node: a time without a zone is
    taken for one of this machine's zone, which need not be that of the log."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for event in events:
        if not _foreign(event):
            of = event.node, event.attempt
            last[of] = max(last.get(of, event.wall_ns), event.wall_ns)
            if event.stage == "run" and event.phase == BEGIN:
                first[of] = min(first.get(of, event.wall_ns), event.wall_ns)
    runs = defaultdict(list)
    for (node, attempt), begin_ns in first.items():
        # Signs of life are written at least each time that a tenth of the run's age has passed.
        end_ns = last[node, attempt] + max(_SLACK_NS, (last[node, attempt] - begin_ns) // 8)
        runs[node].append((begin_ns - _SLACK_NS, end_ns))
    found = set()
    for event in events:
        within = _foreign(event) and (event.attrs[FOREIGN] in _WITHIN or event.stage == "training_began")
        if within and event.node in runs and not any(a <= event.wall_ns <= b for a, b in runs[event.node]):
            found.add((event.node, event.attrs[FOREIGN]))
    return found


def _in_their_starts(events: Sequence[Event], own: Sequence[Event]) -> list[Event]:
    """The events, those of foreign logs with the attempt and restart in which they were written, as BootSeer's events
    on their node show, or else those of the job's launcher."""
    known = own or [event for event in events if event.attrs[FOREIGN] == _LAUNCHER]
    of_node: dict[str, list[Event]] = defaultdict(list)
    for event in known:
        of_node[event.node].append(event)
    begins = {node: _begins(of_one) for node, of_one in of_node.items()}
    of_any = _begins(known)

    def placed(event: Event) -> Event:
        here = begins.get(event.node, of_any)
        _, attempt, restart, by_bootseer = here[max(bisect(here, event.wall_ns, key=itemgetter(0)) - 1, 0)]
        if event.attrs[FOREIGN] == _LAUNCHER:  # it counts its own restarts, from 0 after each restart by BootSeer
            restart = by_bootseer + event.restart
        return event._replace(attempt=attempt, restart=restart)

    return [placed(event) if _foreign(event) else event for event in events]


def _begins(known: Sequence[Event]) -> list[tuple[int, int, int, int]]:
    """The attempts and restarts in order, with the time from which on lines belong to them, and the number of the last
    restart by BootSeer.

    An attempt begins with the end of the one before, because its queue belongs to it. A restart begins with its first
    event: the end of `run`, which is an event of restart 0, comes after all restarts.
    """
    times: dict[tuple[int, int], list[int]] = {}
    for event in known:
        times.setdefault((event.attempt, event.restart), []).append(event.wall_ns)
    by_bootseer = {(event.attempt, event.restart) for event in known if event.stage == "restart"}
    begins, over_ns = [], 0
    for (attempt, restart), walls in sorted(times.items()):
        latest = max((number for of, number in by_bootseer if of == attempt and number <= restart), default=0)
        begins.append((min(walls) if restart else min(over_ns, *walls), attempt, restart, latest))
        over_ns = max(over_ns, *walls)
    return sorted(begins) or [(0, 0, 0, 0)]


def _foreign(event: Event) -> bool:
    """Whether the event was made from a foreign log: it has the attribute and, unlike a user's own event, one clock."""
    return FOREIGN in event.attrs and event.wall_ns == event.mono_ns
