"""Converted images for containerd: which are known, where their layers are mounted, and when that ends.

    <root>/images/<hex>.json    what is needed to mount an image again after a boot: see `_Known`
    <root>/images/<hex>/        where all of it is mounted; containers mount its layers

An image is mounted once on a node, for all its containers, by a program of its own (this module as a script): mount
daemons are forked, which a process with threads cannot do, and they outlive the snapshotter. Containers get the layers
and not the tree, since the kernel stacks file systems only two deep, and EROFS from a file counts as one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from bootseer.artifact.loading import Loading
from bootseer.artifact.places import own_folder
from bootseer.artifact.signatures import Signatures
from bootseer.errors import BootseerError, PermanentError, TransientError, UsageError
from bootseer.image.document import ImageDocument
from bootseer.image.mounting.found import find
from bootseer.image.mounting.mounted import unmount
from bootseer.image.mounting.request import Request
from bootseer.image.reference import Place, Reference, parse_reference, store_uri
from bootseer.io import locks
from bootseer.logs import logger
from bootseer.mounts import kernel
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.state import MountState, Runtime

_LOG = logger(__name__)
_DIGEST_LABEL = "containerd.io/snapshot/cri.manifest-digest"
_REF_LABEL = "containerd.io/snapshot/cri.image-ref"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_DECIDE_S = 1.0
_UNKNOWN_S = 10.0
"""For how long an image that no store has is not looked for again: the layers of one pull."""
_MOUNT_S = 120.0
_LOCK_S = 2 * _MOUNT_S


@dataclass(frozen=True, slots=True)
class Settings:
    """How images come to this node. All of it is handed on to the program that mounts."""

    cache: str
    runtime: str
    store: str = ""
    """Where converted images are; empty: in each image's own repository."""
    plain_http: bool = False
    loading: str = "auto"
    workload: str = ""
    trusted_keys: str = ""
    record_s: float = 60.0
    """When the start of an image's first container counts as over, and with it the record of what it reads."""


class Layer(NamedTuple):
    """A layer of a converted image, and all below it."""

    name: str
    """As the table of snapshots has it: digest and number of layers."""
    digest: str


class _Known(msgspec.Struct):
    digest: str
    store: str
    identities: list[str]
    """Of the block files of its layers, bottom first."""
    chains: dict[str, int]
    """Of each chain id how many block files show it."""


