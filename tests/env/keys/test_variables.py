"""Variables in a key, as a whole or in part."""

from __future__ import annotations

import pytest

from bootseer.env.keys.key_settings import choose_variables, is_allowed, looks_secret
from bootseer.store.addresses import without_credentials


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "GITHUB_PAT",
        "UV_INDEX_MINE_PASSWORD",
        "NETRC",
        "hub_token",
        "SLURM_JWT",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert looks_secret(name)
    assert "hunter2" not in repr(choose_variables({name: "hunter2"}, referenced=[name], declared=[name]))


@pytest.mark.parametrize(
    "name", ["PATH", "MONKEY", "KEYBOARD_LAYOUT", "AUTHOR", "PIP_INDEX_URL", "TOKENIZERS_PARALLELISM"]
)
def test_other_names_are_none(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "name", ["CFLAGS", "PIP_INDEX_URL", "UV_INDEX", "FORCE_CUDA", "PYTHONDONTWRITEBYTECODE", "HOME"]
)
def test_what_changes_an_installation_is_always_seen(name: str) -> None:
    assert choose_variables({name: "x"}).values == {name: "=x"}


@pytest.mark.parametrize(
    "name", ["PIP_CACHE_DIR", "UV_CONCURRENT_BUILDS", "CUDA_VISIBLE_DEVICES", "MAX_JOBS", "PYTHONUNBUFFERED"]
)
def test_variables_about_output_and_places_are_left_out_even_when_named(name: str) -> None:
    assert not is_allowed(name)
    found = choose_variables({name: "x"}, referenced=[name])
    assert not found.values
    assert name in found.notes[0]


def test_a_declared_variable_counts_whatever_it_is_called() -> None:
    assert list(choose_variables({"RANK": "1"}, declared=["RANK"]).values) == ["RANK"]


def test_that_a_named_variable_is_not_set_is_a_value() -> None:
    assert choose_variables({}, referenced=["SIZE"]).values == {"SIZE": "not set"}
    empty = choose_variables({"SIZE": ""}, referenced=["SIZE"])
    assert empty.values != choose_variables({}, referenced=["SIZE"]).values


def test_a_value_that_is_not_known_to_be_harmless_is_only_a_digest() -> None:
    assert "large" not in choose_variables({"SIZE": "large"}, referenced=["SIZE"]).values["SIZE"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://u:p@h.test/simple", "https://h.test/simple"),
        ("git+ssh://git@h.test/r.git", "git+ssh://git@h.test/r.git"),
        ("git+ssh://git:pw@h.test/r.git", "git+ssh://git@h.test/r.git"),
        ("https://h.test/x?X-Amz-Signature=abc&v=1", "https://h.test/x?X-Amz-Signature=&v=1"),
        ("https://a:b@one.test https://c@two.test", "https://one.test https://two.test"),
        ("https://a:p@ss@h.test/", "https://h.test/"),
        ("name@example.test", "name@example.test"),
        ("https://h.test/@scope/x", "https://h.test/@scope/x"),
        ("https://h.test/t/ab-01234567-89ab-cdef-0123-456789abcdef/me", "https://h.test/t/<TOKEN>/me"),
        ("https://h.test/conda/t/pfx_0aBcDeFgHiJkLmNo", "https://h.test/conda/t/<TOKEN>"),
        ("https://h.test/t/how-to-use-12-4-with-550-54/1234", "https://h.test/t/how-to-use-12-4-with-550-54/1234"),
    ],
)
def test_addresses_lose_what_must_not_be_disclosed(text: str, clean: str) -> None:
    assert without_credentials(text) == clean
