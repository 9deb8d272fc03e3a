"""Containers report the end of their start, so that the record of what it reads ends neither too early nor too late.

Without a report it ends after a fixed time. `bootseer run` in a pod that has this socket connects to it
(`launch.observers.PodStart`). While the connection is open the record goes on; one byte means that training has begun.
If the last connection for an image ends without it, the fixed time begins anew: the job may have had a first command.

Any container may connect. The kernel tells which process does (SO_PEERCRED), and that process's table of mounts which
snapshot is its root, so a container cannot end the record of an image that it does not run.
"""

from __future__ import annotations

import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bootseer.errors import BootseerError
from bootseer.io.trusted_folder import own_folder
from bootseer.logs import logger
from bootseer.snapshotter.lazy import LazyImages

_LOG = logger(__name__)
_MAX_S: Final = 1800.0
"""A record ends after this time even if its start does not, like that of a service."""
_MAX_CONNECTIONS: Final = 256
_PER_CONNECTION_S: Final = 0.01
"""Limits what a container that connects again and again costs."""
_TURN_S: Final = 0.2
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# Of the process's root: an overlay's options have the folder of its changes.
_ROOT = re.compile(r"^\d+ \d+ \S+ \S+ / .* - overlay \S+ \S*?\bupperdir=([^,\s]+)", re.MULTILINE)


def start(path: Path, images: LazyImages, image_of: Callable[[Path], str], stop: threading.Event) -> None:
    """Serve the socket `path`, which any user may connect to, in a thread until `stop`. If that is impossible, there is
    only a message.

    `image_of` returns the image of the container whose changes are in a folder, "" if there is none.
    """
    try:
        own_folder(path.parent, otherwise="name another folder with BOOTSEER_RUNTIME").chmod(0o755)
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen()
    except (BootseerError, OSError) as error:
        _LOG.warning("containers cannot report the end of their start: %s", error)
        return

    args = (path, listening, images, image_of, stop)
    threading.Thread(target=_serve, args=args, name="bootseer-starts", daemon=True).start()


def _serve(
    path: Path,
    listening: socket.socket,
    images: LazyImages,
    image_of: Callable[[Path], str],
    stop: threading.Event,
) -> None:
    with selectors.DefaultSelector() as selector, listening:
        selector.register(listening, selectors.EVENT_READ, (listening, ""))
        while not stop.is_set():
            for key, _ in selector.select(_TURN_S):
                sock, image = key.data
                try:
                    if sock is not listening:
                        selector.unregister(sock)
                        with sock:
                            has_begun = bool(sock.recv(1))
                        if has_begun or all(other.data[1] != image for other in selector.get_map().values()):
                            images.reschedule(image, 0.0 if has_begun else None)
                        continue
                    time.sleep(_PER_CONNECTION_S)
                    sock = listening.accept()[0]  # closed with its last reference, unless it is registered
                    image = image_of(_changes(sock))
                    _LOG.debug("a container reports its start: %s", image or "of no image")
                    if image and len(selector.get_map()) <= _MAX_CONNECTIONS:
                        images.reschedule(image, _MAX_S)
                        selector.register(sock, selectors.EVENT_READ, (sock, image))
                    else:
                        sock.close()
                except Exception as error:  # the next container may report
                    _LOG.warning("a container's report is lost: %s", error)
    path.unlink(missing_ok=True)


def _changes(sock: socket.socket) -> Path:
    """The folder of the changes of the container that has connected; an empty path if its root is no overlay."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    roots = _ROOT.findall(Path(f"/proc/{pid}/mountinfo").read_text(errors="replace"))
    return Path(roots[-1] if roots else "")
