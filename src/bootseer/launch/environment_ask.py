"""What is asked for, in the words of the request key. Called by `environment_stage` and `cli.env_key`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from bootseer.env.keys.request_key import Ask, Base
from bootseer.launch.environment_wanted import EnvironmentWanted

if TYPE_CHECKING:
    from bootseer.image.mounting.request import Request

HOST = Base("host", "", {})


def ask_for(
    setup: str | None,
    requirements: Sequence[str],
    wanted: EnvironmentWanted,
    env: Mapping[str, str],
    *,
    base: Base | None = None,
) -> Ask:
    """The question; `base` None: the environment is on this machine."""
    return Ask(
        setup=setup,
        requirements=tuple(requirements),
        cwd=os.getcwd(),  # noqa: PTH109 - a name
        env=env,
        base=base or HOST,
        inputs=wanted.inputs,
        tenant=wanted.tenant,
        kept=(*(f"left out {path}" for path in wanted.leave_out), *(f"kept {path}" for path in wanted.keep)),
        variables=wanted.variables,
        salt=wanted.place,
    )


def base_of_image(request: Request) -> Base:
    """The image that a setup runs in. Raises what its registry or store raises."""
    from bootseer.image.sources.source import open_source

    with closing(open_source(request.reference, platform=request.platform, plain_http=request.plain_http)) as source:
        return Base("image", source.digest, source.config)
