"""The HDFS of `checkpoint`, with the checkpoint in all its layouts, and the processes that run its arms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpoint_child import MIB, Job
from checkpoint_claims import Layouts
from checkpoint_content import DCP, MODEL, Content

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import Part, part_path
from bootseer.places import open_place
from hdfs_cluster import HdfsCluster

RATE_MBIT = 400
LINKS = 4
_PARITY_NODE = LINKS
BLOCK_BYTES = 16 * MIB
_DEADLINE_S = 300.0
_HERE = Path(__file__).absolute().parent
FOLDERS = {
    Layouts.ORDINARY: "/ordinary",
    Layouts.REPLICAS: "/replicas",
    Layouts.STRIPED: "/striped",
    Layouts.PARITY: "/parity",
}
CURVE = (2, 8)
"""Numbers of stripes for which a separate file is made; the layout has 4, and 1 is a plain file."""


@dataclass(frozen=True, slots=True)
class Done:
    """The results of the processes of one arm."""

    seconds: float
    """From the first process's begin to the last one's end."""
    cpu_s: float
    peak_bytes: int
    digests: Sequence[str]
    facts: Sequence[Mapping[str, Any]]


def run(
    module: str,
    arm: str,
    jobs: Sequence[Job],
    environment: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Done:
    """Run an arm, with concurrent processes, one for each job. `inside` is put in front of the command."""
    words = [*inside, sys.executable, str(_HERE / f"{module}.py"), arm]
    variables = {**os.environ, "BOOTSEER_CHECKPOINT_CACHE": "0", **(environment or {})}
    with ExitStack() as stack:
        children = []
        for job in jobs:
            child = stack.enter_context(
                subprocess.Popen(
                    [*words, json.dumps(asdict(job))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=variables,
                    text=True,
                )
            )
            stack.callback(child.kill)
            children.append(child)
        late = threading.Timer(_DEADLINE_S, lambda: [child.kill() for child in children])
        stack.callback(late.cancel)
        late.start()
        for child in children:
            assert child.stdout is not None
            while (line := child.stdout.readline()) and line != "ready\n":
                pass
        for child in children:
            assert child.stdin is not None
            if child.poll() is None:
                child.stdin.write("\n")
                child.stdin.flush()
        said = []
        for child in children:
            output, errors = child.communicate()
            if child.returncode:
                raise RuntimeError(f"{arm} fails: {errors.strip()[-2000:]}")
            said.append(json.loads(output.splitlines()[-1]))
    return Done(
        seconds=max(one["end"] for one in said) - min(one["begin"] for one in said),
        cpu_s=sum(one["cpu_s"] for one in said),
        peak_bytes=max(one["peak_bytes"] for one in said),
        digests=[one["digest"] for one in said],
        facts=[one["facts"] for one in said],
    )


class Storage:
    """The cluster and its files. They are written without a limit, which `shape` sets afterwards."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.content = content
        self.plain = [f"/plain/{i}" for i in range(LINKS)]
        """Files of `content.first_bytes`, each in one block, all on different DataNodes."""
        self._cluster = HdfsCluster(
            folder,
            num_datanodes=LINKS + 1,
            links=True,
            fast_detection=True,
            is_brief=False,
            # By default a node counts as overloaded that has twice the average of connections, and gets no block: that
            # is for large clusters, and happens among four nodes whenever one has just been written to.
            settings={"dfs.webhdfs.enabled": "true", "dfs.namenode.redundancy.considerLoad": "false"},
        )

    def __enter__(self) -> Storage:
        self._cluster.__enter__()
        try:
            self._write()
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cluster.__exit__(kind, error, at)

    @property
    def uri(self) -> str:
        return self._cluster.uri

    @property
    def conf(self) -> Path:
        """The configuration folder."""
        return self._cluster.folder / "conf"

    def job(self, path: str, length: int = 0, offset: int = 0) -> Job:
        return Job(uri=self.uri, path=path, offset=offset, length=length or self.content.model_bytes)

    def shape(self, mbit: int | None) -> None:
        """Limit all links; None lifts the limit."""
        for i in range(LINKS + 1):
            self._cluster.set_rate(i, mbit)

    def web_address(self, path: str) -> str:
        """The web server of a DataNode with the first block of a file."""
        node = self._cluster.where(path)[0].nodes[0]
        return self._cluster.datanode_http[self._cluster.nodes.index(node)]

    def placement(self, path: str) -> tuple[list[float], float]:
        """MiB of an ordinary file with one replica by DataNode, and the part of the four links that it can use at most.

        As if all its blocks could be read at the same time.
        """
        found: Counter[str] = Counter()
        for block in self._cluster.where(path):
            found[block.nodes[0]] += block.size_bytes
        amounts = [found[node] / MIB for node in self._cluster.nodes]
        return amounts, sum(amounts) / max(amounts) / LINKS

    def stripes(self, path: str) -> list[list[int]]:
        """The DataNode number of each part of a striped file, by segment."""
        with closing(open_place(f"{self.uri}/")) as place:
            head = Files(place).head(path.lstrip("/"))
            assert head is not None, f"{path} is not striped"
            return [[self._node_of(path, head.id, part) for part in segment.parts] for segment in head.segments]

    def _node_of(self, path: str, head_id: str, part: Part) -> int:
        (block,) = self._cluster.where(f"/{part_path(path.lstrip('/'), head_id, part.name)}")
        return self._cluster.nodes.index(block.nodes[0])

    def remove(self, *paths: str) -> None:
        from hdfs_native import Client

        for path in paths:
            Client(self.uri).delete(path, True)

    def _write(self) -> None:
        # Files without parity are on four nodes: the fifth is started afterwards.
        self._cluster.kill(_PARITY_NODE)
        self._cluster.wait_until_dead(_PARITY_NODE)
        model = self.content.model
        for i, path in enumerate(self.plain):
            job = replace(self.job("", self.content.first_bytes), paths=[path], local=str(model))
            # A writer on the host of a DataNode would write to it, not over a link.
            run("checkpoint_plain", "native_write", [job], inside=self._cluster.inside(i, []))
        for layout, replication in ((Layouts.ORDINARY, 1), (Layouts.REPLICAS, 2)):
            for local in (model, *sorted((self.content.folder / DCP).iterdir())):
                path = f"{FOLDERS[layout]}/{local.relative_to(self.content.folder)}"
                size = local.stat().st_size
                job = Job(uri=self.uri, paths=[path], length=size, local=str(local))
                job = replace(job, block_bytes=BLOCK_BYTES, replication=replication)
                run("checkpoint_plain", "native_write", [job])
        self.put(FOLDERS[Layouts.STRIPED], self.content.folder, 4)
        for number in CURVE:
            self.put(f"/curve-{number}", model, number)
        self._cluster.restart(_PARITY_NODE)
        self.put(FOLDERS[Layouts.PARITY], self.content.folder, 4, parity=True)

    def put(self, path: str, local: Path, stripes: int, *, parity: bool = False) -> Done:
        """Publish a local file or folder in stripes."""
        job = Job(uri=self.uri, path=path, local=str(local), stripes=stripes, parity=parity)
        return run("checkpoint_arms", "put", [job])


def model_in(layout: str) -> str:
    """The path of the safetensors file in a layout."""
    return f"{FOLDERS[layout]}/{MODEL}"


def dcp_in(layout: str) -> str:
    """The path of the DCP checkpoint in a layout."""
    return f"{FOLDERS[layout]}/{DCP}"
