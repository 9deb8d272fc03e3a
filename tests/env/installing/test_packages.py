"""Installed packages, read from records on disk."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.env.installing.packages import (
    installed,
    library_folders,
    new_distributions,
    new_packages,
    normalised,
    path_in_root,
)

STATUS = """Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13
Description: a library
 Version: not this one

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 2
"""


def _library(root: Path) -> Path:
    folder = root / "lib" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def _found(root: Path) -> set[tuple[str, str]]:
    return {(each.name, each.version) for each in installed(["/lib/site-packages"], root=str(root)).distributions}


def test_names_and_versions_come_from_the_names_of_folders(tmp_path):
    folder = _library(tmp_path)
    for name in ("Ruamel.Yaml_clib-0.2.8.dist-info", "six-1.16.0.egg-info", "old-1.0-py3.11.egg-info", "not_one"):
        (folder / name).mkdir()
    assert _found(tmp_path) == {("ruamel-yaml-clib", "0.2.8"), ("six", "1.16.0"), ("old", "1.0")}


def test_a_record_without_a_version_in_its_name_is_read(tmp_path):
    folder = _library(tmp_path)
    (folder / "Plain.egg-info").mkdir()
    (folder / "Plain.egg-info" / "PKG-INFO").write_text("Name: Plain\nVersion: 3.1\n\nVersion: 9\n")
    (folder / "single.egg-info").write_text("Name: single\nVersion: 4\n")
    (folder / "broken.egg-info").write_text("Name: broken\n")
    assert _found(tmp_path) == {("plain", "3.1"), ("single", "4")}


def test_remains_of_an_interrupted_pip_are_not_installed(tmp_path):
    (_library(tmp_path) / "~umpy-1.0.dist-info").mkdir()
    assert _found(tmp_path) == set()


def test_folders_that_do_not_exist_hold_nothing(tmp_path):
    assert installed(["/nowhere"], root=str(tmp_path)).distributions == ()


def test_new_packages_are_new_names_and_new_versions_of_python_and_of_the_system(tmp_path):
    folder = _library(tmp_path)
    (folder / "kept-1.dist-info").mkdir()
    (folder / "raised-1.dist-info").mkdir()
    before = installed(["/lib/site-packages"], root=str(tmp_path))
    (folder / "raised-1.dist-info").rename(folder / "raised-2.dist-info")
    (folder / "added-1.dist-info").mkdir()
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    after = installed(["/lib/site-packages"], root=str(tmp_path))
    assert new_packages(before, after) == ("added==1", "deb:zlib1g:amd64==1:1.2.13", "raised==2")


def test_a_distribution_that_was_installed_again_is_new(tmp_path):
    record = _library(tmp_path) / "same-1.dist-info"
    record.mkdir()
    before = installed(["/lib/site-packages"], root=str(tmp_path))
    record.rmdir()
    (record.parent / "file").write_text("")
    record.mkdir()
    (record / "RECORD").write_text("")
    after = installed(["/lib/site-packages"], root=str(tmp_path))
    assert new_packages(before, after) == ()
    assert [each.name for each in new_distributions(before, after)] == ["same"]


def test_libraries_are_found_among_changed_paths():
    paths = [
        "/opt/v/lib/python3.11/site-packages/a-1.dist-info/METADATA",
        "/opt/v/lib/python3.11/site-packages/a.py",
        "/usr/lib/python3/dist-packages/b.egg-info",
        "/srv/c-1.dist-info/METADATA",
    ]
    assert library_folders(paths) == {"/opt/v/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"}


def test_all_spellings_of_a_name_are_one():
    assert {normalised(name) for name in ("Typing_Extensions", "typing.extensions", "typing--extensions")} == {
        "typing-extensions"
    }


def test_links_of_an_image_lead_to_its_own_files_and_not_to_this_machines(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "secret-9.dist-info").mkdir(parents=True)
    (outside / "status").write_text(STATUS)
    (root / "opt/venv-2/own-1.dist-info").mkdir(parents=True)
    (root / "opt/venv").symlink_to("/opt/venv-2")
    (root / "opt/up").symlink_to("../../../opt/./venv")
    (root / "opt/out").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").symlink_to(outside / "status")
    found = installed(["/opt/venv", "/opt/up", "/opt/out", "/loop", "/none/.."], root=str(root))
    assert [each.record for each in found.distributions] == ["/opt/up/own-1.dist-info", "/opt/venv/own-1.dist-info"]
    assert not found.system
    assert path_in_root(str(root), "opt/venv/pip.conf") == root / "opt/venv-2/pip.conf"
    assert path_in_root("/", "opt/x") == Path("/opt/x")


def test_pipes_in_an_image_are_no_records(tmp_path):
    folder = _library(tmp_path)
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (folder / "one.egg-info").mkdir()
    for pipe in (tmp_path / "var/lib/dpkg/status", folder / "two.egg-info", folder / "one.egg-info/PKG-INFO"):
        os.mkfifo(pipe)
    assert _found(tmp_path) == set()
