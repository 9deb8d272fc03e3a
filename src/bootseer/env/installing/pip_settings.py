"""Translate the settings of `pip install` to uv, so that uv installs exactly what pip would.

pip's configuration files, its variables, and options in requirement files are read without starting pip, in pip's
documented order: global, user, environment, the file in `PIP_CONFIG_FILE`, then the variables; the section `[install]`
before `[global]`. If a setting has no counterpart in uv, pip installs.

Addresses may contain passwords: they go into the environment, never into arguments, which every user of the machine can
read.

Does no I/O: reading, and tests for folders, are arguments.
"""

from __future__ import annotations

import configparser
import os.path
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bootseer.env.keys.key_settings import pip_files
from bootseer.env.keys.requirement import ARCHIVES
from bootseer.env.keys.requirements import VARIABLE, Requirements
from bootseer.store.addresses import without_credentials

Read = Callable[[str], str | None]
"""The text of a file in the job's view; None if it does not exist or is not readable."""

_SECTIONS = ("global", "install")
_NOT_OPTIONS = {"config-file", "version", "help"}
_ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url", "i": "index-url", "f": "find-links", "U": "upgrade"}


@dataclass(frozen=True, slots=True)
class Setting:
    """An effective option of pip."""

    name: str
    """The long option without its hyphens."""
    value: str
    where: str
    """Its file or variable, for messages."""


def settings(env: Mapping[str, str], cwd: str, prefix: str, home: str, read: Read) -> list[Setting]:
    """The settings in force before requirement files: one value for each name."""
    found: dict[str, Setting] = {}
    for section in _SECTIONS:
        for path in pip_files(env, cwd, home, prefix, lambda path: read(path) is not None):
            parser = configparser.RawConfigParser()
            try:
                parser.read_string(read(path) or "")
                items = parser.items(section) if parser.has_section(section) else []
            except configparser.Error:
                # pip stops at an unreadable file; our caller stops at the unknown name.
                return [Setting("unreadable", "", path)]
            found |= {name: Setting(name, value, path) for key, value in items if (name := _option_name(key)) and value}
    for variable, value in env.items():
        name = _option_name(variable[4:])
        if variable.startswith("PIP_") and name not in _NOT_OPTIONS and value:
            found[name] = Setting(name, value, variable)
    return list(found.values())


def _option_name(name: str) -> str:
    name = name.lower().replace("_", "-").removeprefix("--")
    return _ALIASES.get(name, name)


