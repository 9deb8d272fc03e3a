"""The process in a container: the image's command, the user's, and the host's variables that are passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptError, UsageError
from bootseer.image.containers.process import Process, ProcessOptions, process_of

IMAGE = {
    "config": {
        "Entrypoint": ["/entry"],
        "Cmd": ["serve"],
        "Env": ["PATH=/opt/bin:/bin", "A=image", "ODD"],
        "WorkingDir": "/work",
        "User": "7:8",
    }
}


def process(
    words: ProcessOptions, tmp_path: Path, host_env: dict[str, str] | None = None, image: Any = IMAGE
) -> Process:
    return process_of(image, words, tmp_path, host_env or {})


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (ProcessOptions(), ("/entry", "serve")),
        (ProcessOptions(command=("train", "--x")), ("/entry", "train", "--x")),
        (ProcessOptions(entrypoint="/other"), ("/other",)),
        (ProcessOptions(entrypoint="", command=("train",)), ("train",)),
    ],
)
def test_commands_are_put_together_as_engines_do(tmp_path: Path, words: ProcessOptions, args: tuple[str, ...]) -> None:
    assert process(words, tmp_path).args == args


def test_the_image_tells_user_folder_and_variables(tmp_path: Path) -> None:
    found = process(ProcessOptions(), tmp_path)
    assert (found.user.uid, found.user.gid, found.cwd) == (7, 8, "/work")
    assert found.env == {"PATH": "/opt/bin:/bin", "A": "image", "HOME": "/"}


def test_options_of_the_user_take_precedence_over_the_image_s(tmp_path: Path) -> None:
    words = ProcessOptions(env=("A=mine", "HOST", "NOT_SET"), workdir="/elsewhere", user="0")
    found = process(words, tmp_path, {"HOST": "h", "OTHER": "o"})
    assert found.env["A"] == "mine"
    assert found.env["HOST"] == "h"
    assert {"OTHER", "NOT_SET"}.isdisjoint(found.env)
    assert (found.cwd, found.user.uid) == ("/elsewhere", 0)


def test_identity_and_destination_of_events_pass_and_nothing_else(tmp_path: Path) -> None:
    host = {
        "BOOTSEER_JOB": "moe",
        "TRACEPARENT": "00-x",
        "SLURM_PROCID": "3",
        "MASTER_ADDR": "n0",
        "BOOTSEER_SPOOL": "/here",
        "AWS_SECRET_ACCESS_KEY": "s",
        "LD_PRELOAD": "/x.so",
        "PATH": "/host",
    }
    env = process(ProcessOptions(), tmp_path, host).env
    assert {name for name in host if name in env} == {
        "BOOTSEER_JOB",
        "TRACEPARENT",
        "SLURM_PROCID",
        "MASTER_ADDR",
        "PATH",
    }
    assert env["PATH"] == "/opt/bin:/bin"


def test_secrets_pass_only_when_they_are_named(tmp_path: Path) -> None:
    host = {
        "SLURM_JWT": "s3cret",
        "SLURM_JOB_ID": "7",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=s3cret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:s3cret@collector:4318/?token=s3cret",
        "PET_RDZV_TOKEN": "s3cret",
        "SKYPILOT_API_SECRET": "s3cret",
        "PMIX_PASSWORD": "s3cret",
        "SLURM_SACK_KEY": "s3cret",
        "SLURM_DB_PASS": "s3cret",
        "PET_REGISTRY_AUTH": "s3cret",
        "SKYPILOT_CRED": "s3cret",
        "BOOTSEER_ALERT_TO": "slack=https://hooks.example/T0/s3cret",
        "NCCL_IB_PKEY": "0",
        "http_proxy": "http://me:s3cret@proxy:3128/",
        "https_proxy": "me:s3/cr@s3cret@proxy:3128",
        "no_proxy": "localhost,10.0.0.0/8",
        "HTTPS_PROXY": "http://me:s3cret@proxy:3128",
    }
    env = process(ProcessOptions(), tmp_path, host).env
    assert not [name for name in host if "cret" in env.get(name, "")]
    assert (env["SLURM_JOB_ID"], env["NCCL_IB_PKEY"]) == ("7", "0")
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318/?token="
    assert (env["http_proxy"], env["https_proxy"]) == ("http://proxy:3128/", "proxy:3128")
    assert (env["no_proxy"], env["HTTPS_PROXY"]) == (host["no_proxy"], "http://proxy:3128")
    named = process(ProcessOptions(env=("SLURM_JWT", "http_proxy", "PET_RDZV_TOKEN=mine")), tmp_path, host).env
    assert (named["SLURM_JWT"], named["http_proxy"]) == (host["SLURM_JWT"], host["http_proxy"])
    assert named.get("PET_RDZV_TOKEN") == "mine"


@pytest.mark.parametrize(
    "words", [ProcessOptions(entrypoint=""), ProcessOptions(workdir="relative"), ProcessOptions(env=("=x",))]
)
def test_words_that_cannot_be_are_usage_errors(tmp_path: Path, words: ProcessOptions) -> None:
    with pytest.raises(UsageError):
        process(words, tmp_path)


@pytest.mark.parametrize(
    "config", [[], {"Cmd": "sh"}, {"Cmd": ["x"], "Env": [1]}, {"Cmd": ["x"], "User": 7}, {"Cmd": ["a\0b"]}]
)
def test_a_configuration_that_is_none_is_corrupt(tmp_path: Path, config: Any) -> None:
    with pytest.raises(CorruptError):
        process(ProcessOptions(), tmp_path, image={"config": config or [1]})


def test_an_image_without_configuration_runs_what_it_is_told(tmp_path: Path) -> None:
    found = process(ProcessOptions(command=("sh",)), tmp_path, image={"config": None})
    assert (found.args, found.cwd, found.user.uid) == (("sh",), "/", 0)
    assert found.env["PATH"].endswith("/bin")
