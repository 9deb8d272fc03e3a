"""What the parts of one environment start share: what is asked for, where, and how its stages are marked.

Made by whoever runs a setup or shows a snapshot: `environment_stage`, `environment_make`, `environment_look` and
`image_stage`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bootseer.artifact.places import environments_folder
from bootseer.artifact.progress import Show, no_progress
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.launch.environment_setup import STAGE
from bootseer.launch.environment_wanted import EnvironmentWanted, own_store
from bootseer.launch.run_folder import RunFolder
from bootseer.launch.session import Session
from bootseer.launch.supervise import in_foreground


@dataclass(frozen=True)
class Task:
    """One start's environment."""

    setup: str | None
    requirements: tuple[str, ...]
    wanted: EnvironmentWanted
    env: Mapping[str, str]
    """The environment that the job and its setup get."""
    own_env: Mapping[str, str]
    """The same without what we add: what the request key may depend on."""
    session: Session | None
    own_group: bool
    """Whether what is started leads a process group of its own (`supervise`)."""
    folder: RunFolder
    show: Show = no_progress
    """Shows people what is waited for."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """What became of the snapshot, once that is known (`environment_publish.tell`)."""

    @classmethod
    def made(
        cls,
        setup: str | None,
        requirements: Sequence[str],
        wanted: EnvironmentWanted,
        env: Mapping[str, str],
        *,
        own_env: Mapping[str, str] | None = None,
        session: Session | None = None,
        own_group: bool | None = None,
        show: Show = no_progress,
    ) -> Task:
        """With a folder of its own, which is to be removed. Raises `PermanentError` when the cache takes none.

        What is not said is that of a start without a job.
        """
        return cls(
            setup=setup,
            requirements=tuple(requirements),
            wanted=wanted,
            env=env,
            own_env=env if own_env is None else own_env,
            session=session,
            own_group=not in_foreground() if own_group is None else own_group,
            folder=RunFolder.made(environments_folder(wanted.cache) / "runs"),
            show=show,
        )

    @cached_property
    def cwd(self) -> str:
        """The job's working folder, by name."""
        return os.getcwd()  # noqa: PTH109 - a name

    @property
    def what(self) -> str:
        """The setup, for people."""
        return ", ".join(Path(path).name for path in (self.setup, *self.requirements) if path)

    @property
    def node(self) -> str:
        """What this machine is called."""
        return self.session.tracer.identity.node if self.session is not None else os.uname().nodename

    @property
    def job(self) -> str:
        """What the job is called; empty when nobody knows."""
        return self.session.tracer.identity.job if self.session is not None else ""

    @property
    def store_uri(self) -> str:
        """The store of snapshots."""
        return self.wanted.store or own_store(self.wanted.cache)

    @property
    def signatures(self) -> Signatures:
        """What is signed in the store of snapshots. This node's own store holds nothing but what this node made."""
        return self.wanted.signatures if self.wanted.store else UNSIGNED

    @property
    def store_folder(self) -> tuple[str, ...]:
        """The store's folder, where it is one: starts write into it meanwhile, here and on other nodes."""
        scheme, separator, path = self.store_uri.partition("://")
        return (path,) if separator and scheme == "file" else () if separator else (scheme,)

    @property
    def changes(self) -> Path:
        """Where what jobs change in their environments goes."""
        return environments_folder(self.wanted.cache) / "changes"

    @contextmanager
    def stage(self, name: str = "") -> Iterator[dict[str, Any]]:
        """A part of the stage, or the stage itself; facts that are put into what it yields go into its end.

        A fact named `error` makes it a failed one.
        """
        if self.session is None:
            yield {}
            return
        with self.session.tracer.span(f"{STAGE}.{name}" if name else STAGE) as span:
            yield span.attrs
            if "error" in span.attrs:
                span.fail(str(span.attrs["error"]))
