"""Logins from kubelet's credential provider plugins, with a registry that requires them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import AccessError, NotFoundError, UsageError
from bootseer.store import credential_providers as providers
from bootseer.store.credential_providers import Credentials
from bootseer.store.open import open_registry
from bootseer.store.tokens import find_credentials
from registry import PASSWORD, USER, Registry, needs_registry

V1 = "credentialprovider.kubelet.k8s.io/v1"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`plugin(script, images)`: configures a plugin with this shell script. Returns the file of its requests."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv(providers.CONFIG, str(tmp_path / "providers.yaml"))
    monkeypatch.setenv(providers.PROGRAMS, str(tmp_path))

    def write(script: str, *images: str, version: str = V1) -> Path:
        asked = tmp_path / "asked"
        program = tmp_path / "cloud"
        program.write_text(f"#!/bin/sh\ntr -d '\\n' >> {asked}; echo >> {asked}\n{script}\n")
        program.chmod(0o755)
        (tmp_path / "providers.yaml").write_text(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: cloud\n"
            f"  matchImages: {json.dumps(images or ['*.example'])}\n  defaultCacheDuration: 12h0m\n"
            f"  apiVersion: {version}\n  args: [get]\n  env: [{{name: REGION, value: north}}]\n"
        )
        return asked

    return write


def answer(key: str, kind: str = "Registry", duration: str | None = None) -> str:
    document = {
        "apiVersion": V1,
        "kind": "CredentialProviderResponse",
        "cacheKeyType": kind,
        "cacheDuration": duration,
        "auth": {key: {"username": USER, "password": PASSWORD}},
    }
    return f"test $1 = get && test $REGION = north && echo '{json.dumps(document)}'"


@pytest.mark.parametrize(
    ("pattern", "image", "fits"),
    [
        ("123.dkr.ecr.*.amazonaws.com", "123.dkr.ecr.eu-1.amazonaws.com/a/b", True),
        ("*.dkr.ecr.*.amazonaws.com", "1.2.dkr.ecr.eu-1.amazonaws.com/a", False),
        ("*.azurecr.io", "team.azurecr.io/a", True),
        ("*.azurecr.io", "azurecr.io/a", False),
        ("gcr.io", "gcr.io/a", True),
        ("*.*.registry.io", "a.b.registry.io/x", True),
        ("registry.io:8080/path", "registry.io:8080/path/x", True),
        ("registry.io:8080/path", "registry.io:8080/other", False),
        ("registry.io", "registry.io:8080/x", False),
        ("https://registry.io/v", "registry.io/v/x", True),
        ("k[8-9]s.io", "k8s.io/x", True),
        ("k[^8]s.io", "k8s.io/x", False),
    ],
)
def test_images_match_as_kubelet_has_it(pattern: str, image: str, fits: bool) -> None:
    assert providers.matches(pattern, image) is fits


@pytest.mark.parametrize(
    ("kind", "duration", "times"),
    [("Image", None, 2), ("Registry", "1h", 1), ("Global", None, 1), ("Global", "0s", 4)],
)
def test_answers_are_kept_by_their_key(
    plugin: Callable[..., Path], kind: str, duration: str | None, times: int
) -> None:
    asked = plugin(answer("*.example", kind, duration))
    for _ in range(2):
        for repository in ("a/b", "a/c"):
            assert find_credentials("one.example", repository) == Credentials(USER, PASSWORD)
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    assert len(requests) == times
    assert requests[0] == {"apiVersion": V1, "kind": "CredentialProviderRequest", "image": "one.example/a/b"}
    assert find_credentials("other.place", "a/b") == Credentials()
    assert len(asked.read_text().splitlines()) == times


@needs_registry
def test_a_registry_is_opened_and_a_login_that_ended_is_asked_for_again(
    plugin: Callable[..., Path], tmp_path: Path
) -> None:
    with Registry(tmp_path, basic=True) as registry, closing(open_registry(registry.host, "a/b")) as opened:
        plugin(answer(f"{registry.host}/a", duration="0s").replace(PASSWORD, "of yesterday"), registry.host)
        with pytest.raises(AccessError, match="status 401"):
            opened.manifest("1")
        plugin(answer(f"{registry.host}/a", duration="0s"), registry.host)
        with pytest.raises(NotFoundError):
            opened.manifest("1")


@needs_registry
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no role >&2; exit 3", "cloud ended with 3: 'no role'"),
        ("echo '{'", "an invalid CredentialProviderResponse"),
        ("exec sleep 600", "did not answer in 0.2 s"),
        (answer("x").replace(V1, V1 + "beta1"), "answers as .*v1beta1"),
        (answer("x", duration="soon"), "an invalid CredentialProviderResponse"),
    ],
)
def test_a_plugin_that_fails_is_named_once_and_the_registry_asked_without_a_login(
    plugin: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    words: str,
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(providers, "_PLUGIN_S", 0.2)
    with Registry(tmp_path, basic=True) as registry:
        asked = plugin(script, registry.host)
        for _ in range(2):
            with closing(open_registry(registry.host, "a/b")) as opened, pytest.raises(AccessError, match=words):
                opened.manifest("1")
    assert len(asked.read_text().splitlines()) == 1
    assert len(caplog.messages) == 1
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("apiVersion: kubelet", "apiVersion: kublet", "kubelet.config|Invalid enum"),
        ("name: cloud", "name: ../cloud", "no usable name"),
        ("name: cloud", "name: elsewhere", "elsewhere: no such program"),
        ("12h0m", "soon", "not a duration"),
        ("matchImages", "images", "matchImages"),
        ("kind", "{", "mend it|usable"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named_and_costs_the_login_alone(
    plugin: Callable[..., Path], tmp_path: Path, old: str, new: str, words: str
) -> None:
    plugin(answer("*.example"))
    path = tmp_path / "providers.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UsageError, match=words):
        providers.check_providers(os.environ)
    found = find_credentials("one.example", "a/b")
    assert (found.user, bool(found.why)) == ("", True)


def test_several_files_of_a_folder_are_taken_in_their_order(plugin: Callable[..., Path], tmp_path: Path) -> None:
    asked = plugin(answer("one.example"))
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "2.yaml").write_text((tmp_path / "providers.yaml").read_text())
    (folder / "1.json").write_text(
        json.dumps({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig", "providers": []})
    )
    (folder / "notes.txt").write_text("{")
    found = providers.find_login("one.example", "a", {providers.CONFIG: str(folder), providers.PROGRAMS: str(tmp_path)})
    assert found.user
    assert asked.exists()
