"""Files of a snapshot written to the machine's folders: complete, never over a user's files, resumed after a kill."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.env.changes import Action, Change
from bootseer.env.keys.files import FactCache, stamp_of
from bootseer.env.restoring import loose
from bootseer.env.restoring.loose import Conflict, plan
from bootseer.env.restoring.placement import apply_plan
from bootseer.env.snapshot.manifest import Entry, Manifest
from bootseer.errors import PermanentError
from restoring import Setup


@dataclass
class Machine:
    """A machine simulated in a folder, and a setup that changed `/home/u` on another one."""

    root: Path
    setup: Setup

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def entries(self, **more: object) -> list[Entry]:
        return list(self.setup.written(self.setup.changes(Path("/home/u"), **more)).entries)  # type: ignore[arg-type]

    def restore(self, entries: list[Entry], roots: tuple[str, ...] = ()) -> int:
        """Returns the number of steps."""
        planned = plan(entries, self.setup.at, roots=roots, root=str(self.root))
        apply_plan(planned, self.setup.at)
        return len(planned.steps)

    def tree(self) -> dict[str, str]:
        """All paths with their modes and contents."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "/"
            found[str(path.relative_to(self.root))] = f"{path.lstat().st_mode:o} {content}"
        return found


@pytest.fixture
def machine(tmp_path: Path, setup: Setup) -> Machine:
    root = tmp_path / "machine"
    (root / "home" / "u").mkdir(parents=True)
    setup.at("/home/u").mkdir(parents=True)
    return Machine(root, setup)


def sha256(content: str) -> str:
    return f"file:sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def test_everything_is_written_as_the_setup_left_it(machine: Machine) -> None:
    setup = machine.setup
    setup.write("/home/u/repo/.git/config", "[core]\n")
    setup.write("/home/u/repo/run.sh", "#!/bin/sh\n", mode=0o4755)
    setup.at("/home/u/repo/link").symlink_to("../elsewhere")
    os.link(setup.at("/home/u/repo/run.sh"), setup.at("/home/u/repo/again"))
    os.mkfifo(setup.at("/home/u/repo/pipe"), 0o622)
    (setup.at("/home/u/closed")).mkdir()
    setup.write("/home/u/closed/file", "x")
    setup.at("/home/u/closed").chmod(0o500)
    os.setxattr(setup.at("/home/u/repo/.git/config"), "user.note", b"kept")
    os.utime(setup.at("/home/u/repo/run.sh"), ns=(5, 1_500_000_000_123_456_789))
    machine.restore(machine.entries())
    run, again = machine.at("/home/u/repo/run.sh"), machine.at("/home/u/repo/again")
    assert stat.S_IMODE(run.stat().st_mode) == 0o4755
    assert run.stat().st_mtime_ns == setup.at("/home/u/repo/run.sh").stat().st_mtime_ns
    assert again.samefile(run)
    assert str(machine.at("/home/u/repo/link").readlink()) == "../elsewhere"
    assert stat.S_ISFIFO(machine.at("/home/u/repo/pipe").stat().st_mode)
    assert os.getxattr(machine.at("/home/u/repo/.git/config"), "user.note") == b"kept"
    assert stat.S_IMODE(machine.at("/home/u/closed").stat().st_mode) == 0o500
    assert machine.at("/home/u/closed/file").read_text() == "x"


def test_a_second_restore_does_nothing(machine: Machine) -> None:
    machine.setup.write("/home/u/a/b", "content")
    machine.setup.at("/home/u/a/link").symlink_to("b")
    entries = machine.entries()
    assert machine.restore(entries) > 0
    before = machine.tree()
    assert machine.restore(entries) == 0
    assert machine.tree() == before


def test_a_file_that_is_as_the_setup_found_it_is_replaced(machine: Machine) -> None:
    machine.setup.write("/home/u/.bashrc", "old\nnew\n", mode=0o600)
    machine.at("/home/u/.bashrc").write_text("old\n")
    machine.restore(machine.entries(before={"/home/u/.bashrc": sha256("old\n")}))
    assert machine.at("/home/u/.bashrc").read_text() == "old\nnew\n"
    assert stat.S_IMODE(machine.at("/home/u/.bashrc").stat().st_mode) == 0o600


