"""What looks like a secret, and what only looks so."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from bootseer.env.capturing.secrets import HEAD_BYTES, find, is_secret_variable, is_worth_reading, value_kind

# Put together here, so that nobody takes this file for a leak.
GITHUB = "gh" + "p_" + "a1B2c3D4e5" * 4
HUGGING_FACE = "hf" + "_" + "AbCdEfGh12" * 4
AWS = "AKI" + "A" + "Q3EGJKLMNPRSTUVW"
GITLAB = "glpat" + "-" + "x1y2z3x1y2z3x1y2z3x1"
NPM = "np" + "m_" + "a1B2" * 9
OPENAI = "s" + "k-proj-" + "aB3" * 16
KEY = "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END"

PACKAGES = "/opt/env/lib/python3.12/site-packages"
LOGIN = "an address with a password"

# fmt: off
SECRETS = [
    ("/root/.config/pip/pip.conf", "index-url = https://me:s3cr3tpw@index.example/simple\n", LOGIN),
    ("/opt/venv/pip.conf", f"extra-index-url = https://{'0a1b2c3d' * 4}@index.example/simple\n", LOGIN),
    ("/root/.config/uv/uv.toml", 'url = "https://__token__:s3cr3tpw@index.example/simple"\n', LOGIN),
    ("/opt/app/.git/config", f"\turl = https://x-access-token:{GITHUB}@git.example/a/b\n", "a GitHub token"),
    ("/opt/app/.git/config", "\turl = https://oauth2:hunter2222@git.corp/a/b\n", LOGIN),
    ("/srv/project/requirements.txt", f"git+https://{GITHUB}@git.example/a/b\n", "a GitHub token"),
    ("/srv/x/.netrc", "machine a.corp\nlogin me\npassword hunter22\n", "a password"),
    ("/srv/x/.npmrc", "//registry.example/:_authToken=0a1b2c3d-4e5f\n", "a token of npm"),
    ("/srv/x/.npmrc", f"//registry.example/:_authToken={NPM}\n", "an npm token"),
    ("/srv/.docker/config.json", '{"auths": {"a.corp": {"auth": "bWU6aHVudGVyMjI="}}}', "a login of a registry"),
    ("/srv/.aws/credentials", f"[default]\naws_access_key_id = {AWS}\n", "an AWS access key"),
    ("/opt/app/.env", f"HF_TOKEN={HUGGING_FACE}\n", "a Hugging Face token"),
    ("/opt/app/.env", "DB=1\nexport SESSION_SECRET='0a1b2c3d4e5f6a7b8c'\n", "a secret (SESSION_SECRET)"),
    ("/etc/environment", f"WANDB_API_KEY={'0a1b2c3d' * 5}\n", "a secret (WANDB_API_KEY)"),
    ("/etc/profile.d/job.sh", f"export GITLAB={GITLAB}\n", "a GitLab token"),
    ("/opt/app/settings.yaml", f"openai: {OPENAI}\n", "an API key"),
    ("/opt/app/service.json", '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}', "a private key"),
    ("/opt/app/deploy_key", KEY, "a private key"),
    (f"{PACKAGES}/a-1.dist-info/direct_url.json", f'{{"url": "https://{GITHUB}@git.example/a/b"}}', "a GitHub token"),
]
# fmt: on


@pytest.mark.parametrize(("path", "text", "kind"), SECRETS)
def test_secrets_are_found(path: str, text: str, kind: str) -> None:
    assert is_worth_reading(path, len(text))
    assert find(path, text.encode()) == kind


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/opt/app/pip.conf", "[global]\nindex-url = https://index.example/simple\n"),
        ("/opt/app/.git/config", "url = https://git.example/a/b\nurl = git@git.example:a/b\nurl = ssh://git@git.example/a/b\n"),
        ("/opt/app/README.txt", "https://user:password@example.com and https://user:pass@host\n"),
        ("/opt/app/run.sh", 'curl "https://$USER:$TOKEN@host/x"; export API_TOKEN=${API_TOKEN:-none}\n'),
        ("/opt/app/.env", "API_KEY=your-api-key-goes-here-1\nTOKEN=\nSECRET_FILE=/run/secrets/key1234567\n"),
        ("/opt/app/.env", "TOKENIZERS_PARALLELISM=false\nKEYBOARD=us-international-105keys\n"),
        ("/opt/app/.npmrc", "//registry.example/:_authToken=${NPM_TOKEN}\n"),
        ("/opt/app/tests/server.key", KEY),
        ("/opt/app/server.py", f"PEM = '''{KEY[:20]}'''"),
        ("/opt/env/lib/python3.12/site-packages/certifi/cacert.pem", KEY),
        ("/opt/env/lib/python3.12/site-packages/lib/settings.json", f'"{GITHUB}"'),
        ("/opt/app/node_modules/x/.npmrc", f"//r/:_authToken={NPM}"),
        ("/opt/app/public.txt", "-----BEGIN PUBLIC KEY-----\nMIIB\n"),
        ("/opt/app/data.bin", f"\0{GITHUB}"),
        ("/opt/app/data.parquet", GITHUB),
        ("/opt/app/lock.json", '{"sha512": "sha512-Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1ub3A=="}'),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_secret_is_not_found(path: str, text: str) -> None:
    assert not is_worth_reading(path, len(text)) or find(path, text.encode()) is None


def test_large_files_and_empty_ones_are_not_read() -> None:
    assert not is_worth_reading("/opt/app/.env", 0)
    assert not is_worth_reading("/opt/app/.env", (1 << 20) + 1)


def test_nothing_is_found_among_installed_packages_and_the_standard_library() -> None:
    found = []
    for root in {sys.prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink() and is_worth_reading(str(path), path.stat().st_size):
                    with path.open("rb") as file:
                        kind = find(str(path), file.read(HEAD_BYTES))
                    found += [(path, kind)] if kind else []
    assert found == []


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
    assert value_kind(f"Bearer {GITHUB}") == "a GitHub token"
    assert value_kind("https://host/x") is None


def test_a_password_that_ends_like_an_example_is_a_password() -> None:
    address = b"[global]\nindex-url = https://user:hunter2token@packages.example.com/simple\n"
    assert find("/home/u/venv/pip.conf", address) == "an address with a password"
    assert find("/home/u/venv/pip.conf", address.replace(b"hunter2token", b"my-token")) is None
