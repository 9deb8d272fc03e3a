"""Logins from kubelet's credential provider plugins: programs on a node that provide logins for its cloud's registries.

    BOOTSEER_CREDENTIAL_PROVIDER_CONFIG    a CredentialProviderConfig (YAML or JSON), or a folder of such files
    BOOTSEER_CREDENTIAL_PROVIDER_BIN_DIR   the folder of the programs

These correspond to kubelet's `--image-credential-provider-config` and `--image-credential-provider-bin-dir`. A plugin
reads a CredentialProviderRequest from its standard input and returns logins by registry, with the scope and duration
for which they may be cached; each process caches them in memory. A failing plugin is logged and called again a minute
later; meanwhile there is no login, which public images do not need.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as member
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from bootseer.errors import AccessError, PermanentError, UsageError
from bootseer.logs import logger

CONFIG = "BOOTSEER_CREDENTIAL_PROVIDER_CONFIG"
PROGRAMS = "BOOTSEER_CREDENTIAL_PROVIDER_BIN_DIR"
_LOG = logger(__name__)
_PLUGIN_S = 60.0
_FAILED_S = 60.0
_MAX_BYTES = 1 << 20
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|0")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""Names of the same registry."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A login: a user with a password, or an identity token that is exchanged for access tokens."""

    user: str = ""
    password: str = member(default="", repr=False)
    identity_token: str = member(default="", repr=False)
    until: float = member(default=math.inf, compare=False)
    """When (monotonic) to look it up again."""
    why: str = member(default="", compare=False)
    """Why there is none although there should be one."""

    @property
    def basic(self) -> str:
        """The value of an `Authorization` header with user and password."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode(errors="surrogateescape")).decode()


class _Variable(msgspec.Struct):
    name: str
    value: str = ""


class _Provider(msgspec.Struct):
    name: str
    matchImages: list[str]  # noqa: N815 - the format's own names
    defaultCacheDuration: str  # noqa: N815
    apiVersion: Literal[  # noqa: N815
        "credentialprovider.kubelet.k8s.io/v1",
        "credentialprovider.kubelet.k8s.io/v1beta1",
        "credentialprovider.kubelet.k8s.io/v1alpha1",
    ]
    args: list[str] = []
    env: list[_Variable] | None = None
    tokenAttributes: dict[str, Any] | None = None  # noqa: N815


class _Config(msgspec.Struct):
    apiVersion: Literal["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"]  # noqa: N815
    kind: Literal["CredentialProviderConfig"]
    providers: list[_Provider]


class Login(msgspec.Struct):
    """One login of a response."""

    username: str = ""
    password: str = ""


class _Answer(msgspec.Struct):
    apiVersion: str  # noqa: N815
    kind: Literal["CredentialProviderResponse"]
    cacheKeyType: Literal["Image", "Registry", "Global"]  # noqa: N815
    auth: dict[str, Login] | None = None
    cacheDuration: str | None = None  # noqa: N815


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_ANSWER = msgspec.json.Decoder(_Answer)
msgspec.json.Decoder(_Config)


class Found(NamedTuple):
    """The plugins' result for an image."""

    logins: Mapping[str, Login] = {}
    """By registry, or pattern of registries."""
    until: float = math.inf
    """When (monotonic) to ask again."""
    why: str = ""
    """The error message, if something failed."""


def find_login(host: str, repository: str, env: Mapping[str, str]) -> Credentials:
    """The login for `host[:port]/repository` from the plugins configured in `env`.

    Empty if no plugin has one, or it fails, which is logged.
    """
    config, programs = env.get(CONFIG, ""), env.get(PROGRAMS, "")
    if not config:
        return Credentials()
    image = f"{'docker.io' if host in DOCKER_HUB else host}/{repository}"
    reason, until = "", math.inf
    try:
        plugins = _plugins(config, programs, _changed(Path(config)))
    except UsageError as error:
        _LOG.warning("%s is requested without credentials: %s", image, error)
        return Credentials(until=time.monotonic() + _FAILED_S, why=str(error))
    for plugin in plugins:
        if any(matches(pattern, image) for pattern in plugin.provider.matchImages):
            found = plugin.ask(image)
            reason, until = reason or found.why, min(until, found.until)
            # The longest name is the most specific one.
            for name, login in sorted(found.logins.items(), key=lambda item: len(item[0]), reverse=True):
                if matches(name, image):
                    return Credentials(login.username, login.password, until=found.until)
    return Credentials(until=until, why=reason)


def check_providers(env: Mapping[str, str]) -> None:
    """Raise `UsageError` for an invalid configuration, or missing programs."""
    if config := env.get(CONFIG, ""):
        _plugins(config, env.get(PROGRAMS, ""), _changed(Path(config)))


def matches(pattern: str, image: str) -> bool:
    """Whether an image `host[:port]/path` matches a pattern of kubelet: the same number of host labels, each matched by
    its own wildcards, the same port, and a path with the pattern's as prefix."""
    host, _, path = pattern.partition("://")[2].partition("/") if "://" in pattern else pattern.partition("/")
    wanted_host, _, wanted_path = image.partition("/")
    name, _, port = host.partition(":")
    wanted_name, _, wanted_port = wanted_host.partition(":")
    parts, wanted = name.split("."), wanted_name.split(".")
    return (
        port == wanted_port
        and len(parts) == len(wanted)
        and wanted_path.startswith(path)
        and all(fnmatchcase(one, part.replace("[^", "[!")) for part, one in zip(parts, wanted, strict=True))
    )


