"""What does it cost a node to serve its peers, and are two interfaces twice as fast as one?

The server: one process, 8 and 64 connections (its limit of 32 is raised for it), a file in memory, requests for one
block and for what a node requests on average. The client discards the data (`MSG_TRUNC`), which costs little. The
baselines are nginx, if it is installed, and threads that only call sendfile. The interfaces: a service in a network
namespace with two links, each limited by the kernel's tbf; a fetcher on the other side pulls a block file, over one
link and over both. The send limit: one connection to a server with a limit, alone and beside idle connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import node
from harness import ROOT, Benchmark, Must, Outcome
from link import run

_MIB = 1 << 20
_CONNECTIONS = 64
_IDLE = 28
_BLOCK = 256 << 10
_USUAL = 1 << 20
"""In the benchmark `nodes`, eight nodes send each other 3.2 GB in 3,265 requests."""
_CASES = ((8, _BLOCK), (_CONNECTIONS, _BLOCK), (_CONNECTIONS, _USUAL))
"""Connections, and bytes of a request."""
_FILE_MIB = 256
_LINK_MBIT = 100
_PULLED_MIB = 48
_BARE = struct.Struct("!QQ")
_IDENTITY = "ab" * 32
_SECRET = b"s" * 32
_METHOD = (
    "the server's processor time and peak memory are those of its whole process, including the service's imports, "
    "for all rounds together; connections request a range at a time without pauses, over loopback. "
    "Rounds alternate with those of nginx (one worker, sendfile), and of threads that only call sendfile for each "
    "request of 16 bytes. The links have "
    f"{_LINK_MBIT} Mbit/s each (tbf) and no latency; arms alternate, each pull into a new cache. "
    f"'limited': one connection to a server with a limit of 1 GiB/s, alone and then beside {_IDLE} idle ones"
)


def measure(quick: bool) -> Outcome:
    if os.geteuid():
        raise RuntimeError("the benchmark of peers' servers needs root: it makes network namespaces")
    rounds = 2 if quick else 5
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        rates, costs = _load(Path(folder), rounds)
        pulled = _links(Path(folder), rounds)
    one, both = (min(times) for times in pulled.values())
    served = {name.removeprefix("server, "): cost for name, cost in costs.items() if name.startswith("server, ")}
    return Outcome(
        parameters={"connections": _CONNECTIONS, "link_mbit": _LINK_MBIT, "pulled_mib": _PULLED_MIB, "rounds": rounds},
        samples={name: [_PULLED_MIB / taken for taken in times] for name, times in pulled.items()},
        unit="MiB/s",
        baselines={"two links": "one link"},
        must_reach=[
            *(
                Must(f"served in a second of processor time, {case}", rounds / cost["cpu_s"], 3.0, "GiB", at_least=True)
                for case, cost in served.items()
            ),
            Must("the server's peak memory", max(cost["peak_bytes"] for cost in served.values()) / _MIB, 40.0, "MiB"),
            Must("two links against one (best of each)", one / both, 1.9, "x", at_least=True),
            Must("with a limit, beside idle connections / alone", _shared(rates), 0.8, "x", at_least=True),
        ],
        details={"loopback_mib_s": rates, "costs": costs},
        method=_METHOD,
    )


def _load(folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """MiB/s of each round of each server, and the total costs of each: processor seconds, peak memory in bytes."""
    data = folder / "data"
    with data.open("wb") as file:
        for _ in range(_FILE_MIB):
            file.write(os.urandom(_MIB))
    rates: dict[str, list[float]] = {}
    costs: dict[str, dict[str, float]] = {}
    for connections, length in _CASES:
        case = f"{connections} connections, {length >> 10} KiB"
        with contextlib.ExitStack() as stack:
            servers = {
                f"server, {case}": (stack.enter_context(_loaded("load", data)), _ask),
                f"sendfile alone, {case}": (stack.enter_context(_loaded("bare", data)), _ask_bare),
            }
            if shutil.which("nginx"):
                servers[f"nginx, {case}"] = stack.enter_context(_nginx(folder)), _ask_http
            for _ in range(rounds):
                for name, (server, ask) in servers.items():
                    rates.setdefault(name, []).append(_ask_all(server.address, ask, length, connections))
        costs |= {name: server.cost for name, (server, _) in servers.items()}
    return rates | _limited(data, rounds), costs


def _limited(data: Path, rounds: int) -> dict[str, list[float]]:
    """MiB/s of one connection to a server with a limit, alone and beside idle connections."""
    from bootseer.peers.client import Client

    rates = {}
    with _loaded("limited", data) as limited, contextlib.ExitStack() as idle:
        for name in ("limited, alone", "limited, beside idle ones"):
            rates[name] = [_ask_all(limited.address, _ask, _BLOCK, 1) for _ in range(rounds)]
            for _ in range(_IDLE):
                client = Client(_SECRET)
                idle.callback(client.close)
                client.probe(limited.address)
    return rates


def _shared(rates: dict[str, list[float]]) -> float:
    return median(rates["limited, beside idle ones"]) / median(rates["limited, alone"])


@dataclass
class _Loaded:
    address: str
    cost: dict[str, float] = field(default_factory=dict)
    """Known after its end."""


@contextlib.contextmanager
def _loaded(mode: str, data: Path) -> Iterator[_Loaded]:
    command = [sys.executable, __file__, mode, str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        loaded = _Loaded(process.stdout.readline().strip())
        try:
            yield loaded
        finally:
            process.terminate()
            loaded.cost = json.loads(process.stdout.readline())


@contextlib.contextmanager
def _nginx(folder: Path) -> Iterator[_Loaded]:
    """Serves the folder with one worker, whose processor time is the cost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    temporary = " ".join(f"{kind}_temp_path {folder}/nginx;" for kind in ("client_body", "proxy", "fastcgi"))
    config = folder / "nginx.conf"
    config.write_text(
        f"user root; daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        f"events {{}}\nhttp {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; {temporary}\n"
        f"server {{ listen {address}; root {folder}; }} }}\n"
    )
    with subprocess.Popen(["nginx", "-p", folder, "-e", folder / "nginx.log", "-c", config]) as process:
        try:
            while not (workers := list(node.descendants(process.pid))):
                time.sleep(0.1)
            before_s = node.cpu_s(workers[0])
            loaded = _Loaded(address)
            yield loaded
            loaded.cost = {"cpu_s": node.cpu_s(workers[0]) - before_s}
        finally:
            process.terminate()


def _ask_all(address: str, ask: Callable[[str, int, int, int], None], length: int, connections: int) -> float:
    """MiB/s of all connections together, over 1 GiB, in requests of `length` bytes."""
    num_each = (1 << 30) // length // connections
    began_s = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        for asked in [threads.submit(ask, address, number, num_each, length) for number in range(connections)]:
            asked.result()
    return 1024 / (time.perf_counter() - began_s)


def _starts(number: int, num_each: int, length: int) -> Iterator[int]:
    """Where the requests of a connection begin."""
    for at in range(num_each):
        yield (number * num_each + at) * length % (_FILE_MIB * _MIB)


def _ask(address: str, number: int, num_each: int, length: int) -> None:
    from bootseer.peers.choice import Level
    from bootseer.peers.client import Client
    from bootseer.peers.protocol import ANSWER, Request

    connection, _ = Client(_SECRET)._connect(address, 30.0)
    connection.sock.settimeout(60.0)
    for start in _starts(number, num_each, length):
        connection.send(connection.signer.sign(Request(_IDENTITY, start, length, Level.GLOBAL, "m")))
        connection.receive(ANSWER)
        left = length - len(connection._received)
        connection._received = b""
        _throw_away(connection.sock, left)
    connection.sock.close()


def _ask_http(address: str, number: int, num_each: int, length: int) -> None:
    with _connected(address) as sock:
        for start in _starts(number, num_each, length):
            sock.sendall(b"GET /data HTTP/1.1\r\nHost: a\r\nRange: bytes=%d-%d\r\n\r\n" % (start, start + length - 1))
            received = b""
            while not (end := received.find(b"\r\n\r\n") + 4) > 4:
                received += sock.recv(4096)
            assert received.startswith(b"HTTP/1.1 206"), received
            _throw_away(sock, length - len(received) + end)


def _ask_bare(address: str, number: int, num_each: int, length: int) -> None:
    with _connected(address) as sock:
        for start in _starts(number, num_each, length):
            sock.sendall(_BARE.pack(start, length))
            _throw_away(sock, length)


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def _throw_away(sock: socket.socket, left: int) -> None:
    into = bytearray(_BLOCK)
    while left:
        left -= sock.recv_into(into, min(left, _BLOCK), socket.MSG_TRUNC)


def _serve_bare(path: str) -> None:
    """In a child process: a thread per connection sends ranges of the file."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)

    def serve(sock: socket.socket) -> None:
        with sock, Path(path).open("rb") as file:
            while received := sock.recv(_BARE.size):
                at, length = _BARE.unpack(received)
                end = at + length
                while at < end:
                    at += os.sendfile(sock.fileno(), file.fileno(), at, end - at)

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    before = resource.getrusage(resource.RUSAGE_SELF)
    threading.Thread(target=accept, daemon=True).start()
    _tell_cost(listening, before)


def _tell_cost(listening: socket.socket, before: resource.struct_rusage) -> None:
    """Print the address, wait for SIGTERM, print the costs of the process."""
    print(f"127.0.0.1:{listening.getsockname()[1]}", flush=True)
    signal.sigwait({signal.SIGTERM})
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu_s": cpu_s, "peak_bytes": node.peak_bytes(os.getpid())}), flush=True)


def _serve_load(path: str, max_rate: int | None = None) -> None:
    """In a child process: serve the file until SIGTERM, then print the costs."""
    from bootseer.peers import server, service  # the service's imports use memory too

    assert service
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server.MAX_CONNECTIONS = _CONNECTIONS  # type: ignore[misc]

    fd = os.open(path, os.O_RDONLY)  # as of a cached file

    class File:
        size_bytes = _FILE_MIB * _MIB

        @contextlib.contextmanager
        def opened(self) -> Iterator[int]:
            yield fd

        def here(self, first: int, blocks: int) -> int:
            return blocks

        def wait_for(self, *_: object) -> Iterator[None]:
            return iter(())

    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    serving = server.Server([listening], _SECRET, {_IDENTITY: File()}.get, max_rate=max_rate)
    _tell_cost(listening, resource.getrusage(resource.RUSAGE_SELF))
    assert serving.served.bytes_sent, "the process was asked for something"


class _TwoLinks:
    """A network namespace with two links to this one, both limited in its sending direction."""

    def __init__(self) -> None:
        self._name = f"peers-{os.getpid()}"

    def __enter__(self) -> _TwoLinks:
        run("ip", "netns", "add", self._name)
        try:
            for number in range(2):
                near, far, net = f"pn{os.getpid()}.{number}", f"rail{number}", f"198.19.77.{4 * number}"
                base = net.rpartition(".")[0]
                run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self._name)
                run("ip", "address", "add", f"{base}.{4 * number + 1}/30", "dev", near)
                run("ip", "link", "set", near, "up")
                run("ip", "-n", self._name, "address", "add", f"{base}.{4 * number + 2}/30", "dev", far)
                run("ip", "-n", self._name, "link", "set", far, "up")
                limit = ["tbf", "rate", f"{_LINK_MBIT}mbit", "burst", "128kb", "latency", "100ms"]
                run("tc", "-n", self._name, "qdisc", "replace", "dev", far, "root", *limit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        run("ip", "netns", "delete", self._name)

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._name, *command]


def _links(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each pull, over one link and over both."""
    from bootseer.blocks.index import Index
    from bootseer.blocks.writer import BlockWriter
    from bootseer.store.file import FileStore

    store = FileStore(folder / "store")
    with BlockWriter(store, block_size=_BLOCK, threads=1) as writer:
        for _ in range(_PULLED_MIB):
            writer.write(os.urandom(_MIB))
        written = writer.finish()
    index = Index.parse(b"".join(store.read(written.index_name)))
    (folder / "index").write_bytes(index.encode())
    took: dict[str, list[float]] = {"one link": [], "two links": []}
    with _TwoLinks() as links, _serving(links, folder) as addresses:
        assert len(addresses) == 2, addresses  # the service uses both by default
        for number in range(rounds + 1):
            for name in took if number % 2 else reversed(took):
                seconds = _pull(folder, index, addresses[: 1 if name == "one link" else 2], f"{name}{number}")
                if number:  # the first round is discarded
                    took[name].append(seconds)
    return took


@contextlib.contextmanager
def _serving(links: _TwoLinks, folder: Path) -> Iterator[list[str]]:
    command = links.inside(sys.executable, __file__, "serve", str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            yield json.loads(service.stdout.readline())
        finally:
            service.terminate()


def _serve(path: str) -> None:
    """In a child process in the namespace: the service of a node with the whole file."""
    from bootseer.blocks.index import Index
    from bootseer.cache.cache import Cache
    from bootseer.fetch.fetcher import Fetcher
    from bootseer.peers.interfaces import chosen
    from bootseer.peers.job import JobPeers
    from bootseer.peers.rendezvous import Rendezvous
    from bootseer.peers.service import Limits, Service
    from bootseer.store.file import FileStore

    folder = Path(path)
    index = Index.parse((folder / "index").read_bytes())
    cached = Cache(folder / "full").open(index)
    fetcher = Fetcher()
    fetcher.add(index, FileStore(folder / "store"), cached)
    fetcher.pull_all()
    fetcher.close()
    source = Rendezvous(str(folder / "meet"), "bench", "full", "", chosen([]), _SECRET)
    service = Service(folder / "peers", source, Limits(before=None))
    JobPeers.open(folder / "peers").register_blocks(index.identity, str(folder / "store"), False, folder / "full")
    assert source.own is not None
    addresses = json.dumps(source.own.addresses)
    service.run(lambda: print(addresses, flush=True))


def _pull(folder: Path, index: object, addresses: list[str], name: str) -> float:
    from bootseer.blocks.index import Index
    from bootseer.cache.cache import Cache
    from bootseer.fetch.fetcher import Fetcher
    from bootseer.peers.choice import Peer
    from bootseer.peers.job import JobPeers
    from bootseer.peers.origins import PeerGroup
    from bootseer.store.file import FileStore

    assert isinstance(index, Index)
    job = JobPeers.create(folder / f"asking {name}", _SECRET)
    job.write_members("asking", [Peer("full", tuple(addresses))])
    group = PeerGroup(job)
    fetcher = Fetcher()
    with contextlib.closing(Cache(folder / f"cache {name}").open(index)) as cached:
        peers = group.file(index, str(folder / "store"), False, folder / f"cache {name}")
        fetcher.add(index, FileStore(folder / "store"), cached, peers=peers)
        began_s = time.perf_counter()
        fetcher.pull_all()
        taken_s = time.perf_counter() - began_s
        stats = fetcher.stats()
        fetcher.close()
    group.close()
    assert stats.peer_bytes == index.size_bytes, "all of it comes from the peer"
    return taken_s


BENCHMARK = Benchmark(
    name="peer_server",
    question="What does it cost a node to serve its peers, and are two interfaces twice as fast as one?",
    measure=measure,
)

if __name__ == "__main__":
    limited = partial(_serve_load, max_rate=1 << 30)
    {"load": _serve_load, "limited": limited, "bare": _serve_bare, "serve": _serve}[sys.argv[1]](sys.argv[2])
