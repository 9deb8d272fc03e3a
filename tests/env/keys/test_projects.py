"""Files for installation besides pip's: projects, locks and conda's."""

from __future__ import annotations

import pytest

from bootseer.env.keys.key import difference
from bootseer.env.keys.requirement import grouped, kind_of, lines_of_pip, relevant_parts, unhashed_sources
from bootseer.errors import UsageError
from setup_projects import Project

PROJECT = '[project]\nname = "job"\nversion = "1"\ndependencies = ["click==8.1.7"]\n'
PYLOCK = 'lock-version = "1.0"\n[[packages]]\nname = "click"\n'
CONDA = "name: job\ndependencies:\n  - numpy\n  - pip:\n    - -r more.txt\n    - ./local\n    - click==8\n"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("requirements.txt", "click", "requirements"),
        ("requirements.lock", "click==8 --hash=sha256:aa", "requirements"),
        ("pyproject.toml", PROJECT, "pyproject"),
        ("job.toml", PROJECT, "pyproject"),
        ("pyproject.toml", f"{PROJECT}dynamic = true\n", "pyproject"),
        ("pylock.toml", PYLOCK, "pylock"),
        ("pylock.gpu.toml", PYLOCK, "pylock"),
        ("a/uv.lock", "version = 1\n[[package]]\n", "uv.lock"),
        ("environment.yml", CONDA, "conda"),
        ("gpu.yaml", CONDA, "conda"),
    ],
)
def test_a_file_is_known_by_name_and_content(name: str, text: str, kind: str) -> None:
    assert kind_of(name, text.encode()) == kind


