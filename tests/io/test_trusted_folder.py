"""Folders that only their owner and root can change, and others."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from bootseer.errors import AccessError, UsageError
from bootseer.io.trusted_folder import home_of, open_own, open_trusted, trusted_folder

OTHER = 64321
ELSE = "set VARIABLE"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")


def trusted(path: Path, **how: bool) -> Path:
    return trusted_folder(path, otherwise=ELSE, **how)


def test_a_missing_folder_is_made_closed_and_those_above_it_open(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert trusted(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_without_make_nothing_is_made(tmp_path: Path) -> None:
    assert trusted(tmp_path / "a" / "b", make=False) == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()


def test_a_private_folder_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    trusted(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o755
    trusted(tmp_path / "open", private=True)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


def test_links_are_replaced_by_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/below/..")
    assert trusted(tmp_path / "relative" / "below") == tmp_path / "real" / "below"
    assert trusted(tmp_path / "relative" / "new" / ".." / "below") == tmp_path / "real" / "below"


def test_a_relative_path_begins_at_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trusted(Path("a/b")) == tmp_path / "a" / "b"


def test_an_absolute_path_needs_no_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert trusted(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        trusted(Path("b"))


def test_a_loop_of_links_and_a_file_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*/loop'"):
        trusted(tmp_path / "loop" / "folder")
    with pytest.raises(NotADirectoryError, match="/file'"):
        trusted(tmp_path / "file" / "folder")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, above: bool) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, 0, OTHER)  # a group other than root's
    elif mode == 0o775:
        pytest.skip("its group may have only this user")
    folder.chmod(mode)
    with pytest.raises(AccessError, match=f"{folder} can be changed by other users .*: chmod go-w {folder}, or set"):
        trusted(folder / "below" if above else folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="asks for root's group")
def test_the_user_s_group_is_no_protection_when_it_is_another_user_s_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    known = [pwd.getpwuid(0)]
    monkeypatch.setattr(pwd, "getpwall", lambda: known)
    assert trusted(folder) == folder
    known.append(pwd.struct_passwd(("operator", "x", 11, 0, "", "/", "/bin/sh")))
    with pytest.raises(AccessError, match=f"{folder} can be changed by other users"):
        trusted(folder)


def test_the_sticky_bit_protects_what_is_below_and_not_the_folder_itself(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert trusted(tmp_path / "below") == tmp_path / "below"
    with pytest.raises(AccessError, match="can be changed by other users"):
        trusted(tmp_path)


@as_root
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, above: bool) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(AccessError, match=f"{folder} belongs to user {OTHER}, not to user 0: set VARIABLE"):
        trusted(folder / "below" if above else folder)


@as_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(AccessError, match=f"/link belongs to user {OTHER}"):
        trusted(tmp_path / "link")


@as_root
def test_what_a_link_leads_to_is_checked_as_the_rest(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "real").mkdir(parents=True)
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    (tmp_path / "link").symlink_to(tmp_path / "theirs" / "real")
    with pytest.raises(AccessError, match=f"/theirs belongs to user {OTHER}"):
        trusted(tmp_path / "link")


def test_a_descriptor_stays_at_its_folder(tmp_path: Path) -> None:
    folder = open_trusted(tmp_path / "folder", otherwise=ELSE)
    try:
        (tmp_path / "folder").rename(tmp_path / "moved")
        own = open_own(folder, "own", "own", otherwise=ELSE)
        os.close(own)
        assert (tmp_path / "moved" / "own").is_dir()
        (tmp_path / "moved" / "link").symlink_to(tmp_path)
        with pytest.raises(AccessError, match="link is not a folder, or a link to one: set VARIABLE"):
            open_own(folder, "link", "link", otherwise=ELSE)
    finally:
        os.close(folder)


def test_a_home_is_that_of_the_variable_or_of_the_user() -> None:
    assert home_of({"HOME": "/somewhere"}, 0, otherwise=ELSE) == "/somewhere"
    assert home_of({}, 0, otherwise=ELSE) == "/root"
    for env, uid in (({}, OTHER), ({"HOME": "here"}, 0)):
        with pytest.raises(UsageError, match="has no home folder"):
            home_of(env, uid, otherwise=ELSE)
