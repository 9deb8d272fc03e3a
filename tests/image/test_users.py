"""Users of an image: names in its own files, numbers, and trees with links out of themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.image.containers.rootfs import User, program_at, read_in_root, resolve_user
from busybox import GROUP, PEOPLE
from waiting import until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "passwd").write_text(PEOPLE)
    (tmp_path / "root" / "etc" / "group").write_text(GROUP)
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("words", "user"),
    [
        ("", User(0, 0, (), "/root")),
        ("worker", User(1000, 1001, (44,), "/home/worker")),
        ("1000", User(1000, 1001, (44,), "/home/worker")),
        ("worker:staff", User(1000, 50, (), "/home/worker")),
        ("4242", User(4242, 0, (), "/")),
        ("4242:4343", User(4242, 4343, (), "/")),
    ],
)
def test_names_and_numbers_are_those_of_the_image(root: Path, words: str, user: User) -> None:
    assert resolve_user(root, words) == user


@pytest.mark.parametrize("words", ["nobody-here", "worker:nogroup", "99999999999", "root:99999999999"])
def test_an_unknown_name_is_a_usage_error_with_a_hint(root: Path, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_user(root, words)
    assert caught.value.hint


def test_an_image_without_users_has_root() -> None:
    assert resolve_user(Path("/proc/self/task"), "") == User(0, 0)


@pytest.mark.parametrize("link", ["/etc/secret", "../../../../../../../etc/secret"])
def test_a_link_leads_to_the_image_s_own_file_and_never_to_the_host_s(tmp_path: Path, root: Path, link: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "secret").write_text("the host's")
    (root / "etc" / "link").symlink_to(link)
    (root / "etc" / "absolute").symlink_to(str(tmp_path / "etc" / "secret"))
    assert read_in_root(root, "/etc/link", 100) is None
    assert read_in_root(root, "/etc/absolute", 100) is None
    (root / "etc" / "secret").write_text("the image's")
    assert read_in_root(root, "/etc/link", 100) == b"the image's"


def test_only_the_beginning_of_a_plain_file_is_read(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 1000)
    os.mkfifo(root / "pipe")
    assert read_in_root(root, "large", 10) == b"x" * 10
    assert read_in_root(root, "pipe", 10) is None
    assert read_in_root(root, "etc", 10) is None


def test_a_program_is_found_through_links(root: Path) -> None:
    (root / "program").touch(0o755)
    (root / "text").touch(0o644)
    (root / "link").symlink_to("/program")
    answers = [program_at(root, name) for name in ("program", "link", "text", "etc", "nothing")]
    assert answers == ["program", "program", "", "", ""]


def test_files_that_are_renamed_elsewhere_do_not_hide_a_program_behind_a_link(root: Path, tmp_path: Path) -> None:
    """For a path with `..`, the kernel answers EAGAIN if anything was renamed meanwhile."""
    (root / "bin").mkdir()
    (root / "bin" / "python3.11").touch(0o755)
    (root / "etc" / "python3").symlink_to("../bin/python3.11")
    renaming = "import os\nwhile True: os.rename('a', 'b'); os.rename('b', 'a')"
    (tmp_path / "a").touch()
    with subprocess.Popen([sys.executable, "-c", renaming], cwd=tmp_path) as process:
        try:
            until((tmp_path / "b").exists)
            assert {program_at(root, "/etc/python3") for _ in range(5000)} == {"python3.11"}
        finally:
            process.kill()
