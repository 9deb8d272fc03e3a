"""Converted images for containerd: which are known, where their layers are mounted, and when they are unmounted.

    <root>/images/<hex>.json    what is needed to mount an image again after a boot: see `_KnownImage`
    <root>/images/<hex>/        mount point of the whole image; containers mount its layers
    <root>/l/<20 hex>/<number>  link to the mount point of a layer, for containerd: it passes the names of all layers of
                                a container to the kernel in one page, which is full with 62 names of 64 digits

An image is mounted once per node for all its containers, by a separate program (this module as a script): mount daemons
are forked, which a process with threads must not do, and they outlive the snapshotter. Containers get the layers
instead of the merged tree, since the kernel allows only two levels of stacked file systems, and EROFS on a file counts
as one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from bootseer.artifact.document import readable
from bootseer.artifact.loading import Loading
from bootseer.artifact.signatures import Signatures
from bootseer.errors import BootseerError, PermanentError, TransientError, UsageError
from bootseer.image.document import ImageDocument
from bootseer.image.mounting.mounted import unmount
from bootseer.image.mounting.request import Request
from bootseer.image.mounting.resolve import resolve_image
from bootseer.image.reference import Reference, SourceKind, parse_reference, store_uri
from bootseer.image.sources.manifest import read_diff_ids
from bootseer.io import locks
from bootseer.io.files import replace_file
from bootseer.io.tasks import Tasks
from bootseer.io.trusted_folder import own_folder
from bootseer.logs import logger
from bootseer.mounts import kernel
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.shared_layers import OWN
from bootseer.mounts.state import MountState, Runtime

_LOG = logger(__name__)
_DIGEST_LABEL = "containerd.io/snapshot/cri.manifest-digest"
_REF_LABEL = "containerd.io/snapshot/cri.image-ref"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_DECIDE_S = 1.0
_UNKNOWN_S = 10.0
"""For how long an unknown image is not looked up again: the layers of one pull come within this time."""
_MOUNT_S = 120.0
_LOCK_S = 2 * _MOUNT_S
_LINK_DIGITS = 20
_FINDERS = 32
root_folder = partial(own_folder, otherwise="name another folder with --root")


@dataclass(frozen=True, slots=True)
class Settings:
    """How images are mounted on this node. All of it is passed to the program that mounts."""

    cache: str
    runtime: str
    store: str = ""
    """The store of converted images; empty: each image's own repository."""
    plain_http: bool = False
    loading: str = "auto"
    workload: str = ""
    trusted_keys: str = ""
    record_s: float = 60.0
    """After this time the start of an image's first container counts as complete, and its record ends."""


@readable
class _KnownImage(msgspec.Struct):
    digest: str
    store: str
    identities: list[str]
    """Of the block files of its layers, bottom first."""
    chains: dict[str, int]
    """For each chain id, the number of block files that make it up."""


