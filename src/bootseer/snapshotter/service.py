"""containerd's snapshots API v1 over gRPC on a Unix socket: messages, errors, and the server.

The messages of containerd's `api/services/snapshots/v1/snapshots.proto` have a dozen fields, which are read and written
by number (`hdfs.protobuf`), without generated code. grpcio is the extra `containerd`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as network
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bootseer.agent.agent import activated_socket, is_activated, notify
from bootseer.artifact.places import own_folder
from bootseer.errors import (
    AccessError,
    BootseerError,
    NotFoundError,
    PermanentError,
    TransientError,
    UsageError,
    needs_extra,
)
from bootseer.hdfs.protobuf import MalformedError, Message, field
from bootseer.io.locks import claim
from bootseer.io.tasks import Tasks
from bootseer.logs import logger
from bootseer.machine.check import Check
from bootseer.snapshotter import starts
from bootseer.snapshotter.lazy import LazyImages, Settings, root_folder
from bootseer.snapshotter.records import ACTIVE, VIEW, ExistsError, Record, RefusedError, matching
from bootseer.snapshotter.snapshots import Mount, Snapshots

_LOG = logger(__name__)
SERVICE = "containerd.services.snapshots.v1.Snapshots"
SOCKET = "snapshotter.sock"
_STARTS = "starts/socket"
"""Below the runtime folder, see `starts`."""
CHECK = "containerd"
"""The name of the doctor's check."""
_CHECK_S = 3.0
_THREADS = 32
_STOP_S = 5.0
_LOOK_S = 0.2
_PER_MESSAGE = 50
_MAX_SOCKET = 107


def run_snapshotter(root: Path, socket: Path, settings: Settings, stop: threading.Event) -> None:
    """Serve snapshots below `root` until `stop`. Nothing is unmounted or deleted at the end.

    If systemd passed a socket, callers wait in its queue while no process serves, and `socket` is ignored.

    Raises `UsageError` if grpcio is missing or another snapshotter uses the folder, `PermanentError` for unusable
    folders and sockets.
    """
    import bootseer.store.oci  # noqa: F401 - in advance: the lookup of the first image is limited to a second

    with needs_extra("containerd", "the snapshotter"):
        import grpc
    passed = activated_socket() if is_activated() else None
    if passed is not None:
        socket = root / "grpc.sock"
    if len(os.fsencode(socket)) > _MAX_SOCKET:
        raise UsageError(f"{socket}: too long for a socket", hint=f"at most {_MAX_SOCKET} bytes")
    root_folder(root)
    lock = claim(root / "lock", f"another snapshotter serves {root}", "name another folder with --root")
    images = LazyImages(root, settings)
    snapshots = Snapshots(root, images)
    own_folder(socket.parent, otherwise="name another socket with --socket")
    if socket.exists() and not stat.S_ISSOCK(socket.stat().st_mode):
        raise UsageError(f"{socket}: a file of this name exists", hint="name another socket with --socket")
    with network.socket(network.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(str(socket))  # a killed process leaves a socket that refuses connections
        raise UsageError(f"another process answers on {socket}", hint="name another socket with --socket")
    socket.unlink(missing_ok=True)
    # Not `ThreadPoolExecutor`, whose threads would hold up the end of this process while a mount hangs.
    pool = Tasks("bootseer-snapshotter", _THREADS)
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)], handlers=())
    server.add_generic_rpc_handlers((_handlers(grpc, snapshots),))
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as error:
        raise PermanentError(f"cannot listen on {socket}") from error
    finally:
        os.umask(before)
    server.start()
    # In the background: a mount that hangs must not block pods of other images.
    threading.Thread(target=snapshots.remount, name="bootseer-remount", daemon=True).start()
    if passed is not None:
        threading.Thread(target=_accept, args=(passed, socket, stop), name="bootseer-accept", daemon=True).start()
    starts.start(Path(settings.runtime) / _STARTS, images, snapshots.image_of, stop)
    _LOG.info("serves %s on %s", root, socket if passed is None else passed.getsockname())
    notify("READY=1")
    try:
        while not stop.wait(_LOOK_S):  # a signal that a thread of gRPC receives does not end a wait without a limit
            pass
    finally:
        notify("STOPPING=1")
        server.stop(_STOP_S).wait()
        snapshots.records.close()
        os.close(lock)


