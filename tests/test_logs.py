"""The content, destination and size of logs, of the program as users run it and in a daemon's file."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import __version__
from bootseer.logs import FILE_BYTES, without_secrets

_WRITER = """
import logging, os, sys
from pathlib import Path
from bootseer import logs
file = Path(sys.argv[1])
os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
logs.set_up(os.environ, file=file)
log = logging.getLogger("bootseer.fetch.block_reads")
for number in range(int(sys.argv[2])):
    log.info("line %d %s", number, "x" * 1000)
log.debug("never")
sys.stderr.write("the interpreter's own words\\n")
"""


def ran(tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", *words],
        env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:pw@host:5000/v2/?a=1", "GET https://***@host:5000/v2/?a=1"),
        ("PUT http://me:p@w@host/x for you@host", "PUT http://***@host/x for you@host"),
        ("Authorization: Bearer abc.def next", "Authorization: Bearer *** next"),
        ("url?X-Amz-Signature=abc&x=1", "url?X-Amz-Signature=***&x=1"),
        ("HF_TOKEN=hf_abc password: 'pw'", "HF_TOKEN=*** password: '***'"),
        ("AWS_SECRET_ACCESS_KEY=abc x", "AWS_SECRET_ACCESS_KEY=*** x"),
        ("https://a.blob.example/c?sv=1&sig=abc%3D&se=2", "https://a.blob.example/c?sv=1&sig=***&se=2"),
        ("AccountName=a;AccountKey=abc==;x", "AccountName=a;AccountKey=***;x"),
        ("-Dfs.s3a.secret.key=abc -Dx=1", "-Dfs.s3a.secret.key=*** -Dx=1"),
        ("-Dfs.azure.account.key.a.dfs.core.windows.net=b==", "-Dfs.azure.account.key.a.dfs.core.windows.net=***"),
        ("serve --password geheim1 --db-token 'abc' --port 80", "serve --password *** --db-token '***' --port 80"),
        ("['--api-key', 'abc', '--no-token', '--x']", "['--api-key', '***', '--no-token', '--x']"),
        ("X=Basic dXNlcjpwYXNzd29yZA== y", "X=Basic *** y"),
        (
            "--tokenizer gpt2 --token-file /a basic understanding",
            "--tokenizer gpt2 --token-file /a basic understanding",
        ),
        ("tokenizer=gpt2 the token of a block", "tokenizer=gpt2 the token of a block"),
    ],
)
def test_secrets_are_not_in_any_line(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.slow
def test_nothing_is_logged_unless_it_is_asked_for(tmp_path: Path) -> None:
    quiet = ran(tmp_path, "ckpt", "list", "nowhere", BOOTSEER_LOG="")
    assert len(quiet.stderr.splitlines()) == 1
    told = ran(tmp_path, "--debug", "ckpt", "list", "nowhere")
    assert told.returncode == quiet.returncode
    assert re.search(r"^\S+Z debug   cli \[\d+ MainThread\] the command failed\n    Traceback", told.stderr, re.M)
    assert told.stderr.splitlines()[-1] == quiet.stderr.splitlines()[-1]


def test_levels_by_package_and_lines_of_json(tmp_path: Path) -> None:
    told = ran(tmp_path, "ckpt", "list", "nowhere", BOOTSEER_LOG="fetch=info, cli=debug", BOOTSEER_LOG_FORMAT="json")
    begin, line = map(json.loads, told.stderr.splitlines()[:2])
    assert (begin["level"], begin["logger"]) == ("info", "bootseer.cli.main")
    assert begin["message"].startswith(f"bootseer {__version__}, Python ")
    assert (line["level"], line["logger"]) == ("debug", "bootseer.cli")
    assert "Traceback" in line["traceback"]
    wrong = ran(tmp_path, "ckpt", "list", "nowhere", BOOTSEER_LOG="fetch=loud")
    assert (wrong.returncode, "'loud' is not a level" in wrong.stderr) == (2, True)


def test_a_daemons_file_is_bounded_and_closed_to_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", _WRITER, log, "2500"], check=True, timeout=300)
    text, older = log.read_text(), (tmp_path / "log.1").read_text()
    assert len(text) <= FILE_BYTES and len(older) <= FILE_BYTES
    assert "line 2499 " in text and "never" not in text
    assert text.endswith("the interpreter's own words\n"), "standard error is redirected to the new file"
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    numbers = [int(number) for number in re.findall(r" line (\d+) ", older + text)]
    assert numbers == list(range(numbers[0], 2500)), "none is lost in between"