_PUBLIC = ""
"""The default index of both programs."""
# Output, caching and prompts of pip, which do not affect the result. We make the bytecode.
_IRRELEVANT = frozenset(
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
# The user's own settings of package sources for uv.
_OWN_INDEXES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")


@dataclass(slots=True)
class Translation:
    """The same settings for uv."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """Settings without a counterpart, as messages; if there is one, pip must install."""
    # Package sources, collected as pip does, until all settings are known.
    indexes: list[str] = field(default_factory=lambda: [_PUBLIC])
    find_links: list[str] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)
    no_index: bool = False


def translate(
    settings: Iterable[Setting], requirements: Requirements, env: Mapping[str, str], exists: Callable[[str], bool]
) -> Translation:
    """Translate pip's settings, and options in requirement files, to uv. `exists` tests whether a local folder or file
    exists."""
    done = Translation()
    # An index replaces the default, an extra one adds to it, in any order of the lines.
    for setting in sorted(settings, key=lambda each: each.name != "index-url"):
        _translate_setting(setting, done)
    for option, text, path in requirements.options:
        name, value = _option_name(option.lstrip("-")), VARIABLE.sub(lambda name: env.get(name[1]) or name[0], text)
        if name == "find-links":
            beside = os.path.join(os.path.dirname(path), value)  # noqa: PTH118, PTH120 - may be a URL
            done.find_links.append(beside if "://" not in value and exists(beside) else value)
        else:
            _translate_setting(Setting(name, value or "true", path), done)
    _translate_requirements(requirements, done)
    _translate_sources(done, env, exists)
    # pip ignores uv's source tables and configuration files.
    done.arguments += ["--no-sources", "--no-config", "--index-strategy", "unsafe-best-match"]
    # pip copies files into the environment; a link into uv's cache would let a job edit the cache.
    done.environment["UV_LINK_MODE"] = "copy"
    joined = ("UV_FIND_LINKS", "UV_INSECURE_HOST")
    for name in done.environment.keys() & env.keys():
        if name.startswith("UV_") and name not in joined:
            del done.environment[name]  # the user's own settings for uv are kept
    return done


def _translate_setting(setting: Setting, done: Translation) -> None:
    name, value = setting.name, setting.value
    if not (_is_irrelevant(name, value) or _take_source(name, value, done) or _take_option(name, value, done)):
        done.refusals.append(f"pip's setting {name} ({setting.where}) has no counterpart in uv")


def _is_irrelevant(name: str, value: str) -> bool:
    return (
        name in _IRRELEVANT
        or (value.lower() in _FALSE and name not in _NUMBERS)
        or (name == "upgrade-strategy" and value == "only-if-needed")
        or (name == "use-feature" and set(value.split()) <= _HARMLESS_FEATURES)
        or (name == "keyring-provider" and value in ("auto", "disabled"))
    )


def _take_source(name: str, value: str, done: Translation) -> bool:
    """Package sources."""
    if name == "index-url":
        done.indexes = [] if done.no_index else [value.strip()]
    elif name == "extra-index-url":
        done.indexes += [] if done.no_index else value.split()
    elif name == "no-index":
        done.no_index, done.indexes = True, []
    elif name == "find-links":
        done.find_links += value.split()
    elif name == "trusted-host":
        done.trusted += value.split()
    else:
        return False
    return True


def _take_option(name: str, value: str, done: Translation) -> bool:
    """Connections to servers and caching of their answers; selection of versions, and how packages are built."""
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
    elif without_credentials(value) != value:
        return False  # uv would get the password as an argument
    elif name in _FLAGS and value.lower() in _TRUE:
        _add_flag(done, _FLAGS[name])
    elif name in ("no-binary", "only-binary"):
        done.arguments += [word for each in value.replace(",", " ").split() for word in (f"--{name}", each)]
    elif name == "constraint":
        # pip passes constraints of its configuration to the pips that build packages.
        done.arguments += [word for each in value.split() for word in ("-c", each, "-b", each)]
    elif name == "build-constraint":
        done.arguments += [word for each in value.split() for word in ("-b", each)]
    else:
        return False
    return True


def _add_flag(done: Translation, word: str) -> None:
    if word not in done.arguments:  # uv accepts each of them once
        done.arguments.append(word)


def _translate_requirements(requirements: Requirements, done: Translation) -> None:
    done.refusals += [*requirements.problems, *(f"{address} cannot be read here" for address in requirements.remote)]
    done.refusals += [f"the option {name} of a requirement" for name in sorted(requirements.own_options - {"hash"})]
    if requirements.uses_cwd:  # for its checkout
        done.refusals.append("an editable requirement comes from version control, which uv does not install")
    if has_sources(requirements):
        # uv's cache recognises changes of a folder by few of its files: other changes would not be built.
        _add_flag(done, "--refresh")
    if "hash" in requirements.own_options:  # pip then requires one for each
        _add_flag(done, "--require-hashes")


def has_sources(requirements: Requirements) -> bool:
    """Whether something is a local folder or comes from version control: its content may change under one name."""
    return bool(requirements.repositories) or not all(path.endswith(ARCHIVES) for path in requirements.locals)


def _translate_sources(done: Translation, env: Mapping[str, str], exists: Callable[[str], bool]) -> None:
    if done.indexes and not any(env.get(name) for name in _OWN_INDEXES):
        # For equal versions pip takes the last source, uv the first; the default comes after all.
        default, *more = done.indexes
        if default != _PUBLIC:
            done.environment["UV_DEFAULT_INDEX"] = default
        if more:
            done.environment["UV_INDEX"] = " ".join(reversed(more))
    links = [link if "://" in link else os.path.expanduser(link) for link in done.find_links]  # noqa: PTH111
    links = [link for link in links if "://" in link or exists(link)]  # pip skips missing ones
    if done.no_index:
        _add_flag(done, "--no-index")
    if any("," in link for link in links):
        done.refusals.append("a place of find-links has a comma in its name")
    for name, values, comma in (("UV_FIND_LINKS", links, ","), ("UV_INSECURE_HOST", done.trusted, " ")):
        if values:
            done.environment[name] = comma.join(dict.fromkeys([*filter(None, env.get(name, "").split(comma)), *values]))
