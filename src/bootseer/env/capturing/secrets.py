"""Find secrets by their form: a snapshot is shared, and must contain none.

Precision comes before recall: a false positive keeps a setup from being snapshotted at all. Keys and known forms of
tokens are found by a library's rules (`env.snapshot.secret_check`); this module finds what those do not cover: logins
in addresses and settings, and random words after names like `token`. Only files that people or setups write are
searched: settings, environment files, remotes of clones.

Does no I/O.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterator

from bootseer.env.keys.key_settings import looks_secret
from bootseer.store.addresses import CONDA_TOKEN

# Published content, and the few files in it that an installer writes for this installation. A file in `site-packages`
# is published if the record of its package lists it.
_PUBLISHED = re.compile(
    r".*/node_modules/.*|.*/lib/python\d[\d.]*/(?!(site|dist)-packages/).*|/usr/(share|include|lib|lib64|libexec|src)/.*"
)
_EXAMPLES = re.compile(r".*/(tests?|testing|testdata|test-data|vectors|fixtures|examples?|docs?)/.*|.*snakeoil.*")
_WRITTEN_BY_INSTALLERS = re.compile(r".*/(direct_url\.json|pip\.conf|\.git/config|uv-receipt\.toml)")
_SETTINGS = re.compile(
    r".*\.(conf|cfg|ini|toml|ya?ml|json|env|sh|bash|zsh|fish|profile|properties|xml|list|repo|sources|\w*rc|cnf|auth|txt|in|ps1)"
    r"|.*/\.?(env|environment|netrc|_netrc|npmrc|pypirc|condarc|bashrc|profile|bash_profile|zshrc|zshenv|credentials|config"
    r"|git-credentials|gitconfig|kubeconfig|pgpass|my\.cnf|s3cfg|boto|dockercfg|yarnrc|curlrc|msmtprc|Renviron|token|activate)(\.\w+)?~?",
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
_ANY_TOKEN = "|".join(rf"(?P<t{n}>{form})" for n, (_, form) in enumerate(_TOKENS))
# The first letters of all forms, looked at before these are tried, save nine tenths of the time.
_TOKEN = re.compile(rf"(?=[Aadghnpsxy])(?<![A-Za-z0-9_])(?:{_ANY_TOKEN})")
_PRIVATE_KEY = re.compile(r"^\W{0,3}-----BEGIN (?:[A-Z]+ ){0,2}PRIVATE KEY(?: BLOCK)?-----\s*\S", re.MULTILINE)
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,20}://(?P<user>[^\s/@:\"'<>]*)(?::(?P<password>[^\s/@\"'<>]+))?@[\w\[]", re.IGNORECASE
)
_OF_FILES = (
    ("a login of git", r".*", r"\bextraheader\s*=\s*\"?authorization:\s*\w+\s+(?P<value>\S+)"),
    ("a private key", r".*", r"\bclient-key-data[\"']?\s*:\s*[\"']?(?P<value>LS0tLS1CRUdJTi)"),  # -----BEGIN
    ("a token of npm", r"\.npmrc", r"^[^#;\n]*:_(?:authToken|auth|password)\s*=\s*(?P<value>\S+)"),
    ("a login of a registry", r"config\.json|\.dockercfg", r'"auth"\s*:\s*"(?P<value>[A-Za-z0-9+/=]{8,})"'),
    ("a password", r".*netrc.*|\.?msmtprc", r"\bpassword\s+(?P<value>\S+)"),
    ("a password", r".*\.repo|(yum|dnf)\.conf", r"^[ \t]*(?:proxy_)?password[ \t]*=[ \t]*(?P<value>\S+)"),
    ("a password", r"\.?curlrc", r"^[ \t]*-*(?:proxy-)?u(?:ser)?[ \t=:]+\"?[^\s:\"]+:(?P<value>[^\s\"]+)"),
    # Only what looks like a password that a person chose: many repositories have such a file with defaults.
    (
        "a password",
        r".*\.env(\.(local|dev\w*|prod\w*))?",
        r"^(?:export[ \t]+)?(?:\w*PASSWORD|(?:\w*_)?PASS(?:WD)?)[ \t]*=[ \t]*[\"']?"
        r"(?P<value>(?![/~]|\./)(?=\S*\d)(?=\S*[a-z])[^\s\"']{8,})",
    ),
)
"""Kinds of secrets in files with these names, and their form."""
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*[\"']?(?P<value>[^\s\"'#;]+)", re.MULTILINE
)
_NAMED = re.compile(
    r"(?P<name>key|token|secret|passw(?:or)?d|passphrase|pass|pwd|credentials?|auth)[\"']?[ \t]*[:=]>?[ \t]*[\"']?"
    r"(?P<value>[A-Za-z0-9_+/=~!@#$%^*-]{16,})(?=[\"',;\s]|$)",
    re.IGNORECASE,
)
_IS_SECRETS_NAME = re.compile(
    r"(token|secret|passw(or)?d|passphrase|credentials?)$|(^|[^A-Za-z0-9])(pass|pwd|auth|key)$"
    r"|(api|access|secret|private|auth|account|client|encryption|signing|master|license|storage|admin|service)[_-]?key$",
    re.IGNORECASE,
)
_MIN_BITS = 3.3
"""Bits of entropy per character: words of a language and names have fewer."""
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
_RANDOM = re.compile(r"(?=(?:.*\d){2})(?=.*[A-Za-z])[A-Za-z0-9_+/=~!@#$%^*-]+")
_BASE64 = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9_./+=:-]{16,}")


def is_published(path: str) -> bool:
    """Whether a file is published content of packages."""
    return _PUBLISHED.fullmatch(path) is not None and _WRITTEN_BY_INSTALLERS.fullmatch(path) is None


def is_example(path: str) -> bool:
    """Whether keys and passwords in this file are for tests or examples."""
    return _EXAMPLES.fullmatch(path) is not None


def find_secret(path: str, data: bytes) -> str | None:
    """The kind of secret that a file contains, as words that follow "it holds"; None for none."""
    by_installer = bool(_WRITTEN_BY_INSTALLERS.fullmatch(path))
    if b"\0" in data or (not by_installer and (is_published(path) or is_example(path))):
        return None
    name = posixpath.basename(path).lstrip(".")
    called_so = "." not in name and looks_secret(name.replace("-", "_"))
    if by_installer or called_so or _SETTINGS.fullmatch(path):
        return next(_secrets_in(path, data.decode("utf-8", "replace")), None)
    # Settings, too, have names without an ending (`apt.conf.d/80proxy`, `Pipfile`); lock files list addresses.
    if b"://" in data and ("." not in name or name.endswith(".lock")):
        return _login_kind(data.decode("utf-8", "replace"))
    return None


def secret_kind(value: str) -> str | None:
    """The kind of secret that a value is by its form, worded as in `find_secret`; None for none."""
    if (token := _TOKEN.search(value)) is not None:
        return _token_kind(token)
    if _PRIVATE_KEY.search(value):
        return "a private key"
    return _login_kind(value)


def passwords_in(value: str) -> list[str]:
    """The passwords and tokens in addresses within a value."""
    logins = (address for address in _ADDRESS.finditer(value) if _is_login(address))
    return [address["password"] or address["user"] for address in logins] + CONDA_TOKEN.findall(value)


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable is a secret: by its value, or by its name if the value is not a path, number or switch."""
    if secret_kind(value) is not None:
        return True
    return looks_secret(name) and len(value) >= 4 and _HARMLESS.fullmatch(value) is None


