"""`--requirements` with other files than pip's: a project, locks, a conda environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from bootseer.env.keys.lock import own_uv
from environment_place import Place, made_place

pytestmark = pytest.mark.root
PROJECT = '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.9"\ndependencies = ["beta"]\n'
IMPORT = ("python", "-c", "import alpha, beta; print(alpha.VERSION, beta.VERSION)")
CONDAS = ("micromamba", "mamba", "conda")


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


def uv(place: Place, *words: str, **more: str) -> None:
    env = {**place.env, "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(place.wheels), **more}
    subprocess.run([own_uv() or "uv", *words], cwd=place.project, env=env, check=True, timeout=300)


@pytest.mark.parametrize("name", ["pyproject.toml", "uv.lock", "pylock.toml"])
def test_a_project_and_its_locks_are_installed_and_kept(place: Place, name: str) -> None:
    place.write("pyproject.toml", PROJECT)
    if name != "pyproject.toml":
        place.write("pyproject.toml", PROJECT.replace('"beta"', '"beta", "alpha==1.0"'))
        uv(place, "lock", "-q")
        uv(place, "export", "-q", "--frozen", "--no-emit-project", "-o", "pylock.toml")
    expected = "1.1 2.0\n" if name == "pyproject.toml" else "1.0 2.0\n"
    words = ("-r", name, "--", *IMPORT)
    assert place.run(*words).stdout == expected
    assert (place.start()["mode"], place.start()["trust"]) == ("captured", "observed")
    assert place.run(*words).stdout == expected
    assert place.start()["mode"] == "restored"
    if name == "uv.lock":  # it pins versions in another way than a requirements file
        ran = place.bootseer("env", "verify", place.start()["key"], "--tier", "oracle", "-r", name)
        assert ran.stdout.endswith(" 0 differ\n"), ran.stderr
    place.write("pyproject.toml", (place.project / "pyproject.toml").read_text() + "[tool.ruff]\nline-length = 9\n")
    place.run(*words)
    assert place.start()["mode"] == "restored"
    assert place.run("--env", "bypass", *words).stdout == expected
    assert not (place.project / ".venv").exists()


def test_a_lock_with_packages_of_an_index_is_installed_as_it_says(place: Place) -> None:
    """From PyPI itself, with digests, by the uv that BootSeer depends on."""
    place.more = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
    place.write("pyproject.toml", PROJECT.replace("beta", "six==1.16.0"))
    uv(place, "lock", "-q", UV_NO_INDEX="", UV_FIND_LINKS="")
    for mode in ("captured", "restored"):
        ran = place.run("-r", "uv.lock", "--", "python", "-c", "import six; print(six.__version__)")
        assert (ran.stdout, place.start()["mode"]) == ("1.16.0\n", mode)
    assert place.documents()[0]["max_age_s"] is None


def test_a_file_that_nothing_installs_from_starts_nothing(place: Place) -> None:
    place.write("poetry.lock", "")
    ran = place.run("-r", "poetry.lock", "--", "touch", "started", code=2)
    assert "poetry export -o requirements.txt" in ran.stderr
    place.write("environment.yml", "dependencies:\n  - numpy\n")
    ran = place.run("-r", "environment.yml", "--", "touch", "started", code=127)
    assert "environment.yml: no conda environment is active" in ran.stderr
    if not any(map(shutil.which, CONDAS)):
        more = {"CONDA_PREFIX": str(place.venv)}
        ran = place.run("-r", "environment.yml", "--", "touch", "started", code=127, more=more)
        assert "environment.yml: needs micromamba or mamba or conda on PATH; install one of them" in ran.stderr
    assert not (place.project / "started").exists()


@pytest.mark.skipif(shutil.which("micromamba") is None, reason="needs micromamba, which no registry here has")
def test_an_environment_for_conda_is_installed_and_kept(place: Place) -> None:
    prefix = place.root / "conda"
    subprocess.run(["micromamba", "create", "-y", "-p", prefix, "python", "pip"], check=True, timeout=300)
    place.more = {"CONDA_PREFIX": str(prefix), "PATH": f"{prefix}/bin:{os.environ['PATH']}"}
    place.write("environment.yml", "dependencies:\n  - six\n")
    for mode in ("captured", "restored"):
        place.run("-r", "environment.yml", "--", "python", "-c", "import six")
        assert place.start()["mode"] == mode