class LazyImages:
    """The converted images that containerd has on this node. Safe for any thread."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self._folder = root_folder(root / "images")
        self._links = root_folder(root / "l")
        self._settings = settings
        self._runtime = Runtime(Path(settings.runtime))
        self._lock = threading.Lock()
        self._finders = Tasks("bootseer-find", _FINDERS)
        self._lookups: dict[str, tuple[float, Future[_KnownImage | None]]] = {}
        self._mounting: dict[str, threading.RLock] = {}
        """By digest: held while an image is mounted or unmounted, and until its new snapshot is recorded."""
        self._failed: dict[str, tuple[float, str]] = {}
        """By digest: when it could not be mounted, and why."""
        self._timed: dict[str, threading.Timer] = {}
        """By digest: ends the record of the start of the image's first container."""
        self._pulled: dict[str, str] = {}
        """For each image that is pulled normally, the chain id of its latest layer."""

    def layer(self, chain: str, parent: str, labels: Mapping[str, str], record: Callable[[str], None]) -> str | None:
        """The mounted layer of this chain id, with all layers below it, as in the table of snapshots: the hexadecimal
        digits of the image's digest, a dash, and the number of layers. None if it is unknown, not found within a
        second, or cannot be mounted.

        None also for layers above one that this pull fetches normally: containerd fetches all layers from there on, and
        lazy ones would be fetched twice.

        `record` is called with the layer while it cannot be unmounted: `release_unknown` sees no use of it before.
        """
        match = _DIGEST.fullmatch(labels.get(_DIGEST_LABEL, ""))
        if match is None:
            return None
        # containerd's own table of snapshots prefixes the chain id with namespace and number.
        if not parent or self._pulled.get(match[0]) != parent.rpartition("/")[2]:
            try:
                known = self._look_up(match[0], labels.get(_REF_LABEL, "")).result(_DECIDE_S)
                if known is not None and chain in known.chains:
                    layer, stored = f"{match[1]}-{known.chains[chain]}", self._folder / f"{match[1]}.json"
                    with self._mount_turn(match[1]):
                        if not stored.exists():
                            replace_file(stored, msgspec.json.encode(known), durable=True)
                        self.lowers(layer)
                        record(layer)
                    self._pulled.pop(match[0], None)
                    return layer
            except TimeoutError:
                _LOG.warning("%s: no answer within %g s; its layers are pulled", match[0], _DECIDE_S)
            except Exception as error:  # of any library: pods must start
                _LOG.warning("%s: its layers are pulled: %s", match[0], error)
                unknown: Future[_KnownImage | None] = Future()
                unknown.set_result(None)
                self._lookups[match[0]] = (time.monotonic(), unknown)
        self._pulled[match[0]] = chain
        return None

    def lowers(self, name: str) -> list[Path]:
        """Links to the mounted layers, the uppermost first; mounts them if necessary. Raises `BootseerError`."""
        digest, _, depth = name.partition("-")
        known = self._load(digest)
        with self._mount_turn(digest):
            state = self._mounted(digest)
            if state is None:
                try:
                    self._mount(known)
                except TransientError as error:
                    self._failed[digest] = time.monotonic(), str(error)
                    raise
                state = self._mounted(digest)
                if state is None:
                    raise TransientError(f"sha256:{digest}: it was unmounted again")
            mounted = set(kernel.mount_points())
            return [
                self._link(digest, known.identities.index(identity), self._point(state, identity, mounted))
                for identity in dict.fromkeys(reversed(known.identities[: int(depth)]))
            ]

    def same_layer(self, name: str, chain: str) -> str:
        """The layer of this chain id in the image of another layer."""
        digest = name.partition("-")[0]
        return f"{digest}-{self._load(digest).chains[chain]}"

    def begin(self, name: str) -> None:
        """A container of the image is created: schedule the end of its start's record."""
        digest = name.partition("-")[0]
        if self._settings.workload and digest not in self._timed:
            self._schedule(digest, self._settings.record_s)

    def reschedule(self, name: str, after_s: float | None = None) -> None:
        """End the record of the image's start after this time from now (None: the usual one), unless it has ended."""
        digest = name.partition("-")[0]
        with self._lock:
            timer = self._timed.get(digest)
            if timer is not None and not timer.finished.is_set():
                timer.cancel()
                self._schedule(digest, self._settings.record_s if after_s is None else after_s)

    def _schedule(self, digest: str, after_s: float) -> None:
        self._timed[digest] = timer = threading.Timer(after_s, self._end_startup, (digest,))
        timer.daemon = True
        timer.start()

    def release(self, name: str, used: Callable[[], Collection[str]]) -> None:
        """Unmount an image if none of the layers that snapshots use, `used()`, is of it."""
        digest = name.partition("-")[0]

        def is_used() -> bool:
            return any(other.startswith(digest) for other in used())

        if is_used():  # does not wait for a mount that hangs
            return
        with self._mount_lock(digest):
            if is_used():
                return
            state = self._runtime.find(self._folder / digest)
            if state is not None:
                with contextlib.suppress(BootseerError, OSError):  # busy: retried by `release_unknown`
                    unmount(self._runtime, state)
            if not kernel.is_mount(self._folder / digest):
                (self._folder / f"{digest}.lock").unlink(missing_ok=True)
                shutil.rmtree(self._links / digest[:_LINK_DIGITS], ignore_errors=True)
                with contextlib.suppress(OSError):
                    (self._folder / digest).rmdir()
                (self._folder / f"{digest}.json").unlink(missing_ok=True)  # last: `release_unknown` goes by it
                self._lookups.pop(f"sha256:{digest}", None)
                self._timed.pop(digest, None)
                self._failed.pop(digest, None)

    def release_unknown(self, used: Callable[[], Collection[str]]) -> None:
        """Unmount all images that no snapshot uses."""
        for path in self._folder.glob("*.json"):
            self.release(path.stem, used)

    @contextlib.contextmanager
    def _mount_turn(self, digest: str) -> Iterator[None]:
        """The mount lock, to mount the image. Raises `TransientError` if a mount has failed while this thread waited:
        with a store that hangs each further one would take a minute, and occupy a thread meanwhile."""
        asked_s = time.monotonic()
        with self._mount_lock(digest):
            failed_s, reason = self._failed.get(digest, (asked_s, ""))
            if failed_s > asked_s:
                raise TransientError(reason)
            yield

    def _mount_lock(self, digest: str) -> threading.RLock:
        with self._lock:
            return self._mounting.setdefault(digest, threading.RLock())

    def _end_startup(self, digest: str) -> None:
        state = self._mounted(digest)
        if state is not None and state.daemon is not None:
            with contextlib.suppress(BootseerError):
                Daemon(self._runtime.folder(state), state.daemon).end_startup()

    def _mounted(self, digest: str) -> MountState | None:
        state = self._runtime.find(self._folder / digest)
        return state if state is not None and self._runtime.health(state) == "mounted" else None

    def _point(self, state: MountState, identity: str, mounted: Collection[str]) -> Path:
        for point in (self._runtime.folder(state) / OWN / identity, self._runtime.layers / identity):
            if str(point) in mounted:
                return point
        raise PermanentError(
            f"{state.what}: layer {identity} is not mounted: this kernel does not mount EROFS files, or the image was"
            " converted again after it was pulled; then remove it from this node and pull it again"
        )

    def _link(self, digest: str, number: int, point: Path) -> Path:
        """The link to a layer of the image, which leads to `point` from now on."""
        link = self._links / digest[:_LINK_DIGITS] / str(number)
        if not link.is_symlink() or link.readlink() != point:
            link.parent.mkdir(exist_ok=True)
            new = link.with_suffix(".new")
            new.unlink(missing_ok=True)
            new.symlink_to(point)
            new.replace(link)
        return link

    def _look_up(self, digest: str, reference: str) -> Future[_KnownImage | None]:
        with self._lock:
            found = self._lookups.get(digest)
            if found is not None:
                asked_s, future = found
                is_old = time.monotonic() - asked_s > _UNKNOWN_S
                if not future.done() or not is_old or (future.exception() is None and future.result() is not None):
                    return future
            future = self._finders.submit(self._find, digest, reference)
            self._lookups[digest] = (time.monotonic(), future)
        return future

    def _find(self, digest: str, reference: str) -> _KnownImage | None:
        try:
            uri = store_uri(parse_reference(reference), self._settings.store) or ""
            found = resolve_image(_request(self._settings, digest, uri), say=_LOG.info)
        except UsageError as error:
            _LOG.info("%s: %s", digest, error)
            return None
        found.store.close()
        identities, chains = [layer.file.identity for layer in found.document.layers], _chains(found.document)
        return _KnownImage(digest, uri, identities, chains) if chains else None

    def _load(self, digest: str) -> _KnownImage:
        path = self._folder / f"{digest}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=_KnownImage)
        except (OSError, msgspec.MsgspecError) as error:
            raise PermanentError(f"{path}: {error}; remove the image and pull it again") from error

    def _mount(self, known: _KnownImage) -> None:
        target = self._folder / known.digest.removeprefix("sha256:")
        wanted = json.dumps(
            {"settings": asdict(self._settings), "digest": known.digest, "store": known.store, "target": str(target)}
        )
        try:
            # In its own session, so that signals that end this process do not reach the daemon.
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
            reason = done.stderr.strip()[-500:] or subprocess.CalledProcessError(done.returncode, __name__)
            raise TransientError(f"{known.digest} cannot be mounted: {reason}")


