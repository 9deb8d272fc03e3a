"""Other tools for many nodes that pull one image: a pull-through mirror on one of them, and BitTorrent."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nodes_arms import Start, copy, run_container, today
from nodes_site import Script

_MIRROR_PORT = 5000
_PIECE = 1 << 20
_ANNOUNCE_S = 1
_NAME = "layout"
_IMPORTED = "localhost/team/job:1"


def mirror(start: Start, address: str) -> Script:
    """containerd on all nodes pulls through a registry on the first node, at `address`."""
    registry, _, name = start.origin.image.partition("/")
    script = today(start, f"{address}:{_MIRROR_PORT}/{name}")
    if start.number:
        return script
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(start.folder / "mirror")}},
        "http": {"addr": f"{address}:{_MIRROR_PORT}"},
        "proxy": {"remoteurl": f"http://{registry}"},
    }
    start.folder.mkdir(exist_ok=True)
    (start.folder / "mirror.yml").write_text(json.dumps(config))
    serve = f"docker-registry serve {start.folder}/mirror.yml </dev/null >{start.folder}/mirror.log 2>&1 &"
    until = (
        f"for _ in $(seq 400); do (exec 3<>/dev/tcp/{address}/{_MIRROR_PORT}) 2>/dev/null && break; sleep 0.05; done"
    )
    return replace(script, prepare=[*script.prepare, serve, until])


def torrent(start: Start, seeds: str) -> Script:
    """aria2 downloads the image's layers from the origin's and the other nodes' aria2, containerd imports them."""
    layers = start.folder / "torrent"
    layers.mkdir(parents=True)
    done = layers / "done"
    hook = layers / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {done}\n")
    hook.chmod(0o755)
    words = [*_aria2(layers), f"--on-bt-download-complete={hook}", "--seed-time=100", seeds]
    bring = f"{' '.join(words)} </dev/null >&2 & until [ -e {done} ]; do kill -0 $!; sleep 0.05; done"
    unpack = f"tar -C {layers}/{_NAME} -cf - . | ctr image import --index-name {_IMPORTED} -"
    script = today(start)
    steps = [["bash", "-ec", bring], ["bash", "-ec", unpack], *copy(start), run_container(start, _IMPORTED)]
    return replace(script, steps=steps)


@contextmanager
def seeding(layout: Path, folder: Path, address: str) -> Iterator[str]:
    """Seed an OCI layout at the origin, whose address this is; yields the torrent's path."""
    share = folder / "seed"
    share.mkdir()
    (share / _NAME).symlink_to(layout, target_is_directory=True)
    path = share / "image.torrent"
    with ThreadingHTTPServer((address, 0), _tracker()) as tracker:
        threading.Thread(target=tracker.serve_forever, daemon=True).start()
        path.write_bytes(_torrent(layout, f"http://{address}:{tracker.server_port}/announce"))
        words = [*_aria2(share), "--check-integrity=true", "--seed-ratio=0.0", str(path)]
        with (share / "log").open("wb") as log:
            server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield str(path)
        finally:
            server.terminate()
            server.wait()
            tracker.shutdown()


def _tracker() -> type[BaseHTTPRequestHandler]:
    """The torrent's tracker: tells clients about each other."""
    known: dict[bytes, None] = {}

    class Tracker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            known[socket.inet_aton(self.client_address[0]) + int(query["port"][0]).to_bytes(2, "big")] = None
            data = _bencoded({"interval": _ANNOUNCE_S, "min interval": _ANNOUNCE_S, "peers": b"".join(known)})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    return Tracker


def _aria2(folder: Path) -> list[str]:
    found = ["--enable-dht=false", "--enable-dht6=false", f"--bt-tracker-interval={_ANNOUNCE_S}"]
    quiet = ["--quiet=true", "--no-conf=true", "--file-allocation=none", "--bt-max-peers=0"]
    return ["aria2c", f"--dir={folder}", *found, *quiet]


def _torrent(layout: Path, tracker: str) -> bytes:
    """The description of a folder's files, as BitTorrent clients read it."""
    files = sorted(path for path in layout.rglob("*") if path.is_file())
    data = b"".join(path.read_bytes() for path in files)
    pieces = b"".join(hashlib.sha1(data[at : at + _PIECE]).digest() for at in range(0, len(data), _PIECE))  # noqa: S324
    rows = [{"length": path.stat().st_size, "path": list(path.relative_to(layout).parts)} for path in files]
    info = {"files": rows, "name": _NAME, "piece length": _PIECE, "pieces": pieces}
    return _bencoded({"announce": tracker, "info": info})


def _bencoded(value: object) -> bytes:
    match value:
        case int():
            return b"i%de" % value
        case str():
            return _bencoded(value.encode())
        case bytes():
            return b"%d:%s" % (len(value), value)
        case list():
            return b"l%se" % b"".join(map(_bencoded, value))
        case dict():
            return b"d%se" % b"".join(_bencoded(key) + _bencoded(value[key]) for key in sorted(value))
    raise TypeError(type(value))
