"""How long the ranks of a large job take to connect, with a resolver that never answers.

Real TCPStore clients, many threads in few processes, in a network namespace. The arm with names has the hosts file that
`bootseer run --peers` gives a command. Curves: connect, a barrier, and a gather in which each client gets all keys.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

from harness import Benchmark, Must, Outcome

from bootseer.launch.command import with_hosts_file
from bootseer.mounts import kernel
from bootseer.peers.choice import Peer
from bootseer.peers.job import FOLDER
from bootseer.peers.names import RES_OPTIONS, HostsFile

_ADDRESS, _PORT = "10.77.0.1", 29_400
_GIVEN_UP_S = 30.0
"""Limit for clients that wait for the resolver."""
_FEW, _MANY = 100, 1_000
_CURVE = (10, 100, 300, 1_000, 2_000, 4_000)
_STAGES = ("connect", "barrier", "gather")


def measure(quick: bool) -> Outcome:
    rounds = 1 if quick else 3
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for number in (_FEW, _MANY):
            for arm in ("DNS", "RES_OPTIONS", "names"):
                found = _clients(number, arm, 1)
                samples.setdefault(f"{number} clients, {arm}", []).append(found["connect"])
    curve = {str(number): _clients(number, "names", 3) for number in (_CURVE[:4] if quick else _CURVE)}
    return Outcome(
        parameters={"rounds": rounds, "given_up_s": _GIVEN_UP_S, "lines_of_hosts": 2 * max(_CURVE)},
        samples=samples,
        unit="s",
        baselines={f"{number} clients, names": f"{number} clients, DNS" for number in (_FEW, _MANY)},
        must_reach=[
            Must("1,000 clients connect, names known", median(samples[f"{_MANY} clients, names"]), 2.0, "s"),
            Must("the same, asking DNS", median(samples[f"{_MANY} clients, DNS"]), 10.0, "s", at_least=True),
        ],
        details={"curve_s": curve},
        method="arms alternate; caches are warm; other programs may use the machine; curves are measured once",
    )


def _clients(number: int, arm: str, stages: int) -> dict[str, float]:
    """Seconds of each stage, from the common begin until the last client has ended it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
        env |= {FOLDER: folder} if arm == "names" else {}
        env |= {"RES_OPTIONS": RES_OPTIONS} if arm == "RES_OPTIONS" else {}
        words = [sys.executable, str(Path(__file__)), folder, str(number), str(stages)]
        ran = subprocess.run(["unshare", "-n", *words], env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{number} clients, {arm}: {ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def _in_namespace(folder: Path, number: int, stages: int) -> dict[str, float]:
    """In the network namespace: the server and all clients."""
    for words in (["link", "set", "lo", "up"], ["addr", "add", f"{_ADDRESS}/32", "dev", "lo"]):
        subprocess.run(["ip", *words], check=True)
    kernel.unshare_mounts()
    conf = folder / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\n")
    kernel.attach(kernel.clone_mount(conf), Path("/etc/resolv.conf").resolve())
    dead = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dead.bind(("127.0.0.1", 53))
    # The own node is last, so that each client searches the whole file.
    peers = [Peer(f"gpu{each}", ("x:1",), "", (f"10.78.{each >> 8}.{each & 255}",)) for each in range(1, max(_CURVE))]
    HostsFile(folder).add([*peers, Peer("gpu0", ("x:1",), "", (_ADDRESS,))])
    if (enter := with_hosts_file(dict(os.environ), None)) is not None:
        enter()
    processes = min(number, 8)
    context = multiprocessing.get_context("fork")
    begin, listening = context.Barrier(processes + 1), context.Event()
    ended: Any = context.SimpleQueue()
    server = context.Process(target=_serve, args=(listening,), daemon=True)
    server.start()
    listening.wait()
    share = [range(first, number, processes) for first in range(processes)]
    nodes = [context.Process(target=_node, args=(ranks, number, stages, begin, ended), daemon=True) for ranks in share]
    for node in nodes:
        node.start()
    found = {}
    for stage in _STAGES[:stages]:
        begin.wait()
        began_s = time.monotonic()
        collector = threading.Thread(target=lambda: [ended.get() for _ in nodes], daemon=True)
        collector.start()
        collector.join(_GIVEN_UP_S if stage == "connect" else None)
        found[stage] = round(time.monotonic() - began_s, 4)
        if collector.is_alive():  # the rest would wait as long
            break
    for each in (server, *nodes):
        each.kill()
    return found


def _serve(listening: Any) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(_ADDRESS, _PORT, is_master=True, wait_for_workers=False)
    listening.set()
    while store.num_keys() >= 0:
        time.sleep(3600)


def _node(ranks: range, number: int, stages: int, begin: Barrier, ended: Any) -> None:
    """The clients of one process, one thread each. Connecting holds the interpreter's lock, so those of one process
    connect one after the other; barrier and gather wait without the lock."""
    from torch.distributed import TCPStore

    threading.stack_size(512 << 10)
    stores: dict[int, TCPStore] = {}

    def connect(rank: int) -> None:
        stores[rank] = TCPStore(_ADDRESS, _PORT, is_master=False, wait_for_workers=False)

    def barrier(rank: int) -> None:
        if stores[rank].add("came", 1) == number:
            stores[rank].set("all", "1")
        stores[rank].wait(["all"])

    def gather(rank: int) -> None:
        stores[rank].set(f"key{rank}", f"{rank:064}")
        stores[rank].multi_get([f"key{each}" for each in range(number)])

    works: tuple[Callable[[int], None], ...] = (connect, barrier, gather)
    for work in works[:stages]:
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        begin.wait()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended.put(len(threads))


BENCHMARK = Benchmark("connections", "How long do ranks take to connect if the resolver does not answer?", measure)

if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        told = _in_namespace(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # threads still wait
