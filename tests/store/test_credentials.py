"""The lookup of logins."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessError
from bootseer.store.credential_providers import Credentials
from bootseer.store.tokens import find_credentials

HOST = "registry.example:5000"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path / "none"))

    def write(content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)

    return write


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Creates a program `docker-credential-mine` with this shell script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def write(text: str) -> None:
        program = programs / "docker-credential-mine"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    return write


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_no_file_means_no_login(config: object) -> None:
    assert find_credentials(HOST) == Credentials()


@pytest.mark.parametrize(
    "content", [{}, [], {"auths": 5}, {"auths": {}}, {"auths": {HOST: {}}}, {"auths": {"other": {"auth": "x"}}}]
)
def test_a_file_without_our_host_has_no_login(config: Callable[[Any], None], content: Any) -> None:
    config(content)
    assert find_credentials(HOST) == Credentials()


@pytest.mark.parametrize("key", [HOST, f"https://{HOST}", f"https://{HOST}/v1/", f"http://{HOST}/"])
def test_a_login_is_found_in_the_file(config: Callable[[Any], None], key: str) -> None:
    config({"auths": {key: {"auth": encoded("me:pass:word")}}})
    assert find_credentials(HOST) == Credentials("me", "pass:word")
    assert find_credentials("registry.example") == Credentials()


def test_a_login_of_a_path_is_for_what_is_below(config: Callable[[Any], None]) -> None:
    users = {"/team": "team", "": "all", "/team/a": "team-a", "/tea": "tea"}
    config({"auths": {f"{HOST}{path}": {"auth": encoded(f"{user}:x")} for path, user in users.items()}})
    for repository, user in (("team/a", "team-a"), ("team/ab", "team"), ("other/a", "all"), ("team", "team")):
        assert find_credentials(HOST, repository) == Credentials(user, "x")


@pytest.mark.parametrize("path", ["v1/", "v2/"])
def test_a_login_for_another_path_is_not_used(config: Callable[[Any], None], path: str) -> None:
    """With another team's login, a registry refused reads that it permits without any."""
    config({"auths": {f"{HOST}/team": {"auth": encoded("me:word")}}})
    assert find_credentials(HOST, "public/a") == Credentials()
    config({"auths": {f"{HOST}/{path}": {"auth": encoded("me:word")}}})
    assert find_credentials(HOST, "public/a") == Credentials("me", "word")


def test_a_login_under_the_name_of_the_host_precedes_an_older_one_under_its_address(
    config: Callable[[Any], None],
) -> None:
    config({"auths": {f"https://{HOST}": {"auth": encoded("me:old")}, HOST: {"auth": encoded("me:word")}}})
    assert find_credentials(HOST, "team/a") == Credentials("me", "word")


@pytest.mark.parametrize("host", ["docker.io", "index.docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io"])
def test_the_login_for_docker_hub_counts_for_all_its_names(
    config: Callable[[Any], None], helper: Callable[[str], None], host: str, key: str
) -> None:
    config({"auths": {key: {"auth": encoded("me:word")}}})
    assert find_credentials(host) == Credentials("me", "word")
    helper('test "$(cat)" = https://index.docker.io/v1/ && echo \'{"Username": "helped", "Secret": "word"}\'')
    config({"credHelpers": {key: "mine"}})
    assert find_credentials(host) == Credentials("helped", "word")


def test_logins_of_enroot_are_found_and_its_commands_not_run(
    config: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path))
    (tmp_path / ".credentials").write_text(
        "# NGC\nmachine nvcr.io login $oauthtoken password word\n"
        f"machine {HOST.partition(':')[0]} login me password two words\n"
        f"machine ecr.example login AWS password $(touch {tmp_path}/ran)\n"
    )
    assert find_credentials("nvcr.io") == Credentials("$oauthtoken", "word")
    assert find_credentials(HOST) == Credentials("me", "two words")
    assert find_credentials("other.example") == Credentials()
    assert "is a command, which is not run" in find_credentials("ecr.example").why
    assert not (tmp_path / "ran").exists()
    config({"auths": {"nvcr.io": {"auth": encoded("docker:first")}}})
    assert find_credentials("nvcr.io") == Credentials("docker", "first")


