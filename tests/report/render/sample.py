"""Reports to draw: a small complete one, a big one, and one in which nothing was observed.

Built from the per-node stage times of a made-up job with two barriers, so that segments, chain and sums agree.
"""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

from bootseer.report.model import (
    WAIT,
    WORK,
    Clock,
    Coverage,
    Fact,
    Input,
    Kind,
    Link,
    Node,
    Overhead,
    Overview,
    Place,
    Report,
    Segment,
    Share,
    Stage,
    Startup,
    Straggler,
    StragglerGroup,
)
from bootseer.report.model_starts import CheckpointStart, DataNode, EnvironmentStart, ImageStart

ZERO_NS = 1_763_640_000_000_000_000
PRICE = 2.5

_BEFORE = (
    "queue",
    "allocation",
    "image_loading.fetch",
    "image_loading.mount",
    "environment_setup.install",
    "environment_setup.verify",
    "model_initialization.import_torch",
)
_BETWEEN = ("model_initialization.build", "untracked", "model_initialization.checkpoint_read", "first_step")
RENDEZVOUS = "model_initialization.rendezvous"
STAGES = (*_BEFORE, RENDEZVOUS, *_BETWEEN)


def simulate(works: list[dict[str, float]], *, gpus: int, names: list[str]) -> list[Node]:
    """Nodes that work for `works` seconds in each stage and wait for each other at the rendezvous and at the end."""
    first = [sum(work[stage] for stage in _BEFORE) for work in works]
    opened = max(first)
    last = max(opened + sum(work[stage] for stage in _BETWEEN) for work in works)
    nodes = []
    for i, work in enumerate(works):
        segments: list[Segment] = []
        now = 0.0

        def add(stage: str, until: float, kind: Kind, into: list[Segment] = segments) -> float:
            start = into[-1].end_s if into else 0.0
            if until > start:
                into.append(Segment(stage, start, until, kind, "ok" if kind == WORK else ""))
            return until

        for stage in _BEFORE:
            now = add(stage, now + work[stage], WORK)
        now = add(RENDEZVOUS, opened, WAIT)
        for stage in _BETWEEN:
            now = add(stage, now + work[stage], "untracked" if stage == "untracked" else WORK)
        own_end = now
        add("first_step", last, WAIT)
        sums = {
            kind: sum(s.end_s - s.start_s for s in segments if s.kind == kind) for kind in (WORK, WAIT, "untracked")
        }
        read = next(s for s in segments if s.stage.endswith("checkpoint_read"))
        background = [Segment("image_loading.stream", read.start_s - 2, read.end_s + 3, WORK, "ok")]
        nodes.append(
            Node(
                node=names[i],
                rank=i * gpus,
                num_ranks=gpus,
                gpus=gpus,
                start_s=0.0,
                end_s=last,
                own_end_s=own_end,
                work_s=sums[WORK],
                wait_s=sums[WAIT],
                untracked_s=sums["untracked"],
                outcome="ok",
                last_stage="first_step",
                clock_offset_s=(i % 7 - 3) * 0.004,
                clock_error_s=0.0021,
                segments=segments,
                background=background,
                attrs={"image_loading.fetch.bytes": 28_620_000_000, "environment_setup.install.packages": 111},
            )
        )
    return nodes


def truncated(node: Node) -> Node:
    """The same node, killed in the middle of its environment setup."""
    kept = [
        s for s in node.segments if not s.stage.startswith(("model", "first", "untracked", "environment_setup.verify"))
    ]
    kept[-1] = replace(
        kept[-1], end_s=kept[-1].start_s + 0.6 * (kept[-1].end_s - kept[-1].start_s), outcome="truncated"
    )
    end = kept[-1].end_s
    return replace(
        node,
        outcome="truncated",
        last_stage=kept[-1].stage,
        own_end_s=end,
        work_s=end,
        wait_s=0.0,
        untracked_s=0.0,
        segments=kept,
        background=[],
    )


