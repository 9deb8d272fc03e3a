"""Options for the environment that a command runs in, for `run` and the verbs of `env`, and the step from their values
to what `launch.environment_stage` wants.

The table is read in front of every `bootseer run`, so that what only environments need is imported in the functions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bootseer.cli.image_options import signatures
from bootseer.cli.options import Option
from bootseer.env import MODES, Mode
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.launch.environment.task import Daemons, EnvironmentWanted

MODE = "BOOTSEER_ENV"
_MAX_AGE = "BOOTSEER_ENV_MAX_AGE"
_WAIT = "BOOTSEER_ENV_WAIT"
_DAEMONS = "BOOTSEER_ENV_DAEMONS"
_PUBLISH = "BOOTSEER_ENV_PUBLISH"
_TENANT = "BOOTSEER_ENV_TENANT"
_LEAVE_OUT = "BOOTSEER_ENV_LEAVE_OUT"
_KEEP = "BOOTSEER_ENV_KEEP"
_RULES = "BOOTSEER_ENV_SECRET_RULES"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_S = 3600.0 * 24 * 365 * 10

REQUIREMENTS = "Install these: requirements.txt, pyproject.toml, uv.lock, pylock.toml, environment.yml."
SETUP = (
    Option("setup", ("--setup",), "A setup script.", metavar="SCRIPT"),
    Option("requirements", ("--requirements", "-r"), REQUIREMENTS, metavar="FILE", many=True),
)
"""What the environment is made by, where no command follows."""

KEY = (
    Option("inputs", ("--env-input",), "A file or folder that the setup depends on.", metavar="PATH", many=True),
    Option("variables", ("--env-var",), "A variable that the setup depends on.", metavar="NAME", many=True),
    Option(
        "tenant",
        ("--env-tenant",),
        "Who shares snapshots: another name, other snapshots (default: all).",
        metavar="NAME",
    ),
    Option(
        "leave_out",
        ("--env-leave-out",),
        "What no snapshot keeps besides credentials that are known as such: a path, or a pattern as a shell's, ~ for "
        "any home. The command that follows the setup gets it.",
        metavar="PATH",
        many=True,
    ),
    Option(
        "keep",
        ("--env-keep",),
        "What is kept although it looks like a secret: a path, or a pattern.",
        metavar="PATH",
        many=True,
    ),
)
"""What the request key is made of besides the setup itself."""

CAPTURE = (
    Option(
        "imports",
        ("--env-import",),
        "A module that must import before a snapshot is kept.",
        metavar="MODULE",
        many=True,
    ),
    Option(
        "conflicts",
        ("--env-conflicts",),
        "Whether a new conflict that `pip check` finds keeps a snapshot from being kept (refuse, the default; accept).",
        choices=("refuse", "accept"),
    ),
    Option(
        "secret_rules",
        ("--env-secret-rules",),
        "Further rules for what looks like a secret, in the format of gitleaks (TOML) or kingfisher (YAML).",
        metavar="FILE",
        many=True,
    ),
    Option(
        "max_age",
        ("--env-max-age",),
        "Snapshots older than this are made anew, as 12h or 7d (default: 7d unless all versions are pinned; none).",
        metavar="TIME",
    ),
)
"""What a snapshot must be like."""

ENVIRONMENT = (
    Option(
        "env_mode",
        ("--env",),
        "Snapshots of the environment: use and make them (auto, the default), make anew (refresh), neither (bypass), "
        "or end where none can be used (require).",
        choices=MODES,
    ),
    *KEY,
    *CAPTURE,
    Option(
        "daemons",
        ("--env-daemons",),
        "Processes that the setup leaves running: started again where its snapshot is used (relaunch, the default), or "
        "no snapshot is made or used (refuse).",
        choices=("relaunch", "refuse"),
    ),
    Option(
        "wait",
        ("--env-wait",),
        "How long to wait while another node makes the snapshot, as 10m (the default).",
        metavar="TIME",
    ),
)
"""The environment's part of the options of `run`."""


