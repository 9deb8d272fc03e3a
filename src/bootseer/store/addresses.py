"""The form of names in registries, and addresses without credentials: user names, passwords, tokens in queries and in
conda's paths.

A cache key must not contain a token or change when one is renewed; errors and containers must not contain one either.
Applied wherever an address enters a key, a message or a container. Decides and touches nothing.
"""

from __future__ import annotations

import re

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:\d{1,5})?")
REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# In `ssh://git@host` and `git+ssh://git@host` the user is part of the address; a password never is.
_USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^/\s'\"]*)@(?=[^/\s@])")
_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]*")
_SECRET = re.compile(
    r"token|secret|passw|passphrase|credential|signature|^sig$|^key$|api-?key|auth|expires|^x-amz-|^x-goog-|^se$|^sp$|^sv$",
    re.IGNORECASE,
)
CONDA_TOKEN = re.compile(r"(?<=/t/)(?=[^/\s]*[A-Z]|(?:[^/\s\d]*\d){6})[\w.~-]{16,}+(?!/\d+\b)")
"""The token in an address of conda's channels, `https://host/t/TOKEN/channel`. Forums have a number behind a title:
`/t/some-title/1234`."""
_LOGIN = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)?\S*@(?!sha256:)")


def shown(address: str) -> str:
    """An address for an error message, without anything in front of an @."""
    return without_credentials(_LOGIN.sub(lambda found: f"{found[1] or ''}...@", address))


def without_credentials(text: str) -> str:
    """The text with users and tokens removed from all addresses, and the values of secret-like parameters."""
    if "://" not in text:
        return text
    return CONDA_TOKEN.sub("<TOKEN>", _PARAMETER.sub(_parameter, _USER.sub(_user, text)))


def _user(found: re.Match[str]) -> str:
    name = found["user"].partition(":")[0]
    return f"{found['scheme']}://{name}@" if found["scheme"].endswith("ssh") and name else f"{found['scheme']}://"


def _parameter(found: re.Match[str]) -> str:
    return f"{found[1]}=" if _SECRET.search(found[1]) else found[0]
