"""A place for tests that set environments up: a project, a Python environment, wheels, a store, a cache.

It is not in /tmp, because snapshots do not include files in scratch folders. At the end of the test all of it is
unmounted and deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from bootseer.artifact.owned_folder import delete_abandoned
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from bootseer.trace.event import Event
from conftest_launch import BOOTSEER
from image_node import unmount_below
from once import compiled_secret_rules, copy, lent_python_with_pip, spread
from wheels import make_wheel

DEADLINE_S = 600.0
"""Long, because snapshots are written at a low priority: next to other tests they get a fiftieth of a core."""
Ran = subprocess.CompletedProcess[str]
_OURS = ("SLURM_", "PET_", "TORCHELASTIC_", "BOOTSEER_", "TRACEPARENT", "OTEL_", "PIP_", "UV_", "PYTHON", "VIRTUAL_ENV")


@dataclass
class Place:
    """`run` runs `bootseer run` in the project, with the Python of `venv` first on PATH."""

    root: Path
    cache: str = "cache"
    """Folder of the node cache, and name of the node: another name simulates another node."""
    more: dict[str, str] = field(default_factory=dict)
    begun: list[warm.Started] = field(default_factory=list)

    @property
    def project(self) -> Path:
        return self.root / "project"

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def site(self) -> Path:
        return next(self.venv.glob("lib/python3*/site-packages"))

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def outside(self) -> Path:
        """A folder that no node captures; a counting script records its runs there."""
        return Path("/run", self.root.name)

    @property
    def env(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        return {
            **clean,
            "HOME": str(self.root / "home"),
            "PATH": f"{self.venv}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "BOOTSEER_CACHE": str(self.root / self.cache),
            "BOOTSEER_RUNTIME": str(self.root / f"{self.cache}-runtime"),
            "BOOTSEER_SPOOL": str(self.root / "spool"),
            "BOOTSEER_STORE": str(self.store),
            "BOOTSEER_NODE": self.cache,
            "KF_RULE_CACHE_DIR": str(compiled_secret_rules()),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **self.more,
        }

    def bootseer(
        self, *words: str, more: Mapping[str, str] | None = None, is_new: bool = False, stdin: str = ""
    ) -> Ran:
        """Run bootseer in a fork of a process with its imports, or with `is_new` in a new Python process."""
        env = {**self.env, **(more or {})}
        if not is_new:
            return warm.bootseer(words, env=env, cwd=self.project, input=stdin)
        command = [*BOOTSEER, *words]
        options: dict[str, Any] = {
            "input": stdin,
            "capture_output": True,
            "text": True,
            "timeout": DEADLINE_S,
            "cwd": self.project,
        }
        return subprocess.run(command, env=env, check=False, **options)

    def run(self, *words: str, code: int = 0, **kwargs: Any) -> Ran:
        """Run `bootseer run`; asserts this exit code, and no traceback if it is 0."""
        ran = self.bootseer("run", "-q", *words, **kwargs)
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr or code, ran.stderr
        assert "an error of BootSeer" not in ran.stderr, ran.stderr
        return ran

    def begin(self, *words: str, more: Mapping[str, str] | None = None) -> warm.Started:
        """Start `bootseer run` in a new session."""
        env = {**self.env, **(more or {})}
        self.begun.append(warm.Started(["run", "-q", *words], env=env, cwd=self.project, become=_new_session))
        return self.begun[-1]

    def write(self, name: str, text: str) -> str:
        """Write a file of the project; returns its name."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def keep_rules(self) -> None:
        """Copy the compiled rules for secrets to this place, for runs that may not read the common copy and would each
        compile them, which takes 4 s of processor time."""
        rules = self.root / "rules"
        if not rules.exists():
            copy(compiled_secret_rules(), rules)
        self.more["KF_RULE_CACHE_DIR"] = str(rules)

    def counting_script(self, text: str = "", name: str = "setup.sh") -> str:
        """A setup script that records its runs in a folder that is not captured."""
        self.outside.mkdir(parents=True, exist_ok=True)
        return self.write(name, f"echo ran >> {self.outside}/ran\n{text}")

    def alpha_script(self, text: str = "") -> str:
        """One that writes the module `alpha` to site-packages without pip, which takes a second of processor time."""
        return self.counting_script(f"echo 'VERSION = \"1.0\"' > {self.site}/alpha.py\n{text}")

    @property
    def num_setups(self) -> int:
        """How often a counting script ran."""
        ran = self.outside / "ran"
        return len(ran.read_text().splitlines()) if ran.exists() else 0

    def events(self) -> list[Event]:
        spool = self.root / "spool"
        if not spool.exists():
            return []
        return sorted(scan(sources([str(spool)])).events, key=lambda event: event.wall_ns)

    def start(self) -> Mapping[str, Any]:
        """The attributes of the last start's event `environment_start`."""
        return [event for event in self.events() if event.stage == "environment_start"][-1].attrs

    def published(self) -> Mapping[str, Any]:
        """The attributes of the last start's event `environment_publish`."""
        return [event for event in self.events() if event.stage == "environment_publish"][-1].attrs

    def documents(self) -> list[Mapping[str, Any]]:
        """The documents in the store."""
        return [json.loads(path.read_text()) for path in sorted(self.store.glob("environments/*/document"))]

    def leftovers(self, *, after_next: bool = False) -> list[str]:
        """Folders of runs, which starts that have ended must not leave on the node.

        `after_next`: first delete abandoned ones like the next start, for example those that another mount namespace
        held for a moment.
        """
        runs = self.root / self.cache / "environments" / "runs"
        if after_next:
            delete_abandoned(runs, "run-")
        return [str(path) for path in runs.glob("*")] if runs.exists() else []

    def mounts(self) -> list[str]:
        """Mount points below the place, except layers that are kept for the next start."""
        table = Path("/proc/self/mounts").read_text().splitlines()
        points = [line.split()[1] for line in table]
        return [point for point in points if point.startswith(f"{self.root}/") and "/layers/" not in point]


@contextmanager
def made_place() -> Iterator[Place]:
    """A place that is deleted afterwards."""
    # In a folder that is captured, unlike /tmp, and that every user can enter.
    root = Path(tempfile.mkdtemp(prefix="bootseer-test-", dir="/srv" if os.geteuid() == 0 else Path.home())).resolve()
    root.chmod(0o711)
    spread(root)
    try:
        place = Place(root)
        for folder in (place.project, place.store, root / "home", root / "cache"):
            folder.mkdir()
        with lent_python_with_pip(place.venv):
            make_wheel(place.wheels, "alpha", "1.0", {"alpha.py": _ALPHA}, scripts={"alpha": "alpha:main"})
            make_wheel(place.wheels, "alpha", "1.1", {"alpha.py": _ALPHA.replace("1.0", "1.1")})
            make_wheel(place.wheels, "beta", "2.0", requires=["alpha"])
            try:
                yield place
            finally:
                for started in place.begun:
                    started.close()
            unmount_below(root)
    finally:
        unmount_below(root)
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(Path("/run", root.name), ignore_errors=True)


def _new_session() -> None:
    os.setsid()


def end(process: warm.Started, number: int = signal.SIGKILL) -> str:
    """End a run with a signal; returns its standard error."""
    process.send_signal(number)
    return process.communicate(timeout=DEADLINE_S)[1]


_ALPHA = 'VERSION = "1.0"\n\n\ndef main():\n    print("alpha", VERSION)\n'
