"""pip's settings, passed to uv."""

from __future__ import annotations

import pytest

from bootseer.env.installing.pip_settings import Setting, translate
from bootseer.env.keys.requirements import Requirements

ALWAYS = ["--no-sources", "--no-config", "--index-strategy", "unsafe-best-match"]


def _translated(pairs=(), requirements=None, env=None, there=lambda path: True):
    found = [Setting(name, value, "here") for name, value in pairs]
    return translate(found, requirements or Requirements(), env or {}, there)


def test_nothing_set_means_the_public_index_and_copies():
    done = _translated()
    assert done.arguments == ALWAYS
    assert done.environment == {"UV_LINK_MODE": "copy"}
    assert done.refusals == []


def test_indexes_stand_in_the_order_in_which_pip_prefers_them():
    done = _translated([("extra-index-url", "https://b https://c"), ("index-url", "https://a")])
    assert done.environment["UV_DEFAULT_INDEX"] == "https://a"
    assert done.environment["UV_INDEX"] == "https://c https://b"


def test_an_index_in_a_requirement_file_replaces_the_others():
    told = Requirements(options=[("-i", "https://x", "r"), ("--extra-index-url", "https://y", "r")])
    done = _translated([("index-url", "https://a"), ("extra-index-url", "https://b")], told)
    assert (done.environment["UV_DEFAULT_INDEX"], done.environment["UV_INDEX"]) == ("https://x", "https://y")


def test_no_index_leaves_no_index():
    done = _translated([("no-index", "yes"), ("index-url", "https://a"), ("find-links", "/w")])
    assert "--no-index" in done.arguments
    assert "UV_DEFAULT_INDEX" not in done.environment
    assert done.environment["UV_FIND_LINKS"] == "/w"


def test_what_the_user_tells_uv_itself_stays():
    env = {"UV_INDEX_URL": "https://u", "UV_HTTP_TIMEOUT": "5", "UV_LINK_MODE": "hardlink", "UV_FIND_LINKS": "/u"}
    done = _translated([("index-url", "https://a"), ("timeout", "60"), ("find-links", "/a")], env=env)
    assert done.environment == {"UV_FIND_LINKS": "/u,/a"}


def test_passwords_are_in_no_argument():
    pairs = [
        ("index-url", "https://me:secret@h/simple"),
        ("find-links", "https://me:secret@h/w"),
        ("proxy", "h:secret"),
        ("constraint", "https://me:secret@h/c.txt"),
    ]
    done = _translated(pairs)
    assert "secret" not in " ".join(done.arguments)
    assert done.refusals == ["pip's setting constraint (here) has no counterpart in uv"]


def test_places_that_do_not_exist_are_left_out():
    done = _translated([("find-links", "/gone /there https://h/w")], there=lambda path: path == "/there")
    assert done.environment["UV_FIND_LINKS"] == "/there,https://h/w"


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("pre", "true", ["--prerelease=allow"]),
        ("no-binary", "a,b", ["--no-binary", "a", "--no-binary", "b"]),
        ("only-binary", ":all:", ["--only-binary", ":all:"]),
        ("constraint", "c.txt", ["-c", "c.txt", "-b", "c.txt"]),
        ("require-hashes", "1", ["--require-hashes"]),
        ("no-deps", "on", ["--no-deps"]),
        ("break-system-packages", "1", ["--break-system-packages"]),
        ("pre", "false", []),
        ("quiet", "2", []),
        ("no-compile", "yes", []),
        ("use-feature", "fast-deps", []),
    ],
)
def test_choices_have_their_counterparts(name, value, arguments):
    done = _translated([(name, value)])
    assert done.refusals == []
    assert done.arguments == [*arguments, *ALWAYS]


@pytest.mark.parametrize(
    ("name", "value", "variables"),
    [
        ("cert", "/ca.pem", {"SSL_CERT_FILE": "/ca.pem"}),
        ("client-cert", "/me.pem", {"SSL_CLIENT_CERT": "/me.pem"}),
        ("timeout", "60", {"UV_HTTP_TIMEOUT": "60"}),
        ("retries", "0", {"UV_HTTP_RETRIES": "0"}),
        ("trusted-host", "a b:8", {"UV_INSECURE_HOST": "a b:8"}),
        ("no-cache-dir", "1", {"UV_NO_CACHE": "1"}),
        ("keyring-provider", "subprocess", {"UV_KEYRING_PROVIDER": "subprocess"}),
    ],
)
def test_connections_have_their_counterparts(name, value, variables):
    done = _translated([(name, value)])
    assert done.refusals == []
    assert variables.items() <= done.environment.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "/t"),
        ("user", "yes"),
        ("prefix", "/p"),
        ("root", "/r"),
        ("prefer-binary", "1"),
        ("upgrade", "1"),
        ("use-deprecated", "legacy-resolver"),
        ("use-feature", "something-new"),
        ("config-settings", "a=b"),
        ("requirement", "always.txt"),
        ("unreadable", ""),
        ("what-pip-will-know-tomorrow", "x"),
    ],
)
def test_what_has_no_counterpart_is_a_reason_for_pip(name, value):
    (reason,) = _translated([(name, value)]).refusals
    assert reason == f"pip's setting {name} (here) has no counterpart in uv"


def test_flags_that_are_set_twice_are_reported_once():
    told = Requirements(options=[("--pre", "", "r"), ("--no-index", "", "r")], own_options={"hash"})
    done = _translated([("pre", "1"), ("no-index", "1"), ("require-hashes", "1")], told)
    assert len(done.arguments) == len(set(done.arguments))
