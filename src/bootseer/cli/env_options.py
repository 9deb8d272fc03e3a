"""Options about environment setups and their snapshots, for `run` and the verbs of `env`, and the step from their
values to the settings of `launch.environment`.

The table is imported by every `bootseer run`, so anything that only environments need is imported inside the functions.
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
    from bootseer.launch.environment.task import Daemons, EnvironmentOptions

MODE = "BOOTSEER_ENV"
_DAEMONS = "BOOTSEER_ENV_DAEMONS"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_S = 3600.0 * 24 * 365 * 10

SETUP = (
    Option("--setup", "Script that sets up the environment.", metavar="SCRIPT"),
    Option(
        "--requirements -r",
        "File to install from: requirements.txt, pyproject.toml, uv.lock, pylock.toml or environment.yml.",
        metavar="FILE",
        many=True,
    ),
)

KEY = (
    Option("--env-input", "File or folder that the setup depends on.", metavar="PATH", many=True, dest="inputs"),
    Option("--env-var", "Variable that the setup depends on.", metavar="NAME", many=True, dest="variables"),
    Option(
        "--env-tenant",
        "Share snapshots only with setups of the same tenant (default: with all).",
        metavar="NAME",
        dest="tenant",
    ),
    Option(
        "--env-leave-out",
        "Path or shell pattern (~ for any home) to leave out of snapshots, besides known credentials. The command that "
        "follows the setup still sees it.",
        metavar="PATH",
        many=True,
        dest="leave_out",
    ),
    Option(
        "--env-keep",
        "Path or pattern to keep in snapshots although it looks like a secret.",
        metavar="PATH",
        many=True,
        dest="keep",
    ),
)
"""Parts of the request key besides the setup itself."""

CAPTURE = (
    Option(
        "--env-import",
        "Module that must be importable for a snapshot to be published.",
        metavar="MODULE",
        many=True,
        dest="imports",
    ),
    Option(
        "--env-conflicts",
        "Whether to publish a snapshot if `pip check` finds a new conflict (accept) or not (refuse, the default).",
        choices=("refuse", "accept"),
        dest="conflicts",
    ),
    Option(
        "--env-secret-rules",
        "Additional rules to detect secrets, in the format of gitleaks (TOML) or kingfisher (YAML).",
        metavar="FILE",
        many=True,
        dest="secret_rules",
    ),
    Option(
        "--env-max-age",
        "Replace snapshots older than this, such as 12h, 7d or none (default: 7d, or none if all versions are pinned).",
        metavar="TIME",
        dest="max_age",
    ),
)
"""Conditions for a snapshot."""

ENVIRONMENT = (
    Option(
        "--env",
        "Environment snapshots: use and make them (auto, the default), always make a new one (refresh), do neither "
        "(bypass), or fail if none can be used (require).",
        choices=MODES,
        dest="env_mode",
    ),
    *KEY,
    *CAPTURE,
    Option(
        "--env-daemons",
        "Processes that the setup leaves running: start them again from a snapshot (relaunch, the default), or use no "
        "snapshots for such a setup (refuse).",
        choices=("relaunch", "refuse"),
        dest="daemons",
    ),
    Option(
        "--env-wait",
        "How long to wait for another node that makes the snapshot, such as 30m or 0 (default: 10m).",
        metavar="TIME",
        dest="wait",
    ),
)
"""Options of `run` about the environment."""


def wanted(values: Mapping[str, Any], source: Mapping[str, Any]) -> EnvironmentOptions:
    """The environment settings; `source` has the options about store and loading. Raises `UsageError`."""
    from bootseer.artifact.places import STORE, cache_root, runtime_root
    from bootseer.launch.environment.task import EnvironmentOptions

    mode: Mode = values.get("env_mode") or _mode()
    wait_s = _duration(values.get("wait"), "--env-wait", "BOOTSEER_ENV_WAIT", zero=True)
    return EnvironmentOptions(
        cache=cache_root(),
        runtime=runtime_root(),
        mode=mode,
        store=source.get("store") or os.environ.get(STORE) or None,
        plain_http=bool(source.get("plain_http")),
        signatures=signatures(source),
        loading=source.get("loading", "auto"),
        inputs=tuple(values["inputs"]),
        variables=tuple(values["variables"]),
        imports=tuple(values.get("imports", ())),
        leave_out=_patterns("--env-leave-out", _listed(values["leave_out"], "BOOTSEER_ENV_LEAVE_OUT")),
        keep=_patterns("--env-keep", _listed(values["keep"], "BOOTSEER_ENV_KEEP")),
        secret_rules=tuple(map(os.path.abspath, _listed(values.get("secret_rules", ()), "BOOTSEER_ENV_SECRET_RULES"))),
        conflicts=values.get("conflicts") or "refuse",
        daemons=_daemons(values),
        max_age_s=_duration(values.get("max_age"), "--env-max-age", "BOOTSEER_ENV_MAX_AGE", endless=True),
        wait_s=600.0 if wait_s is None else wait_s,
        publish_s=_duration(None, "", "BOOTSEER_ENV_PUBLISH") or 600.0,
        tenant=values["tenant"] or os.environ.get("BOOTSEER_ENV_TENANT", ""),
    )


def _mode() -> Mode:
    chosen = os.environ.get(MODE) or "auto"
    for mode in MODES:
        if mode == chosen:
            return mode
    raise UsageError(f"{MODE}={chosen!r} is not a mode", hint=f"choose from {', '.join(MODES)}")


def _daemons(values: Mapping[str, Any]) -> Daemons:
    # The variable is the node owner's: if it refuses, the job's option cannot allow it.
    chosen = {values.get("daemons") or "relaunch", os.environ.get(_DAEMONS) or "relaunch"}
    if not chosen <= {"relaunch", "refuse"}:
        raise UsageError(f"{_DAEMONS}={os.environ[_DAEMONS]!r} is unknown", hint="choose from relaunch, refuse")
    return "refuse" if "refuse" in chosen else "relaunch"


def _listed(given: Iterable[str], variable: str) -> tuple[str, ...]:
    """The values of an option and those of a variable, separated by colons, that sets it for a whole cluster."""
    return (*given, *filter(None, os.environ.get(variable, "").split(":")))


def _patterns(option: str, given: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in given:
        if not pattern.startswith(("/", "~/", "*")):
            raise UsageError(f"{option} {pattern!r} is not a path or pattern", hint="begin it with /, ~/ or *")
    return given


def _duration(given: str | None, option: str, variable: str, **also: Any) -> float | None:
    """Seconds of the option, else of the variable, else None; `also` as in `parse_duration`."""
    if given:
        return parse_duration(given, option, **also)
    text = os.environ.get(variable)
    return parse_duration(text, variable, **also) if text else None


def parse_duration(text: str, option: str, *, endless: bool = False, zero: bool = False, unit: str = "s") -> float:
    """Seconds of `90` (in `unit`), `90s`, `10m`, `12h`, `7d`, `2w`; with `endless` also `none`, infinity; with `zero`
    also 0. Raises `UsageError`.
    """
    import re

    if endless and text.strip() == "none":
        return math.inf
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw]?)", text.strip().lower(), re.ASCII)
    value_s = float(match[1]) * _UNITS[match[2] or unit] if match is not None else -1.0
    if not (0 < value_s <= _MAX_S or (zero and value_s == 0)):
        raise UsageError(f"{option} {text!r} is not a duration", hint="for example 90s, 10m, 12h or 7d")
    return value_s