@pytest.mark.parametrize(
    ("name", "text", "words", "hint"),
    [
        ("poetry.lock", "", "files of this kind are not supported", "poetry export"),
        ("pixi.toml", '[project]\nname = "x"\n', "files of this kind are not supported", "pixi workspace export"),
        ("setup.py", "", "files of this kind are not supported", "-e ."),
        ("pyproject.toml", "[tool.ruff]", "no table [project]", "export"),
        ("pyproject.toml", '[project]\ndynamic = ["dependencies"]', "its dependencies are dynamic", "uv lock"),
        ("pyproject.toml", f"{PROJECT}[tool.uv.sources]\na = {{workspace = true}}", "workspace", "uv.lock"),
        ("pyproject.toml", "[project", "not TOML", "wrote"),
        ("pyproject.toml", f"x = {'[' * 50_000}", "not TOML", "wrote"),
        ("my.lock", "version = 1\n[[package]]\n", "under another name", "uv.lock"),
        ("values.yaml", "replicas: 3\n", "not an environment file of conda", "environment.yml"),
    ],
)
def test_what_cannot_be_installed_from_is_an_error_with_what_to_do(name: str, text: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind_of(name, text.encode())
    assert words in str(caught.value)
    assert hint in caught.value.hint


def test_of_a_project_only_what_decides_the_installation_counts() -> None:
    def parts(text: str) -> tuple[str, ...]:
        return relevant_parts("pyproject", "pyproject.toml", text.encode())

    before = parts(PROJECT)
    assert parts(f"# a comment\n{PROJECT}readme = 'x'\n[tool.ruff]\nline-length = 1\n") == before
    assert parts(PROJECT.replace("8.1.7", "8.1.8")) != before
    assert parts(f"{PROJECT}[tool.uv]\nno-binary-package = ['click']\n") != before
    assert parts(f"{PROJECT}[build-system]\nrequires = ['hatchling']\n") != before


def test_what_a_file_takes_from_this_machine_or_from_repositories_is_reported() -> None:
    sources = "a = {path = '../a', editable = true}\nb = {git = 'https://tok@h.test/b', branch = 'main'}\n"
    found = list(unhashed_sources("pyproject", "p", f"{PROJECT}[tool.uv.sources]\n{sources}".encode()))
    assert [(one.kind, one.target, one.reference, one.editable) for one in found] == [
        ("path", "../a", "", True),
        ("vcs", "git+https://h.test/b", "main", False),
    ]
    lock = (
        'version = 1\n[[package]]\nname = "a"\nsource = { editable = "../a" }\n[[package]]\nname = "me"\n'
        'source = { virtual = "." }\n[[package]]\nname = "w"\nwheels = [{ path = "/w/w.whl" }, '
        '{ path = "/w/known.whl", hash = "sha256:aa" }]\n'
    )
    assert {(one.target, one.editable) for one in unhashed_sources("uv.lock", "uv.lock", lock.encode())} == {
        ("../a", True),
        ("/w/w.whl", False),
    }
    pylock = PYLOCK + 'directory = { path = "lib" }\nwheels = [{ path = "x.whl", hashes = {sha256 = "aa"} }]\n'
    assert [one.target for one in unhashed_sources("pylock", "pylock.toml", pylock.encode())] == ["lib"]
    assert lines_of_pip(CONDA.encode()).split("\n") == ["-r more.txt", "./local", "click==8"]


@pytest.mark.parametrize(
    "text",
    [
        "  - -r sub/a.txt  # why\n  - wheels/x-1.whl",
        "  - '-r sub/a.txt'\n  -   \"wheels/x-1.whl\"",
        "    ['-r sub/a.txt', click, \"wheels/x-1.whl\"]",
        "    [\n    -r sub/a.txt,\n    wheels/x-1.whl ]",
        "  - -rsub/a.txt\n  - x @ file:wheels/x-1.whl",
    ],
)
def test_what_pip_installs_for_conda_is_found_in_any_form(text: str) -> None:
    lines = lines_of_pip(f"channels: [a, nvidia/label/b]\ndependencies:\n- c/d::e\n- pip:\n{text}\n".encode())
    first, *_, last = lines.split("\n")
    assert (first.replace(" ", ""), last.removeprefix("x @ file:")) == ("-rsub/a.txt", "wheels/x-1.whl")


def test_an_environment_file_that_only_conda_can_refuse_is_no_error() -> None:
    for text in ("[", "- a", "dependencies: 1", "dependencies:\n- pip:\n- pip: x\n- 3\n", "[" * 100_000):
        assert lines_of_pip(text.encode()) == ""


def test_conda_comes_first_and_each_lock_is_installed_by_itself() -> None:
    files = [("r.txt", "a"), ("pylock.toml", PYLOCK), ("pyproject.toml", PROJECT), ("environment.yml", CONDA)]
    assert grouped([(name, text.encode()) for name, text in files]) == [
        ("conda", ["environment.yml"]),
        ("pylock", ["pylock.toml"]),
        ("pyproject", ["r.txt", "pyproject.toml"]),
    ]


@pytest.mark.slow
def test_such_files_are_in_the_key_with_all_that_they_name(empty: Project) -> None:
    empty.write("a/pyproject.toml", "[project]\nname = 'a'\nversion = '1'\n")
    empty.write("pyproject.toml", f"{PROJECT}[tool.uv.sources]\na = {{path = 'a'}}\n")
    before = empty.key(requirements=("pyproject.toml",))
    assert "dependencies of pyproject.toml" in before.unpinned
    empty.write("pyproject.toml", f"{PROJECT}[tool.uv.sources]\na = {{path = 'a'}}\n[tool.ruff]\n")
    assert empty.key(requirements=("pyproject.toml",)).digest == before.digest
    empty.write("a/a.py", "")
    assert empty.key(requirements=("pyproject.toml",)).digest != before.digest
    empty.write("uv.lock", 'version = 1\n[[package]]\nname = "a"\nsource = { directory = "a" }\n')
    locked = empty.key(requirements=("uv.lock",))
    assert {"requirements uv.lock", "requirements pyproject.toml"} <= locked.components.keys()
    assert f"package {empty.job / 'a'}" in locked.components
    assert not locked.unpinned
    empty.write("environment.yml", CONDA)
    empty.write("more.txt", "six\n")
    conda = empty.key(requirements=("environment.yml",))
    assert "requirements more.txt" in conda.components
    assert "six" in conda.unpinned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "lock", "setup"),
    [
        ("dependencies = ['lib']\n[tool.uv.sources]\nlib = {path = '../lib'}\n", "", "uv sync"),
        (
            "dependencies = ['lib']\n[tool.uv.sources]\nlib = {path = '../lib'}\n",
            "",
            "uv pip install -r pyproject.toml",
        ),
        (
            "dependencies = ['lib']\n",
            "[[package]]\nname = 'lib'\nsource = {directory = '../lib'}\n",
            "uv sync --frozen",
        ),
        ("dependencies = ['lib @ file://LIB']\n", "", "pip install ."),
        ("dependencies = ['lib @ file://LIB']\n", "", ""),
        ("[dependency-groups]\ndev = ['lib @ file:///${PROJECT_ROOT}/../lib']\n", "", "pdm install"),
        ("[tool.poetry.group.dev.dependencies]\nlib = {path = '../lib', develop = true}\n", "", "poetry install"),
        ("dependencies = ['more @ file://MORE']\n", "", "pip install -e ."),  # which depends on the other
    ],
)
def test_what_a_project_takes_from_beside_its_folder_is_in_the_key(
    empty: Project, text: str, lock: str, setup: str
) -> None:
    lib, more = empty.root / "lib", empty.root / "more"
    for folder, needs in ((lib, "[]"), (more, f"['lib @ file://{lib}']")):
        folder.mkdir()
        (folder / "pyproject.toml").write_text(f"[project]\nname = '{folder.name}'\ndependencies = {needs}\n")
    text = text.replace("LIB", str(lib)).replace("MORE", str(more))
    empty.write("pyproject.toml", f"[project]\nname = 'job'\nversion = '1'\n{text}")
    if lock:
        empty.write("uv.lock", f"version = 1\n{lock}")
    asked: dict[str, object] = {"requirements": ("pyproject.toml",)}
    if setup:
        empty.write("setup.sh", f"{setup}\n")
        asked = {"setup": "setup.sh"}
    before = empty.key(**asked)
    (lib / "lib.py").write_text("")
    after = empty.key(**asked)
    assert [row.name for row in difference(before.components, after)] == [f"package {lib}"]
    assert bool(after.unpinned) == (not lock)


