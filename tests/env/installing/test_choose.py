"""The chosen commands, run for real with the test's own wheels: uv and pip must install the same packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.env.installing.choose import choose
from bootseer.env.installing.interpreter import ask, runner
from bootseer.env.installing.packages import installed, new_packages
from once import python_state, undo_changes
from wheels import make_index, make_wheel

pytestmark = pytest.mark.slow


def _requirements(folder, text):
    (folder / "requirements.txt").write_text(text)
    return str(folder / "requirements.txt")


def _choose(requirements, env, python, folder, **more):
    return choose([requirements], env, python, runner(), cwd=str(folder), **more)


def _install(command, env, folder, **more):
    done = subprocess.run(
        command.argv, env={**env, **command.env}, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def both(uv, job_env, python, tmp_path):
    """`both(text)`: what uv and pip install for these requirements, each in a new environment."""

    def install(text: str) -> dict[str, tuple[str, ...]]:
        requirements = _requirements(tmp_path, text)
        found = {}
        before, state = installed(python.folders), python_state(Path(python.prefix))
        installation = _choose(requirements, job_env, python, tmp_path)
        assert [command.installer for command in installation.commands] == ["uv", "pip"], installation.why_not_uv
        for command in installation.commands:
            _install(command, job_env, tmp_path)
            found[command.installer] = new_packages(before, installed(python.folders))
            found[f"{command.installer} content"] = {
                path.name: path.read_text() for path in Path(python.folders[-1]).glob("*.py")
            }
            if command.installer == "uv":
                undo_changes(Path(python.prefix), state)
        return found

    return install


def _assert_same(found, *expected):
    assert found["uv"] == found["pip"] == expected
    assert found["uv content"] == found["pip content"]


def test_uv_installs_what_pip_would_from_two_indexes(both, job_env, tmp_path):
    first = make_index(
        tmp_path / "first",
        [make_wheel(tmp_path / "a", "app", "1.0", requires=["base<3"]), make_wheel(tmp_path / "a", "base", "1.0")],
    )
    second = make_index(
        tmp_path / "second",
        [
            make_wheel(tmp_path / "b", "base", "2.0"),
            make_wheel(tmp_path / "b", "base", "3.0"),
            make_wheel(tmp_path / "b", "app", "1.0", {"app.py": "ELSEWHERE = 1\n"}, requires=["base<2"]),
        ],
    )
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {first}\nextra-index-url = {second}\n")
    job_env["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    # Both indexes have app 1.0: that of the second one is installed.
    _assert_same(both("app\n"), "app==1.0", "base==1.0")


def test_uv_installs_what_pip_would_from_places_in_the_requirement_file(both, tmp_path):
    make_wheel(tmp_path / "wheels", "app", "1.0", requires=["extra; python_version < '3'"])
    make_wheel(tmp_path / "wheels", "app", "2.0rc1")
    make_wheel(tmp_path / "wheels", "local", "1.0")
    make_wheel(tmp_path / "wheels", "local", "1.0+cpu")
    _assert_same(both("--no-index\n--find-links wheels\napp\nlocal==1.0\n"), "app==1.0", "local==1.0+cpu")


def test_uv_takes_early_versions_where_pip_is_told_to(both, tmp_path):
    make_wheel(tmp_path / "wheels", "app", "1.0")
    make_wheel(tmp_path / "wheels", "app", "2.0rc1")
    _assert_same(both("--no-index\n--pre\n-f wheels\napp\n"), "app==2.0rc1")


def test_uv_obeys_constraints_of_pip_s_variables(both, job_env, tmp_path):
    make_wheel(tmp_path / "wheels", "app", "1.0")
    make_wheel(tmp_path / "wheels", "app", "2.0")
    (tmp_path / "constraints.txt").write_text("app<2\n")
    job_env["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    _assert_same(both("--no-index\n-f wheels\napp\n"), "app==1.0")


def test_a_changed_source_is_built_again(uv, job_env, python, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "app"\nversion = "1.0"\n'
    )
    (project / "backend.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\nfrom wheels import make_wheel\n"
        "def build_wheel(folder, *_, **__):\n"
        "    return make_wheel(Path(folder), 'app', '1.0', {'app.py': Path('deep/app.py').read_text()}).name\n"
    )
    (project / "deep").mkdir()
    requirements = _requirements(tmp_path, "./project\n")
    for text in ("VALUE = 1\n", "VALUE = 2\n"):
        (project / "deep" / "app.py").write_text(text)
        command = _choose(requirements, job_env, python, tmp_path).commands[0]
        assert command.installer == "uv"
        _install(command, job_env, tmp_path)
        assert (Path(python.folders[-1]) / "app.py").read_text() == text


def test_what_is_installed_is_no_link_into_a_cache(uv, job_env, python, tmp_path):
    make_wheel(tmp_path / "wheels", "app", "1.0")
    command = _choose(_requirements(tmp_path, "--no-index\n-f wheels\napp\n"), job_env, python, tmp_path).commands[0]
    _install(command, job_env, tmp_path)
    assert (Path(python.folders[-1]) / "app.py").stat().st_nlink == 1


@pytest.mark.root
def test_pip_does_not_warn_of_root_unless_it_is_told_to(no_uv, job_env, tmp_path):
    python = ask(str(Path(sys.base_prefix) / "bin" / "python3"), job_env, runner())
    if not python.pip:
        pytest.skip("the Python below this environment has no pip")
    make_wheel(tmp_path / "wheels", "app", "1.0")
    job_env["PIP_TARGET"] = str(tmp_path / "target")
    requirements = _requirements(tmp_path, "--no-index\n-f wheels\napp\n")
    said = []
    for more in ({}, {"PIP_ROOT_USER_ACTION": "warn"}):
        command = _choose(requirements, job_env | more, python, tmp_path).commands[-1]
        env = job_env | more | command.env
        said.append(
            subprocess.run(command.argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
        )
    assert said[0] == ""
    assert "as the 'root' user" in said[1]


def test_without_uv_pip_installs_and_the_reason_is_reported(no_uv, job_env, python, tmp_path):
    make_wheel(tmp_path / "wheels", "app", "1.0")
    installation = _choose(_requirements(tmp_path, "--no-index\n-f wheels\napp\n"), job_env, python, tmp_path)
    assert installation.why_not_uv == "there is no uv"
    (command,) = installation.commands
    _install(command, job_env, tmp_path)
    assert not list(Path(python.folders[-1]).glob("__pycache__/app*"))


def test_a_setting_that_uv_lacks_brings_pip(uv, job_env, python, tmp_path):
    job_env["PIP_TARGET"] = str(tmp_path / "target")
    installation = _choose(_requirements(tmp_path, "app\n"), job_env, python, tmp_path)
    assert [command.installer for command in installation.commands] == ["pip"]
    assert installation.why_not_uv == "pip's setting target (PIP_TARGET) has no counterpart in uv"


@pytest.mark.parametrize(
    ("answer", "why"),
    [("echo uv 0.4.30", "uv 0.4.30 is too old"), ("echo shim: no version is set >&2; exit 127", "there is no uv")],
)
def test_a_uv_that_is_of_no_use_is_passed_over(no_uv, job_env, python, tmp_path, answer, why):
    (tmp_path / "bin" / "uv").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "bin" / "uv").chmod(0o755)
    assert _choose(_requirements(tmp_path, "app\n"), job_env, python, tmp_path).why_not_uv == why


def test_a_uv_next_to_the_job_s_python_is_found(uv, no_uv, job_env, python, tmp_path):
    shutil.copy(uv, Path(python.scripts) / "uv")
    installation = _choose(_requirements(tmp_path, "app\n"), job_env, python, tmp_path)
    assert installation.commands[0].argv[0] == str(Path(python.scripts) / "uv")


def test_an_environment_that_cannot_be_written_is_left_to_pip(uv, job_env, python, tmp_path):
    from msgspec.structs import replace

    installation = _choose(_requirements(tmp_path, "app\n"), job_env, replace(python, writable=False), tmp_path)
    assert "not writable" in installation.why_not_uv


def test_settings_are_read_below_another_root(uv, job_env, python, tmp_path):
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "pip.conf").write_text("[global]\ntarget = /t\n")
    del job_env["PIP_CONFIG_FILE"]
    (tmp_path / "root" / "requirements.txt").write_text("app\n")
    installation = _choose("/requirements.txt", job_env, python, tmp_path, root=str(tmp_path / "root"))
    assert installation.why_not_uv == "pip's setting target (/etc/pip.conf) has no counterpart in uv"
