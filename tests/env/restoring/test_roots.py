"""Which folders of realistic setups are mounted, and which files are written in place."""

from __future__ import annotations

import pytest

from bootseer.env.changes import Action, Change
from bootseer.env.restoring.roots import Division, Environment, divide, is_system, may_be_edited

PYTHON = "lib/python3.11"


class Node:
    """Folders after a setup: the given ones, and all ancestors of changed paths."""

    def __init__(
        self, kinds: dict[str, Environment], folders: set[str], files: set[str], working_folder: str = ""
    ) -> None:
        self.working_folder = working_folder
        self.kinds = kinds
        self.folders = folders
        self.files = files

    def environment(self, folder: str) -> Environment:
        return self.kinds.get(folder, "")

    def is_folder(self, path: str) -> bool:
        return path in self.folders and path not in self.files


def divided(
    *paths: str,
    kinds: dict[str, Environment] | None = None,
    new: tuple[str, ...] = (),
    deleted: tuple[str, ...] = (),
    opaque: tuple[str, ...] = (),
    working_folder: str = "",
) -> Division:
    """`paths` are new files; `new` and `opaque` are new and replaced folders."""
    changes = [
        *(Change(path, Action.ADDED) for path in (*paths, *new)),
        *(Change(path, Action.DELETED) for path in deleted),
        *(Change(path, Action.MODIFIED, opaque=True) for path in opaque),
    ]
    above = {change.path[:end] for change in changes for end in range(1, len(change.path)) if change.path[end] == "/"}
    return divide(changes, Node(kinds or {}, above | {*new, *opaque}, set(paths), working_folder))


VENV = "/home/u/project/.venv"
KINDS: dict[str, Environment] = {"/usr": "python", "/usr/local": "python"}


def test_a_new_venv_is_mounted_and_the_project_around_it_is_not() -> None:
    found = divided(
        f"{VENV}/pyvenv.cfg",
        f"{VENV}/bin/python",
        f"{VENV}/{PYTHON}/site-packages/torch/__init__.py",
        "/home/u/project/app.egg-info/PKG-INFO",
        kinds={VENV: "venv"},
        new=(VENV, f"{VENV}/bin", "/home/u/project/app.egg-info"),
    )
    assert found == Division((VENV,), ("/home/u/project/app.egg-info", "/home/u/project/app.egg-info/PKG-INFO"))


def test_a_venv_that_was_there_is_mounted_by_its_parts() -> None:
    found = divided(f"{VENV}/bin/tool", f"{VENV}/{PYTHON}/site-packages/a.py", f"{VENV}/note", kinds={VENV: "venv"})
    assert found == Division((f"{VENV}/bin", f"{VENV}/lib"), (f"{VENV}/note",))


def test_files_of_packages_outside_their_code_are_mounted_in_an_existing_venv() -> None:
    shared = [f"{VENV}/{name}/x" for name in ("share/man", "share/jupyter", "etc", "opt", "man")]
    found = divided(*shared, "/home/u/.local/share/x", kinds={VENV: "venv", "/home/u/.local": "python"})
    assert found == Division(
        (f"{VENV}/etc", f"{VENV}/man", f"{VENV}/opt", f"{VENV}/share"), ("/home/u/.local/share/x",)
    )
    # In a new venv around a project they may be the project's.
    found = divided(f"{VENV}/share/x", f"{VENV}/train.py", kinds={VENV: "venv"}, new=(VENV,))
    assert f"{VENV}/share/x" in found.loose


def test_a_venv_that_was_made_anew_is_mounted_as_a_whole() -> None:
    found = divided(f"{VENV}/bin/tool", kinds={VENV: "venv"}, opaque=(VENV,))
    assert found == Division((VENV,), ())


def test_a_project_folder_that_is_a_venv_keeps_the_jobs_files() -> None:
    found = divided(
        "/workspace/x/pyvenv.cfg",
        f"/workspace/x/{PYTHON}/site-packages/a.py",
        "/workspace/x/train.py",
        "/workspace/x/checkpoints",
        kinds={"/workspace/x": "venv"},
        new=("/workspace/x",),
    )
    assert found.roots == ("/workspace/x/lib",)
    assert "/workspace/x/checkpoints" in found.loose
    assert "/workspace/x" in found.loose


