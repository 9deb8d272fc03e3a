"""Digests of files and folders: bounded, cached, never wrong after a change."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from bootseer.env.keys import sources
from bootseer.env.keys.files import FactCache, NodeFiles, wheel_contents
from bootseer.env.keys.sources import read_tree
from bootseer.errors import PermanentError
from setup_projects import git


def _files(folder: Path | None = None) -> NodeFiles:
    return NodeFiles(FactCache(folder))


def _digest(path: Path) -> str:
    return read_tree(str(path), _files()).digest


def test_a_copy_of_a_tree_has_the_same_digest(tmp_path: Path) -> None:
    tree = tmp_path / "one"
    (tree / "b").mkdir(parents=True)
    (tree / "b/c").write_text("1")
    (tree / "link").symlink_to("b/c")
    shutil.copytree(tree, tmp_path / "two", symlinks=True)
    assert _digest(tree) == _digest(tmp_path / "two")
    (tmp_path / "two/b/d").mkdir()
    assert _digest(tree) != _digest(tmp_path / "two")


def test_what_a_link_leads_to_counts_and_loops_end(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "outside").write_text("1")
    (tree / "link").symlink_to("../outside")
    (tree / "loop").symlink_to(".")
    (tree / "up").symlink_to("..")
    (tree / "broken").symlink_to("nowhere")
    before = _digest(tree)
    (tmp_path / "outside").write_text("2")
    assert _digest(tree) != before


def test_pipes_and_sockets_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    _digest(tmp_path)
    with pytest.raises(PermanentError, match="not a regular file"):
        _files().digest(str(tmp_path / "pipe"))
    assert _files().kind(str(tmp_path / "pipe")) == ""


def test_the_commit_counts_only_for_projects_that_take_their_version_from_it(tmp_path: Path) -> None:
    git("init", "-q", "-b", "main", cwd=tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\n")
    git("commit", "-q", "--allow-empty", "-m", "one", cwd=tmp_path)
    plain = _digest(project)
    git("commit", "-q", "--allow-empty", "-m", "two", cwd=tmp_path)
    assert _digest(project) == plain
    (project / "pyproject.toml").write_text("[build-system]\nrequires=['setuptools-scm']\n")
    versioned = _digest(project)
    git("tag", "v1", cwd=tmp_path)
    tagged = _digest(project)
    git("commit", "-q", "--allow-empty", "-m", "three", cwd=tmp_path)
    assert len({versioned, tagged, _digest(project)}) == 3


@pytest.mark.parametrize("answers", [True, False], ids=["with git", "without git"])
def test_each_commit_and_each_tag_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    repository, project = tmp_path / "repository", tmp_path / "repository/packages/project"
    project.mkdir(parents=True)
    (project / "setup.cfg").write_text("setup_requires = pbr\n")
    found = [_digest(project)]
    git("init", "-q", "-b", "main", cwd=repository)
    steps = ["commit -q --allow-empty -m one", "tag newest", "tag v1.0", "commit -q --allow-empty -m two", "pack-refs"]
    for step in (*steps, "tag v1.1"):
        git(*step.split(), cwd=repository)
        with monkeypatch.context() as patch:
            patch.setenv("GIT_DIR", str(tmp_path))
            if not answers:
                patch.setenv("PATH", str(tmp_path))
            found.append(_digest(project))
    assert len({*found}) >= len(found) - 1  # packing does not change the digest


def test_a_repository_that_the_setup_does_not_see_is_not_asked(tmp_path: Path) -> None:
    """In an image, where only a part of the repository is mounted: the working folder."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "setup.cfg").write_text("setup_requires = pbr\n")
    git("init", "-q", "-b", "main", cwd=tmp_path)
    found = set()
    for _ in range(2):
        git("commit", "-q", "--allow-empty", "-m", "more", cwd=tmp_path)
        files = NodeFiles(FactCache(None), lambda path: Path(path).is_relative_to(project))
        found.add(read_tree(str(project), files).digest)
    assert len(found) == 1