@pytest.mark.slow
def test_a_branch_that_a_lock_fixes_is_not_asked_for(empty: Project) -> None:
    empty.write("pyproject.toml", f"{PROJECT}[tool.uv.sources]\nclick = {{git = 'file:///nowhere', branch = 'main'}}\n")
    empty.write("setup.sh", "uv sync\n")
    assert any(name.startswith("repository") for name in empty.key(setup="setup.sh").components)
    empty.write("uv.lock", "version = 1\n")
    assert not any(name.startswith("repository") for name in empty.key(setup="setup.sh").components)


@pytest.mark.slow
def test_a_member_of_a_workspace_is_installed_by_the_lock_above_it(empty: Project) -> None:
    for name in ("a", "b"):
        empty.write(f"packages/{name}/pyproject.toml", f"[project]\nname = '{name}'\nversion = '1'\n")
    empty.write("pyproject.toml", "[tool.uv.workspace]\nmembers = ['packages/*']\n")
    empty.write("uv.lock", "version = 1\n[[package]]\nsource = {editable = 'packages/b'}\n")
    empty.write("packages/a/setup.sh", "uv sync --frozen\n")
    asked = {"setup": "setup.sh", "cwd": str(empty.job / "packages/a")}
    keys = [empty.key(**asked)]
    for name, text in (("uv.lock", "# again"), ("pyproject.toml", "# again"), ("packages/b/b.py", "")):
        path = empty.job / name
        path.write_text((path.read_text() if path.exists() else "") + text)
        keys.append(empty.key(**asked))
        (row,) = difference(keys[-2].components, keys[-1])
        assert row.name in (f"file {path}", f"package {path.parent}")


@pytest.mark.slow
def test_the_project_that_a_variable_of_uv_names_is_in_the_key(empty: Project) -> None:
    empty.write("other/pyproject.toml", PROJECT)
    empty.write("setup.sh", "uv sync\n")
    env = {**empty.env, "UV_PROJECT": "other"}
    before = empty.key(setup="setup.sh", env=env)
    empty.write("other/uv.lock", "version = 1\n")
    after = empty.key(setup="setup.sh", env=env)
    assert [row.name for row in difference(before.components, after)] == ["requirements other/uv.lock"]


@pytest.mark.slow
def test_the_build_folder_of_an_earlier_start_is_no_input(empty: Project) -> None:
    empty.write("CMakeLists.txt", "project(x)\n")
    empty.write("setup.sh", "mkdir -p build && cd build && cmake .. && make install\n")
    before = empty.key(setup="setup.sh").digest
    for name in ("CMakeCache.txt", "Makefile"):
        empty.write(f"build/{name}", "")
    assert empty.key(setup="setup.sh").digest == before
    empty.write("CMakeLists.txt", "project(y)\n")
    assert empty.key(setup="setup.sh").digest != before
