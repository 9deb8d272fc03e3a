"""What pip's settings are called by uv, so that uv installs exactly what pip would.

A setting without a counterpart is a reason to take pip. Addresses may hold passwords: they go into the environment,
never into an argument list, which every user of the machine can read. Decides; whether a folder is there is an
argument. Called by `choose`.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bootseer.env.installing.pip_settings import Requirements, Setting

_PUBLIC = ""
"""The index that both programs ask when nobody names one."""
# What pip shows, keeps or asks, without a say in what is installed. Bytecode is ours to make.
_NO_MATTER = frozenset(
    {
        *("cache-dir", "check-build-dependencies", "clean", "no-clean", "compile", "no-compile", "use-pep517"),
        *("color", "no-color", "debug", "exists-action", "log", "no-input", "progress-bar", "quiet", "verbose"),
        *("disable-pip-version-check", "python-version-warning", "no-python-version-warning", "root-user-action"),
        *("no-warn-conflicts", "no-warn-script-location"),
    }
)
_HARMLESS_FEATURES = frozenset({"fast-deps", "truststore", "inprocess-build-deps", "in-tree-build"})
_FLAGS = {
    "pre": "--prerelease=allow",
    "no-deps": "--no-deps",
    "require-hashes": "--require-hashes",
    "break-system-packages": "--break-system-packages",
    "no-build-isolation": "--no-build-isolation",
}
_NUMBERS = {"timeout": "UV_HTTP_TIMEOUT", "retries": "UV_HTTP_RETRIES"}
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f"})
# The user's own word to uv about where packages come from.
_OWN_INDEXES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")


@dataclass(slots=True)
class Translation:
    """How uv is told the same."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """What has no counterpart, in words; if there is one, pip must install."""


@dataclass(slots=True)
class _Sources:
    """Where packages come from, as pip gathers it while it reads."""

    indexes: list[str]
    find_links: list[str] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)
    no_index: bool = False


def translate(
    settings: Iterable[Setting], requirements: Requirements, env: Mapping[str, str], exists: Callable[[str], bool]
) -> Translation:
    """Tell uv what pip would read. `exists` says whether a local folder or file is there."""
    done, sources = Translation(), _Sources([_PUBLIC])
    # An index replaces, a further one adds, in whatever order the file has them.
    for setting in sorted(settings, key=lambda each: each.name != "index-url"):
        _take(setting, sources, done)
    for setting in requirements.options:
        if setting.name == "find-links":
            beside = os.path.join(os.path.dirname(setting.where), setting.value)  # noqa: PTH118, PTH120 - may be a URL
            sources.find_links.append(beside if "://" not in setting.value and exists(beside) else setting.value)
        else:
            _take(setting, sources, done)
    _take_requirements(requirements, done)
    _tell_sources(sources, done, env, exists)
    # pip knows none of uv's tables of other sources, nor its configuration files.
    done.arguments += ["--no-sources", "--no-config", "--index-strategy", "unsafe-best-match"]
    # What pip installs is the environment's own; a link into uv's cache would let a job edit the cache.
    done.environment["UV_LINK_MODE"] = "copy"
    joined = ("UV_FIND_LINKS", "UV_INSECURE_HOST")
    for name in done.environment.keys() & env.keys():
        if name.startswith("UV_") and name not in joined:
            del done.environment[name]  # what the user told uv itself stays
    return done


def _take(setting: Setting, sources: _Sources, done: Translation) -> None:
    name, value = setting.name, setting.value
    known = (
        _is_no_matter(name, value)
        or _take_source(name, value, sources)
        or _take_choice(name, value, done)
        or _take_connection(name, value, done)
    )
    if not known:
        done.refusals.append(f"pip's setting {name} ({setting.where}) has no counterpart in uv")


def _is_no_matter(name: str, value: str) -> bool:
    return (
        name in _NO_MATTER
        or (value.lower() in _FALSE and name not in _NUMBERS)
        or (name == "upgrade-strategy" and value == "only-if-needed")
        or (name == "use-feature" and set(value.split()) <= _HARMLESS_FEATURES)
        or (name == "keyring-provider" and value in ("auto", "disabled"))
    )


def _take_source(name: str, value: str, sources: _Sources) -> bool:
    """Where packages come from."""
    if name == "index-url":
        sources.indexes = [] if sources.no_index else [value.strip()]
    elif name == "extra-index-url":
        sources.indexes += [] if sources.no_index else value.split()
    elif name == "no-index":
        sources.no_index, sources.indexes = True, []
    elif name == "find-links":
        sources.find_links += value.split()
    elif name == "trusted-host":
        sources.trusted += value.split()
    else:
        return False
    return True


def _take_choice(name: str, value: str, done: Translation) -> bool:
    """Which packages are taken, and how they are built."""
    if name in _FLAGS and value.lower() in _TRUE:
        _flag(done, _FLAGS[name])
    elif name in ("no-binary", "only-binary"):
        done.arguments += [word for each in value.replace(",", " ").split() for word in (f"--{name}", each)]
    elif name == "constraint":
        # pip hands a constraint of its configuration to the pips that build packages, too.
        done.arguments += [word for each in value.split() for word in ("-c", each, "-b", each)]
    elif name == "build-constraint":
        done.arguments += [word for each in value.split() for word in ("-b", each)]
    else:
        return False
    return True


def _flag(done: Translation, word: str) -> None:
    if word not in done.arguments:  # uv takes each but once
        done.arguments.append(word)


def _take_connection(name: str, value: str, done: Translation) -> bool:
    """How servers are reached, and what is kept of their answers."""
    if name in ("cert", "client-cert"):
        done.environment["SSL_CERT_FILE" if name == "cert" else "SSL_CLIENT_CERT"] = value
    elif name in _NUMBERS and value.isdigit():
        done.environment[_NUMBERS[name]] = value
    elif name == "proxy":
        done.environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), value)
    elif name == "keyring-provider" and value == "subprocess":
        done.environment["UV_KEYRING_PROVIDER"] = value
    elif name == "no-cache-dir":
        done.environment["UV_NO_CACHE"] = "1"
    else:
        return False
    return True


def _take_requirements(requirements: Requirements, done: Translation) -> None:
    if requirements.editable_remote:
        done.refusals.append("an editable requirement comes from version control, which uv does not install")
    done.refusals += [f"the option {each.name} of a requirement ({each.where})" for each in requirements.own_options]
    done.refusals += [f"{path} cannot be read here" for path in requirements.unread]
    if requirements.local:
        # uv's cache knows a folder by few of its files: sources changed elsewhere would not be built again.
        _flag(done, "--refresh")
    if requirements.hashes:
        _flag(done, "--require-hashes")


def _tell_sources(sources: _Sources, done: Translation, env: Mapping[str, str], exists: Callable[[str], bool]) -> None:
    if sources.indexes and not any(env.get(name) for name in _OWN_INDEXES):
        # Where two have the same version pip takes it from the last, uv from the first; the default comes after all.
        default, *more = sources.indexes
        if default != _PUBLIC:
            done.environment["UV_DEFAULT_INDEX"] = default
        if more:
            done.environment["UV_INDEX"] = " ".join(reversed(more))
    links = [link if "://" in link else os.path.expanduser(link) for link in sources.find_links]  # noqa: PTH111
    links = [link for link in links if "://" in link or exists(link)]  # pip walks past missing ones
    if sources.no_index:
        _flag(done, "--no-index")
    if any("," in link for link in links):
        done.refusals.append("a place of find-links has a comma in its name")
    for name, values, comma in (("UV_FIND_LINKS", links, ","), ("UV_INSECURE_HOST", sources.trusted, " ")):
        if values:
            done.environment[name] = comma.join(dict.fromkeys([*filter(None, env.get(name, "").split(comma)), *values]))
