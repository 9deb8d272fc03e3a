"""What looks like somebody's secret: a snapshot is shared, and must hold none.

Precision comes before reach: a file that is taken for a secret keeps a setup from being snapshotted at all. Packages
are published, so what they contain is no secret (certificates for tests, examples of tokens), whatever it looks like.
Only files that people or setups write are looked into: settings, environment files, remotes of clones, keys.

Decides and touches nothing. Who calls: whoever writes a snapshot, for each file; `exports`, for values.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from bootseer.env.keys.variables import looks_secret

MAX_BYTES = 1 << 20
"""Larger files are no settings."""
HEAD_BYTES = 65_536
"""So much of a file is looked at."""

# Published content, and the few files in it that an installer writes for this one installation.
_PUBLISHED = re.compile(
    r".*/(site-packages|dist-packages|node_modules|lib/python\d[\d.]*)/.*"
    r"|/usr/(share|include|lib|lib64|libexec|src)/.*|.*/(tests?|testing|testdata|test-data|vectors|fixtures|examples?|docs?)/.*"
)
_WRITTEN_BY_INSTALLERS = re.compile(r".*/(direct_url\.json|pip\.conf|\.git/config|uv-receipt\.toml)")
_SETTINGS = re.compile(
    r".*\.(conf|cfg|ini|toml|ya?ml|json|env|sh|bash|zsh|fish|profile|properties|xml|list|repo|sources|rc|cnf|auth|netrc|txt|in|ps1)"
    r"|.*/\.?(env|environment|netrc|_netrc|npmrc|pypirc|condarc|bashrc|profile|bash_profile|zshrc|zshenv|credentials|config"
    r"|git-credentials|gitconfig|pgpass|my\.cnf|s3cfg|boto|dockercfg|yarnrc|Renviron|token|activate)(\.\w+)?",
    re.IGNORECASE,
)
_SHELL_LIKE = re.compile(
    r".*\.(env|sh|bash|zsh|profile|properties|ini|cfg|conf)|.*/\.?(env(\..*)?|environment|bashrc|profile|bash_profile|zshrc|zshenv"
    r"|npmrc|s3cfg|boto|credentials|Renviron|activate)",
    re.IGNORECASE,
)
_TOKENS = (
    ("a GitHub token", r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,}"),
    ("a GitLab token", r"gl(?:pat|dt|rt|cbt)-[A-Za-z0-9_-]{20,}"),
    ("a Hugging Face token", r"hf_[A-Za-z0-9]{30,}"),
    ("an AWS access key", r"(?:AKIA|ASIA)[A-Z2-7]{16}"),
    ("an AWS secret key", r"(?i:aws_secret_access_key)[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}"),
    ("a Google API key", r"AIza[A-Za-z0-9_-]{35}"),
    ("a Google token", r"ya29\.[A-Za-z0-9_-]{30,}"),
    ("a Slack token", r"xox[abeoprs]-[A-Za-z0-9-]{20,}"),
    ("an npm token", r"npm_[A-Za-z0-9]{36}"),
    ("a PyPI token", r"pypi-AgE[A-Za-z0-9_-]{50,}"),
    ("a Docker token", r"dckr_pat_[A-Za-z0-9_-]{20,}"),
    ("an API key", r"sk-(?:ant-|proj-|svcacct-)?(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{32,}"),
)
_TOKEN = re.compile("|".join(rf"(?<![A-Za-z0-9_])(?P<t{n}>{form})" for n, (_, form) in enumerate(_TOKENS)))
_PRIVATE_KEY = re.compile(r"^\W{0,3}-----BEGIN (?:[A-Z]+ ){0,2}PRIVATE KEY(?: BLOCK)?-----\s*\S", re.MULTILINE)
_KEY_IN_JSON = re.compile(r'"private_key"\s*:\s*"-----BEGIN ')
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,20}://(?P<user>[^\s/@:\"'<>]*)(?::(?P<password>[^\s/@\"'<>]+))?@[\w\[]", re.IGNORECASE
)
_NPM = re.compile(r"^[^#;\n]*:_(?:authToken|auth|password)\s*=\s*(?P<value>\S+)", re.MULTILINE)
_LOGIN = re.compile(r"\bpassword\s+(?P<value>\S+)")
_DOCKER = re.compile(r'"auth"\s*:\s*"(?P<value>[A-Za-z0-9+/=]{8,})"')
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*[\"']?(?P<value>[^\s\"'#;]+)", re.MULTILINE
)
_PLACEHOLDER = re.compile(
    r"[$%{}<>*]|\.\.\.|^(x+|\*+|none|null|true|false)$|your|change.?me|example|dummy|placeholder|redacted"
    r"|^[a-z_.-]*(secret|password|token)$"
    r"|^(user|pass|passwd|password|name|login)$",
    re.IGNORECASE,
)
_SAFE_FOR_ADDRESSES = re.compile(
    r"(?:git|hg|svn|ssh|anonymous|oauth2|x-access-token|user|username|__token__)?", re.IGNORECASE
)
_HARMLESS = re.compile(r"[/~].*|\.{1,2}/.*|\d{1,6}|true|false|none", re.IGNORECASE | re.DOTALL)
_BASE64 = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9_./+=:-]{16,}")


def is_worth_reading(path: str, size: int) -> bool:
    """Whether `find` needs to see the beginning of this file."""
    if not 0 < size <= MAX_BYTES:
        return False
    return bool(_WRITTEN_BY_INSTALLERS.fullmatch(path)) or not _PUBLISHED.fullmatch(path)


def find(path: str, head: bytes) -> str | None:
    """What kind of secret a file holds, in words that follow "it holds"; None for none.

    `head` are its first `HEAD_BYTES`; ask `is_worth_reading` before reading them.
    """
    by_installer = bool(_WRITTEN_BY_INSTALLERS.fullmatch(path))
    if not by_installer and _PUBLISHED.fullmatch(path):
        return None
    if b"\0" in head:
        return None
    text = head.decode("utf-8", "replace")
    if _PRIVATE_KEY.search(text) and "snakeoil" not in path:  # that one is made to be known
        return "a private key"
    if not by_installer and not _SETTINGS.fullmatch(path):
        return None
    return next(_found(path, text), None)


def value_kind(value: str) -> str | None:
    """What kind of secret a value is by its form, as in `find`."""
    if (token := _TOKEN.search(value)) is not None:
        return _token_kind(token)
    if _PRIVATE_KEY.search(value):
        return "a private key"
    if any(_is_login(address) for address in _ADDRESS.finditer(value)):
        return "an address with a password"
    return None


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable is a secret: by its value, or by its name where the value is no path, number or switch."""
    if value_kind(value) is not None:
        return True
    return looks_secret(name) and len(value) >= 4 and _HARMLESS.fullmatch(value) is None