def test_a_password_of_enroot_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path))
    (tmp_path / ".credentials").write_bytes(b"machine nvcr.io login me password pass\xe9\n")
    assert base64.b64decode(find_credentials("nvcr.io").basic.removeprefix("Basic ")) == b"me:pass\xe9"


def test_user_and_password_may_be_plain(config: Callable[[Any], None]) -> None:
    config({"auths": {HOST: {"username": "me", "password": "word"}}})
    assert find_credentials(HOST) == Credentials("me", "word")


def test_an_identity_token_is_found(config: Callable[[Any], None]) -> None:
    config({"auths": {HOST: {"auth": encoded("me:"), "identitytoken": "abc"}}})
    assert find_credentials(HOST) == Credentials("me", "", "abc")


@pytest.mark.parametrize("content", ["{", "\0", *(json.dumps({"auths": {HOST: {"auth": auth}}}) for auth in "%é")])
def test_a_damaged_file_is_an_error_that_names_it(config: Callable[[Any], None], content: str, tmp_path: Path) -> None:
    config(content)
    with pytest.raises(AccessError, match=str(tmp_path)):
        find_credentials(HOST)


@pytest.mark.parametrize("where", [{"credsStore": "mine"}, {"credHelpers": {HOST: "mine"}, "credsStore": "other"}])
def test_a_helper_is_asked(config: Callable[[Any], None], helper: Callable[[str], None], where: Any) -> None:
    config(where)
    helper(f'test "$1" = get && test "$(cat)" = {HOST} && echo \'{{"Username": "me", "Secret": "word"}}\'')
    assert find_credentials(HOST) == Credentials("me", "word")


def test_a_helper_may_give_an_identity_token(config: Callable[[Any], None], helper: Callable[[str], None]) -> None:
    config({"credsStore": "mine"})
    helper('echo \'{"Username": "<token>", "Secret": "abc"}\'')
    assert find_credentials(HOST) == Credentials("", "", "abc")


def test_a_helper_without_our_host_leaves_it_to_the_file(
    config: Callable[[Any], None], helper: Callable[[str], None]
) -> None:
    config({"credsStore": "mine", "auths": {HOST: {"auth": encoded("me:word")}}})
    helper("echo credentials not found in native keychain; exit 1")
    assert find_credentials(HOST) == Credentials("me", "word")


@pytest.mark.parametrize(
    ("text", "words"),
    [("echo locked; exit 1", "locked"), ("echo x", "not a credential"), ("echo '{}'", "not a credential")],
)
def test_a_helper_that_fails_is_named(
    config: Callable[[Any], None], helper: Callable[[str], None], text: str, words: str
) -> None:
    config({"credsStore": "mine"})
    helper(text)
    with pytest.raises(AccessError, match=f"docker-credential-mine .*{words}"):
        find_credentials(HOST)


@pytest.mark.parametrize("name", ["../mine", "a b", "a/b"])
def test_a_helper_is_a_name_and_no_path(config: Callable[[Any], None], name: str) -> None:
    config({"credsStore": name})
    with pytest.raises(AccessError, match="not the name of a credential helper"):
        find_credentials(HOST)


def test_a_helper_that_is_missing_is_named(config: Callable[[Any], None]) -> None:
    config({"credsStore": "not-installed"})
    with pytest.raises(AccessError, match="docker-credential-not-installed"):
        find_credentials(HOST)


def test_secrets_do_not_show_in_text() -> None:
    assert "word" not in repr(Credentials("me", "word", "sword"))


def test_a_user_without_a_home_has_no_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert find_credentials(HOST) == Credentials()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert find_credentials(HOST) == Credentials()
