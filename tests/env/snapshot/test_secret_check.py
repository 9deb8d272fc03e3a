"""Content that must not be published is refused by the writer itself, before a byte of it is stored."""

from __future__ import annotations

import base64
import json
import os
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.snapshot.secret_check import SecretCheck
from bootseer.errors import PermanentError, UsageError
from env_snapshots import snapshot
from erofs_images import needs_root
from once import compiled_secret_rules
from store_doubles import MemoryStore
from wheels import make_wheel

pytestmark = pytest.mark.slow

SECRET = "7Gq2xK9wLmT4vB8nRz5pYc3d"  # noqa: S105 - drawn for this test


def check_of(*, homes: Sequence[str] = (), **options: Any) -> SecretCheck:
    return SecretCheck(Exclusions(homes=homes), cache=compiled_secret_rules(), **options)


@pytest.mark.slow
def test_nothing_of_a_snapshot_with_a_secret_is_stored_and_all_are_named(tmp_path: Path) -> None:
    """Independent of how a path got into the changes."""
    upper = tmp_path / "upper"
    (upper / "root").mkdir(parents=True)
    (upper / "root/.vault-token").write_text("x\n")
    store = MemoryStore(str(tmp_path))
    with pytest.raises(PermanentError, match=r"/root/\.vault-token \(credentials\)"):
        snapshot(store, upper)
    (upper / "root/.vault-token").unlink()
    for name in ("b.env", "c.env"):
        (upper / name).write_text(f"TOKEN={SECRET}{name}\n")
    (upper / "a").write_text("what comes first")
    (upper / "large").write_bytes(b"a" * (2 << 20))
    with pytest.raises(PermanentError, match=r"/b\.env \(.*\), /c\.env") as caught:
        snapshot(store, upper)
    assert SECRET not in str(caught.value)
    assert not list(store.list())


def test_a_secret_across_pieces_of_a_large_file_is_found_and_one_far_into_it_is_not(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    check = check_of(variables={"MY_TOKEN": SECRET})
    (upper / "large").write_bytes(b"a" * ((1 << 20) - 5) + SECRET.encode() + b"a" * (1 << 20))
    with pytest.raises(PermanentError, match=r"/large \(the value of MY_TOKEN\)"):
        snapshot(MemoryStore(str(tmp_path)), upper, check=check)
    (upper / "large").write_bytes(b"a" * (20 << 20) + SECRET.encode())
    assert snapshot(MemoryStore(str(tmp_path)), upper, check=check).num_files == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("package-lock.json", f'"resolved": "https://me:{SECRET}@a.test/p.tgz",\n'),
        ("setup.env", f"export DB_PASSWORD={SECRET}\n"),
        (".npmrc", f"//a.test/:_authToken={SECRET}\n"),
    ],
)
@pytest.mark.parametrize("before", [0, 1 << 20])
def test_a_secret_by_form_is_found_in_a_large_file(name: str, text: str, before: int) -> None:
    data = b"\n" * before + text.encode() + b"\n" * (2 << 20)
    judge = check_of().check_large(f"/root/{name}", len(data))
    assert any(judge(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20))


@pytest.mark.parametrize("name", [f"a-{SECRET}", f"{SECRET}/a", f"a\n{SECRET}"])
def test_names_are_judged_and_not_repeated(tmp_path: Path, name: str) -> None:
    upper = tmp_path / "upper"
    (upper / name).parent.mkdir(parents=True)
    (upper / name).touch()
    with pytest.raises(PermanentError, match=r"a name \(the value of MY_TOKEN\)") as caught:
        snapshot(MemoryStore(str(tmp_path)), upper, check=check_of(variables={"MY_TOKEN": SECRET}))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("before", ["", "a", "ab", "x-access-token:"])
def test_a_value_in_base64_is_found(before: str) -> None:
    check = check_of(variables={"MY_TOKEN": SECRET})
    text = b"[http]\nextraheader = basic " + base64.b64encode(f"{before}{SECRET}\n".encode())
    assert check.check_content("/opt/x", text) == "/opt/x (the value of MY_TOKEN, in base64)"


def test_a_value_in_json_is_found() -> None:
    chosen = 'Tr0ub"4d\\ör'
    check = check_of(variables={"DB_PASSWORD": chosen})
    text = json.dumps({"exports": [{"name": "LOGIN", "value": f"me:{chosen}"}]}).encode()
    assert check.check_text("its document", text) == "its document (the value of DB_PASSWORD)"


def test_a_link_that_the_owner_keeps_is_none(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "link").symlink_to(f"https://me:{SECRET}@a.test/")
    check = SecretCheck(Exclusions(keep=["/link"]), cache=compiled_secret_rules())
    assert [entry.path for entry in snapshot(MemoryStore(str(tmp_path)), upper, check=check).entries] == ["/link"]


@needs_root
def test_links_and_attributes_are_judged(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "link").symlink_to(f"https://me:{SECRET}@a.test/")
    with pytest.raises(PermanentError, match="/link"):
        snapshot(MemoryStore(str(tmp_path)), upper)
    (upper / "link").unlink()
    (upper / "file").write_text("")
    check = check_of(variables={"MY_TOKEN": SECRET})
    os.setxattr(upper / "file", f"user.{SECRET}", b"1")
    with pytest.raises(PermanentError, match=r"/file \(the value of MY_TOKEN"):
        snapshot(MemoryStore(str(tmp_path)), upper, check=check)
    os.removexattr(upper / "file", f"user.{SECRET}")
    os.setxattr(upper / "file", "user.note", ("gh" + f"p_{'a1B2c3D4e5' * 4}").encode())
    with pytest.raises(PermanentError, match="/file"):
        snapshot(MemoryStore(str(tmp_path)), upper)