def is_random(word: str) -> bool:
    """Whether a word looks random: letters, several digits, high entropy, no name or path."""
    if not 16 <= len(word) <= 4096 or _RANDOM.fullmatch(word) is None or not _is_literal(word):
        return False
    counts = Counter(word)
    return -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values()) >= _MIN_BITS


def _secrets_in(path: str, text: str) -> Iterator[str]:
    if (token := _TOKEN.search(text)) is not None:
        yield _token_kind(token)
    if (login := _login_kind(text)) is not None:
        yield login
    name = posixpath.basename(path)
    for kind, names, form in _OF_FILES:
        found = re.finditer(form, text, re.IGNORECASE | re.MULTILINE) if re.fullmatch(names, name) else ()
        if any(_is_literal(match["value"]) for match in found):
            yield kind
    if looks_secret(name.strip(".").partition(".")[0].replace("-", "_")) and is_random(text.strip()):
        yield "a random word, and is called like a secret"
    if _SHELL_LIKE.fullmatch(path):
        yield from (f"a secret ({match['name']})" for match in _ASSIGNED.finditer(text) if _is_assigned_secret(match))
    for match in _NAMED.finditer(text):
        before = text[max(match.start() - 24, 0) : match.start()]
        if _IS_SECRETS_NAME.search(before + match["name"]) and is_random(match["value"]):
            yield f"a random word behind {match['name']!r}"


def _is_assigned_secret(match: re.Match[str]) -> bool:
    value = match["value"]
    return is_secret_variable(match["name"], value) and _is_literal(value) and _BASE64.fullmatch(value) is not None


def _token_kind(match: re.Match[str]) -> str:
    return next(kind for n, (kind, _) in enumerate(_TOKENS) if match[f"t{n}"])


def _login_kind(text: str) -> str | None:
    if any(_is_login(address) for address in _ADDRESS.finditer(text)):
        return "an address with a password"
    return "a token of conda" if "://" in text and any(map(is_random, CONDA_TOKEN.findall(text))) else None


def _is_login(address: re.Match[str]) -> bool:
    """Whether an address contains a password, or a user name that looks like a token."""
    password = address["password"]
    if password is None:
        user = address["user"]
        return bool(_BASE64.fullmatch(user)) and len(user) >= 20 and _is_literal(user)
    return _is_literal(password) and not (_is_default_login(address["user"]) and _is_default_login(password))


def _is_default_login(word: str) -> bool:
    return bool(_SAFE_FOR_ADDRESSES.fullmatch(word)) or word.lower() in ("pass", "password", "pwd", "token")


def _is_literal(value: str) -> bool:
    """Whether a value is literal: neither a variable nor a placeholder."""
    return _PLACEHOLDER.search(value) is None
