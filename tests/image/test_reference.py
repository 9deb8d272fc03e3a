"""References to images as users type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.image.reference import Reference, SourceKind, parse_reference

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost/a", Reference(SourceKind.REGISTRY, "localhost", "a", "latest")),
        ("127.0.0.1:5000/team/image:v1", Reference(SourceKind.REGISTRY, "127.0.0.1:5000", "team/image", "v1")),
        ("[::1]:5000/a:b", Reference(SourceKind.REGISTRY, "[::1]:5000", "a", "b")),
        (f"registry.example/a/b@{DIGEST}", Reference(SourceKind.REGISTRY, "registry.example", "a/b", "", DIGEST)),
        (f"registry.example/a:t@{DIGEST}", Reference(SourceKind.REGISTRY, "registry.example", "a", "t", DIGEST)),
        ("docker://registry.example#team/a:b", Reference(SourceKind.REGISTRY, "registry.example", "team/a", "b")),
        ("docker://registry.example:5000/a:b", Reference(SourceKind.REGISTRY, "registry.example:5000", "a", "b")),
        ("docker.io/ubuntu:24.04", Reference(SourceKind.REGISTRY, "docker.io", "library/ubuntu", "24.04")),
        ("docker.io/team/a", Reference(SourceKind.REGISTRY, "docker.io", "team/a", "latest")),
        ("oci:some/folder", Reference(SourceKind.LAYOUT, path="some/folder")),
        ("oci:/a/b:v1.2", Reference(SourceKind.LAYOUT, tag="v1.2", path="/a/b")),
        ("oci:/a:b/c", Reference(SourceKind.LAYOUT, path="/a:b/c")),
        ("docker-archive:x.tar", Reference(SourceKind.ARCHIVE, path="x.tar")),
        ("docker-archive:x.tar:me/a:v1", Reference(SourceKind.ARCHIVE, tag="me/a:v1", path="x.tar")),
        ("dir:root fs", Reference(SourceKind.FOLDER, path="root fs")),
        ("/srv/root", Reference(SourceKind.FOLDER, path="/srv/root")),
        ("../root", Reference(SourceKind.FOLDER, path="../root")),
        (DIGEST, Reference(SourceKind.CONVERTED, digest=DIGEST)),
    ],
)
def test_every_form_is_taken_apart_and_put_together_again(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ubuntu",
        "ubuntu:22.04",
        "team/image",
        "docker://",
        "docker:///etc",
        "docker://oci:x",
        "registry.example/",
        "registry.example/Upper",
        "registry.example/a:",
        "registry.example/a:b:c",
        "registry.example/a@sha256:12",
        "registry.example/../a",
        "-x.example/a",
        "oci:",
        "docker-archive:",
        "dir:",
        "a\0b",
        "registry.example/a\n",
        "dockerd://ubuntu:22.04",
        "podman://localhost/a",
        "x" * 5000,
    ],
)
def test_what_is_no_name_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "me:secret@registry.example/a",
        "https://me:secret@registry.example/a",
        "me:se/cr:secret@registry.example/a:t",
        f"me:secret@registry.example/a@{DIGEST}",
        "me:secret@registry.example/a\n",
        "docker://me:secret@name",
        "oci://me:secret@registry.example/a",
        "dir://me:secret@registry.example/a",
        "hdfs://registry.example/a?token=secret",
    ],
)
def test_a_password_in_a_name_is_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert "secret" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("text", ["https://registry.example/a:1", "HTTP://registry.example/a:1"])
def test_an_address_as_in_a_browser_is_told_what_to_leave_out(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert caught.value.hint.startswith(f"leave out {text.partition('registry')[0]}; ")


@pytest.mark.parametrize("text", ["docker://team/name:1", "team/name:1"])
def test_an_image_without_a_registry_is_shown_with_one(text: str) -> None:
    with pytest.raises(UsageError, match="names no registry") as caught:
        parse_reference(text)
    assert "registry.example:5000/team/name:1" in caught.value.hint


@pytest.mark.parametrize(("text", "wrong"), [("sha256:3fa9", "registry.example:5000"), ("bad image", "bad image;")])
def test_a_hint_names_nothing_that_would_be_refused(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert wrong not in caught.value.hint


def test_a_digest_outranks_a_tag() -> None:
    assert parse_reference(f"registry.example/a:t@{DIGEST}").version == DIGEST
    assert parse_reference("registry.example/a:t").version == "t"


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_a_usage_error(text: str) -> None:
    try:
        found = parse_reference(text)
    except UsageError:
        return
    assert parse_reference(str(found)) == found