def _found(path: str, text: str) -> Iterator[str]:
    if _KEY_IN_JSON.search(text):
        yield "a private key"
    if (token := _TOKEN.search(text)) is not None:
        yield _token_kind(token)
    if any(_is_login(address) for address in _ADDRESS.finditer(text)):
        yield "an address with a password"
    name = posixpath.basename(path)
    special = {
        ".npmrc": (_NPM, "a token of npm"),
        ".netrc": (_LOGIN, "a password"),
        "_netrc": (_LOGIN, "a password"),
        "config.json": (_DOCKER, "a login of a registry"),
        ".dockercfg": (_DOCKER, "a login of a registry"),
    }.get(name)
    if special is not None and any(_is_real(match["value"]) for match in special[0].finditer(text)):
        yield special[1]
    if _SHELL_LIKE.fullmatch(path):
        yield from (f"a secret ({match['name']})" for match in _ASSIGNED.finditer(text) if _is_assigned_secret(match))


def _is_assigned_secret(match: re.Match[str]) -> bool:
    value = match["value"]
    return is_secret_variable(match["name"], value) and _is_real(value) and _BASE64.fullmatch(value) is not None


def _token_kind(match: re.Match[str]) -> str:
    return next(kind for n, (kind, _) in enumerate(_TOKENS) if match[f"t{n}"])


def _is_login(address: re.Match[str]) -> bool:
    """Whether an address carries a password, or a user that can only be a token."""
    password = address["password"]
    if password is None:
        user = address["user"]
        return bool(_BASE64.fullmatch(user)) and len(user) >= 20 and _is_real(user)
    return _is_real(password) and not (_is_dull(address["user"]) and _is_dull(password))


def _is_dull(word: str) -> bool:
    return bool(_SAFE_FOR_ADDRESSES.fullmatch(word)) or word.lower() in ("pass", "password", "pwd", "token")


def _is_real(value: str) -> bool:
    """Whether a value stands for itself: no variable, no example."""
    return _PLACEHOLDER.search(value) is None
