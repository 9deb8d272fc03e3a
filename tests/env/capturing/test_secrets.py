"""What is detected as a secret and what is not, by a library's rules and ours together, as for a snapshot."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import sys
import uuid
from pathlib import Path

import pytest

from bootseer.env.capturing.secrets import is_random, is_secret_variable, passwords_in, secret_kind
from env_snapshots import secret_check

# Concatenated here, so that no scanner reports this file as a leak.
GITHUB = "gh" + "p_" + "a1B2c3D4e5" * 4
HUGGING_FACE = "hf" + "_" + "QwErTyUiOpAsDfGhJkLzXcVbNmQaWsEdRf"
AWS = "AKI" + "A" + "Q3EGJKLMNPRSTUVW"
GITLAB = "glpat" + "-" + "x1y2z3x1y2z3x1y2z3x1"
NPM = "np" + "m_" + "a1B2" * 9
OPENAI = "s" + "k-proj-" + "aB3" * 16
C20 = "a1B2c3D4e5F6g7H8i9J0"
OTHERS = {
    "an AWS secret key": f"AWS_SECRET_ACCESS_{'KEY'}={C20 * 2}",
    "a Google API key": "AIz" + "a" + (C20 * 2)[:35],
    "a Google token": "ya2" + "9." + C20 * 2,
    "a Slack token": "xox" + "b-" + C20 * 2,
    "a PyPI token": "pypi" + "-AgE" + C20 * 3,
    "a Docker token": "dck" + "r_pat_" + C20 * 2,
}
DRAWN = base64.b64encode(hashlib.sha512(b"a key").digest()).decode()
KEY = "-----BEGIN " + f"OPENSSH PRIVATE KEY-----\n{DRAWN}\n{DRAWN}\n-----END " + "OPENSSH PRIVATE KEY-----\n"
DRAWN_ID = str(uuid.uuid5(uuid.NAMESPACE_DNS, "a key"))
THEIRS = "it matches the rule betterleaks."

PACKAGES = "/opt/env/lib/python3.12/site-packages"
LOGIN = "an address with a password"

# fmt: off
SECRETS = [
    ("/root/.config/pip/pip.conf", "index-url = https://me:s3cr3tpw@index.example/simple\n", LOGIN),
    ("/opt/venv/pip.conf", f"extra-index-url = https://{'0a1b2c3d' * 4}@index.example/simple\n", LOGIN),
    ("/root/.config/uv/uv.toml", 'url = "https://__token__:s3cr3tpw@index.example/simple"\n', LOGIN),
    ("/opt/app/.git/config", f"\turl = https://x-access-token:{GITHUB}@git.example/a/b\n", "a GitHub token"),
    ("/opt/app/.git/config", "\turl = https://oauth2:hunter2222@git.corp/a/b\n", LOGIN),
    ("/opt/app/.git/config", "\textraheader = AUTHORIZATION: basic eC1hY2Nlc3MtdG9rZW46aEo3\n", "a login of git"),
    ("/root/.gitconfig", '\textraHeader = "Authorization: Bearer hJ7kQ2mZp9xVwR4t"\n', "a login of git"),
    ("/opt/app/kubeconfig", f"    client-key-data: {base64.b64encode(KEY.encode()).decode()}\n", "a private key"),
    ("/etc/apt/apt.conf.d/80proxy", 'Acquire::http::Proxy "http://me:hunter2222@proxy.corp:3128";\n', LOGIN),
    ("/opt/app/Pipfile", 'url = "https://me:hunter2222@index.corp/simple"\n', LOGIN),
    ("/opt/app/Pipfile.lock", '"url": "https://me:hunter2222@index.corp/simple",\n', LOGIN),
    ("/srv/.creds", "https://me:hunter2222@git.corp\n", LOGIN),
    ("/srv/project/requirements.txt", f"git+https://{GITHUB}@git.example/a/b\n", "a GitHub token"),
    ("/srv/x/.netrc", "machine a.corp\nlogin me\npassword hunter22\n", "a password"),
    ("/srv/x/.npmrc", "//registry.example/:_authToken=0a1b2c3d-4e5f\n", "a token of npm"),
    ("/srv/x/.npmrc", f"//registry.example/:_authToken={NPM}\n", "an npm token"),
    ("/srv/.condarc", f"channels: [https://h.corp/t/ab-{DRAWN_ID}/me]\n", "a token of conda"),
    ("/srv/.docker/config.json", '{"auths": {"a.corp": {"auth": "bWU6aHVudGVyMjI="}}}', "a login of a registry"),
    ("/srv/.aws/credentials", f"[default]\naws_access_key_id = {AWS}\n", "an AWS access key"),
    ("/opt/app/.env", f"HF_TOKEN={HUGGING_FACE}\n", "a Hugging Face token"),
    ("/root/.netrc.bak", "machine a.corp login me password hunter22\n", "a password"),
    ("/root/.netrc~", "machine a.corp login me password hunter22\n", "a password"),
    ("/opt/app/.env", "DB=1\nexport SESSION_SECRET='0a1b2c3d4e5f6a7b8c'\n", "a secret (SESSION_SECRET)"),
    ("/etc/environment", f"WANDB_API_KEY={'0a1b2c3d' * 5}\n", "a secret (WANDB_API_KEY)"),
    ("/etc/profile.d/job.sh", f"export GITLAB={GITLAB}\n", "a GitLab token"),
    ("/opt/app/settings.yaml", f"openai: {OPENAI}\n", "an API key"),
    *(("/opt/app/settings.yaml", f"x: '{token}'\n", kind) for kind, token in OTHERS.items()),
    ("/opt/app/service.json", json.dumps({"private_key": KEY}), f"{THEIRS}private-key"),
    ("/opt/app/deploy_key", KEY, f"{THEIRS}private-key"),
    ("/opt/app/data.bin", f"\0{GITHUB}", f"{THEIRS}github-pat"),
    (f"{PACKAGES}/lib/settings.py", f'"{GITHUB}"', f"{THEIRS}github-pat"),
    ("/opt/app/examples/run.py", f'"{GITHUB}"', f"{THEIRS}github-pat"),
    ("/root/.config/a/auth.json", '{"token": "d8e8fca2dc0f896fd7cb4cb0031ba249"}', "a random word behind 'token'"),
    ("/root/.config/a/api_key", "d8e8fca2dc0f896fd7cb4cb0031ba249\n", "a random word, and is called like a secret"),
    ("/etc/yum.repos.d/x.repo", "[x]\nusername=me\npassword=hunter\nenabled=1\n", "a password"),
    ("/srv/x/.msmtprc", "host a.corp\nuser me\npassword hunter\n", "a password"),
    ("/srv/x/.curlrc", '-s\nuser = "me:hunter"\n', "a password"),
    ("/srv/x/.curlrc", "--proxy-user me:hunter\n", "a password"),
    ("/root/.config/curlrc", "user = me:hunter\n", "a password"),
    ("/etc/msmtprc", "password hunter\n", "a password"),
    ("/opt/app/.env", "DB_HOST=a\nDB_PASSWORD=hunter22\n", "a password"),
    ("/opt/app/prod.env", "export PGPASSWORD='hunter22'\n", "a password"),
    ("/opt/app/db.yaml", "password: 7Gq2xK9wLmT4vB8nRz5pYc3d\n", "a random word behind 'password'"),
    ("/opt/app/rclone.conf", "[s]\npass = 7Gq2xK9wLmT4vB8nRz5p", "a secret (pass)"),
    (f"{PACKAGES}/a-1.dist-info/direct_url.json", f'{{"url": "https://{GITHUB}@git.example/a/b"}}', "a GitHub token"),
]
# fmt: on


@pytest.mark.parametrize(("path", "text", "kind"), SECRETS)
def test_secrets_are_found(path: str, text: str, kind: str) -> None:
    assert secret_check().check_content(path, text.encode()) == f"{path} ({kind})"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/opt/app/pip.conf", "[global]\nindex-url = https://index.example/simple\n"),
        ("/opt/app/.git/config", "url = https://git.example/a/b\nurl = git@git.example:a/b\nurl = ssh://git@git.example/a/b\n"),
        ("/root/.gitconfig", "extraheader = AUTHORIZATION: basic ***\n"),
        ("/opt/app/Makefile", "fetch:\n\tcurl https://$(USER):$(TOKEN)@host/x https://user:password@host\n"),
        ("/opt/app/client.py", 'connect("https://me:hunter2222@index.corp")\n'),
        ("/opt/app/README.txt", "https://user:password@example.com and https://user:pass@host\n"),
        ("/opt/app/links.yaml", "x: https://forum.example/t/cuda-12-4-and-driver-550-54/1234\n"),
        ("/opt/app/run.sh", 'curl "https://$USER:$TOKEN@host/x"; export API_TOKEN=${API_TOKEN:-none}\n'),
        ("/opt/app/.env", "API_KEY=your-api-key-goes-here-1\nTOKEN=\nSECRET_FILE=/run/secrets/key1234567\n"),
        ("/opt/app/.env", "TOKENIZERS_PARALLELISM=false\nKEYBOARD=us-international-105keys\n"),
        ("/opt/app/.npmrc", "//registry.example/:_authToken=${NPM_TOKEN}\n"),
        ("/opt/app/.env", "POSTGRES_PASSWORD=postgres\nDB_PASS=${DB_PASS1}\nBYPASS=abcd12345\n"),
        ("/opt/app/.env.example", "DB_PASSWORD=hunter22\n"),
        ("/opt/app/.env", "DB_PASSWORD=/run/secrets/db_1\nDB_PASS='./secrets/db_2'\n"),
        ("/etc/yum.repos.d/x.repo", "[x]\npassword=\nenabled=1\n#password=hunter\nproxy_password=$password\n"),
        ("/srv/x/.curlrc", 'user-agent = "a:b"\nurl = "https://a.corp:80/"\nuser = me\n'),
        ("/srv/x/.msmtprc", "passwordeval pass show mail\n"),
        ("/opt/app/tests/server.key", KEY),
        ("/opt/app/server.py", f"PEM = '''{KEY[:20]}'''"),
        ("/opt/app/node_modules/x/.npmrc", f"//r/:_authToken={NPM}"),
        ("/opt/app/public.txt", "-----BEGIN PUBLIC KEY-----\nMIIB\n"),
        ("/opt/app/lock.json", '{"sha512": "sha512-Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1ub3A=="}'),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_secret_is_not_found(path: str, text: str) -> None:
    assert secret_check().check_content(path, text.encode()) == ""


@pytest.mark.slow
def test_nothing_is_found_among_installed_packages() -> None:
    """All files of this Python's environment, with the records of its packages."""
    check = secret_check.__wrapped__()
    rows = []
    for folder, _, names in os.walk(sys.prefix):
        for path in (f"{folder}/{name}" for name in names if not name.endswith(".pyc")):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                rows.append((path, "file", status.st_size, b""))
    assert check.check_paths(rows, lambda path: Path(path).read_bytes()) == []
    small = (path for path, _, size, _ in rows if size <= 1 << 20)
    assert [found for path in small if (found := check.check_content(path, Path(path).read_bytes()))] == []


