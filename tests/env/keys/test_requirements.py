"""Requirements files and single requirements, read as by pip and uv."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.keys import requirement
from bootseer.env.keys.requirements import Requirements
from bootseer.errors import NotFoundError


class Written:
    """Files as a dictionary; a value of None is a folder."""

    def __init__(self, files: dict[str, str | None]) -> None:
        self.files = files

    def kind(self, path: str) -> Literal["file", "folder", ""]:
        if path not in self.files:
            return ""
        return "folder" if self.files[path] is None else "file"

    def read(self, path: str) -> bytes:
        text = self.files.get(path)
        if text is None:
            raise NotFoundError(f"{path}: no such file")
        return text.encode()


def _closed(files: dict[str, str | None], *names: str, **env: str) -> Requirements:
    found = Requirements(env=env)
    found.add_files([(name, False) for name in names], Written(files), "/job")
    found.close()
    return found


@pytest.mark.parametrize(
    ("text", "kind", "name", "target", "pinned"),
    [
        ("click==8.1.7", "name", "click", "==8.1.7", True),
        ("Click[extra] === 8", "name", "click", "=== 8", True),
        ("zope.interface == 1 ; python_version < '4'", "name", "zope-interface", "== 1", True),
        ("click==8.*", "name", "click", "==8.*", False),
        ("click==8.1,<9", "name", "click", "==8.1,<9", False),
        ("click>=8", "name", "click", ">=8", False),
        ("click", "name", "click", "", False),
        ("./a/b.whl", "path", "", "./a/b.whl", True),
        ("b-1.0.tar.gz", "path", "", "b-1.0.tar.gz", True),
        (".[dev,test]", "path", "", ".", True),
        ("../lib[x]", "path", "", "../lib", True),
        ("/opt/lib", "path", "", "/opt/lib", True),
        ("./my lib/b.whl ; python_version>'3'", "path", "", "./my lib/b.whl", True),
        ("'./my lib[x]'", "path", "", "./my lib", True),
        ("./lib -C a=b", "path", "", "./lib", True),
        ("file:///opt/my%20lib", "path", "", "/opt/my lib", True),
        ("lib @ file:///opt/lib", "path", "lib", "/opt/lib", True),
        ("lib @ https://u:p@h.test/l.zip", "url", "lib", "https://h.test/l.zip", False),
        (f"https://h.test/l.zip#sha256={'a' * 64}", "url", "", f"https://h.test/l.zip#sha256={'a' * 64}", True),
        (f"git+https://h.test/r.git@{'a' * 40}", "vcs", "", "git+https://h.test/r.git", True),
        ("git+https://h.test/r.git@main#egg=Lib_X", "vcs", "lib-x", "git+https://h.test/r.git", False),
        ("git+ssh://git@h.test/r.git", "vcs", "", "git+ssh://git@h.test/r.git", False),
        ("git+https://token@h.test/r.git", "vcs", "", "git+https://h.test/r.git", False),
        ("lib @ git+https://h.test/r.git@v1 ; python_version>'3'", "vcs", "lib", "git+https://h.test/r.git", False),
    ],
)
def test_a_requirement_is_read_as_an_installer_does(text: str, kind: str, name: str, target: str, pinned: bool) -> None:
    found = requirement.parse(text)
    assert found is not None
    assert (found.kind, found.name, found.target, found.pinned) == (kind, name, target, pinned)


def test_nested_files_are_relative_to_the_file_that_names_them() -> None:
    files: dict[str, str | None] = {
        "/job/r.txt": "-r sub/a.txt\n--requirement=sub/b.txt\n-csub/c.txt",
        "/job/sub/a.txt": "-r ../d.txt",
        "/job/sub/b.txt": "",
        "/job/sub/c.txt": "x==1",
        "/job/d.txt": "",
    }
    found = _closed(files, "r.txt")
    assert sorted(found.files) == sorted(files)
    assert not found.problems


def test_lines_may_go_on_and_comments_do_not_count() -> None:
    found = _closed({"/job/r.txt": "# -r nothing.txt\na==1 \\\n  --hash=sha256:aa # why\n\n  b \\\n  ==2\n"}, "r.txt")
    assert list(found.unpinned) == ["dependencies of b==2"]
    assert not found.problems


def test_a_folder_to_find_distributions_in_is_found_among_other_options() -> None:
    text = "-i https://me:pw@one.test/\n--extra-index-url=https://tok@two.test/ \n--no-index\n--pre\n-f ./wheels\n"
    found = _closed({"/job/r.txt": text, "/job/wheels": None}, "r.txt")
    assert found.find_links == ["/job/wheels"]


def test_a_local_path_is_looked_for_as_pip_and_as_uv_do() -> None:
    files: dict[str, str | None] = {
        "/job/r.txt": "-r sub/a.txt",
        "/job/sub/a.txt": "-e ./lib\n./x.whl",
        "/job/lib": None,
        "/job/sub/lib": None,
        "/job/sub/x.whl": "",
    }
    found = _closed(files, "r.txt")
    assert sorted(found.locals) == ["/job/lib", "/job/sub/lib", "/job/sub/x.whl"]
    assert found.locals["/job/lib"]
    assert not found.locals["/job/sub/x.whl"]


@pytest.mark.parametrize(
    "line", ["-e lib[dev]", "-e lib#egg=lib", "-elib ; python_version>'3'", "--editable=./lib[dev]"]
)
def test_an_editable_project_is_found_however_it_is_named(line: str) -> None:
    found = _closed({"/job/r.txt": line, "/job/lib": None}, "r.txt")
    assert found.locals == {"/job/lib": True}


@pytest.mark.parametrize("line", ["${WHEELS}/x.whl", "x @ file:///${WHEELS}/x.whl", "${LINE}"])
def test_variables_are_expanded_in_names_of_local_files(line: str) -> None:
    text = f"-r file:///${{WHEELS}}/r.txt\n-f ${{WHEELS}}\n-f ~/f\n-i https://${{HOST}}/\nx @ https://${{HOST}}/x.zip\n{line}\n"
    files = {"/job/r.txt": text, "/w": None, "/h/f": None, "/w/x.whl": "", "/w/r.txt": ""}
    found = _closed(files, "r.txt", WHEELS="/w", HOST="u:pw@h.test", LINE="/w/x.whl", HOME="/h")
    assert list(found.files) == ["/job/r.txt", "/w/r.txt"]
    assert (list(found.locals), found.find_links) == (["/w/x.whl"], ["/w", "/h/f"])
    assert "pw" not in repr(found)


def test_a_constraint_pins_what_is_open_and_asks_for_nothing() -> None:
    limits = f"click==8\nother==1\n-e ./lib\nsix==1 --hash=sha256:{'0' * 64}\n"
    found = _closed({"/job/r.txt": "-c c.txt\nClick\nrich>1\nsix", "/job/c.txt": limits}, "r.txt")
    # As for a version in the file itself: what it depends on is open, unless each has a digest.
    assert list(found.unpinned) == ["dependencies of click", "rich>1"]
    assert not found.locals


def test_what_an_address_with_a_digest_depends_on_is_open() -> None:
    """Only `--hash` makes pip ask for a digest of everything else."""
    address = f"https://h.test/l.zip#sha256={'a' * 64}"
    assert list(_closed({"/job/r.txt": f"l @ {address}\n"}, "r.txt").unpinned) == ["dependencies of l"]
    assert not _closed({"/job/r.txt": f"l @ {address} --hash=sha256:{'a' * 64}\n"}, "r.txt").unpinned
    found = _closed({"/job/r.txt": "-c c.txt\nl", "/job/c.txt": f"l @ {address}\n"}, "r.txt")
    assert list(found.unpinned) == ["dependencies of l"]


def test_a_lock_as_constraints_covers_what_its_packages_depend_on() -> None:
    lock = "# autogenerated by uv\na==1\n"
    assert not _closed({"/job/r.txt": "-c c.txt\na", "/job/c.txt": lock}, "r.txt").unpinned


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock", "pylock.toml", "pylock.gpu.toml"])
def test_a_lock_covers_what_its_packages_depend_on(name: str) -> None:
    found = _closed(
        {"/job/pyproject.toml": "[project]\ndependencies=['a']", f"/job/{name}": ""}, "pyproject.toml", name
    )
    assert not found.unpinned
    assert f"/job/{name}" in found.files


@pytest.mark.parametrize(
    "header", ["# This file is autogenerated by pip-compile with Python 3.11", "# autogenerated by uv"]
)
def test_a_compiled_file_covers_what_its_packages_depend_on(header: str) -> None:
    assert not _closed({"/job/r.txt": f"#\n{header}\n#\na==1\n"}, "r.txt").unpinned
    assert _closed({"/job/r.txt": f"#\n{header}\n#\na==1\nb\n"}, "r.txt").unpinned == {"b": None}


@pytest.mark.parametrize("lock", ["p/uv.lock", "p/poetry.lock", "p/lock.txt"])
def test_a_lock_covers_its_projects_and_no_other_requirement_files(lock: str) -> None:
    files = {
        "/job/p/pyproject.toml": "[project]\ndependencies=['a']",
        f"/job/{lock}": "# autogenerated by uv\na==1\n-e ./p/lib\n",
        "/job/p/lib/setup.py": "",
        "/job/p/lib": None,
        "/job/r.txt": "-e ./p/lib\nb==2\n",
    }
    found = _closed(files, "p/pyproject.toml", lock, "r.txt")
    assert list(found.unpinned) == ["dependencies of b==2"]


def test_too_many_files_are_a_problem() -> None:
    files: dict[str, str | None] = {f"/job/{n}.txt": f"-r {n + 1}.txt" for n in range(600)}
    found = _closed(files, "0.txt")
    assert any("more than 500" in problem for problem in found.problems)


def test_variables_in_a_file_are_reported() -> None:
    assert _closed({"/job/r.txt": "--index-url https://${USER_1}:${TOKEN}@h.test/"}, "r.txt").variables == {
        "USER_1",
        "TOKEN",
    }


@pytest.mark.parametrize("line", ["-e ' '", '-e "\t"', "' '"])
def test_a_requirement_of_blanks_is_none(line: str) -> None:
    _closed({"/job/r.txt": line}, "r.txt")


@given(st.text(max_size=200))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    _closed({"/job/r.txt": text}, "r.txt")


@given(st.text(max_size=60))
def test_no_requirement_makes_the_reader_fail(text: str) -> None:
    requirement.parse(text)
    requirement.parse(text, editable=True, hashed=True)