def test_attributes_of_files_that_are_there_already_are_set(machine: Machine) -> None:
    root, setup, is_root = machine.at("/home/u"), machine.setup, os.geteuid() == 0
    for above in (root, setup.at("/home/u")):
        (above / "folder").mkdir()
        for name in ("server", "first"):
            (above / name).write_text("same")
            (above / name).chmod(0o644)
        (above / "link").symlink_to("server")
    os.link(root / "first", root / "second")
    os.chown(setup.at("/home/u/link"), -1, 5 if is_root else -1, follow_symlinks=False)
    for name in ("server", "folder"):
        os.setxattr(setup.at(f"/home/u/{name}"), "user.note", b"x")
    setup.at("/home/u/first").chmod(0o600)
    before = {f"/home/u/{name}": sha256("same") for name in ("server", "first")}
    entries = machine.entries(before={**before, "/home/u/folder": "directory", "/home/u/link": "symlink:server"})
    assert machine.restore(entries) == 3 + is_root
    assert os.getxattr(root / "server", "user.note") == os.getxattr(root / "folder", "user.note") == b"x"
    # The setup saw a copy of its own.
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in ("first", "second")] == [0o600, 0o644]
    assert not is_root or (root / "link").lstat().st_gid == 5
    assert machine.restore(entries) == 0


def test_files_do_not_inherit_an_access_list_that_their_folder_got_later(machine: Machine) -> None:
    machine.setup.write("/home/u/shared/file", "x", mode=0o600)
    rows = ((1, 7, -1), (2, 7, 1000), (4, 5, -1), (16, 7, -1), (32, 5, -1))
    access_list = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)
    os.setxattr(machine.setup.at("/home/u/shared"), "system.posix_acl_default", access_list)
    machine.restore(machine.entries())
    assert os.getxattr(machine.at("/home/u/shared"), "system.posix_acl_default") == access_list
    assert os.listxattr(machine.at("/home/u/shared/file")) == []


@pytest.mark.parametrize("theirs", ["their own\n", None])
def test_a_file_that_was_changed_or_is_missing_is_a_conflict(machine: Machine, theirs: str | None) -> None:
    machine.setup.write("/home/u/.bashrc", "old\nnew\n")
    machine.setup.write("/home/u/fine", "")
    if theirs is not None:
        machine.at("/home/u/.bashrc").write_text(theirs)
    before = machine.tree()
    with pytest.raises(Conflict, match=r"/home/u/\.bashrc") as caught:
        machine.restore(machine.entries(before={"/home/u/.bashrc": sha256("old\n")}))
    assert len(caught.value.reasons) == 1
    assert machine.tree() == before


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_a_new_file_never_takes_the_place_of_anything(machine: Machine, there: str) -> None:
    machine.setup.write("/home/u/new", "content")
    place = machine.at("/home/u/new")
    if there == "file":
        place.write_text("theirs")
    elif there == "folder":
        place.mkdir()
    else:
        place.symlink_to("/etc/passwd")
    before = machine.tree()
    with pytest.raises(Conflict):
        machine.restore(machine.entries())
    assert machine.tree() == before


