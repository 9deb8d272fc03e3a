"""Credentials of a setup: the command after it gets them, they are in no store, and a restored start names them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from environment_place import Place, made_place
from launch.test_run_environment_container import run as run_in_container
from launch.test_run_environment_faults import user_s
from stored import stored

pytestmark = pytest.mark.root
SECRET = "7Gq2xK9wLmT4vB8nRz5pYc3d"  # noqa: S105 - drawn for this test
LOGINS = f"""
echo {SECRET}vault > $HOME/.vault-token
mkdir -p $HOME/.kube $HOME/.kaggle $HOME/.huggingface $HOME/.config/rclone $HOME/.ngc $HOME/.aws/sso/cache
echo {SECRET}kube > $HOME/.kube/config
echo {SECRET}kaggle > $HOME/.kaggle/kaggle.json
echo {SECRET}hugging > $HOME/.huggingface/token
echo {SECRET}rclone > $HOME/.config/rclone/rclone.conf
echo {SECRET}ngc > $HOME/.ngc/config
echo {SECRET}sso > $HOME/.aws/sso/cache/one.json
printf 'machine a.test login me password {SECRET}netrc\\n' > $HOME/.netrc
ln -s .netrc $HOME/netrc-link
echo words > vocab
"""
NAMES = ("vault", "kube", "kaggle", "hugging", "rclone", "ngc", "sso", "netrc")
SHOW = "cat vocab $HOME/.vault-token $HOME/.netrc $HOME/netrc-link $HOME/.aws/sso/cache/one.json $HOME/.ngc/config"


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


def is_shown(output: str) -> bool:
    return output.startswith("words\n") and all(
        f"{SECRET}{name}" in output for name in ("vault", "netrc", "sso", "ngc")
    )


def assert_not_stored(place: Place) -> None:
    held = stored(place.store)
    assert b"vocab" in held
    assert SECRET.encode() not in held


def test_named_credentials_are_in_no_store_and_the_command_finds_them(place: Place) -> None:
    script = place.counting_script(LOGINS)
    words = ("--setup", script, "--", "sh", "-c", SHOW)
    first = place.run(*words)
    assert is_shown(first.stdout)
    assert place.published()["published"] is True
    assert place.start()["trust"] == "observed"
    assert_not_stored(place)
    # The written files are not in the key, so the next start finds the snapshot and, on this machine, the login.
    second = place.run(*words)
    assert (second.stdout, place.start()["mode"], place.num_setups) == (first.stdout, "restored", 1)
    assert "credentials that the setup wrote" not in second.stderr
    (document,) = place.documents()
    told = json.loads(place.bootseer("env", "show", str(document["key"]), "--json").stdout)["left_out"]
    assert {Path(row["path"]).name for row in told if row["rule"] == "credentials"} >= {
        ".netrc",
        ".vault-token",
        "cache",
    }
    assert "left out" in place.bootseer("env", "show", str(document["key"])).stdout


def test_a_restored_start_on_another_machine_names_what_is_missing(place: Place) -> None:
    script = place.counting_script("echo words > vocab; echo secret > $HOME/.vault-token\n")
    words = ("--setup", script, "--", "cat", "vocab")
    place.run(*words)
    (place.root / "home" / ".vault-token").unlink()
    place.cache = "other"
    second = place.run(*words)
    assert (second.stdout, place.start()["mode"]) == ("words\n", "restored")
    assert "credentials that the setup wrote" in second.stderr
    assert f"{place.root}/home/.vault-token" in second.stderr


def test_credentials_that_were_here_are_neither_in_the_key_nor_in_the_store(place: Place) -> None:
    token = place.root / "home" / ".vault-token"
    token.write_text(SECRET)
    script = place.counting_script("cat $HOME/.vault-token > /dev/null; echo words > vocab\n")
    words = ("--setup", script, "--", "cat", "vocab")
    place.run(*words)
    assert place.start()["trust"] == "observed"
    token.write_text("another login")
    place.run(*words)
    assert (place.start()["mode"], place.num_setups) == ("restored", 1)
    assert_not_stored(place)


def test_a_user_s_capture_keeps_no_credentials(place: Place) -> None:
    script = place.write("setup.sh", LOGINS)
    with user_s(place) as run:
        ran = run("--setup", script, "--", "sh", "-c", SHOW)
        assert ran.returncode == 0, ran.stderr
        assert is_shown(ran.stdout)
        assert place.start()["way"] == "user"
        assert place.published()["published"] is True, ran.stderr
    assert_not_stored(place)


def test_a_scan_keeps_no_credentials(place: Place) -> None:
    script = place.counting_script(LOGINS)
    ran = run_in_container(place, "--setup", script, "--", "sh", "-c", SHOW)
    assert is_shown(ran.stdout)
    assert place.start()["way"] == "scan"
    assert place.published()["published"] is True
    assert_not_stored(place)


@pytest.mark.parametrize(
    "script",
    [
        "echo $SECRET > $HOME/.vault-token; ln $HOME/.vault-token $HOME/again",
        "echo $SECRET > $HOME/.vault-token; cp $HOME/.vault-token copy",
        "cp $HOME/.kaggle/kaggle.json copy",
        "echo $SECRET > $HOME/.vault-token; echo prefix-$SECRET-suffix > copy",
        "echo $MY_TOKEN > copy",
        "mkdir data; ln -s https://me:$SECRET@a.test/ data/link",
        "echo '[global]' > pip.conf; echo index-url = https://me:$SECRET@a.test/simple >> pip.conf",
        "python -c \"open('big', 'w').write('x' * 3000000 + ' ' + '$SECRET')\"; echo $SECRET > $HOME/.vault-token",
    ],
    ids=["hard-link", "copy", "copy-of-an-old-one", "a-word", "a-variable", "link", "address", "large"],
)
def test_copies_and_words_of_secrets_are_not_published(place: Place, script: str) -> None:
    kaggle = place.root / "home" / ".kaggle" / "kaggle.json"
    kaggle.parent.mkdir()
    kaggle.write_text('{"key": "old login"}')
    setup = place.counting_script(f"SECRET={SECRET}\n{script}; echo words > vocab\n")
    words = ("--setup", setup, "--", "cat", "vocab")
    ran = place.run(*words, more={"MY_TOKEN": SECRET})
    assert ran.stdout == "words\n"
    assert place.published()["published"] is False
    assert "it would contain what looks like a secret" in ran.stderr
    assert SECRET.encode() not in stored(place.store)
    assert not place.documents()


def test_owners_leave_files_out_and_make_exceptions(place: Place) -> None:
    place.write(
        "rules.toml", "[[rules]]\nid = 'own'\ndescription = 'ours'\nregex = 'own-[0-9]{8}'\nkeywords = ['own-']\n"
    )
    token = f"echo 'token = {SECRET}' > token.cfg; echo own-12345678 > own"
    script = place.counting_script(f"echo words > vocab; {token}; echo k > $HOME/.vault-token\n")
    words = ("--setup", script, "--", "cat", "vocab", "own")
    ran = place.run(*words)
    assert "token.cfg (a secret (token))" in ran.stderr
    assert "--env-keep PATH" in place.run(*words).stderr
    assert place.start()["code"] == "unsafe"
    ran = place.run("--env-keep", "*/token.cfg", "--env-secret-rules", "rules.toml", *words)
    assert f"{place.project}/own (it matches the rule" in ran.stderr
    chosen = ("--env-keep", "*/token.cfg", "--env-leave-out", f"{place.project}/own")
    ran = place.run(*chosen, "--env-secret-rules", "rules.toml", *words)
    assert ran.stdout == "words\nown-12345678\n"
    assert f"{place.project}/own is not kept (left out by the owner)" in ran.stderr
    assert place.published()["published"] is True, ran.stderr
    held = stored(place.store)
    assert SECRET.encode() in held
    assert b"own-12345678" not in held
    ran = place.bootseer("run", "--env-keep", "token.cfg", *words)
    assert ran.returncode == 2
    assert "begin it with /, ~/ or *" in ran.stderr
    # The same settings as variables, for a fleet, find the same snapshot.
    fleet = {"BOOTSEER_ENV_KEEP": "*/token.cfg", "BOOTSEER_ENV_LEAVE_OUT": f"{place.project}/own"}
    place.run(*words, more=fleet)
    assert place.start()["mode"] == "restored"
