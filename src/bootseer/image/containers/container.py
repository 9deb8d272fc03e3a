"""Prepare, start and remove a container for a mounted image.

runc or crun starts it, called by `shim`. The result is an ordinary command line for `launch.supervise`, so that
signals, standard streams and the exit code work as without a container. A guard process cleans up if `bootseer` is
killed: SIGKILL cannot be caught, and the container is no child that dies with `bootseer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.errors import PermanentError, TransientError, UsageError, os_errors_as
from bootseer.image.containers.cdi import CDI_FOLDERS, edits_for, gpu_names
from bootseer.image.containers.limits import Limits
from bootseer.image.containers.process import Process, ProcessOptions, process_of
from bootseer.image.containers.rootfs import User, program_at
from bootseer.image.containers.runtime_config import (
    Bind,
    device_nodes,
    is_renamed,
    node_binds,
    runtime_config,
    without_root,
)
from bootseer.logs import logger
from bootseer.mounts.user_namespace import is_host, num_owners

_LOG = logger(__name__)

Runtime = Literal["auto", "runc", "crun"]
_INSTALL = "apt-get install runc, or put a released static binary of runc or crun into a folder of PATH"
# With these options neither fails where cgroups cannot be changed. Their device rules are not needed: see
# `runtime_config`.
_WITHOUT_CGROUPS = {"runc": ("--rootless", "true"), "crun": ("--cgroup-manager=disabled",)}
_SHIM = Path(__file__).with_name("shim.py")
# The guard waits for its standard input: at a line (all is cleaned up) it ends, at end of file it runs its commands. A
# scheduler that ends the whole job must not keep the mounts, so signals are ignored. A shell starts 20 times as fast as
# Python.
_GUARD = "trap '' INT TERM HUP; read -r _ && exit\n"
_OF_GUARD = "</dev/null >/dev/null 2>&1 timeout -s KILL 60 "
_OF_HOST = ("resolv.conf", "hosts", "hostname")
_END_S = 30.0
_OLDEST_PYTHON = 11


class Options(Struct, frozen=True):
    """The user's options for a container."""

    process: ProcessOptions = field(default_factory=ProcessOptions)
    limits: Limits = field(default_factory=Limits)
    binds: tuple[Bind, ...] = ()
    gpus: str = ""
    """`all`, or comma-separated numbers; empty: no GPU."""
    devices: tuple[str, ...] = ()
    """CDI names (`vendor.com/class=name`), and device nodes of the host or folders of them (`device_nodes`)."""
    runtime: Runtime = "auto"
    own_pids: bool = True
    """Whether the container gets its own process id namespace; else it sees and may signal the host's processes."""
    parent: tuple[str, ...] = ()
    """Arguments for the image's Python, for a parent of the command in the container. Empty: the command is its first
    program, as also where the image has no Python that can run it (`Container.has_parent`)."""