def test_a_link_on_the_way_leads_nowhere(machine: Machine, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    machine.setup.write("/home/u/project/file", "content")
    machine.at("/home/u/project").symlink_to(outside)
    with pytest.raises(Conflict, match="symbolic link"):
        machine.restore([entry for entry in machine.entries() if entry.kind == "file"])
    assert list(outside.iterdir()) == []


def test_a_file_that_appears_after_the_look_stays_where_there_are_no_hard_links(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a container whose runtime forbids faccessat2(2), with which `os.access` finds no file."""

    def refuse(*words: object, **more: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    machine.setup.write("/home/u/file", "new")
    planned = plan(machine.entries(), machine.setup.at, root=str(machine.root))
    machine.at("/home/u/file").write_text("a user's")
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "access", lambda *words, **more: False)
    with pytest.raises(PermanentError):
        apply_plan(planned, machine.setup.at)
    assert machine.at("/home/u/file").read_text() == "a user's"


def test_a_link_that_appears_after_the_look_leads_nowhere(machine: Machine, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    machine.setup.write("/home/u/project/file", "content")
    machine.at("/home/u/project").mkdir()
    planned = plan(machine.entries(), machine.setup.at, root=str(machine.root))
    machine.at("/home/u/project").rmdir()
    machine.at("/home/u/project").symlink_to(outside)
    with pytest.raises(PermanentError):
        apply_plan(planned, machine.setup.at)
    assert list(outside.iterdir()) == []


def test_deletions_happen_only_to_what_the_setup_had_found(machine: Machine) -> None:
    gone = [Path(f"/home/u/{name}") for name in ("old", "link", "never", "dir")]
    before = {"/home/u/old": sha256("old"), "/home/u/link": "symlink:old", "/home/u/never": sha256("x")}
    before["/home/u/dir"] = "directory"
    entries = machine.entries(deleted=gone, before=before)
    machine.at("/home/u/old").write_text("old")
    machine.at("/home/u/link").symlink_to("old")
    machine.at("/home/u/dir").mkdir()
    machine.restore(entries)
    assert list(machine.at("/home/u").iterdir()) == []
    machine.at("/home/u/old").write_text("another")
    machine.at("/home/u/dir").mkdir()
    machine.at("/home/u/dir/theirs").touch()
    with pytest.raises(Conflict) as caught:
        machine.restore(entries)
    assert sorted(reason.split(":")[0] for reason in caught.value.reasons) == ["/home/u/dir", "/home/u/old"]


def test_a_file_where_the_setup_had_deleted_a_folder_is_a_conflict(machine: Machine) -> None:
    entries = machine.entries(deleted=[Path("/home/u/dir")], before={"/home/u/dir": "directory"})
    machine.at("/home/u/dir").write_text("theirs")
    with pytest.raises(Conflict, match="/home/u/dir: it differs from what the setup found"):
        machine.restore(entries)
    assert machine.at("/home/u/dir").read_text() == "theirs"


def test_a_folder_that_the_setup_replaced_must_hold_nothing_else(machine: Machine) -> None:
    machine.setup.write("/home/u/repo/file", "x")
    entries = machine.entries(before={"/home/u/repo": "directory"}, opaque=[Path("/home/u/repo")])
    machine.at("/home/u/repo").mkdir()
    machine.at("/home/u/repo/results").write_text("precious")
    with pytest.raises(Conflict, match="results"):
        machine.restore(entries)
    machine.at("/home/u/repo/results").unlink()
    machine.restore(entries)
    assert machine.at("/home/u/repo/file").read_text() == "x"


def test_what_was_deleted_in_a_capture_here_goes_with_all_that_was_in_it(machine: Machine) -> None:
    machine.setup.write("/home/u/repo/file", "x")
    before = {"/home/u/repo": "directory", "/home/u/dir": "directory"}
    entries = machine.entries(before=before, opaque=[Path("/home/u/repo")], deleted=[Path("/home/u/dir")])
    for folder in ("repo/old", "dir/deep"):
        machine.at(f"/home/u/{folder}").mkdir(parents=True)
        machine.at(f"/home/u/{folder}/x").touch()
    apply_plan(plan(entries, machine.setup.at, root=str(machine.root), captured=True), machine.setup.at)
    assert sorted(path.name for path in machine.root.rglob("*")) == ["file", "home", "repo", "u"]


def test_paths_in_roots_are_left_to_the_mounts(machine: Machine) -> None:
    machine.setup.write("/home/u/venv/lib/a", "x")
    machine.setup.write("/home/u/venv-2", "y")
    machine.restore(machine.entries(), roots=("/home/u/venv",))
    assert sorted(path.name for path in machine.at("/home/u").iterdir()) == ["venv-2"]


def test_folders_of_the_system_are_written_over_in_an_extraction(machine: Machine) -> None:
    machine.at("/usr/lib").mkdir(parents=True)
    machine.at("/usr/lib/old").mkdir()
    machine.at("/usr/lib/old/x").write_text("x")
    machine.at("/usr/lib/tool").write_text("1.0")
    machine.setup.write("/usr/lib/tool", "2.0")
    changes = [
        Change("/usr/lib/tool", Action.MODIFIED, str(machine.setup.at("/usr/lib/tool"))),
        Change("/usr/lib/old", Action.DELETED),
    ]
    machine.restore(list(machine.setup.written(changes).entries))
    assert machine.at("/usr/lib/tool").read_text() == "2.0"
    assert not machine.at("/usr/lib/old").exists()


def test_mounts_are_listed_once_for_all_files(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have hundreds of mounts, and a snapshot tens of thousands of system files."""
    listed: list[int] = []
    monkeypatch.setattr(loose, "mount_table", lambda: listed.append(1) or [])
    machine.at("/usr/lib").mkdir(parents=True)
    entries = [Entry(f"/usr/lib/{name}", "file", 0o644, size=3, digest="blake3:" + 64 * "0") for name in "ab"]
    for entry in entries:
        machine.at(entry.path).write_text("old")
    planned = plan(entries, machine.setup.at, root=str(machine.root))
    assert [step.operation for step in planned.steps] == ["replace", "replace"]
    assert len(listed) <= 1


def test_bytecode_that_differs_is_left_to_python(machine: Machine) -> None:
    machine.setup.write("/home/u/p/__pycache__/m.cpython-311.pyc", "theirs")
    entries = [
        Entry("/home/u/p/__pycache__/m.cpython-311.pyc", "file", 0o644, size=4, digest="blake3:" + 64 * "0"),
    ]
    machine.at("/home/u/p/__pycache__").mkdir(parents=True)
    machine.at("/home/u/p/__pycache__/m.cpython-311.pyc").write_text("old!")
    assert machine.restore(entries) == 0


def test_places_that_no_snapshot_has_are_refused(machine: Machine) -> None:
    with pytest.raises(Conflict, match="no snapshot"):
        plan([Entry("/proc/self/mem", "file", 0o644)], machine.setup.at)


def test_what_a_setup_has_just_captured_is_written_without_digests(machine: Machine) -> None:
    machine.setup.write("/home/u/a", "content")
    entries = [Entry("/home/u/a", "file", 0o644, os.getuid(), os.getgid(), size=7)]
    machine.restore(entries)
    assert machine.restore(entries) == 0
    machine.at("/home/u/a").write_text("CONTENT")
    with pytest.raises(Conflict):
        machine.restore(entries)


def test_files_that_were_compared_before_are_not_read_again(machine: Machine, tmp_path: Path) -> None:
    machine.setup.write("/home/u/large", "content")
    entries = machine.entries()
    machine.restore(entries)
    place = machine.at("/home/u/large")
    # Recently changed files are read again; a file's change time cannot be set, but that of the cached fact can.
    facts = FactCache(tmp_path / "known")
    facts.put("blake3", "/home/u/large", stamp_of(place.stat()), "blake3:" + 64 * "1")
    facts.save()
    forged = [replace(entry, digest="blake3:" + 64 * "1") for entry in entries if entry.kind == "file"]
    assert plan(forged, machine.setup.at, root=str(machine.root), facts=tmp_path / "known").steps == ()
    place.write_text("CONTENT")
    with pytest.raises(Conflict):
        plan(forged, machine.setup.at, root=str(machine.root), facts=tmp_path / "known")


def test_two_restores_at_once_into_a_shared_folder_agree(machine: Machine) -> None:
    for number in range(200):
        machine.setup.write(f"/home/u/d{number % 7}/f{number}", str(number))
    entries = machine.entries()
    plans = [plan(entries, machine.setup.at, root=str(machine.root)) for _ in range(3)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            apply_plan(plans[number], machine.setup.at)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(path.is_file() for path in machine.root.rglob("*")) == 200
    assert machine.restore(entries) == 0


_KILLED = """
import os, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from bootseer.env.restoring import placement
from bootseer.env.restoring.loose import plan
from bootseer.env.snapshot.manifest import Manifest
left = int(sys.argv[1])
real = os.link
def link(*arguments, **options):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return real(*arguments, **options)
os.link = link
entries = Manifest.parse(Path({manifest!r}).read_bytes()).entries
where = lambda path: Path({after!r}, path.lstrip("/"))
placement.apply_plan(plan(entries, where, root={root!r}), where)
"""


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_restore_that_was_killed_is_completed_by_the_next(machine: Machine, tmp_path: Path, after: int) -> None:
    for number in range(10):
        machine.setup.write(f"/home/u/d/f{number}", "x" * 5000)
    machine.setup.at("/home/u/d").chmod(0o555)
    written = machine.setup.written(machine.setup.changes(Path("/home/u")))
    (tmp_path / "manifest").write_bytes(Manifest(written.entries).encode())
    program = _KILLED.format(
        tests=str(Path(__file__).parents[2]),
        manifest=str(tmp_path / "manifest"),
        after=str(machine.setup.after),
        root=str(machine.root),
    )
    ran = subprocess.run([sys.executable, "-c", program, str(after)], timeout=180, check=False)
    assert ran.returncode == 9
    done = [path for path in machine.at("/home/u/d").iterdir() if path.name.startswith("f")]
    assert all(path.stat().st_size == 5000 for path in done)
    machine.restore(list(written.entries))
    assert len([path for path in machine.at("/home/u/d").iterdir() if path.name.startswith("f")]) == 10
    assert stat.S_IMODE(machine.at("/home/u/d").stat().st_mode) == 0o555


@pytest.mark.parametrize("name", ["index", "logs/HEAD", "logs/refs/heads/main", "FETCH_HEAD", "modules/a/index"])
def test_files_that_git_writes_by_itself_are_left_as_they_are(machine: Machine, name: str) -> None:
    path = f"/home/u/repo/.git/{name}"
    machine.setup.write(path, "the setup's")
    entries = machine.entries()
    machine.restore(entries)
    machine.at(path).write_text("after git status")
    assert machine.restore(entries) == 0
    assert machine.at(path).read_text() == "after git status"
    machine.at(path).unlink()
    machine.restore(entries)
    assert machine.at(path).read_text() == "the setup's"


def test_what_a_clone_consists_of_is_compared(machine: Machine) -> None:
    machine.setup.write("/home/u/repo/.git/HEAD", "ref: refs/heads/main")
    entries = machine.entries()
    machine.restore(entries)
    machine.at("/home/u/repo/.git/HEAD").write_text("ref: refs/heads/mine")
    with pytest.raises(Conflict):
        machine.restore(entries)


def test_a_file_that_the_setup_wrote_again_as_it_was_is_written_where_it_is_not(machine: Machine) -> None:
    machine.setup.write("/home/u/data", "same")
    machine.setup.at("/home/u/link").symlink_to("data")
    entries = machine.entries(before={"/home/u/data": sha256("same"), "/home/u/link": "symlink:data"})
    machine.restore(entries)
    assert machine.at("/home/u/data").read_text() == "same"
    assert str(machine.at("/home/u/link").readlink()) == "data"
    machine.at("/home/u/data").write_text("theirs")
    with pytest.raises(Conflict):
        machine.restore(entries)


def settings(machine: Machine, before: str) -> list[Entry]:
    """A setup that changed a file in /etc, which is a mount, and added another."""
    for name in ("profile", "new.conf", "ld.so.cache"):
        machine.setup.write(f"/etc/{name}", f"{name} of the setup")
    return [
        entry
        for entry in machine.setup.written(
            machine.setup.changes(
                Path("/etc"),
                before={"/etc/profile": before, "/etc/ld.so.cache": ""},
                deleted=[Path("/etc/gone")],
            )
        ).entries
        if entry.kind != "directory"
    ]


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("profile", "found", True),
        ("profile", "profile of the setup", True),
        ("profile", "edited since", False),
        ("new.conf", "new.conf of the setup", True),
        ("new.conf", "somebody's", False),
        ("ld.so.cache", "of other libraries", True),
        ("other", "x", True),
    ],
)
def test_a_mount_hides_nothing_but_what_the_setup_had_found(machine: Machine, name: str, text: str, fits: bool) -> None:
    entries = settings(machine, sha256("found"))
    machine.at("/etc").mkdir()
    machine.at("/etc/profile").write_text("found")
    machine.at(f"/etc/{name}").write_text(text)
    if not fits:
        with pytest.raises(Conflict, match=f"/etc/{name}"):
            machine.restore(entries, roots=("/etc",))
    else:
        assert machine.restore(entries, roots=("/etc",)) == 0
    assert machine.at(f"/etc/{name}").read_text() == text


def test_settings_that_do_not_exist_are_no_longer_what_the_setup_found(machine: Machine) -> None:
    entries = settings(machine, sha256("found"))
    with pytest.raises(Conflict, match="/etc/profile"):
        machine.restore(entries, roots=("/etc",))


def test_a_hard_link_to_a_file_that_is_mounted_becomes_a_file_of_its_own(machine: Machine) -> None:
    machine.setup.write("/home/u/a/first", "new")
    os.link(machine.setup.at("/home/u/a/first"), machine.setup.at("/home/u/b"))
    machine.at("/home/u/a").mkdir()
    machine.at("/home/u/a/first").write_text("old")
    machine.restore(machine.entries(), roots=("/home/u/a",))
    assert machine.at("/home/u/b").read_text() == "new"
