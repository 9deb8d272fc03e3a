"""For tests of restores: snapshots of a folder with a setup's results, and processes in a restored view."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.changes import Action, Change
from bootseer.env.document import EnvironmentDocument
from bootseer.env.snapshot.write import Written, write_snapshot
from bootseer.store.file import FileStore
from bootseer.store.store import Store
from env_snapshots import secret_check

KEY = "ab" * 32
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Setup:
    """The results of a setup: its files are below `after`, each at its absolute path."""

    after: Path
    store: Store

    def at(self, path: Path | str) -> Path:
        return self.after / str(path).lstrip("/")

    def write(self, path: Path | str, content: str, mode: int = 0o644) -> None:
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
        place.chmod(mode)

    def changes(
        self,
        below: Path,
        *,
        deleted: Iterable[Path] = (),
        opaque: Iterable[Path] = (),
        before: Mapping[str, str] = NOTHING,
    ) -> list[Change]:
        """Changes for everything below a path; those with a value in `before` count as modified."""
        found = [Change(str(path), Action.DELETED, before=before.get(str(path), "")) for path in deleted]
        top = self.at(below)
        for source in [top, *top.rglob("*")]:
            path = "/" + str(source.relative_to(self.after))
            action = Action.MODIFIED if path in before else Action.ADDED
            is_opaque = Path(path) in set(opaque)
            found.append(Change(path, action, str(source), opaque=is_opaque, before=before.get(path, "")))
        return found

    def written(self, changes: list[Change], is_loose: Callable[[str], bool] = lambda path: False) -> Written:
        return write_snapshot(
            self.store,
            changes,
            began_s=time.time() - 3600,
            check=secret_check(),
            root=str(self.after),
            is_loose=is_loose,
        )

    def document(self, changes: list[Change], roots: Iterable[Path]) -> EnvironmentDocument:
        return document_of(self.written(changes), roots)


def document_of(written: Written, roots: Iterable[Path] = ()) -> EnvironmentDocument:
    return EnvironmentDocument(
        key=KEY,
        components={},
        file=written.file,
        manifest=written.manifest,
        digest=written.digest,
        roots=tuple(map(str, roots)),
        num_loose=0,
        num_files=written.num_files,
        size_bytes=written.size_bytes,
        packages=(),
        exports=(),
        platform={},
        trust="observed",
        unaccounted=(),
        builder="here",
        version="0",
        built_s=0.0,
        setup_s=1.0,
    )


def new_setup(folder: Path) -> Setup:
    return Setup(folder / "after", FileStore(folder / "store"))


def run_in(enter: Callable[[], None], script: str, **options: object) -> str:
    """The output of a shell script that runs in the view."""
    ran = subprocess.run(
        ["/bin/sh", "-ec", script],
        preexec_fn=enter,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)