def stage_rows(nodes: list[Node]) -> list[Stage]:
    names: list[str] = []
    for stage in STAGES:
        if stage == "untracked":
            continue
        if stage.partition(".")[0] not in names:
            names.append(stage.partition(".")[0])
        if "." in stage:
            names.append(stage)
    rows = []
    for name in names:
        inside = [[s for s in n.segments if s.stage == name or s.stage.startswith(name + ".")] for n in nodes]
        work = [sum(s.end_s - s.start_s for s in own if s.kind == WORK) for own in inside]
        wait = sum(s.end_s - s.start_s for own in inside for s in own if s.kind == WAIT)
        cut = sum(any(s.outcome == "truncated" for s in own) for own in inside)
        ordered = sorted(work)
        size = len(ordered)
        ranks = range(0, size, max(1, size // 100))
        mid = median(ordered)
        gpu_hours = sum((sum(work) + wait, 0.0)) * (nodes[0].gpus or 0) / 3600
        rows.append(
            Stage(
                stage=name,
                depth=name.count("."),
                num_nodes=size,
                num_truncated=cut,
                num_failed=0,
                median_s=mid,
                p90_s=ordered[int(0.9 * (size - 1))],
                max_s=ordered[-1],
                max_over_median=ordered[-1] / mid if mid else None,
                max_node=nodes[work.index(ordered[-1])].node,
                work_s=sum(work),
                wait_s=wait,
                gpu_hours=gpu_hours,
                cost=gpu_hours * PRICE,
                cdf=[*[(ordered[i], (i + 1) / size) for i in ranks][:100], (ordered[-1], 1.0)],
            )
        )
    return rows


def chain(nodes: list[Node]) -> list[Link]:
    alive = [node for node in nodes if node.outcome == "ok"]
    arrivals = [
        ("rendezvous", {n.node: sum(s.end_s - s.start_s for s in n.segments if s.stage in _BEFORE) for n in alive}),
        ("training_began", {n.node: n.own_end_s for n in alive}),
    ]
    links, before = [], 0.0
    for barrier, arrived in arrivals:
        slowest = max(alive, key=lambda n, arrived=arrived: arrived[n.node])
        release = arrived[slowest.node]
        others = [t for name, t in arrived.items() if name != slowest.node]
        worst = max(
            (s for s in slowest.segments if s.kind == WORK and before <= s.start_s < release),
            key=lambda s: s.end_s - s.start_s,
        )
        links.append(
            Link(
                barrier=barrier,
                node=slowest.node,
                rank=slowest.rank,
                from_s=before,
                arrival_s=release,
                release_s=release,
                num_participants=len(alive),
                others_median_arrival_s=median(others),
                stage=worst.stage,
                stage_s=worst.end_s - worst.start_s,
                excess_s=release - median(others),
                waited_gpu_hours=sum(release - t for t in others) * (nodes[0].gpus or 0) / 3600,
            )
        )
        before = release
    return links


def report(nodes: list[Node], *, job: str, slow: list[Node], expected: int, **parts: object) -> Report:
    """A report in which no part is empty."""
    links = chain(nodes)
    gpus = sum(node.gpus or 0 for node in nodes)
    end = max(node.end_s for node in nodes)
    held = sum((node.work_s + node.wait_s + node.untracked_s) * (node.gpus or 0) for node in nodes) / 3600
    waited = sum(node.wait_s * (node.gpus or 0) for node in nodes) / 3600
    total = sum(node.work_s + node.wait_s + node.untracked_s for node in nodes)
    work = sum(node.work_s for node in nodes)
    cut = sum(node.outcome == "truncated" for node in nodes)
    gain = links[0].excess_s or 0.0
    slow_stage = "environment_setup.install"
    stragglers = [
        Straggler(n.node, n.rank, "rendezvous", slow_stage, gain - 0.3 * i, 9.4 - 0.2 * i, 0.4 if i == 0 else 0.0, 1.2)
        for i, n in enumerate(slow)
    ]
    groups = [
        StragglerGroup(
            *(slow_stage, "rendezvous", [n.node for n in slow], [Place("rack", "r7", len(slow), len(slow) + 1)]),
            *(gain, gain * gpus / 3600, gain * gpus / 3600 * PRICE),
            *(gain, gain, gain * gpus / 3600, gain * gpus / 3600 * PRICE),
        )
    ]
    complete = Report(
        startup=Startup(
            *(job, 0, 0, "full", ZERO_NS, "training_began", "first_step"),
            *(len(nodes), sum(n.num_ranks for n in nodes), gpus, ">3000" if gpus > 3000 else "1-10"),
        ),
        verdict=(
            f"Training began after {end:.1f} s; {links[0].node} held {len(nodes) - 1:,} nodes back by {gain:.1f} s in "
            f"{slow_stage}, which cost {waited:,.1f} GPU-hours of waiting."
        ),
        headlines=[f"{len(nodes)} of {expected} nodes were heard: the missing ones may be the stragglers."]
        + ([f"{cut} node stopped before training began; it is left out of the medians."] if cut else []),
        overhead=Overhead(
            *(end + 4.25, end, end, end, work / total, sum(n.wait_s for n in nodes) / total),
            *(held, waited, held * PRICE, waited * PRICE, PRICE),
        ),
        stages=stage_rows(nodes),
        nodes=nodes,
        ranks=[],
        critical_chain=links,
        stragglers=stragglers,
        straggler_groups=groups,
        coverage=Coverage(len(nodes), expected, sum(n.num_ranks for n in nodes), expected * nodes[0].num_ranks, cut, 3),
        clock=Clock(nodes[0].node, 0.012, 0.0021, 1, [nodes[-1].node]),
        unobserved=["allocation", "Time in the queue: neither Slurm nor Kubernetes variables were there."],
        images=[_image(node.node, "fallback" if i == 0 and len(nodes) > 2 else "hot") for i, node in enumerate(nodes)],
        environments=[
            _environment(node.node, "installed" if i == 0 and len(nodes) > 2 else "restored")
            for i, node in enumerate(nodes)
        ],
        checkpoints=[_checkpoint(node.node) for node in nodes],
        facts=[
            Fact(
                "nccl",
                "model_initialization",
                "Init timings: total 1.93 s, bootstrap 0.40 s",
                1.93,
                nodes[0].node,
                "job.log:812",
            ),
            Fact(
                "pip",
                "environment_setup.install",
                "Successfully installed 111 packages",
                None,
                nodes[0].node,
                "job.log:77",
            ),
        ],
        share=Share(3, 3 * end, 21 * end, 3 / 21, 3 * held),
        startups=[
            Overview(
                job,
                i,
                0,
                "full" if i == 0 else "restart",
                ZERO_NS + i * 10**12,
                end * (1 - 0.1 * i),
                len(nodes),
                gpus,
                o,
            )
            for i, o in enumerate(("training_began", "failed", "training_began"))
        ],
        input=Input(2, 1_482_113, 20_144, 57_600, 12, {"not_json": 2, "truncated": 1}),
    )
    return replace(complete, **parts)  # type: ignore[arg-type]


def small(job: str = "moe-8x128", names: tuple[str, str, str] = ("gpu-a-0017", "gpu-a-0018", "gpu-b-0203")) -> Report:
    """Three nodes with two ranks each; the second installs slowly, the third was killed."""
    base = dict(zip(STAGES, (6.0, 1.5, 11.0, 0.6, 9.0, 0.8, 3.1, 0.0, 2.4, 0.7, 6.5, 4.1), strict=True))
    works = [base, base | {"environment_setup.install": 19.5, "first_step": 3.6}, base | {"image_loading.fetch": 12.2}]
    nodes = simulate(works, gpus=2, names=list(names))
    nodes[2] = truncated(nodes[2])
    return report(nodes, job=job, slow=[nodes[1]], expected=4)


def big(num_nodes: int = 1440) -> Report:
    """A job of 1,440 nodes. The last 1 % of the installs end at 92 s, the others by 60 s."""
    rng = random.Random(20251120)
    late = set(rng.sample(range(num_nodes), max(1, num_nodes // 100)))
    works = []
    for i in range(num_nodes):
        work = dict.fromkeys(STAGES, 0.0)
        work["image_loading.fetch"] = rng.uniform(9, 14)
        work["image_loading.mount"] = rng.uniform(0.3, 0.9)
        install = rng.gauss(36, 4)
        work["environment_setup.install"] = min(max(install, 22), 44) + (rng.uniform(28, 33) if i in late else 0)
        work["environment_setup.verify"] = rng.uniform(0.4, 1.2)
        work["model_initialization.import_torch"] = rng.uniform(2.2, 3.5)
        work["model_initialization.build"] = rng.uniform(3, 4)
        work["untracked"] = rng.uniform(0.2, 0.8)
        work["model_initialization.checkpoint_read"] = rng.lognormvariate(2.6, 0.12)
        work["first_step"] = rng.uniform(5, 6)
        works.append(work)
    nodes = simulate(works, gpus=8, names=[f"h800-{i // 32:02d}-{i % 32:02d}" for i in range(num_nodes)])
    slow = sorted((nodes[i] for i in late), key=lambda n: -n.work_s)
    return report(nodes, job="llm-pretrain-0719", slow=slow, expected=num_nodes + 3)


def empty() -> Report:
    """A log in which nothing could be measured."""
    return Report(
        startup=Startup("unknown", 0, 0, "full", 0, "truncated", "last_event", 0, 0, None, ""),
        verdict="Nothing was observed: no event of a startup is in the input.",
        headlines=[],
        overhead=Overhead(None, None, None, 0.0, None, None, None, None, None, None, None),
        stages=[Stage("queue", 0, 0, 0, 0, None, None, None, None, "", 0.0, 0.0, None, None, [])],
        nodes=[],
        ranks=[],
        critical_chain=[Link("training_began", "n0", -1, 0.0, 1.0, 1.0, 1, None, "", 0.0, None, None)],
        stragglers=[],
        straggler_groups=[],
        coverage=Coverage(0, None, 0, None, 0, 0),
        clock=Clock("", 0.0, None, 0, []),
        unobserved=["No stage was seen."],
        images=[],
        environments=[],
        checkpoints=[],
        facts=[],
        share=None,
        startups=[],
        input=Input(1, 0, 0, 0, 0, {}),
    )


HOSTILE = (
    "<script>document.documentElement.dataset.pwned='1'</script>",
    "</script><script>document.documentElement.dataset.pwned='2'</script><!--",
    '"><img src=x onerror="document.documentElement.dataset.pwned=\'3\'">',
    "' onmouseover='document.documentElement.dataset.pwned=4' x='",
    "</title></style><svg onload=\"document.documentElement.dataset.pwned='5'\">",
    "\u202egnp.exe\x00\ud800 &amp;",
)


def _image(node: str, mode: str) -> ImageStart:
    reason = "this kernel has no EROFS" if mode == "fallback" else "hot set 96.0 MiB"
    fetched = (5 << 20, 96 << 20, 0) if mode == "hot" else (0, 0, 412 << 20)
    return ImageStart(
        *(412 << 20, 0, *fetched, 41, 0.97 if mode == "hot" else None, "training_began"),
        *(node, "registry.example/train:7", "sha256:" + "ab" * 32, mode, reason, 0.41, 6, 12, 7),
    )


def _environment(node: str, mode: str) -> EnvironmentStart:
    why = ("driver", "refused: the driver here is 535, the snapshot's 550") if mode == "installed" else ("hit", "hit")
    restored = mode == "restored"
    return EnvironmentStart(
        *((540 << 20, 0, 4 << 20, 90 << 20, 0, 33) if restored else (0,) * 6),
        *(0.96 if restored else None, "training_began"),
        *(node, mode, *why, "c0" * 32, "sha256:" + "cd" * 32 if restored else "", "requirements.txt", "gpu-a-0001"),
        *("observed", "erofs-file" if restored else "", 0.21 if restored else 112.4),
        *((10_800.0, 112.2) if restored else (None, None)),
        *((42_007, 1_760 << 20, 1, 3) if restored else (0,) * 4),
        *(None, ""),
    )


def _checkpoint(node: str) -> CheckpointStart:
    return CheckpointStart(
        *(node, "hdfs://cluster/jobs/moe", "mounted", "", 0.38, "training_began"),
        *(11 << 30, 9 << 30, 2 << 30, 1 << 30, 0, 1, 3, 2, 4, 0, ""),
        [DataNode(f"10.0.0.{i}:9866", (9 << 30) // 4, 12.5, i == 3) for i in range(4)],
    )


def hostile() -> Report:
    """A log by an attacker who tries to run a script in the browser that opens the report."""
    script, close, image, attribute, svg, binary = HOSTILE
    report = small(job=close, names=(script, image, binary))
    nodes = [
        replace(
            node,
            last_stage=attribute,
            attrs={script: image, attribute: close},
            segments=[
                replace(seg, stage=f"{attribute}.{svg}" if i == 2 else seg.stage) for i, seg in enumerate(node.segments)
            ],
        )
        for node in report.nodes
    ]
    # Enough nodes to fold, so that the names also go through the embedded JSON and the search.
    nodes += [replace(nodes[0], node=f"{HOSTILE[i % len(HOSTILE)]}{i}", rank=10 + i) for i in range(40)]
    return replace(
        report,
        verdict=script + image,
        headlines=list(HOSTILE),
        nodes=nodes,
        stages=[replace(stage, stage=f"{stage.stage}{svg}", max_node=script) for stage in report.stages],
        ranks=[],
        critical_chain=[replace(link, barrier=script, stage=svg, node=image) for link in report.critical_chain],
        stragglers=[replace(one, node=script, stage=image, barrier=close) for one in report.stragglers],
        straggler_groups=[
            replace(group, stage=svg, nodes=list(HOSTILE), places=[Place(script, svg, 1, 2)])
            for group in report.straggler_groups
        ],
        images=[replace(image, image=script, reason=close, mode=svg, node=attribute) for image in report.images],
        environments=[
            replace(one, mode=svg, reason=close, node=attribute, builder=script, key=image, why_not=script)
            for one in report.environments
        ],
        checkpoints=[
            replace(one, node=attribute, uri=script, fallback=close, datanodes=[replace(one.datanodes[0], name=image)])
            for one in report.checkpoints
        ],
        facts=[replace(fact, source=script, text=image, where=close, node=attribute) for fact in report.facts],
        unobserved=list(HOSTILE),
        clock=replace(report.clock, reference_node=script, steps=list(HOSTILE)),
        startups=[replace(one, job=script, kind=image, outcome=svg) for one in report.startups],
        input=replace(report.input, skipped={script: 1, attribute: 2}),
    )
