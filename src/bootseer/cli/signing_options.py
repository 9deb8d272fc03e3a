"""Options about signatures, for the verbs that use what lies in stores, and the step from their values to what is
required and signed. The table is read in front of every `bootseer run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.cli.options import FLAG, Option

if TYPE_CHECKING:
    from bootseer.artifact.signatures import Signatures

_SIGNING_KEY = "BOOTSEER_SIGNING_KEY"
_TRUSTED_KEYS = "BOOTSEER_TRUSTED_KEYS"
_REQUIRE = "BOOTSEER_REQUIRE_SIGNATURE"
_DEFAULT_KEYS = "/etc/bootseer/trusted-keys"

TRUST = (
    Option(
        "require_signature",
        ("--require-signature",),
        f"Use only images and environments that a trusted key has signed (default: keys in {_DEFAULT_KEYS}).",
        FLAG,
        default=False,
    ),
    Option(
        "trusted_keys",
        ("--trusted-keys",),
        "Public keys (ed25519, PEM), one of which must have signed: a file, or a folder of .pem files.",
        metavar="PATH",
    ),
)
"""Which signatures are required of what comes from a store."""


def signatures(values: Mapping[str, Any], env: Mapping[str, str], keys: Sequence[str] = ()) -> Signatures:
    """What is required and what is signed; `keys` are files of private keys, before those of the environment.

    Naming trusted keys requires signatures, so that the switch cannot be forgotten. Raises `UsageError` for keys that
    cannot be used.
    """
    from bootseer.artifact.signatures import Signatures

    required = values.get("require_signature") or env.get(_REQUIRE, "0") not in ("", "0")
    trusted = values.get("trusted_keys") or env.get(_TRUSTED_KEYS) or (_DEFAULT_KEYS if required else "")
    signing = tuple(keys) or tuple(path for path in (env.get(_SIGNING_KEY),) if path)
    found = Signatures(signing, trusted)
    found.check()
    return found