def wanted(values: Mapping[str, Any], source: Mapping[str, Any], env: Mapping[str, str]) -> EnvironmentWanted:
    """What the values ask for; `source` tells of store and loading. Raises `UsageError`."""
    from bootseer.artifact.places import STORE, cache_root, runtime_root
    from bootseer.launch.environment.task import EnvironmentWanted

    mode: Mode = values.get("env_mode") or _mode(env)
    return EnvironmentWanted(
        cache=cache_root(env, os.getuid()),
        runtime=runtime_root(env, os.getuid()),
        mode=mode,
        store=source.get("store") or env.get(STORE) or None,
        plain_http=bool(source.get("plain_http")),
        signatures=signatures(source, env),
        loading=source.get("loading", "auto"),
        inputs=tuple(values["inputs"]),
        variables=tuple(values["variables"]),
        imports=tuple(values.get("imports", ())),
        leave_out=_patterns("--env-leave-out", _listed(values["leave_out"], env, _LEAVE_OUT)),
        keep=_patterns("--env-keep", _listed(values["keep"], env, _KEEP)),
        secret_rules=tuple(map(os.path.abspath, _listed(values.get("secret_rules", ()), env, _RULES))),
        conflicts=values.get("conflicts") or "refuse",
        daemons=_daemons(values, env),
        max_age_s=_duration(values.get("max_age"), "--env-max-age", env, _MAX_AGE, endless=True),
        wait_s=_duration(values.get("wait"), "--env-wait", env, _WAIT) or 600.0,
        publish_s=_duration(None, "", env, _PUBLISH) or 600.0,
        tenant=values["tenant"] or env.get(_TENANT, ""),
    )


def _mode(env: Mapping[str, str]) -> Mode:
    chosen = env.get(MODE) or "auto"
    for mode in MODES:
        if mode == chosen:
            return mode
    raise UsageError(f"{MODE}={chosen!r} is not a mode", hint=f"choose from {', '.join(MODES)}")


def _daemons(values: Mapping[str, Any], env: Mapping[str, str]) -> Daemons:
    # The owner of a node forbids by the variable what a job may not allow.
    chosen = {values.get("daemons") or "relaunch", env.get(_DAEMONS) or "relaunch"}
    if not chosen <= {"relaunch", "refuse"}:
        raise UsageError(f"{_DAEMONS}={env[_DAEMONS]!r} is unknown", hint="choose from relaunch, refuse")
    return "refuse" if "refuse" in chosen else "relaunch"


def _listed(given: Iterable[str], env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """The values of an option, and those of a variable that says it for a whole fleet, with colons between them."""
    return (*given, *filter(None, env.get(variable, "").split(":")))


def _patterns(option: str, given: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in given:
        if not pattern.startswith(("/", "~/", "*")):
            raise UsageError(f"{option} {pattern!r} names no place", hint="begin it with /, ~/ or *")
    return given


def _duration(
    given: str | None, option: str, env: Mapping[str, str], variable: str, *, endless: bool = False
) -> float | None:
    """Seconds of the option, else of the variable, else None."""
    if given:
        return parse_duration(given, option, endless=endless)
    return parse_duration(env[variable], variable, endless=endless) if env.get(variable) else None


def parse_duration(text: str, option: str, *, endless: bool = False) -> float:
    """Seconds of `90`, `90s`, `10m`, `12h`, `7d`, `2w`; of `none`, where there may be no end. Raises `UsageError`."""
    import re

    if endless and text.strip() == "none":
        return math.inf
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw]?)", text.strip().lower(), re.ASCII)
    value_s = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if not 0 < value_s <= _MAX_S:
        raise UsageError(f"{option} {text!r} is not a duration", hint="for example 90s, 10m, 12h or 7d")
    return value_s