def _request(settings: Settings, digest: str, uri: str) -> Request:
    return Request(
        reference=Reference(SourceKind.CONVERTED, digest=digest),
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
    """The chain ids, each with the number of block files from the bottom that make it up.

    Empty if the document's layers differ from the image's: a layer that hides all below it makes those needless.
    """
    files = [(number, layer.diff_id) for number, layer in enumerate(document.layers, 1) if layer.diff_id]
    if tuple(diff_id for _, diff_id in files) != read_diff_ids(document.config, None, document.name):
        return {}
    chains: dict[str, int] = {}
    chain = ""
    for number, diff_id in files:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}" if chain else diff_id
        chains[chain] = number
    chains[chain] = len(document.layers)  # includes the layer with the attributes of the root directory
    return chains


def _main(wanted: dict[str, Any]) -> None:
    """Mount one image, unless another process has mounted it meanwhile."""
    from bootseer.image.mounting.mount import mount_image

    settings, target = Settings(**wanted["settings"]), Path(wanted["target"])
    runtime = Runtime(Path(settings.runtime))
    with locks.flocked(target.with_suffix(".lock"), deadline_s=_LOCK_S):
        state = runtime.find(target)
        if state is not None and runtime.health(state) == "mounted":
            return
        if state is not None:
            with contextlib.suppress(BootseerError):
                unmount(runtime, state)
        mount_image(_request(settings, wanted["digest"], wanted["store"]), target, say=_LOG.info)


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except (BootseerError, OSError) as error:
        sys.exit(str(error))
