"""A project whose setup has one input of each class, and its key."""

from __future__ import annotations

import shutil
import subprocess
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.request_key import KeyRequest, request_key
from once import once

SETUP = """\
#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source tools/lib.sh
pip install -r requirements.txt -c limits.txt --find-links wheels ./dist/local-1.0-py3-none-any.whl
pip install -e ./package "git+file://$REPOSITORY@main#egg=helper"
cp config.toml /etc/app.toml
echo "rank $RANK on $HOSTNAME for $FLAVOUR with $HF_TOKEN"
"""


def write_wheel(path: Path, content: str) -> None:
    """A wheel with one module. Equal contents give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("local.py", (2020, 1, 1, 0, 0, 0)), content)


def git(*words: str, cwd: Path) -> str:
    """Run git with a fixed identity; returns its output."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath="]
    ended = subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True, text=True, timeout=180)
    return ended.stdout.strip()


@dataclass
class Project:
    """The folders of a job, and the request for the key of its setup."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    ask: KeyRequest = field(init=False)

    @property
    def job(self) -> Path:
        """The folder with the setup."""
        return self.root / "job"

    def write(self, name: str, text: str) -> Path:
        """Write a file below the job's folder."""
        path = self.job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def key(self, **changed: object) -> RequestKey:
        """The current key of the setup."""
        return request_key(replace(self.ask, **changed))


def _make_small_python(folder: Path) -> None:
    venv.create(folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "six-1.16.0.dist-info").mkdir()
    (site / "six-1.16.0.dist-info" / "RECORD").write_text("six.py,sha256=x,1\n")


def _make_repository(folder: Path) -> None:
    folder.mkdir()
    git("init", "-q", "-b", "main", cwd=folder)
    (folder / "setup.py").write_text("")
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "one", cwd=folder)


@pytest.fixture
def empty(tmp_path: Path) -> Project:
    """A job with an empty folder, and a Python environment with one distribution: with the Python that runs the tests,
    each key would hash the records of 150 distributions."""
    project = Project(tmp_path)
    project.job.mkdir()
    (tmp_path / "home").mkdir()
    python = once("small-python", _make_small_python)
    project.env = {"PATH": f"{python}/bin:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    project.env["XDG_CONFIG_DIRS"] = str(tmp_path / "xdg")
    project.ask = KeyRequest(None, (), str(project.job), project.env)
    return project


@pytest.fixture
def project(empty: Project) -> Project:
    """A setup with an input of each class."""
    repository = empty.root / "repository"
    shutil.copytree(once("repository", _make_repository), repository)
    empty.write("setup.sh", SETUP).chmod(0o755)
    empty.write("tools/lib.sh", ". tools/deeper.sh\n")
    empty.write("tools/deeper.sh", "export A=1\n")
    empty.write("requirements.txt", "-r nested/base.txt\nclick==8.1.7\n")
    empty.write("nested/base.txt", "-c ../more.txt\nrich==13.7.0  # why\n")
    empty.write("more.txt", "idna==3.7\n")
    empty.write("limits.txt", "attrs==24.2.0\n")
    empty.write("config.toml", "a = 1\n")
    empty.write("package/pyproject.toml", "[project]\nname = 'package'\n")
    empty.write("package/src/package.py", "x = 1\n")
    write_wheel(empty.job / "dist/local-1.0-py3-none-any.whl", "one")
    write_wheel(empty.job / "wheels/other-1.0-py3-none-any.whl", "one")
    empty.write("declared/data.json", "{}")
    empty.env.update(REPOSITORY=str(repository), FLAVOUR="big", RANK="0", HOSTNAME="node-1", CFLAGS="-O2")
    empty.env |= {"HF_TOKEN": "hf_1"}
    empty.ask = replace(empty.ask, setup="setup.sh", inputs=("declared",))
    return empty