@pytest.mark.parametrize(
    "word", ["d8e8fca2dc0f896fd7cb4cb0031ba249", "7Gq2xK9wLmT4vB8nRz5pYc3d", "aVd3+x/9Kf2mQ8sLp0Zr7w=="]
)
def test_random_words(word: str) -> None:
    assert is_random(word)


@pytest.mark.parametrize(
    "word",
    ["Ipv6CidrAssociations", "a1" * 20, "0" * 32, "short1A2", "your-token-12345678", "${TOKEN_1234567890_2}", "text"],
)
def test_other_words(word: str) -> None:
    assert not is_random(word)


def test_passwords_of_addresses() -> None:
    assert passwords_in("https://me:hunter2222@a.test/x and https://a.test/y") == ["hunter2222"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "abcd"),
        ("X", HUGGING_FACE),
        ("X", "https://me:hunter22@host/x"),
        ("X", KEY),
        ("PASSWORD", "hunter"),
    ],
)
def test_variables_are_secret_by_name_or_value(name: str, value: str) -> None:
    assert is_secret_variable(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KEY_FILE", "/etc/key"),
        ("TOKEN", ""),
        ("PATH", "/a:/b"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TOKENIZER", "fast"),
        ("MAX_TOKENS", "4096"),
        ("URL", "https://host:80/x@y"),
    ],
)
def test_other_variables_are_not(name: str, value: str) -> None:
    assert not is_secret_variable(name, value)


def test_a_value_says_what_kind_of_secret_it_is() -> None:
    assert secret_kind(f"Bearer {GITHUB}") == "a GitHub token"
    assert secret_kind("https://host/x") is None


def test_a_password_that_ends_like_an_example_is_a_password() -> None:
    address = b"[global]\nindex-url = https://user:hunter2token@packages.example.com/simple\n"
    path = "/home/u/venv/pip.conf"
    assert secret_check().check_content(path, address) == f"{path} (an address with a password)"
    assert secret_check().check_content(path, address.replace(b"hunter2token", b"my-token")) == ""
