"""Root sets owners and modes of the files that it wrote, not of files that another user put in their place."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from bootseer.env.restoring.loose import Conflict, plan
from bootseer.env.restoring.placement import apply_plan
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.env.snapshot.manifest import Entry
from plain_user import UID

pytestmark = pytest.mark.root
PATIENCE_S = 60


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user, who may replace everything in it, with a file of root that only root may read."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "victim").write_text("root's own\n")
    (folder / "victim").chmod(0o600)
    os.chown(folder, UID, UID)
    return folder


def is_roots(path: Path) -> bool:
    status = path.stat()
    return (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o600)


def entry(**more: object) -> Entry:
    return Entry("/given", **{"kind": "file", "mode": 0o4777, "uid": UID, "gid": UID, **more})  # type: ignore[arg-type]


def test_a_file_that_was_exchanged_while_it_was_written_is_not_given_away(theirs: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    os.mkfifo(source)  # the writer blocks here until the content comes
    swapped = []

    def swap() -> None:
        until = time.monotonic() + PATIENCE_S
        while not (new := list(theirs.glob(".bootseer-new-*"))) and time.monotonic() < until:
            time.sleep(0.01)
        folder = os.open(theirs, os.O_PATH)  # that user may not enter the folders above
        child = os.fork()
        if child == 0:
            try:
                os.setresgid(UID, UID, UID)
                os.setresuid(UID, UID, UID)
                os.rename(new[0].name, "aside", src_dir_fd=folder, dst_dir_fd=folder)
                os.rename("victim", new[0].name, src_dir_fd=folder, dst_dir_fd=folder)
                os._exit(0)
            finally:
                os._exit(1)
        swapped.append(os.waitpid(child, 0)[1])
        os.close(folder)
        source.write_bytes(b"content")

    thread = threading.Thread(target=swap)
    thread.start()
    planned = plan([entry(size=7)], lambda path: source, root=str(theirs))
    apply_plan(planned, lambda path: source)
    thread.join(PATIENCE_S)
    assert swapped == [0]
    assert is_roots(theirs / "given")  # this is the victim now, and unchanged
    assert (theirs / "aside").read_bytes() == b"content"
    assert (theirs / "aside").stat().st_uid == UID


def test_a_file_with_another_name_is_not_given_away(theirs: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("root's own\n")
    (theirs / "given").write_text("root's own\n")
    planned = plan([entry(size=source.stat().st_size)], lambda path: source, root=str(theirs), captured=True)
    assert [step.operation for step in planned.steps] == ["set_attributes"]
    (theirs / "given").unlink()
    os.link(theirs / "victim", theirs / "given")
    with pytest.raises(Conflict):
        apply_plan(planned, lambda path: source)
    assert is_roots(theirs / "victim")


def test_a_folder_that_was_exchanged_for_a_link_or_is_in_use_is_not_given_away(theirs: Path) -> None:
    with SafeTree(str(theirs)).folder("") as above:
        with new_folder(above, "made", 0o700) as made:
            assert os.fstat(made).st_ino == (theirs / "made").stat().st_ino
        with pytest.raises(FileExistsError), new_folder(above, "made", 0o700):
            pass