class LazyImages:
    """The converted images of this node that containerd has. Calls may come from any thread."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self._folder = own_folder(own_folder(root) / "images")
        self._settings = settings
        self._runtime = Runtime(Path(settings.runtime))
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[float, Future[_Known | None]]] = {}
        self._mounting: dict[str, threading.Lock] = {}
        self._timed: set[str] = set()
        self._pulled: dict[str, str] = {}
        """Of each image that is pulled as usual the chain id of its layer that came last."""

    def layer(self, chain: str, parent: str, labels: Mapping[str, str]) -> Layer | None:
        """The layer of this chain id, mounted. None: unknown, not known in a second, or it cannot be mounted.

        None too for what lies on such a layer of the same pull: containerd fetches all layers from there on, and what
        came lazily as well would be fetched twice.
        """
        match = _DIGEST.fullmatch(labels.get(_DIGEST_LABEL, ""))
        if match is None:
            return None
        # containerd's own table of snapshots puts namespace and number before the chain id.
        begun = bool(parent) and self._pulled.get(match[0]) == parent.rpartition("/")[2]
        layer = None if begun else self._known_layer(chain, match, labels)
        if layer is None:
            self._pulled[match[0]] = chain
        else:
            self._pulled.pop(match[0], None)
        return layer

    def _known_layer(self, chain: str, match: re.Match[str], labels: Mapping[str, str]) -> Layer | None:
        try:
            known = self._ask(match[0], labels.get(_REF_LABEL, "")).result(_DECIDE_S)
            if known is None or chain not in known.chains:
                return None
            name = f"{match[1]}-{known.chains[chain]}"
            self._keep(known)
            self.lowers(name)
        except LateError:
            _LOG.warning("%s: no answer in %g s; its layers are pulled", match[0], _DECIDE_S)
            return None
        except (BootseerError, OSError) as error:
            _LOG.warning("%s: its layers are pulled: %s", match[0], error)
            self._asked[match[0]] = (time.monotonic(), _answered(None))
            return None
        return Layer(name, match[0])

    def lowers(self, name: str) -> list[Path]:
        """Where the layers are mounted, the uppermost first; mounts them if they are not. Raises `BootseerError`."""
        digest, _, depth = name.partition("-")
        known = self._load(digest)
        with self._lock:
            mounting = self._mounting.setdefault(digest, threading.Lock())
        with mounting:
            state = self._mounted(digest)
            if state is None:
                self._mount(known)
                state = self._mounted(digest)
                if state is None:
                    raise TransientError(f"sha256:{digest}: its mount is gone again")
        wanted = dict.fromkeys(reversed(known.identities[: int(depth)]))
        return [self._point(state, identity) for identity in wanted]

    def begin(self, name: str) -> None:
        """A container of the image is made: the record of its start ends in a while."""
        digest = name.partition("-")[0]
        if not self._settings.workload or digest in self._timed:
            return
        self._timed.add(digest)
        timer = threading.Timer(self._settings.record_s, self._began, (digest,))
        timer.daemon = True
        timer.start()

    def release(self, name: str, left: Collection[str]) -> None:
        """A layer is removed; `left` are those that remain. The image is unmounted with its last one."""
        digest = name.partition("-")[0]
        if any(other.startswith(digest) for other in left):
            return
        with self._lock:
            mounting = self._mounting.setdefault(digest, threading.Lock())
        with mounting:
            state = self._runtime.find(self._folder / digest)
            if state is not None:
                with contextlib.suppress(BootseerError, OSError):  # busy: `release_unknown` tries again
                    unmount(self._runtime, state)
            if not kernel.is_mount(self._folder / digest):
                (self._folder / f"{digest}.json").unlink(missing_ok=True)
                (self._folder / f"{digest}.lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    (self._folder / digest).rmdir()
                self._asked.pop(f"sha256:{digest}", None)
                self._timed.discard(digest)

    def release_unknown(self, images: Collection[str]) -> None:
        """Unmount what none of these snapshots shows."""
        for path in self._folder.glob("*.json"):
            self.release(path.stem, images)

    def _began(self, digest: str) -> None:
        state = self._mounted(digest)
        if state is not None and state.daemon is not None:
            with contextlib.suppress(BootseerError):
                Daemon(self._runtime.folder(state), state.daemon).end_startup()

    def _mounted(self, digest: str) -> MountState | None:
        state = self._runtime.find(self._folder / digest)
        return state if state is not None and self._runtime.health(state) == "mounted" else None

    def _point(self, state: MountState, identity: str) -> Path:
        points = (self._runtime.folder(state) / "layers" / identity, self._runtime.layers / identity)
        for point in points:
            if kernel.is_mount(point):
                return point
        raise PermanentError(f"{state.what}: layer {identity} is not mounted: this kernel does not mount EROFS files")

    def _ask(self, digest: str, reference: str) -> Future[_Known | None]:
        with self._lock:
            found = self._asked.get(digest)
            if found is not None:
                asked_s, future = found
                is_old = time.monotonic() - asked_s > _UNKNOWN_S
                if not future.done() or not is_old or (future.exception() is None and future.result() is not None):
                    return future
            future = Future()
            self._asked[digest] = (time.monotonic(), future)
        threading.Thread(target=self._find, args=(digest, reference, future), name="find", daemon=True).start()
        return future

    def _find(self, digest: str, reference: str, future: Future[_Known | None]) -> None:
        try:
            uri = store_uri(parse_reference(reference), self._settings.store) or ""
            found = find(_request(self._settings, digest, uri), say=_LOG.info)
            chains = _chains(found.document)
            future.set_result(
                _Known(digest, uri, [layer.file.identity for layer in found.document.layers], chains)
                if chains
                else None
            )
        except UsageError as error:
            _LOG.info("%s: %s", digest, error)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error if isinstance(error, BootseerError) else PermanentError(str(error)))

    def _keep(self, known: _Known) -> None:
        path = self._folder / f"{known.digest.removeprefix('sha256:')}.json"
        if not path.exists():
            new = path.with_suffix(f".{threading.get_ident()}")
            with new.open("wb") as file:
                file.write(msgspec.json.encode(known))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)

    def _load(self, digest: str) -> _Known:
        path = self._folder / f"{digest}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Known)
        except (OSError, msgspec.MsgspecError) as error:
            raise PermanentError(f"{path}: {error}; remove the image and pull it again") from error

    def _mount(self, known: _Known) -> None:
        target = self._folder / known.digest.removeprefix("sha256:")
        wanted = json.dumps(
            {"settings": asdict(self._settings), "digest": known.digest, "store": known.store, "target": str(target)}
        )
        try:
            # In a session of its own, so that what ends this process leaves the daemon alone.
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__, wanted],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_MOUNT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TransientError(f"{known.digest} was not mounted in {_MOUNT_S:g} s") from error
        if done.returncode:
            raise TransientError(f"{known.digest} cannot be mounted: {done.stderr.strip()[-500:]}")


def _answered(known: _Known | None) -> Future[_Known | None]:
    future: Future[_Known | None] = Future()
    future.set_result(known)
    return future


def _request(settings: Settings, digest: str, uri: str) -> Request:
    return Request(
        reference=Reference(Place.CONVERTED, digest=digest),
        store=uri or None,
        cache=Path(settings.cache),
        runtime=Path(settings.runtime),
        plain_http=settings.plain_http,
        loading=cast(Loading, settings.loading),
        fallback="none",
        signatures=Signatures((), settings.trusted_keys),
        workload=settings.workload,
    )


def _chains(document: ImageDocument) -> dict[str, int]:
    """Chain ids, each with the number of block files from the bottom that show it.

    Empty where the document has other layers than the image: one that hides all below it makes these needless.
    """
    files = [(number, layer.diff_id) for number, layer in enumerate(document.layers, 1) if layer.diff_id]
    rootfs: Any = document.config.get("rootfs")
    named = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if [diff_id for _, diff_id in files] != named:
        return {}
    chains: dict[str, int] = {}
    chain = ""
    for number, diff_id in files:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}" if chain else diff_id
        chains[chain] = number
    chains[chain] = len(document.layers)  # with the root directory as it must look
    return chains


def _main(wanted: dict[str, Any]) -> None:
    """Mount one image, unless another process did in the meantime."""
    from bootseer.image.mounting.mount import mount_image

    settings, target = Settings(**wanted["settings"]), Path(wanted["target"])
    runtime = Runtime(Path(settings.runtime))
    with locks.flocked(target.with_suffix(".lock"), deadline_s=_LOCK_S):
        state = runtime.find(target)
        if state is not None and runtime.health(state) == "mounted":
            return
        if state is not None:
            with contextlib.suppress(BootseerError):
                unmount(runtime, state, force=True)
        mount_image(_request(settings, wanted["digest"], wanted["store"]), target, say=_LOG.info)


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except (BootseerError, OSError) as error:
        sys.exit(str(error))
