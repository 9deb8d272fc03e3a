"""Options for images and signatures, and the step from their values to the settings of `launch`.

The tables are imported by every `bootseer run`, so anything that only images need is imported inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.cli.options import FLAG, Option, parse_size
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.artifact.signatures import Signatures
    from bootseer.image.containers.container import Options as ContainerOptions
    from bootseer.image.containers.limits import Limits
    from bootseer.image.mounting.request import Request
    from bootseer.launch.image.start import ImageOptions

_SIGNING_KEY = "BOOTSEER_SIGNING_KEY"
_TRUSTED_KEYS = "BOOTSEER_TRUSTED_KEYS"
_REQUIRE = "BOOTSEER_REQUIRE_SIGNATURE"
_DEFAULT_KEYS = "/etc/bootseer/trusted-keys"

TRUST = (
    Option(
        "--require-signature",
        f"Use only images and environments signed by a trusted key (default: keys in {_DEFAULT_KEYS}).",
        FLAG,
        default=False,
    ),
    Option(
        "--trusted-keys",
        "Public keys (ed25519, PEM) to trust: a file, or a folder of .pem files. Implies --require-signature.",
        metavar="PATH",
    ),
)
"""Which signatures are required of artifacts from a store."""

LAYER_LIMIT = Option(
    "--layer-limit",
    "Raise a limit for converting layers: unpacked_bytes=128g, members=8000000, text_bytes=1g.",
    metavar="NAME=VALUE",
    many=True,
    dest="layer_limits",
)
PLAIN_HTTP = Option("--plain-http", "Use the registry without encryption.", FLAG, default=False)
CONVERTED = (
    Option(
        "--store", "Where the converted image is (default: $BOOTSEER_STORE, else its own repository).", metavar="URI"
    ),
    PLAIN_HTTP,
)
"""Where verbs find a converted image."""

SOURCE = (
    *CONVERTED,
    Option(
        "--loading",
        "Load the image lazily, or completely before the start (pull), or whichever is predicted to be faster (auto,"
        " the default).",
        choices=("auto", "lazy", "pull"),
        default="auto",
    ),
    Option(
        "--fallback",
        "For an image that is not converted: convert it on this node (default), or fail (none).",
        choices=("convert", "none"),
        default="convert",
    ),
    LAYER_LIMIT,
    *TRUST,
)
"""How the image is loaded on this node."""

CONTAINER = (
    Option("--workload", "Name of the hot set (default: from the command's program and arguments).", metavar="NAME"),
    Option("--mount", "Bind-mount a file or folder of this machine.", metavar="SRC:DST[:ro]", many=True, dest="binds"),
    Option("--env -e", "Set a variable in the container; without =V, to its value here.", metavar="N[=V]", many=True),
    Option("--env-file", "File of such variables, one per line.", metavar="FILE", many=True, dest="env_files"),
    Option("--workdir -w", "Working directory of the command (default: the image's).", metavar="DIR"),
    Option("--user -u", "User to run as, by name in the image or number.", metavar="USER[:GROUP]"),
    Option(
        "--group-add", "Additional group, by name in the image or number.", metavar="GROUP", many=True, dest="groups"
    ),
    Option("--hostname", "Host name of the container (default: this machine's).", metavar="NAME"),
    Option("--entrypoint", "Replace the image's entrypoint; none removes it.", metavar="PROGRAM"),
    Option("--read-only", "Make the container's root file system read-only.", FLAG, default=False),
    Option("--device", "Device node, folder or CDI name to add.", metavar="DEVICE", many=True, dest="devices"),
    Option(
        "--cap-add", "Capability to add to the default ones, or ALL.", metavar="NAME", many=True, dest="capabilities"
    ),
    Option("--cap-drop", "Default capability to drop, or ALL.", metavar="NAME", many=True, dest="dropped"),
    Option(
        "--ulimit",
        "Resource limit of its processes, such as nofile=65536 (default: this process's).",
        metavar="NAME=SOFT[:HARD]",
        many=True,
        dest="ulimits",
    ),
    Option("--tmpfs", "Mount a tmpfs, such as /scratch:size=8g.", metavar="DST[:OPTIONS]", many=True),
    Option("--shm-size", "Size of /dev/shm, such as 8g (default: half of the memory).", metavar="SIZE"),
    Option(
        "--runtime",
        "OCI runtime; auto, the default, uses runc if it is installed.",
        choices=("auto", "runc", "crun"),
        default="auto",
    ),
    Option(
        "--pid",
        "PID namespace: the container's own (default), or the host's, for profilers and debuggers.",
        choices=("own", "host"),
        default="own",
    ),
)
"""The container that the command runs in."""

IMAGE = (
    Option("--image", "Run the command in this container image, loaded lazily.", metavar="REF"),
    Option(
        "--store",
        "Store of images and environments (default: $BOOTSEER_STORE; else images: their own repository, environments:"
        " this node).",
        metavar="URI",
    ),
    *SOURCE[1:],
    # `--env` of `run` is about environment snapshots.
    *(
        option._replace(words="--container-env -e", dest="env") if option.name == "env" else option
        for option in CONTAINER
    ),
    Option(
        "--container-gpus",
        "GPUs in the container: all (default if a CDI file describes them), numbers, or none.",
        metavar="GPUS",
    ),
)
"""Options of `run` about the image."""


SHARED = ("store", "plain_http", "loading", "require_signature", "trusted_keys")
"""Options of `SOURCE` that also apply to environment snapshots."""


def wanted(reference: str, values: Mapping[str, Any], gpus: str | None) -> ImageOptions:
    """The image and the container that the values ask for. Raises `UsageError`."""
    from bootseer.launch.image.start import ImageOptions

    return ImageOptions(request(reference, values), container(values, gpus))


def request(reference: str, values: Mapping[str, Any]) -> Request:
    """The image and how to load it. Raises `UsageError`."""
    from bootseer.artifact.places import STORE, cache_root, runtime_root
    from bootseer.image.mounting.request import Request
    from bootseer.image.reference import parse_reference, store_uri

    parsed = parse_reference(reference)
    return Request(
        reference=parsed,
        store=store_uri(parsed, values["store"] or os.environ.get(STORE)),
        cache=cache_root(),
        runtime=runtime_root(),
        plain_http=values["plain_http"],
        loading=values["loading"],
        fallback=values["fallback"],
        signatures=signatures(values),
        layer_limits=parse_layer_limits(values.get("layer_limits") or ()),
        workload=parse_workload(values.get("workload") or ""),
    )


def request_of_verb(reference: str, store: str | None, plain_http: bool) -> Request:
    """A converted image, for verbs that have no other options about it."""
    values = {option.name: option.start for option in SOURCE}
    return request(reference, {**values, "store": store, "plain_http": plain_http, "fallback": "none"})


def parse_workload(name: str) -> str:
    import re

    if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"--workload {name!r} is not a valid name", hint="use letters, digits, . _ and -")
    return name


def container(values: Mapping[str, Any], gpus: str | None) -> ContainerOptions:
    """The container; its command is set later. `gpus` None: all if CDI files describe any."""
    from bootseer.image.containers import limits
    from bootseer.image.containers.cdi import describes_gpus
    from bootseer.image.containers.container import Options
    from bootseer.image.containers.process import ProcessOptions
    from bootseer.image.containers.runtime_config import parse_bind

    if gpus is None:
        named = any(name.partition("=")[0].endswith("/gpu") for name in values["devices"])
        gpus = "all" if not named and describes_gpus() else ""
    from_files = [line for path in values["env_files"] for line in limits.read_env_file(path)]
    words = ProcessOptions(
        env=(*from_files, *values["env"]),
        workdir=values["workdir"],
        user=values["user"],
        groups=values["groups"],
        entrypoint="" if values["entrypoint"] in ("", "none") else values["entrypoint"],
    )
    return Options(
        process=words,
        limits=_limits(values),
        binds=tuple(map(parse_bind, values["binds"])),
        gpus="" if gpus == "none" else gpus,
        devices=_devices(values["devices"]),
        runtime=values["runtime"],
        own_pids=values["pid"] == "own",
    )


def _limits(values: Mapping[str, Any]) -> Limits:
    """The container's limits, checked as far as possible without the image."""
    from bootseer.image.containers import limits

    found = limits.Limits(
        read_only=values["read_only"],
        shm_bytes=parse_size(values["shm_size"], "--shm-size") if values["shm_size"] else None,
        capabilities=tuple(values["capabilities"]),
        dropped=tuple(values["dropped"]),
        rlimits=tuple(map(limits.parse_ulimit, values["ulimits"])),
        tmpfs=tuple(map(limits.parse_tmpfs, values["tmpfs"])),
        hostname=limits.parse_hostname(values["hostname"]) if values["hostname"] else "",
    )
    if values["groups"] and os.geteuid() != 0:
        raise UsageError("--group-add needs root: a user namespace maps no other groups", hint="leave it out")
    limits.capabilities_of(found)
    return found