def test_files_of_published_packages_are_none_and_changed_ones_are(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    site = upper / "lib/python3.11/site-packages"
    token = "gh" + "p_" + "a1B2c3D4e5" * 4
    make_wheel(tmp_path / "wheels", "alpha", "1", {"alpha/fixture.py": f"{token!r}\n"})
    with zipfile.ZipFile(next((tmp_path / "wheels").iterdir())) as wheel:
        wheel.extractall(site)
    snapshot(MemoryStore(str(tmp_path)), upper)
    (site / "alpha-1.dist-info/direct_url.json").write_text('{"url": "file:///project"}')
    with pytest.raises(PermanentError, match=r"fixture\.py"):
        snapshot(MemoryStore(str(tmp_path)), upper)
    (site / "alpha-1.dist-info/direct_url.json").unlink()
    (site / "alpha/fixture.py").write_text(f"{token!r} \n")
    with pytest.raises(PermanentError, match=r"fixture\.py"):
        snapshot(MemoryStore(str(tmp_path)), upper)


def test_credentials_of_this_machine_are_known_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/credentials").write_text(f"aws_secret_access_key = {SECRET}\n")
    check = check_of(homes=[str(home)])
    assert (
        check.check_content("/opt/copy", (home / ".aws/credentials").read_bytes())
        == f"/opt/copy (a copy of {home}/.aws/credentials)"
    )
    assert (
        check.check_content("/opt/log", f"using {SECRET}...".encode())
        == f"/opt/log (a word of {home}/.aws/credentials)"
    )
    assert check.check_content("/opt/log", b"using credentials") == ""


def test_credentials_are_known_however_many_words_a_program_keeps_among_its_own(tmp_path: Path) -> None:
    logs = tmp_path / ".config/gcloud/logs"  # sorted before the other file
    logs.mkdir(parents=True)
    for number in range(20):
        (logs / str(number)).write_text("\n".join(secrets.token_urlsafe(24) for _ in range(50)))
    (tmp_path / ".netrc").write_text(f"machine a.test login me password {SECRET}\n")
    check = check_of(homes=[str(tmp_path)])
    assert check.check_content("/opt/log", SECRET.encode()) == f"/opt/log (a word of {tmp_path}/.netrc)"


def test_servers_and_projects_that_credentials_are_for_are_no_secrets(tmp_path: Path) -> None:
    hosts = ["artifactory-prod-01.corp.test", "gitlab01-internal-eu2"]
    (tmp_path / ".netrc").write_text("".join(f"machine {host} login me password {SECRET}\n" for host in hosts))
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"auths": {"registry-01-fra2.corp.test:5000": {"auth": ""}}}')
    (tmp_path / ".config/gcloud").mkdir(parents=True)
    (tmp_path / ".config/gcloud/config").write_text("[core]\nproject = ml-platform-prod-382910\n")
    (tmp_path / ".config/gcloud/adc.json").write_text('{"quota_project_id": "ml-platform-prod-382910"}')
    check = check_of(homes=[str(tmp_path)])
    text = (
        f"https://{hosts[0]}/ml-platform-prod-382910/simple git+https://{hosts[1]}/a registry-01-fra2.corp.test:5000/b"
    )
    assert check.check_text("its document", text.encode()) == ""
    assert check.check_text("its document", SECRET.encode()) == f"its document (a word of {tmp_path}/.netrc)"


def test_passwords_in_addresses_of_variables_are_known_again() -> None:
    check = check_of(variables={"PIP_INDEX_URL": f"https://me:{SECRET}@a.test/", "N_KEY": "17", "HOME": "/x"})
    assert (
        check.check_content("/opt/copy", f"password is {SECRET}".encode()) == "/opt/copy (the value of PIP_INDEX_URL)"
    )
    assert check.check_text("its document", f'"={SECRET}"'.encode()) == "its document (the value of PIP_INDEX_URL)"
    assert check.check_content("/opt/numbers", b"17 /x") == ""


def test_a_password_that_a_person_chose_is_known_by_the_name_of_its_variable() -> None:
    check = check_of(
        variables={"DB_PASSWORD": "Tr0ub4dor&3", "ROOT_PASS": "disabled", "PASSWORD_FILE": "/run/x1234567"}
    )
    assert check.check_content("/opt/db.yaml", b"password: Tr0ub4dor&3\n") == "/opt/db.yaml (the value of DB_PASSWORD)"
    assert check.check_content("/opt/log", b"disabled /run/x1234567") == ""


def test_paths_in_variables_are_no_secrets(tmp_path: Path) -> None:
    here, gone = f"{tmp_path}/user1234/job_5678abc", "/scratch/user1234/job_5678abc"
    Path(here).mkdir(parents=True)
    for variables in ({"PWD": gone}, {"SSH_AUTH_SOCK": here}):
        assert check_of(variables=variables).check_paths([(f"{here}{gone}", "directory", 0, b"")], lambda _: b"") == []
    assert check_of(variables={"MY_KEY": gone}).check_paths([(gone, "directory", 0, b"")], lambda _: b"")


def test_rules_that_cannot_be_read_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[[rules]]\nid = 1")
    with pytest.raises(UsageError) as caught:
        check_of(rules=[str(tmp_path / "rules.toml")])
    assert "--env-secret-rules" in str(caught.value.hint)
