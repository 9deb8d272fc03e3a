"""The oracle on real installations: it reports nothing about a correct snapshot, and every defect."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import warm
from bootseer.env.snapshot.oracle import pinned
from in_capture import JOB_ENV
from once import compiled_secret_rules, lent_python_with_pip
from wheels import make_wheel

JOB = Path(__file__).with_name("oracle_job.py")
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")]


@pytest.fixture
def ask(tmp_path):
    """`ask(...)`: the oracle's result for a snapshot of this setup, after the given changes in between.

    The setup's working folder and environment are in `/srv`, in its view.
    """
    work = tmp_path / "work"
    work.mkdir()
    foreign = ("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"HOME": "/srv", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    install = f"/srv/venv/bin/python -m pip install --no-index --find-links {tmp_path}/wheels -q app"

    def call(
        more: str = "",
        *,
        setup: str = install,
        between: dict[Path, str] | None = None,
        moved: dict[Path, Path] | None = None,
    ) -> dict:
        spec = {
            "folder": str(tmp_path / "oracle"),
            "work": str(work),
            "python": "/srv/venv/bin/python",
            "env": env,
            "rules": str(compiled_secret_rules()),
            "setup": f"{setup}; cd /srv; {more}",
            "between": {str(path): text for path, text in (between or {}).items()},
            "moved": {str(source): str(target) for source, target in (moved or {}).items()},
        }
        (tmp_path / "oracle").mkdir()
        done = warm.job(JOB, input=json.dumps(spec), env=JOB_ENV)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    make_wheel(tmp_path / "wheels", "app", "1.0", {"app/__init__.py": "X = 1\n"}, scripts={"tool": "app:main"})
    with lent_python_with_pip(work / "venv"):
        yield call


def test_the_same_installation_twice_is_the_same_though_a_newer_version_came_out(ask, tmp_path):
    newer = make_wheel(tmp_path / "later", "app", "2.0", {"app/__init__.py": "X = 2\n"})
    said = ask("echo made > file; ln -s file link; mkdir empty", moved={newer: tmp_path / "wheels" / newer.name})
    assert said["packages"] == ["app==1.0"]
    assert said["differences"] == {}
    assert said["compared"] > 8


def test_another_content_under_the_same_version_is_found(ask, tmp_path):
    other = make_wheel(tmp_path / "later", "app", "1.0", {"app/__init__.py": "X = 2\n"}, scripts={"tool": "app:main"})
    said = ask(moved={other: tmp_path / "wheels" / other.name})
    names = {path.rpartition("/site-packages/")[2]: words for path, words in said["differences"].items()}
    assert names.pop("app/__init__.py") == "in the fresh installation: other content"
    assert all("dist-info" in name or "__pycache__" in name for name in names)


def test_forged_files_and_setups_that_never_do_the_same_are_found(ask, tmp_path):
    setup = "echo made > file; echo $$ > own; touch own-$$"
    said = ask(setup, setup="true", between={tmp_path / "oracle" / "tree" / "srv" / "file": "forged\n"})
    assert said["differences"].pop("/srv/file") == "in the fresh installation: other content"
    assert said["differences"].pop("/srv/own") == "in the fresh installation: other content"
    assert sorted(said["differences"].values()) == [
        "in the fresh installation: missing",
        "only in the fresh installation",
    ]


def test_a_setup_that_fails_now_is_an_error(ask, tmp_path):
    said = ask(f"test ! -e {tmp_path}/gone", setup="true", between={tmp_path / "gone": ""})
    assert said["error"] == "the fresh installation failed with exit code 1; there is nothing to compare with"


def test_pins_are_the_versions_of_python_packages():
    assert pinned(["a==1.0", "b==2+cpu", "deb:c:amd64==3"]) == "a==1.0\nb==2+cpu\n"
