"""The checks of `bootseer doctor` that need several packages, and its bundle for a bug report.

The bundle has logs and states of mounts, versions and settings of this machine. Secrets are removed: every text passes
`logs.without_secrets`, and variables and Hadoop properties with names of secrets are listed without their values. Of
jobs it contains only names of mounted places.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from bootseer.artifact.places import runtime_root
from bootseer.checkpoint.mount.mounted import runtime_of
from bootseer.env.capturing.capture import open_capture
from bootseer.env.keys.key_settings import looks_secret
from bootseer.errors import BootseerError, UsageError, os_errors_as
from bootseer.hdfs.addresses import Cluster, configuration, default_authority
from bootseer.hdfs.namenode import NameNode
from bootseer.launch.environment.view import private_capture_ways
from bootseer.logs import without_secrets
from bootseer.machine.check import Check, Status
from bootseer.machine.criu import PROGRAM as CRIU
from bootseer.machine.criu import check_criu, criu_version, find_criu
from bootseer.machine.kernel import AS_ROOT, may_open_fuse
from bootseer.mounts import control
from bootseer.mounts.state import Runtime
from bootseer.peers.interfaces import PORT, chosen, listen_at
from bootseer.peers.names import reverse_s
from bootseer.trace import stacks

ENVIRONMENTS, PEERS, NAMES, HDFS_LOGIN, STACKS = "environments", "peers", "names", "HDFS login", "stack samples"
PROCESSES = "process snapshots"
_LOGIN_S = 8.0
_NAMES_S, _SLOW_NAMES_S = 3.0, 0.05


def check_environments(cache: Path) -> Check:
    """Open and close a capture below the cache, in the best way that works here."""
    opens = ("run --setup, --requirements: one mount instead of an installation",)
    try:
        # If it does not exist yet, its nearest existing parent decides.
        place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        with (
            tempfile.TemporaryDirectory(prefix="bootseer-doctor-", dir=place) as folder,
            open_capture(Path(folder), private_capture_ways(), own=[cache]) as capture,
        ):
            if capture.way == "overlay":
                return Check(ENVIRONMENTS, "ok", "captured by an overlay over /, restored by a mount", "", "", opens)
            found = "captured and restored in a user namespace"
            note = "without root only folders of this user can be in a snapshot"
            if not may_open_fuse():
                found, note = "captured in a user namespace", f"{note}, and without /dev/fuse its files are written out"
            return Check(ENVIRONMENTS, "limited", found, note, AS_ROOT, opens)
    except OSError as error:
        todo = "set BOOTSEER_CACHE to another folder"
        return Check(ENVIRONMENTS, "broken", "", f"{error.filename or cache}: {error.strerror}", todo, opens)
    except BootseerError as error:
        note = f"nothing can be mounted ({str(error) or 'root without the right to mount'})"
    note += ": setups are captured by two walks over the disks"
    return Check(ENVIRONMENTS, "limited", "files are copied", note, f"{AS_ROOT}, or allow user namespaces", opens)


def check_peers() -> Check:
    """Which interfaces `run --peers` would serve on, and whether its port is free."""
    opens = ("run --peers: blocks from the job's other nodes",)
    found = chosen(())
    named = ", ".join(f"{each.name} {each.address} ({each.bytes_s // 125_000:,} Mbit/s)" for each in found)
    try:
        listen_at(found[0].address, PORT).close()
    except OSError as error:
        todo = "free the port, name another one in the list of nodes, or let nodes meet in a folder"
        return Check(PEERS, "limited", named, f"port {PORT} is taken: {error.strerror}", todo, opens)
    if found[0].name == "lo":
        return Check(
            PEERS, "limited", named, "no interface reaches other nodes", "choose one with --peers-interface", opens
        )
    return Check(PEERS, "ok", f"{named}, port {PORT}", "", "", opens)


def check_names() -> Check:
    """The time of a reverse lookup of this node's own address, as PyTorch's TCPStore makes it."""
    opens = ("torchrun, init_process_group: ranks that connect without waiting for names",)
    todo = "run --peers (as root) shows a job the names of its nodes; else a `::ffff:ADDRESS NAME` line in /etc/hosts"
    try:
        address, seconds = reverse_s(_NAMES_S)
    except BootseerError as error:
        return Check(NAMES, "limited", "", f"reverse DNS: {error}", todo, opens)
    if seconds > _SLOW_NAMES_S:
        return Check(NAMES, "limited", "", f"the name of ::ffff:{address} took {seconds:.2f} s", todo, opens)
    return Check(NAMES, "ok", f"the name of ::ffff:{address} took {seconds * 1e3:.1f} ms", "", "", opens)


def check_stacks() -> Check:
    """Whether py-spy is installed and may read other processes of this user: samples a child process."""
    opens = ("BOOTSEER_STACKS=1: the service shows the stack of a late process",)
    if stacks.program() is None:
        return Check(STACKS, "missing", "", "py-spy is not installed", "pip install py-spy", opens)
    words = [sys.executable, "-Sc", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.readline()  # type: ignore[union-attr]
        text, note = stacks.sample([child.pid])
        child.kill()
    if not text:
        return Check(STACKS, "limited", "", note, "run as root, or set kernel.yama.ptrace_scope=0", opens)
    return Check(STACKS, "ok", str(stacks.program()), "", "", opens)


def check_processes(environ: Mapping[str, str]) -> Check:
    """Whether there is a CRIU that can dump and restore processes here."""
    opens = ("run --process-snapshot: imported modules are restored, also in the first start on a node",)
    try:
        path = find_criu(environ)
        found = f"{path} {criu_version(path, environ)}"
    except LookupError as error:
        todo = f"apt-get install criu (from Debian 13 on), or name another one in {CRIU}"
        return Check(PROCESSES, "missing", "", str(error), todo, opens)
    if reason := check_criu(path, environ):
        todo = "run as root, in a container with CAP_CHECKPOINT_RESTORE and CAP_SETPCAP"
        return Check(PROCESSES, "broken", found, reason, todo, opens)
    return Check(PROCESSES, "ok", found, "", "", opens)


def check_hdfs_login() -> Check:
    """Whether the NameNodes of the default file system answer this user, with Kerberos by its ticket or token."""
    opens = ("checkpoints, images and environments in hdfs:// of the configured cluster",)
    try:
        cluster = Cluster.of(default_authority("hdfs:///"))
        how = "Kerberos" if cluster.kerberos else "no login required"
        with contextlib.closing(NameNode(cluster, ask_s=_LOGIN_S)) as namenode:
            namenode.stat("/")
    except BootseerError as error:
        status: Status = "limited" if isinstance(error, UsageError) else "broken"
        return Check(HDFS_LOGIN, status, "", str(error), getattr(error, "hint", ""), opens)
    return Check(HDFS_LOGIN, "ok", f"hdfs://{cluster.authority} answers, {how}", "", "", opens)


_LOG_BYTES = 256 << 10
"""From the end of each log."""
_OURS = ("BOOTSEER_", "SLURM_", "HADOOP_", "KRB5", "XDG_", "NCCL_", "PET_", "TORCHELASTIC_")
_PROPERTY = re.compile(r"<name>\s*([^<]*?)\s*</name>\s*<value>\s*([^<]*?)\s*</value>")
_HIDDEN = "***"
_WEBHOOKS = "BOOTSEER_ALERT_TO"
"""The path of a webhook is its secret."""


def write_bundle(path: Path, doctor: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Write the bundle, a `.tar.gz` that only this user can read; returns the names in it. `doctor`: its checks, as
    JSON.

    Raises `UsageError` if the file exists or cannot be written.
    """
    names = []
    with os_errors_as(UsageError, path, hint="name a new file that can be written"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(file, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as bundle:
                for name, text in _texts(doctor, environ):
                    data = without_secrets(text).encode("utf-8", "backslashreplace")
                    entry = tarfile.TarInfo(f"bootseer-bundle/{name}")
                    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                    bundle.addfile(entry, io.BytesIO(data))
                    names.append(name)
        except BaseException:
            path.unlink(missing_ok=True)  # a part of it, on a full disk
            raise
    return names


def _texts(doctor: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "doctor.json", json.dumps(doctor, indent=1)
    packages = sorted(f"{found.metadata['Name']} {found.version}" for found in distributions())
    yield "versions.txt", "\n".join([f"Python {sys.version}", platform.platform(), *packages])
    ours = (name for name in environ if name.startswith(_OURS))
    shown = {name: _HIDDEN if looks_secret(name) or name == _WEBHOOKS else environ[name] for name in ours}
    yield "environment.txt", "\n".join(f"{name}={shown[name]}" for name in sorted(shown))
    for name in ("core-site.xml", "hdfs-site.xml"):
        with contextlib.suppress(OSError):
            text = Path(configuration(environ) or os.devnull, name).read_text(encoding="utf-8", errors="replace")
            properties = {key: _HIDDEN if _is_secret(key) else value for key, value in _PROPERTY.findall(text)}
            yield f"hadoop/{name}.txt", "\n".join(f"{key} = {value}" for key, value in sorted(properties.items()))
    yield "mountinfo.txt", Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(BootseerError):  # an unusable runtime folder is shown by a check
        root = runtime_root(environ)
        for kind, runtime in (("images", Runtime(root)), ("checkpoints", runtime_of(root))):
            yield from _mounts(kind, runtime)


def _is_secret(name: str) -> bool:
    return looks_secret(name.replace(".", "_").replace("-", "_")) or name.startswith("fs.azure.sas.")


def _mounts(kind: str, runtime: Runtime) -> Iterator[tuple[str, str]]:
    rows = []
    for state in runtime.all():
        status: Mapping[str, Any] = {}
        with contextlib.suppress(BootseerError):
            status = control.send_request(runtime.folder(state), "status") if state.daemon is not None else {}
        rows.append(
            {"id": state.id, "what": state.what, "target": state.target, "health": runtime.health(state), **status}
        )
        if log := runtime.log(state):
            for path in (Path(f"{log}.1"), Path(log)):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(max(os.fstat(file.fileno()).st_size - _LOG_BYTES, 0))
                    yield f"{kind}/{state.id}/{path.name}", file.read().decode("utf-8", "replace")
    yield f"{kind}/mounts.json", json.dumps(rows, indent=1, default=str)
