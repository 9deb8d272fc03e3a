"""A container's process: the image's configuration, the user's options and the host's environment combined.

The image's settings are OCI's `Entrypoint`, `Cmd`, `Env`, `WorkingDir` and `User`. They are untrusted, and accepted
only in the form that the OCI specification defines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from bootseer.errors import CorruptError, UsageError
from bootseer.image.containers.rootfs import User, resolve_user
from bootseer.store.addresses import without_credentials

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED = ("TRACEPARENT", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
           "GROUP_RANK", "ROLE_NAME", "NODE_NAME", "POD_UID", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
           "OMP_NUM_THREADS", "TERM", "TZ", "COLUMNS", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY",
           "HTTPS_PROXY", "NO_PROXY")  # fmt: skip
_PASSED_FAMILIES = ("BOOTSEER_", "SLURM_", "PET_", "TORCHELASTIC_", "TORCHX_", "SKYPILOT_", "OMPI_", "PMI_", "PMIX_",
                    "NCCL_", "OTEL_EXPORTER_OTLP_")  # fmt: skip
# Credentials of schedulers, collectors and webhooks (whose addresses are secrets) are not passed on, unless the user
# names the variable.
_SECRET = re.compile(
    r"JWT|TOKEN|HEADERS|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|COOKIE|ALERT_TO"
    r"|(?:^|_)(?:AUTH|PASS|CREDS?|KEYS?|PAT)(?:_|$)"
)
# These concern the host or how the image was fetched, and have no meaning in the container.
_NOT_PASSED = frozenset(
    f"BOOTSEER_{name}"
    for name in ("SPOOL", "CACHE", "RUNTIME", "STORE", "PLAIN_HTTP", "AUTH_HOSTS", "REQUIRE_SIGNATURE", "PODINFO")
)


class ProcessOptions(Struct, frozen=True):
    """The user's options for the process; None: the image's value."""

    command: tuple[str, ...] = ()
    entrypoint: str | None = None
    """Empty: no entry point."""
    env: tuple[str, ...] = ()
    """`NAME=VALUE`, or `NAME` to pass the host's value on."""
    workdir: str | None = None
    user: str | None = None
    groups: tuple[str, ...] = ()
    """Supplementary groups, by number or by the image's names."""
    unset: tuple[str, ...] = ()
    """Variables to remove, from whatever source."""
    prepend: Mapping[str, str] = field(default_factory=dict)
    """Folders to prepend to variables that are lists of folders (PYTHONPATH)."""


class Process(Struct, frozen=True):
    """The process to start, with paths and ids of the container."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: User


def process_of(image: Mapping[str, Any], options: ProcessOptions, root: Path, host_env: Mapping[str, str]) -> Process:
    """The process for an image configuration (the OCI JSON) whose tree is mounted at `root`.

    Raises `UsageError` if there is no command or a name is unknown, `CorruptError` for an invalid configuration.
    """
    config = image.get("config") or {}
    if not isinstance(config, dict):
        raise CorruptError("invalid image configuration: config is not an object")
    user = resolve_user(root, options.user if options.user is not None else _text(config, "User"), options.groups)
    cwd = options.workdir or _text(config, "WorkingDir") or "/"
    if not cwd.startswith("/"):
        raise UsageError(f"working directory {cwd!r} is not absolute", hint="give --workdir a path that begins with /")
    return Process(_args(config, options), _env(config, options, user, host_env), cwd, user)


def _args(config: Mapping[str, Any], options: ProcessOptions) -> tuple[str, ...]:
    if options.entrypoint is None:
        # As in docker and podman: a command replaces Cmd, an entry point replaces both.
        args = (*_list(config, "Entrypoint"), *(options.command or _list(config, "Cmd")))
    else:
        args = (*([options.entrypoint] if options.entrypoint else []), *options.command)
    if not args:
        raise UsageError("the image has no default command", hint="give one after --")
    return args


def _env(config: Mapping[str, Any], options: ProcessOptions, user: User, host_env: Mapping[str, str]) -> dict[str, str]:
    env = {"PATH": _PATH}
    env.update(item.partition("=")[::2] for item in _list(config, "Env") if "=" in item)
    env.update(passed_variables(host_env))
    for word in options.env:
        name, sign, value = word.partition("=")
        if not name:
            raise UsageError(f"{word!r}: a variable without a name", hint="give NAME=VALUE, or NAME")
        if sign:
            env[name] = value
        elif name in host_env:
            env[name] = host_env[name]
    env.setdefault("HOME", user.home)
    for name in options.unset:
        env.pop(name, None)
    for name, value in options.prepend.items():
        env[name] = f"{value}:{env[name]}" if env.get(name) else value
    return env


def passed_variables(host_env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a container inherits from the host by default: job identity, event sinks, devices.

    Variables whose names suggest secrets are left out, and credentials are removed from addresses.
    """
    return {
        name: _without_login(value) if name.lower().endswith("_proxy") else without_credentials(value)
        for name, value in host_env.items()
        if (name in _PASSED or name.startswith(_PASSED_FAMILIES))
        and name not in _NOT_PASSED
        and not _SECRET.search(name.upper())
    }


def _without_login(proxy: str) -> str:
    """A proxy's address, with or without a scheme, and without credentials."""
    scheme, separator, rest = proxy.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise CorruptError(f"invalid image configuration: {name} is not text")
    return value


def _list(config: Mapping[str, Any], name: str) -> Sequence[str]:
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise CorruptError(f"invalid image configuration: {name} is not a list of texts")
    return value