@dataclass
class _Plugin:
    provider: _Provider
    program: Path
    lock: threading.Lock = member(default_factory=threading.Lock)
    kept: dict[tuple[str, str], Found] = member(default_factory=dict)
    """By kind of the cache key, and key."""

    def ask(self, image: str) -> Found:
        keys = {"Image": image, "Registry": image.partition("/")[0], "Global": ""}
        with self.lock:  # of many concurrent pulls one calls the program, and the others wait for its result
            now = time.monotonic()
            self.kept = {key: found for key, found in self.kept.items() if found.until > now}
            for key in keys.items():
                if key in self.kept:
                    return self.kept[key]
            try:
                answer = self._ask(image)
                lasts_s = seconds(answer.cacheDuration or self.provider.defaultCacheDuration)
                found = Found(answer.auth or {}, time.monotonic() + lasts_s)
                self.kept[answer.cacheKeyType, keys[answer.cacheKeyType]] = found
            except AccessError as error:
                _LOG.warning("%s is requested without credentials: %s", image, error)
                found = Found({}, time.monotonic() + _FAILED_S, str(error))
                self.kept["Image", image] = found
            return found

    def _ask(self, image: str) -> _Answer:
        provider = self.provider
        request = {"apiVersion": provider.apiVersion, "kind": "CredentialProviderRequest", "image": image}
        label = f"credential provider {provider.name}"
        try:
            ended = subprocess.run(
                [self.program, *provider.args],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=_PLUGIN_S,
                check=False,
                env={**os.environ, **{variable.name: variable.value for variable in provider.env or ()}},
            )
        except subprocess.TimeoutExpired as error:
            raise AccessError(f"{label} did not answer in {_PLUGIN_S:g} s") from error
        except (OSError, ValueError) as error:
            raise AccessError(f"{label} does not run: {error}") from error
        if ended.returncode:
            words = ended.stderr[-200:].decode(errors="replace").strip()
            raise AccessError(f"{label} ended with {ended.returncode}: {words!r}")
        try:
            answer = _ANSWER.decode(ended.stdout[:_MAX_BYTES])
            seconds(answer.cacheDuration or "0")
        except (msgspec.MsgspecError, PermanentError) as error:
            # Without its output, which may contain a password.
            raise AccessError(f"{label} returned an invalid CredentialProviderResponse") from error
        if answer.apiVersion != provider.apiVersion:
            raise AccessError(
                f"{label} answers as {answer.apiVersion[:80]!r}, its configuration says {provider.apiVersion}"
            )
        return answer


def seconds(text: str) -> float:
    """Parse a duration in Go's notation, `1h30m`. Raises `PermanentError` for other text."""
    if not _DURATION.fullmatch(text):
        raise PermanentError(f"{text[:40]!r} is not a duration as 12h or 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+\.?\d*)([a-zµ]+)", text))


def _files(path: Path) -> list[Path]:
    """A file, or those of a folder in alphabetical order, like kubelet."""
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.iterdir() if one.suffix in (".json", ".yaml", ".yml") and one.is_file())


def _changed(path: Path) -> tuple[tuple[str, int], ...]:
    """Modification times of the configuration, to detect changes."""
    try:
        return tuple((str(one), one.stat().st_mtime_ns) for one in _files(path))
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


@lru_cache(maxsize=1)
def _plugins(config: str, programs: str, _changed: tuple[tuple[str, int], ...]) -> Sequence[_Plugin]:
    if not programs:
        raise UsageError(f"{CONFIG} is set without {PROGRAMS}", hint="name the folder of the plugins too")
    found = list(itertools.chain.from_iterable(_read(path, Path(programs)) for path in _files(Path(config))))
    names = [plugin.provider.name for plugin in found]
    if len(names) > len(set(names)):
        raise _unusable(Path(config), "two providers have the same name")
    return found


def _read(path: Path, programs: Path) -> Iterator[_Plugin]:
    yaml: Any = importlib.import_module("yaml")
    try:
        with path.open("rb") as file:
            config = msgspec.convert(yaml.safe_load(file.read(_MAX_BYTES)), _Config)
        for provider in config.providers:
            if not provider.matchImages or not re.fullmatch(r"[^/]+", provider.name) or provider.name in (".", ".."):
                raise PermanentError(f"provider {provider.name[:80]!r} has no usable name, or no matchImages")
            seconds(provider.defaultCacheDuration)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    except (yaml.YAMLError, msgspec.ValidationError, PermanentError, RecursionError) as error:
        raise _unusable(path, " ".join(str(error).split())[:300]) from error
    for provider in config.providers:
        if (provider.tokenAttributes or {}).get("requireServiceAccount"):
            _LOG.info("%s: provider %s needs the pod's service account and is left out", path, provider.name)
            continue
        program = programs / provider.name
        if not os.access(program, os.X_OK):
            raise UsageError(f"{program}: no such program", hint=f"{path} names it; set {PROGRAMS}")
        yield _Plugin(provider, program)


def _unusable(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path}: not a usable CredentialProviderConfig: {reason}", hint=f"mend it, or unset {CONFIG}")
