"""Changes found in upper layers, made by hand as tools and kernels may leave them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.env.capturing.capture import container_changes
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.walk import Layer, Walk, describe_state, state_at
from bootseer.env.changes import Action, Change
from bootseer.errors import PermanentError

pytestmark = pytest.mark.root


def described(path: Path) -> str:
    found = state_at(str(path.parent), path.name)
    assert found is not None
    return describe_state(found)


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    if os.geteuid() != 0:
        pytest.skip("only root may make whiteouts")
    for name in ("upper", "lower"):
        (tmp_path / name).mkdir()
    return Layer("/data", str(tmp_path / "upper"), str(tmp_path / "lower"))


def write(folder: str, name: str, text: str = "") -> Path:
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(layer: Layer) -> dict[str, Change]:
    walk = Walk(Exclusions())
    walk.layer(layer)
    return {change.path: change for change in walk.changes()}


def test_whiteouts_are_deletions(layer: Layer) -> None:
    for name in ("device", "emptied", "kept"):
        write(layer.lower, name, name)
    os.mknod(Path(layer.upper, "device"), 0o020000, os.makedev(0, 0))
    os.mknod(Path(layer.upper, "never_there"), 0o020000, os.makedev(0, 0))
    # As in an image that the setup unpacks for containers without root: the kernel shows the file.
    os.setxattr(write(layer.upper, "emptied"), "user.overlay.whiteout", b"y")
    changes = found(layer)
    assert {path: change.action for path, change in changes.items()} == {
        "/data/device": Action.DELETED,
        "/data/emptied": Action.MODIFIED,
    }
    assert changes["/data/device"].before == described(Path(layer.lower, "device"))


@pytest.mark.parametrize("mark", ["trusted.overlay.opaque", "user.overlay.opaque"])
def test_opaque_folders_of_both_forms_hide_what_was_there(layer: Layer, mark: str) -> None:
    write(layer.lower, "folder/gone", "x")
    write(layer.lower, "folder/sub/deep", "x")
    write(layer.upper, "folder/sub/new", "x")
    os.setxattr(Path(layer.upper, "folder"), mark, b"y")
    changes = found(layer)
    assert {path: (change.action, change.opaque) for path, change in changes.items()} == {
        "/data/folder": (Action.MODIFIED, True),
        "/data/folder/gone": (Action.DELETED, False),
        "/data/folder/sub": (Action.MODIFIED, True),
        "/data/folder/sub/deep": (Action.DELETED, False),
        "/data/folder/sub/new": (Action.ADDED, False),
    }


def test_a_new_folder_is_not_opaque_whatever_its_mark(layer: Layer) -> None:
    write(layer.upper, "new/x")
    os.setxattr(Path(layer.upper, "new"), "trusted.overlay.opaque", b"y")
    assert not found(layer)["/data/new"].opaque


def test_a_folder_in_place_of_a_link_is_not_compared_with_where_the_link_leads(layer: Layer, tmp_path: Path) -> None:
    write(str(tmp_path), "elsewhere/x", "same")
    Path(layer.lower, "there").symlink_to(tmp_path / "elsewhere")
    write(layer.upper, "there/x", "same")
    changes = found(layer)
    assert changes["/data/there"].before == f"symlink:{tmp_path}/elsewhere"
    assert changes["/data/there/x"].action is Action.ADDED


def test_links_in_an_upper_layer_are_not_followed(layer: Layer, tmp_path: Path) -> None:
    write(str(tmp_path), "elsewhere/x", "secret")
    Path(layer.upper, "link").symlink_to(tmp_path / "elsewhere")
    assert list(found(layer)) == ["/data/link"]


def test_attributes_that_overlayfs_adds_are_none_of_the_setup(layer: Layer) -> None:
    for folder in (layer.upper, layer.lower):
        write(folder, "folder/file", "same")
        os.utime(folder, ns=(0, 0))
    os.setxattr(Path(layer.upper, "folder"), "trusted.overlay.impure", b"y")
    os.setxattr(Path(layer.upper, "folder/file"), "trusted.overlay.origin", b"\0")
    assert found(layer) == {}
    os.setxattr(Path(layer.upper, "folder"), "user.note", b"1")
    assert list(found(layer)) == ["/data/folder"]


def test_changed_attributes_of_the_whole_disk_are_a_change(layer: Layer) -> None:
    Path(layer.upper).chmod(0o700)
    Path(layer.lower).chmod(0o755)
    assert list(found(layer)) == ["/data"]


def test_names_of_any_bytes_are_found(layer: Layer) -> None:
    write(layer.upper, "caf\udce9\n")
    assert list(found(layer)) == ["/data/caf\udce9\n"]


def test_what_cannot_be_read_is_an_error_that_names_it(layer: Layer) -> None:
    with pytest.raises(PermanentError, match="nowhere"):
        found(Layer("/", f"{layer.upper}/nowhere", layer.lower))


def test_a_containers_changes_are_found_without_its_image(layer: Layer) -> None:
    write(layer.upper, "etc/new", "new")
    write(layer.upper, "root/.bash_history", "x")
    os.mknod(Path(layer.upper, "gone"), 0o020000, os.makedev(0, 0))
    changes, left_out = container_changes(Path(layer.upper), exclusions=Exclusions())
    assert {change.path for change in changes} == {"/etc", "/etc/new", "/gone", "/root"}
    assert next(change for change in changes if change.path == "/gone").action is Action.DELETED
    assert left_out.paths == {"history": ["/root/.bash_history"]}


def test_secrets_are_withheld_with_all_files_in_their_folder(layer: Layer) -> None:
    write(layer.lower, "home/.netrc", "old")
    for name in (".netrc", ".azure/a/token", ".kube/config", ".kube/kubens"):
        write(layer.upper, f"home/{name}", "new")
    walk = Walk(Exclusions(homes=["/data/home"], leave_out=["*/kubens"]))
    walk.layer(layer)
    assert {change.path for change in walk.changes()} == {"/data/home/.kube"}
    withheld = walk.left_out.withheld
    assert {path.removeprefix("/data/home/") for path in withheld} == {
        ".netrc", ".azure", ".azure/a", ".azure/a/token", ".kube/config", ".kube/kubens",
    }  # fmt: skip
    assert withheld["/data/home/.netrc"].before.startswith("file:sha256:")
    assert {one.path: one.rule for one in walk.left_out.reasons.values()} == {
        "/data/home/.netrc": "credentials",
        "/data/home/.azure": "credentials",
        "/data/home/.kube/config": "credentials",
        "/data/home/.kube/kubens": "left out by the owner",
    }


def test_deleted_credentials_are_not_among_those_that_the_setup_wrote(layer: Layer) -> None:
    write(layer.lower, "home/.netrc", "old")
    Path(layer.upper, "home").mkdir()
    os.mknod(Path(layer.upper, "home/.netrc"), 0o020000, os.makedev(0, 0))
    walk = Walk(Exclusions(homes=["/data/home"]))
    walk.layer(layer)
    assert not walk.changes()
    assert not walk.left_out.reasons


def test_a_file_that_was_written_again_counts_unless_a_rule_says_otherwise(layer: Layer) -> None:
    for folder in (layer.upper, layer.lower):
        for name in ("same", "home/.vault-token", "run.pid"):
            write(folder, name, "same")
    again = {"/data/same", "/data/home/.vault-token", "/data/run.pid"}
    walk = Walk(Exclusions(homes=["/data/home"]), always_changed=again)
    walk.layer(layer)
    (change,) = walk.changes()
    assert (change.path, change.action, change.before) == (
        "/data/same",
        Action.MODIFIED,
        described(Path(layer.lower, "same")),
    )


def test_states_are_distinguished(tmp_path: Path) -> None:
    write(str(tmp_path), "a", "x")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    assert described(tmp_path / "a").startswith("file:sha256:2d711642b726b044")
    assert described(tmp_path / "link") == "symlink:a"
    assert described(tmp_path) == "directory"
    assert described(tmp_path / "fifo") == "other"
    assert state_at(str(tmp_path), "none") is None
    assert state_at(str(tmp_path / "a"), "none") is None