def test_pip_into_the_systems_python_mounts_the_innermost_prefix() -> None:
    found = divided(f"/usr/local/{PYTHON}/dist-packages/a.py", "/usr/local/bin/a", kinds=KINDS)
    assert found == Division(("/usr/local",), ())


def test_apt_get_mounts_the_systems_folders() -> None:
    found = divided("/usr/bin/jq", "/usr/share/doc/jq", "/etc/jq.conf", "/var/lib/dpkg/status", kinds=KINDS)
    assert found == Division(("/etc", "/usr", "/var/lib/dpkg"), ())


def test_pip_and_apt_get_together_share_a_root() -> None:
    assert divided(f"/usr/local/{PYTHON}/a.py", "/usr/bin/jq", kinds=KINDS).roots == ("/usr",)


def test_the_users_own_packages_leave_the_rest_of_local_alone() -> None:
    local = "/home/u/.local"
    found = divided(
        f"{local}/{PYTHON}/site-packages/a.py",
        f"{local}/bin/a",
        f"{local}/share/man/a.1",
        kinds={local: "python"},
        new=(local,),
    )
    assert found == Division((f"{local}/bin", f"{local}/lib"), (local, f"{local}/share/man/a.1"))


def test_pyenv_mounts_the_interpreter_and_copies_the_rest() -> None:
    pyenv = "/root/.pyenv"
    found = divided(
        f"{pyenv}/libexec/pyenv",
        f"{pyenv}/versions/3.12.1/bin/python",
        f"{pyenv}/versions/3.12.1/lib/python3.12/os.py",
        kinds={f"{pyenv}/versions/3.12.1": "python"},
        new=(pyenv, f"{pyenv}/versions", f"{pyenv}/versions/3.12.1"),
    )
    assert found.roots == (f"{pyenv}/versions/3.12.1",)
    assert f"{pyenv}/libexec/pyenv" in found.loose


@pytest.mark.parametrize("home", ["/opt/conda", "/home/u/miniconda3"])
def test_conda_is_one_root_even_when_it_was_there(home: str) -> None:
    found = divided(f"{home}/pkgs/a/info", f"{home}/conda-meta/a.json", f"{home}/LICENSE", kinds={home: "conda"})
    assert found == Division((home,), ())


def test_an_environment_inside_conda_is_a_root_of_its_own() -> None:
    inner = "/opt/conda/envs/train"
    kinds: dict[str, Environment] = {"/opt/conda": "conda", inner: "conda"}
    assert divided(f"{inner}/bin/python", kinds=kinds).roots == (inner,)
    assert divided(f"{inner}/bin/python", "/opt/conda/pkgs/x", kinds=kinds).roots == ("/opt/conda",)


def test_below_opt_the_outermost_new_folder_is_mounted() -> None:
    found = divided("/opt/tool/bin/x", "/opt/old/x", new=("/opt/tool", "/opt/tool/bin"))
    assert found == Division(("/opt/tool",), ("/opt/old/x",))


def test_an_opt_that_is_new_itself_is_not_a_root() -> None:
    found = divided("/opt/tool/lib/x", new=("/opt", "/opt/tool"))
    assert found == Division(("/opt/tool",), ("/opt",))


def test_a_new_folder_below_opt_without_programs_may_get_the_jobs_results() -> None:
    found = divided("/opt/job/data/x", "/opt/job/train.py", new=("/opt/job", "/opt/job/data"))
    assert found.roots == ()


@pytest.mark.parametrize("working_folder", ["/opt/tool", "/opt/tool/run/1"])
def test_no_mount_takes_what_a_job_leaves_in_its_working_folder(working_folder: str) -> None:
    new = ("/opt/tool", "/opt/tool/bin")
    assert divided("/opt/tool/bin/x", new=new, working_folder=working_folder).roots == ()
    assert divided("/opt/tool/bin/x", new=new, working_folder="/opt/tools").roots == ("/opt/tool",)