def parse_layer_limits(words: Sequence[str]) -> dict[str, int]:
    """`NAME=VALUE`, fields of `LayerLimits`. Raises `UsageError`."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("unpacked_bytes", "members", "text_bytes"):
            raise UsageError(f"--layer-limit {word!r}: no such limit", hint="unpacked_bytes, members or text_bytes")
        found[name] = parse_size(value, f"--layer-limit {name}")
    return found


def _devices(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if "=" not in name and not name.startswith("/"):
            raise UsageError(
                f"--device {name!r} is neither a path nor a CDI name",
                hint="for example /dev/infiniband/uverbs0, or vendor.com/class=name",
            )
    return tuple(names)


def signatures(values: Mapping[str, Any], keys: Sequence[str] = ()) -> Signatures:
    """Trusted and signing keys; `keys` are files of private keys, preferred to those of the environment.

    Naming trusted keys implies that signatures are required, so the switch cannot be forgotten. Raises `UsageError` for
    unusable keys.
    """
    from bootseer.artifact.signatures import Signatures

    required = values.get("require_signature") or os.environ.get(_REQUIRE, "0") not in ("", "0")
    trusted = values.get("trusted_keys") or os.environ.get(_TRUSTED_KEYS) or (_DEFAULT_KEYS if required else "")
    signing = tuple(keys) or tuple(filter(None, [os.environ.get(_SIGNING_KEY)]))
    found = Signatures(signing, trusted)
    found.check()
    return found
