"""The options that say how files are striped, for `put` and `policy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bootseer.checkpoint.layout import MAX_REPLICATION, MAX_STRIPES
from bootseer.cli.options import COUNT, FLAG, Option

if TYPE_CHECKING:
    from bootseer.checkpoint.layout import Policy

STRIPES = (
    Option("stripes", ("--stripes",), "Nodes that a file is spread over.", COUNT, "N", least=1, most=MAX_STRIPES),
    Option("parity", ("--parity", "--no-parity"), "One part more, so that any one may be missing.", FLAG),
    Option("part_bytes", ("--part-size",), "Most bytes of a part, as 64m.", metavar="SIZE"),
    Option("replication", ("--replication",), "Copies of each part.", COUNT, "N", least=1, most=MAX_REPLICATION),
)


def changed(policy: Policy, given: Mapping[str, object]) -> Policy | None:
    """The policy with what was given changed; None when nothing was. Raises `UsageError`."""
    from dataclasses import replace

    from bootseer.cli.image_options import parse_size

    values = {name: value for name, value in given.items() if value is not None}
    if "part_bytes" in values:
        values["part_bytes"] = parse_size(str(values["part_bytes"]), "--part-size")
    return replace(policy, **values) if values else None  # type: ignore[arg-type]