def test_a_job_that_works_in_a_folder_of_the_system_keeps_its_results() -> None:
    paths = ("/usr/bin/jq", "/etc/jq.conf", "/usr/local/bin/a", f"/usr/local/{PYTHON}/dist-packages/a.py")
    paths += ("/usr/share/doc/jq", "/usr/src/app/x", "/usr/local/app/y")
    found = divided(*paths, kinds=KINDS, working_folder="/usr/src/app")
    assert found == Division(("/etc", "/usr/bin", "/usr/local", "/usr/share"), ("/usr/src/app/x",))
    found = divided(*paths, kinds=KINDS, working_folder="/usr/local/app")
    assert found.loose == ("/usr/local/app/y",)
    assert found.roots == ("/etc", "/usr/bin", "/usr/local/bin", "/usr/local/lib", "/usr/share", "/usr/src")


def test_an_environment_that_the_job_works_in_is_mounted_all_the_same() -> None:
    assert divided("/opt/conda/bin/a", kinds={"/opt/conda": "conda"}, working_folder="/opt/conda/w").roots == (
        "/opt/conda",
    )


@pytest.mark.parametrize("folder", ["/home/u/web/node_modules", "/workspace/node_modules"])
def test_node_modules_are_mounted_at_the_outermost(folder: str) -> None:
    found = divided(f"{folder}/a/node_modules/b/index.js", "/home/u/web/package-lock.json")
    assert found == Division((folder,), ("/home/u/web/package-lock.json",))


def test_packages_outside_of_any_environment_are_mounted() -> None:
    assert divided("/data/lib/site-packages/a/b.py").roots == ("/data/lib/site-packages",)


@pytest.mark.parametrize(
    "path",
    ["/workspace/repo/.git/config", "/models/llama/model.bin", "/home/u/.bashrc", "/srv/x", "/data/checkpoints", "/x"],
)
def test_what_belongs_to_people_is_loose(path: str) -> None:
    assert divided(path, kinds=KINDS) == Division((), (path,))


def test_links_to_folders_of_the_system_are_loose() -> None:
    found = divide([Change("/lib", Action.ADDED)], Node({}, set(), set()))
    assert found == Division((), ("/lib",))


def test_a_deletion_inside_an_environment_belongs_to_it() -> None:
    found = divided(deleted=(f"/usr/local/{PYTHON}/a.py", "/home/u/note"), kinds=KINDS)
    assert found == Division(("/usr/local",), ("/home/u/note",))


def test_a_loose_path_inside_another_root_is_part_of_it() -> None:
    kinds: dict[str, Environment] = {"/data/env": "conda", "/data/env/x/y": "venv"}
    found = divided("/data/env/a", "/data/env/x/y/note", kinds=kinds)
    assert found == Division(("/data/env",), ())


def test_roots_with_similar_names_are_not_inside_each_other() -> None:
    kinds: dict[str, Environment] = {"/d/env": "conda", "/d/env-2": "conda", "/d/env/sub": "conda"}
    assert divided("/d/env/a", "/d/env-2/a", "/d/env/sub/a", kinds=kinds).roots == ("/d/env", "/d/env-2")


@pytest.mark.parametrize(
    ("path", "system"),
    [
        *((path, True) for path in ("/usr", "/usr/lib/x", "/etc/x", "/lib64", "/var/lib/dpkg/status")),
        *((path, False) for path in ("/usrx", "/home/u", "/library/x", "/var/log/x", "/opt/x")),
    ],
)
def test_the_systems_folders_are_known_by_their_names(path: str, system: bool) -> None:
    assert is_system(path) is system


@pytest.mark.parametrize(
    ("path", "edited"),
    [
        *((path, True) for path in ("/etc/profile", "/usr/local/bin/tool", "/home/u/.bashrc", f"{VENV}/bin/activate")),
        *((path, False) for path in ("/usr/bin/jq", "/var/lib/dpkg/status", "/etc/ld.so.cache")),
        *((path, False) for path in (f"{VENV}/{PYTHON}/site-packages/a.py", "/usr/local/x/__pycache__/a.pyc")),
    ],
)
def test_files_that_people_edit_are_distinguished_from_those_of_packages(path: str, edited: bool) -> None:
    assert may_be_edited(path) is edited
