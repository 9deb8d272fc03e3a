"""How fast a checkpoint is read from HDFS and written to it.

A real HDFS whose DataNodes have one link each, limited to 400 Mbit/s or unlimited, and other clients in the same run.
`_METHOD`, which is part of the result file, describes the method; `checkpoint_claims` has the goals.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_child import MIB, Job
from checkpoint_claims import CLAIMED, Layouts, Names, claims, ranks, stripes, unshaped
from checkpoint_cluster import CURVE, LINKS, RATE_MBIT, Done, Storage, dcp_in, model_in, run
from checkpoint_content import Content, make
from checkpoint_libhdfs import Libhdfs
from harness import ROOT, Benchmark, Left, Outcome

_ROUNDS = 3
_RANKS = (1, 2, 4, 8)
_PROCESS_S = 4.0
_SHAPED_MIBPS = 110.0
_UNSHAPED_MIBPS = 500.0
_METHOD = (
    "one HDFS (3.3.6) with five DataNodes, each in a network namespace behind a veth pair limited by the kernel's "
    "tbf in both directions, and a client on the other side of all links. Everything runs on the same processors; "
    "what DataNodes serve is in their page cache. Each arm is a new process with a new client, which connects and "
    "reads the root; the time is from opening the file until the last byte is in the process's allocated memory. "
    "There is no node cache (except for 'warm node cache', which has the whole file), and each arm through FUSE has"
    " a new mount. Afterwards, what was read is compared with what was written. The file is a safetensors file of "
    "random bytes in several layouts: 'ordinary' has blocks of 16 MiB with one or two replicas, placed by the "
    "NameNode; '4 stripes' and '4+1 stripes' have parts of 64 MiB; all but the parity are on four of the DataNodes."
    " The NameNode ignores load when it places blocks. 'The links' are four streams of hdfs-native, each of a file "
    "in one block on a different DataNode. Arms bound to one link read the beginning of the file, or load the first"
    " tensors. FUSE is read like dd bs=4M, the warm cache in reads of 64 MiB; DCP and safetensors load all tensors."
    " Baselines write from memory, BootSeer from a local file; 'write' counts the user's bytes, not the parity. The"
    " order of the arms is reversed in every other round. '4+1 stripes' are on five nodes, so their reads use a "
    "fifth link, which 'the links' do not include. The first round measures all arms, the others only those with "
    "claims"
)


@dataclass(frozen=True, slots=True)
class _Arm:
    """One way to read or write."""

    name: str
    module: str
    arm: str
    jobs: Sequence[Job]
    """One for each process."""
    digests: Sequence[str] = ()
    """Expected digest of what each process reads."""
    environment: Mapping[str, str] | None = None
    moved_bytes: int = 0
    only: int | None = None
    """Measured only with links of this limit in Mbit/s; 0: only without a limit; None: both."""
    after: Callable[[], None] = lambda: None


def measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    """All arms in the first round; in later rounds only those with claims."""
    if os.geteuid():
        raise RuntimeError("the checkpoint benchmark needs root: it makes network namespaces and mounts")
    tensor_bytes, plain_bytes = (256 * MIB, 64 * MIB) if quick else (1024 * MIB, 256 * MIB)
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    libhdfs = Libhdfs(ROOT / ".hadoop" / "libhdfs")
    left_out = {Names.PYARROW: reason, Names.FSSPEC_PYARROW: reason} if (reason := libhdfs.bring()) else {}
    found: dict[str, list[float]] = defaultdict(list)
    details: dict[str, list[Done]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=cache) as text:
        folder = Path(text)
        (folder / "content").mkdir()
        content = make(folder / "content", tensor_bytes, plain_bytes)
        with Storage(folder, content) as storage:
            arms = [*_plain(storage), *_bootseer(storage, folder), *_writes(storage), *_curves(storage)]
            if not left_out:
                arms += _pyarrow(storage, libhdfs)
            amounts, placement = storage.placement(model_in(Layouts.ORDINARY))
            parameters = {
                "file_mib": content.model_bytes / MIB,
                "plain_mib": plain_bytes / MIB,
                "rate_mbit": RATE_MBIT,
                "links": LINKS,
                "ordinary_mib_by_node": amounts,
                "ordinary_can_use": placement,
                "nodes_of_parts": {
                    layout: storage.stripes(model_in(layout)) for layout in (Layouts.STRIPED, Layouts.PARITY)
                },
            }
            all_rounds = [_Round(arms, number) for number in range(rounds or (1 if quick else _ROUNDS))]
            left = Left([one.expected_s() for one in all_rounds])
            for number, one in enumerate(all_rounds, 1):
                print(f"  {left}", flush=True)
                for name, arm, done in one.run(storage):
                    details[name].append(done)
                    found[name].append(arm.moved_bytes / MIB / done.seconds)
                    print(f"  {name}: {found[name][-1]:.1f} MiB/s", flush=True)
                left.made_one()
                yield Outcome(
                    parameters={**parameters, "rounds": number, "of_rounds": len(all_rounds)},
                    samples=found,
                    unit="MiB/s",
                    must_reach=claims(found, placement),
                    details={"left_out": left_out, **{name: _details(of_arm) for name, of_arm in details.items()}},
                    method=_METHOD,
                )


@dataclass(frozen=True, slots=True)
class _Round:
    """All arms with limited links, then without a limit; in reverse order in every other round."""

    arms: Sequence[_Arm]
    number: int

    def run(self, storage: Storage) -> Iterator[tuple[str, _Arm, Done]]:
        for mbit in (RATE_MBIT, None):
            storage.shape(mbit)
            for name, arm in self._wanted(mbit):
                yield name, arm, _run(arm)

    def expected_s(self) -> float:
        """Expected duration on two cores: transferring the bytes, and starting and ending the processes."""
        return sum(
            _PROCESS_S + arm.moved_bytes / MIB / (_SHAPED_MIBPS if mbit else _UNSHAPED_MIBPS)
            for mbit in (RATE_MBIT, None)
            for _, arm in self._wanted(mbit)
        )

    def _wanted(self, mbit: int | None) -> Iterator[tuple[str, _Arm]]:
        for arm in self.arms if self.number % 2 == 0 else reversed(self.arms):
            name = arm.name if mbit else unshaped(arm.name)
            if arm.only in (None, mbit or 0) and (self.number == 0 or name in CLAIMED):
                yield name, arm


def _plain(storage: Storage) -> list[_Arm]:
    """Readers without BootSeer."""
    content, length = storage.content, storage.content.first_bytes
    whole = storage.job(model_in(Layouts.ORDINARY))
    part = replace(whole, length=length)
    web = replace(part, address=storage.web_address(part.path))
    links = replace(whole, paths=storage.plain, length=LINKS * length)
    tensors = Job(uri=storage.uri, path=dcp_in(Layouts.ORDINARY), length=length)
    beginning = [content.digest(0, length)]
    all_links = [content.digest(0, length, LINKS)]
    module = "checkpoint_plain"
    return [
        _Arm(Names.LINKS, module, "native_streams", [links], all_links, moved_bytes=links.length),
        _Arm(Names.NATIVE, module, "native_stream", [part], beginning, moved_bytes=length),
        _Arm(Names.RANGES, module, "native_ranges", [whole], _whole(content), moved_bytes=content.model_bytes),
        _Arm(Names.WEBHDFS, module, "webhdfs", [web], beginning, moved_bytes=length),
        _Arm(Names.FSSPEC, module, "native_dcp", [tensors], [content.first_digest], moved_bytes=length),
    ]


def _pyarrow(storage: Storage, libhdfs: Libhdfs) -> list[_Arm]:
    content, length, module = storage.content, storage.content.first_bytes, "checkpoint_plain"
    job = storage.job(model_in(Layouts.ORDINARY), length)
    digests = [content.digest(0, length)]
    tensors = Job(uri=storage.uri, path=dcp_in(Layouts.ORDINARY), length=length)
    loaded = [content.first_digest]
    environment = libhdfs.environment(storage.conf)
    return [
        _Arm(Names.PYARROW, module, "pyarrow_stream", [job], digests, environment, length),
        _Arm(Names.FSSPEC_PYARROW, module, "pyarrow_dcp", [tensors], loaded, environment, length),
    ]


def _bootseer(storage: Storage, folder: Path) -> list[_Arm]:
    """Each way to read, in each layout."""
    content, module, arms = storage.content, "checkpoint_arms", []
    for layout in (Layouts.ORDINARY, Layouts.REPLICAS, Layouts.STRIPED, Layouts.PARITY):
        model = storage.job(model_in(layout))
        arms += [
            _Arm(f"{layout}: direct", module, "direct", [model], _whole(content), moved_bytes=content.model_bytes),
            _Arm(f"{layout}: FUSE", module, "fuse", [model], _whole(content), moved_bytes=content.model_bytes),
        ]
    for layout in (Layouts.ORDINARY, Layouts.STRIPED, Layouts.PARITY):
        model, loaded = storage.job(model_in(layout)), [content.tensors_digest]
        tensors = Job(uri=storage.uri, path=dcp_in(layout), length=content.tensor_bytes)
        arms += [
            _Arm(f"{layout}: DCP", module, "dcp", [tensors], loaded, moved_bytes=content.tensor_bytes),
            _Arm(f"{layout}: safetensors", module, "safetensors", [model], loaded, moved_bytes=content.tensor_bytes),
        ]
    warm = replace(storage.job(model_in(Layouts.STRIPED)), local=str(folder))
    arms.append(
        _Arm(Names.FUSE_WARM, module, "fuse_warm", [warm], _whole(content), moved_bytes=content.model_bytes, only=0)
    )
    return arms


def _writes(storage: Storage) -> list[_Arm]:
    content, new, one = storage.content, "/new", storage.content.first_bytes
    native = Job(uri=storage.uri, paths=[f"{new}/0"], length=one)
    four = replace(native, paths=[f"{new}/{i}" for i in range(LINKS)], length=LINKS * one)
    put = Job(uri=storage.uri, path=f"{new}/put", local=str(content.model), stripes=4)

    def remove() -> None:
        storage.remove(new)

    arms = [
        _Arm(Names.WRITE_ONE, "checkpoint_plain", "native_write", [native], moved_bytes=one, after=remove),
        _Arm(Names.WRITE_FOUR, "checkpoint_plain", "native_write", [four], moved_bytes=four.length, after=remove),
    ]
    for layout, job in ((Layouts.STRIPED, put), (Layouts.PARITY, replace(put, parity=True))):
        name, size = f"write: {layout}", content.model_bytes
        arms.append(_Arm(name, "checkpoint_arms", "put", [job], moved_bytes=size, after=remove))
    return arms


def _curves(storage: Storage) -> list[_Arm]:
    """By the number of stripes, and by the number of processes that read one part each; only with limited links."""
    content, module, size = storage.content, "checkpoint_arms", storage.content.model_bytes
    one = storage.job(storage.plain[0], storage.content.first_bytes)
    jobs = {stripes(1): [one], **{stripes(number): [storage.job(f"/curve-{number}")] for number in CURVE}}
    for number in _RANKS:
        ends = [size * rank // number for rank in range(number + 1)]
        path = model_in(Layouts.STRIPED)
        jobs[ranks(number)] = [storage.job(path, end - start, start) for start, end in pairwise(ends)]
    arms = []
    for name, of_arm in jobs.items():
        digests = [content.digest(job.offset, job.length) for job in of_arm]
        moved = sum(job.length for job in of_arm)
        arms.append(_Arm(name, module, "direct", of_arm, digests, moved_bytes=moved, only=RATE_MBIT))
    return arms


def _whole(content: Content) -> list[str]:
    return [content.digest(0, content.model_bytes)]


def _run(arm: _Arm) -> Done:
    try:
        done = run(arm.module, arm.arm, arm.jobs, arm.environment)
    except RuntimeError as error:
        raise RuntimeError(f"{arm.name}: {error}") from error
    finally:
        arm.after()
    if arm.digests and list(done.digests) != list(arm.digests):
        raise RuntimeError(f"{arm.name} has read something else than what was written")
    return done


def _details(of_arm: Sequence[Done]) -> Mapping[str, Any]:
    """Other figures: medians, and the statistics of the last run."""
    return {
        "seconds": median(done.seconds for done in of_arm),
        "cpu_s": median(done.cpu_s for done in of_arm),
        "peak_mib": median(done.peak_bytes for done in of_arm) / MIB,
        "said": of_arm[-1].facts[0],
    }


BENCHMARK = Benchmark(
    "checkpoint",
    "How fast is a checkpoint read from HDFS and written to it, relative to its links?",
    by_rounds=measure,
)
