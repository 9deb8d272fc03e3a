"""Which store a URI names, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.store.file import FileStore
from bootseer.store.oci import OciStore
from bootseer.store.open import open_registry, open_store
from bootseer.store.store import MAX_NAME, check_name


def test_folders_are_named_by_path_or_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in (str(tmp_path / "a"), f"file://{tmp_path}/a", "a", "./a"):
        store = open_store(uri)
        assert isinstance(store, FileStore)
        assert store.uri == f"file://{tmp_path}/a"


def test_registries_are_named_by_uri() -> None:
    store = open_store("oci://registry.example:5000/team/cache/")
    assert isinstance(store, OciStore)
    assert store.uri == "oci://registry.example:5000/team/cache"


@pytest.mark.parametrize("uri", ["file:///tmp/x", "oci://h:1/a/b"])
def test_a_store_is_opened_again_by_its_uri(uri: str) -> None:
    assert open_store(open_store(uri).uri).uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "ftp://host/x",
        "memory://x",
        "http://host/x",
        "file://host/x",
        "oci://",
        "oci://host",
        "oci://host/",
        "oci://host/Upper",
        "oci://host/a:tag",
        "oci://ho st/a",
        "oci://host/a/../b",
        "oci://host/a?b",
        "s3://",
        "s3://b?x",
        "hdfs://",
        "://x",
    ],
)
def test_invalid_uris_are_refused_with_a_hint(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(uri)
    assert caught.value.hint


@pytest.mark.parametrize(
    "uri",
    [
        "oci://me:secret@host/a",
        "ftp://me:secret@host/a",
        "ftp://host/me:secret@a",
        "file://me:secret@host/a",
        "s3://bucket/a?X-Amz-Signature=secret",
        "s3://bucket/me:secret@a#x",
        "me:secret@host://a",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(uri)
    assert "secret" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    ("host", "scheme"),
    [
        ("localhost", "http"),
        ("localhost:5000", "http"),
        ("127.0.0.1:5000", "http"),
        ("127.8.8.8", "http"),
        ("[::1]:5000", "http"),
        ("registry.localhost", "http"),
        ("registry.example", "https"),
        ("10.0.0.1:5000", "https"),
        ("[fe80::1]:5000", "https"),
        ("localhost.example", "https"),
        ("127.0.0.1.example", "https"),
        ("named.example:5000", "http"),
        ("named.example", "https"),
    ],
)
def test_only_loopback_and_named_hosts_are_spoken_to_without_encryption(
    monkeypatch: pytest.MonkeyPatch, host: str, scheme: str
) -> None:
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", "other.example, named.example:5000")
    assert open_registry(host, "a")._base.startswith(f"{scheme}://")
    assert open_registry(host, "a", plain_http=True)._base.startswith("http://")


@pytest.mark.parametrize(
    "name", ["a", "A/b_c.d-e", "images/sha256-" + "0" * 64, "sha256:" + "0" * 64, "_x", "x" * MAX_NAME]
)
def test_names_are_themselves(name: str) -> None:
    assert check_name(name) == name