def test_tags_that_git_does_not_tell_in_time_give_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the tags from git's files could give another key than on other nodes."""
    project, git_folder = tmp_path / "project", tmp_path / "bin"
    for folder in (project / ".git", git_folder):
        folder.mkdir(parents=True)
    (project / "setup.cfg").write_text("setup_requires = pbr\n")
    (git_folder / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (git_folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{git_folder}:/usr/bin:/bin")
    monkeypatch.setattr(sources, "_TAGS_DEADLINE_S", 0.3)
    with pytest.raises(PermanentError, match="git: no answer within"):
        _digest(project)


def test_a_tag_that_is_not_in_the_history_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text("setup_requires = pbr\n")
    git("init", "-q", "-b", "main", cwd=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "one", cwd=tmp_path)
    before = _digest(tmp_path)
    git("checkout", "-q", "-b", "other", cwd=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "two", cwd=tmp_path)
    git("tag", "v2", cwd=tmp_path)
    git("checkout", "-q", "main", cwd=tmp_path)
    assert _digest(tmp_path) == before
    worktree = tmp_path / "worktree"
    git("worktree", "add", "-q", str(worktree), "other", cwd=tmp_path)
    (worktree / "setup.cfg").write_text("setup_requires = pbr\n")
    before = _digest(worktree)
    git("tag", "v3", "other", cwd=tmp_path)
    assert _digest(worktree) != before


def test_a_remembered_digest_is_used_until_the_file_changes(tmp_path: Path) -> None:
    path, folder = tmp_path / "large", tmp_path / "facts"
    path.write_bytes(b"a" * (2 << 20))
    status = path.stat()
    stamp = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    facts = FactCache(folder)
    facts.put("digest", str(path), stamp, "remembered")
    facts.save()
    assert _files(folder).digest(str(path))[0] == "remembered"
    path.write_bytes(b"b" * (2 << 20))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _files(folder).digest(str(path))[0] == _files().digest(str(path))[0]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"a" * (2 << 20))
    facts = FactCache(tmp_path / "facts")
    NodeFiles(facts).digest(str(tmp_path / "large"))
    facts.save()
    assert not (tmp_path / "facts").exists()


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"digest:x": 3}', b"[" * 100_000, b"\xff"])
def test_damaged_facts_are_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "facts.json").write_bytes(damage)
    assert FactCache(tmp_path).get("digest", "x", []) is None


def test_facts_that_other_users_may_write_are_not_used(tmp_path: Path) -> None:
    facts = FactCache(tmp_path)
    facts.put("digest", "x", [1], "y")
    facts.save()
    assert FactCache(tmp_path).get("digest", "x", [1]) == "y"
    (tmp_path / "facts.json").chmod(0o666)
    assert FactCache(tmp_path).get("digest", "x", [1]) is None


def test_a_large_wheel_is_known_by_its_list_of_contents(tmp_path: Path) -> None:
    digests = []
    for content in (b"one", b"two"):
        path = tmp_path / "large-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("large.bin"), b"\0" * (65 << 20))
            archive.writestr(zipfile.ZipInfo("x.py"), content)
        with path.open("rb") as file:
            found = wheel_contents(file)
        assert found is not None
        assert len(found) < 1000
        digests.append(_files().digest(str(path))[0])
    assert digests[0] != digests[1]


def test_what_is_no_archive_has_no_list_of_contents(tmp_path: Path) -> None:
    for data in (
        b"",
        b"PK\x05\x06",
        b"PK\x05\x06" + b"\xff" * 30,
        b"PK\x06\x07" + b"\xff" * 16 + b"PK\x05\x06" + b"\xff" * 18,
    ):
        (tmp_path / "x").write_bytes(data)
        with (tmp_path / "x").open("rb") as file:
            assert wheel_contents(file) is None
