"""The mount table: its lines, and which mounts are reachable by a path."""

from __future__ import annotations

from bootseer.mounts.kernel import Mount, depth, is_below, mount_table, parse, visible


def mount(number: int, parent: int, path: str) -> Mount:
    return Mount(number, parent, "0:1", "/", path, frozenset({"rw"}), "tmpfs")


def test_a_line_with_optional_fields_and_blanks_is_read() -> None:
    line = rb"44 27 254:0 /a\040b /mnt/c\134d rw,nosuid shared:1 master:2 - fuse.sshfs some\040one ro,user_id=0"
    assert parse(line) == Mount(44, 27, "254:0", "/a b", "/mnt/c\\d", frozenset({"rw", "nosuid", "ro"}), "fuse.sshfs")


def test_of_mounts_on_one_place_the_top_one_is_visible() -> None:
    rows = [mount(1, 0, "/"), mount(2, 1, "/a"), mount(3, 2, "/a"), mount(4, 2, "/a/hidden"), mount(5, 3, "/a/b")]
    assert [row.id for row in visible(rows)] == [1, 3, 5]


def test_a_mount_below_a_place_that_was_mounted_over_is_not_visible() -> None:
    rows = [mount(1, 0, "/"), mount(2, 1, "/a/b"), mount(3, 2, "/a/b/c"), mount(4, 1, "/a"), mount(5, 1, "/ab")]
    assert [row.id for row in visible(rows)] == [1, 4, 5]


def test_a_root_that_is_mounted_over_counts_as_the_one_on_top() -> None:
    rows = [mount(1, 0, "/"), mount(2, 1, "/a"), mount(3, 1, "/"), mount(4, 3, "/b")]
    assert [row.id for row in visible(rows)] == [3, 4]


def test_a_root_that_is_no_mount_has_nothing_visible() -> None:
    assert visible([mount(2, 1, "/a")]) == []


def test_this_machine_has_a_root_and_proc() -> None:
    paths = [row.path for row in visible(mount_table())]
    assert paths[0] == "/"
    assert "/proc" in paths


def test_paths_are_compared_name_by_name() -> None:
    assert is_below("/a/b", "/a")
    assert is_below("/a", "/")
    assert not is_below("/ab", "/a")
    assert not is_below("/a", "/a")
    assert [depth(path) for path in ("/", "/a", "/a/b")] == [0, 1, 2]