def _accept(passed: network.socket, socket: Path, stop: threading.Event) -> None:
    """Relay connections from systemd's socket: Python's gRPC server cannot use a socket opened by others.

    Stops accepting with `stop`, so that later callers wait for the next process instead of being refused.
    """
    while not stop.is_set():
        if not select.select([passed], [], [], _LOOK_S)[0]:
            continue
        try:
            link, own = passed.accept()[0], network.socket(network.AF_UNIX)
            own.connect(str(socket))
            for ends in ((link, own), (own, link)):
                threading.Thread(target=_copy, args=ends, name="bootseer-relay", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no thread can be started
            _LOG.warning("a connection cannot be relayed: %s", error)
            stop.wait(_LOOK_S)


def _copy(source: network.socket, target: network.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):  # data sent before is still delivered
            end.shutdown(network.SHUT_RDWR)


def check(runtime: Path) -> Check:
    """The doctor's check: whether the snapshotter responds on this node's usual socket."""
    opens, socket = ("pods of converted images that start without a pull",), runtime / SOCKET
    try:
        import grpc
    except ImportError:
        return Check(CHECK, "missing", "", "grpcio is not installed", "pip install 'bootseer[containerd]'", opens)
    if not socket.exists():
        if os.geteuid() != 0:
            return Check(CHECK, "missing", "", "only root can ask the node's snapshotter", "run it as root", opens)
        todo = "systemctl start bootseer-snapshotter (docs/kubernetes.md)"
        return Check(CHECK, "missing", f"grpcio {grpc.__version__}", f"nothing listens on {socket}", todo, opens)
    try:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            found = list(channel.unary_stream(f"/{SERVICE}/List")(b"", timeout=_CHECK_S))
    except grpc.RpcError as error:
        reason = f"{socket}: {error.code().name.lower()}"
        return Check(
            CHECK, "broken", f"grpcio {grpc.__version__}", reason, "systemctl restart bootseer-snapshotter", opens
        )
    number = sum(len(Message(data).every(1)) for data in found)
    return Check(CHECK, "ok", f"{number} snapshots, {socket}", "", "", opens)


def _handlers(grpc: Any, snapshots: Snapshots) -> Any:
    """The ten calls. `grpc` is the module, imported only by processes that serve."""
    codes = {
        NotFoundError: grpc.StatusCode.NOT_FOUND,
        ExistsError: grpc.StatusCode.ALREADY_EXISTS,
        RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
        AccessError: grpc.StatusCode.PERMISSION_DENIED,
        TransientError: grpc.StatusCode.UNAVAILABLE,
        UsageError: grpc.StatusCode.INVALID_ARGUMENT,
        MalformedError: grpc.StatusCode.INVALID_ARGUMENT,
    }

    def abort(context: Any, error: Exception) -> None:
        if not isinstance(error, (BootseerError, MalformedError)):
            _LOG.exception("a call failed")
        code = next((found for kind, found in codes.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
        context.abort(code, str(error)[:4000] or type(error).__name__)

    def unary(answer: Callable[[Message], bytes | None]) -> Any:
        def call(data: bytes, context: Any) -> bytes:
            try:
                return answer(Message(data)) or b""
            except Exception as error:
                abort(context, error)
                raise  # not reached: `abort` raises

        return grpc.unary_unary_rpc_method_handler(call)

    def listed(data: bytes, context: Any) -> Iterator[bytes]:
        try:
            yield from _list(snapshots, Message(data))
        except (BootseerError, MalformedError) as error:
            abort(context, error)

    calls: dict[str, Callable[[Message], bytes | None]] = {
        "Prepare": lambda request: _mounts(_prepare(snapshots, request, ACTIVE)),
        "View": lambda request: _mounts(_prepare(snapshots, request, VIEW)),
        "Mounts": lambda request: _mounts(snapshots.mounts(request.text(2))),
        "Stat": lambda request: field(1, _info(snapshots.records.get(request.text(2, "")))),
        "Update": lambda request: field(1, _info(_update(snapshots, request))),
        "Usage": lambda request: b"".join(
            field(number, value) for number, value in enumerate(snapshots.usage(request.text(2, "")), 1)
        ),
        "Commit": lambda request: snapshots.commit(request.text(3, ""), request.text(2, ""), _labels(request, 4)),
        "Remove": lambda request: snapshots.remove(request.text(2, "")),
        "Cleanup": lambda _: snapshots.cleanup(),
    }
    methods = {name: unary(answer) for name, answer in calls.items()}
    methods["List"] = grpc.unary_stream_rpc_method_handler(listed)
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _prepare(snapshots: Snapshots, request: Message, kind: int) -> list[Mount]:
    return snapshots.prepare(request.text(2, ""), request.text(3, ""), _labels(request, 4), kind=kind)


def _update(snapshots: Snapshots, request: Message) -> Record:
    info = request.message(2)
    paths = [path.decode() for path in request.message(3).every(1)] if 3 in request else []
    return snapshots.records.relabel(info.text(1, ""), _labels(info, 6), paths)


def _list(snapshots: Snapshots, request: Message) -> Iterator[bytes]:
    meets = matching([text.decode() for text in request.every(2)])
    found = [field(1, _info(record)) for record in snapshots.records.all() if meets(record)]
    for at in range(0, len(found), _PER_MESSAGE):
        yield b"".join(found[at : at + _PER_MESSAGE])


def _labels(message: Message, number: int) -> dict[str, str]:
    entries = map(Message, message.every(number))
    return {entry.text(1, ""): entry.text(2, "") for entry in entries}


def _mounts(mounts: list[Mount]) -> bytes:
    return b"".join(
        field(
            1,
            field(1, mount.type) + field(2, mount.source) + b"".join(field(4, option) for option in mount.options),
        )
        for mount in mounts
    )


def _info(record: Record) -> bytes:
    return b"".join(
        (
            field(1, record.key),
            field(2, record.parent),
            field(3, record.kind),
            field(4, _time(record.created_s)),
            field(5, _time(record.updated_s)),
            *(field(6, field(1, name) + field(2, value)) for name, value in record.labels.items()),
        )
    )


def _time(seconds: float) -> bytes:
    return field(1, int(seconds)) + field(2, int(seconds % 1 * 1e9))