class Container:
    """One prepared container. Owns its folder: `config.json`, copies of /etc/hosts etc., the runtime's state."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        image: Mapping[str, Any],
        options: Options,
        host_env: Mapping[str, str],
        *,
        cdi_folders: Sequence[Path] = CDI_FOLDERS,
    ) -> None:
        """Prepare the container in `folder`, which is created if missing, for the tree at `root`.

        Raises `UsageError` for invalid options, `PermanentError` if the folder cannot be written.
        """
        names = [*(gpu_names(options.gpus) if options.gpus else ()), *(name for name in options.devices if "=" in name)]
        edits = edits_for(names, cdi_folders)
        edits.nodes += (node for name in options.devices if "=" not in name for node in device_nodes(name))
        self.process = process_of(image, options.process, root, host_env)
        if options.process.groups and not is_host() and max(self.process.user.groups, default=0) >= num_owners():
            raise UsageError("--group-add needs root", hint="leave it out")
        renamed = not is_host() and is_renamed(self.process.user, num_owners())
        self.runtime = _runtime(options.runtime, self.process.user, renamed=renamed)
        _LOG.info("container %s: %s starts %s", folder.name, self.runtime, self.process.args[0])
        self._own_pids = options.own_pids
        _check_places(root)
        python = _python(self.process, root) if options.parent else ""
        self.has_parent = bool(python)
        first = self.process
        if python:
            first = replace(first, args=(python, "-I", "-S", *options.parent, *first.args))
        self._folder = folder
        self._state = folder / "state"
        # Random: nodes that are containers have equal process ids, and may share the cgroups named by this ID.
        self._id = f"bootseer-{os.urandom(6).hex()}-{folder.name}"[:100]
        self._guard: subprocess.Popen[bytes] | None = None
        with os_errors_as(PermanentError, f"{folder}: the container cannot be prepared"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            binds = [*self._name_files(options.limits.hostname), *options.binds]
            if not is_host():
                binds += node_binds(edits.nodes)
                edits = replace(edits, nodes=[])
            config = runtime_config(first, root, binds, edits, options.limits)
            if not is_host():
                config = without_root(config, num_owners(), self.process.user)
            self.mount_points = {mount["destination"].rstrip("/") for mount in config["mounts"]}
            self._config = config
            self._write_config()

    @property
    def command(self) -> tuple[str, ...]:
        """The command line that runs the user's command in the container, with only `PATH` in the environment."""
        folder = str(self._folder)
        empty_env = ("env", "-i", f"PATH={os.environ.get('PATH', os.defpath)}")
        pids = ("own" if is_host() else "try") if self._own_pids else "host"
        shim = (sys.executable, "-I", "-S", str(_SHIM), pids, folder)
        start = ("run", "--detach", "--pid-file", f"{folder}/pid", "--bundle", folder, self._id)
        return (*empty_env, *shim, *self._program, *start)

    def start_guard(self, then: Sequence[Sequence[str]] = ()) -> None:
        """Start a process that removes the container and then runs the commands `then` if this process is killed.

        Raises `PermanentError`.
        """
        text = _GUARD + "\n".join(_OF_GUARD + shlex.join(words) for words in [self._delete(), *then])
        with os_errors_as(PermanentError, "the container's guard cannot be started"):
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", text], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
            )

    def renew(self, env: Mapping[str, str]) -> None:
        """Prepare the container for another run of its program, with `env` added to its environment.

        Changes to its files are kept. Raises `PermanentError` if the program never started, and as `close` does.
        """
        pid = self._folder / "pid"
        if not pid.exists():
            raise PermanentError(f"{self.runtime} did not start the container")
        self._remove()
        pid.unlink()
        process = self._config["process"]
        given = dict(word.split("=", 1) for word in process["env"])
        process["env"] = [f"{name}={value}" for name, value in {**given, **env}.items()]
        self._write_config()

    def close(self) -> None:
        """Remove the container and its folder. The caller unmounts its root.

        Raises `TransientError` if the runtime takes too long; the guard tries again after this process has ended.
        """
        self._remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_config(self) -> None:
        (self._folder / "config.json").write_text(json.dumps(self._config))  # the shim completes it

    def _remove(self) -> None:
        if self._state.exists() and any(self._state.iterdir()):
            try:
                subprocess.run(self._delete(), capture_output=True, timeout=_END_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise TransientError(f"{self.runtime} did not remove the container {self._id}: {error}") from error

    def dismiss_guard(self) -> None:
        """End the guard without a cleanup, after `close`."""
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the line is sent; the guard ends later
                guard.communicate(b"\n", timeout=_END_S)

    @property
    def _program(self) -> tuple[str, ...]:
        log = str(self._folder / "log")  # else its warnings go to the program's stderr
        return (self.runtime, *_WITHOUT_CGROUPS[self.runtime], "--log", log, "--root", str(self._state))

    def _delete(self) -> list[str]:
        return [*self._program, "delete", "--force", self._id]

    def _name_files(self, hostname: str) -> list[Bind]:
        """Binds of copies of the host's files for name resolution. Copies, because the container may write to them."""
        binds = []
        for name in _OF_HOST:
            try:
                data = Path("/etc", name).read_bytes()
            except OSError:
                continue
            path = self._folder / name
            path.write_bytes(f"{hostname}\n".encode() if hostname and name == "hostname" else data)
            path.chmod(0o644)
            binds.append(Bind(str(path), f"/etc/{name}"))
        return binds


def _python(process: Process, root: Path) -> str:
    """Path of the first `python3` on the image's PATH; empty without one, or if its name does not say that it is
    Python 3.11 or later, as BootSeer needs."""
    if "PYTHONHOME" in process.env:  # which isolated Python ignores
        return ""
    for folder in process.env.get("PATH", "").split(":"):
        path = posixpath.normpath(posixpath.join(process.cwd, folder, "python3"))
        if name := program_at(root, path):
            version = re.fullmatch(r"python3\.(\d+)", name)
            return path if version is not None and int(version[1]) >= _OLDEST_PYTHON else ""
    return ""


def _check_places(root: Path) -> None:
    """Refuse a tree where `/proc`, `/sys` or `/dev` is a link: runc would create device nodes at its target."""
    for name in ("proc", "sys", "dev"):
        if (root / name).is_symlink():
            raise PermanentError(f"the image's /{name} is a symbolic link, which is unsafe: the image is not started")


def _runtime(wanted: Runtime, user: User, *, renamed: bool) -> Literal["runc", "crun"]:
    """The runtime to use. `renamed`: see `runtime_config.is_renamed`."""
    order: tuple[Literal["runc", "crun"], ...] = ("runc", "crun") if wanted == "auto" else (wanted,)
    usable = [name for name in order if name == "crun" or not renamed]
    for name in usable:
        if shutil.which(name) is not None:
            return name
    if renamed:
        missing, todo = (", which is not on PATH", "apt-get install crun") if usable else ("", "--runtime crun")
        reason = f"user {user.uid}:{user.gid} of a container without root needs crun{missing}"
        raise UsageError(reason, hint=f"{todo}, or --user 0")
    raise UsageError(f"{' or '.join(order)} is not on PATH", hint=_INSTALL)
