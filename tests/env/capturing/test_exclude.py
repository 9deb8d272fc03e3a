"""The rules about excluded paths: which ones match, and which similar ones do not."""

from __future__ import annotations

import pytest

from bootseer.env.capturing.exclude import RULES, Exclusions, caches_of, credentials_of

RULE = Exclusions(homes=["/root", "/data/people/me"], own=["/data/spool"], caches=["/data/pip"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/proc/1/status", "kernel"),
        ("/tmp/x/y", "temporary"),
        ("/var/log/dpkg.log", "log"),
        ("/root/.cache/pip/http/1", "package cache"),
        ("/home/somebody/.cache/uv/wheels", "package cache"),
        ("/data/people/me/.npm/_cacache/x", "package cache"),
        ("/data/pip/http", "package cache"),
        ("/var/lib/apt/lists/x", "package cache"),
        ("/opt/conda/pkgs/numpy", "conda packages"),
        ("/root/miniconda3/pkgs/numpy", "conda packages"),
        ("/srv/app/run.pid", "pid file"),
        ("/srv/app/.git/index.lock", "git lock"),
        ("/var/lib/dpkg/lock-frontend", "package database lock"),
        ("/var/lib/dpkg/status-old", "backup of a database"),
        ("/etc/passwd-", "backup of a database"),
        ("/var/cache/ldconfig/aux-cache", "generated cache"),
        ("/var/cache/debconf/templates.dat-old", "generated cache"),
        ("/home/u/.nv/ComputeCache/index", "generated cache"),
        ("/root/.conda/environments.txt", "generated cache"),
        ("/srv/core.31337", "core dump"),
        ("/root/.bash_history", "history"),
        ("/home/u/.netrc", "credentials"),
        ("/root/.ssh/id_ed25519", "credentials"),
        ("/root/.docker/config.json", "credentials"),
        ("/root/.cache/huggingface/token", "credentials"),
        ("/etc/shadow", "credentials"),
        ("/etc/apt/auth.conf.d/corp.conf", "credentials"),
        ("/srv/app/train.keytab", "credentials"),
        ("/etc/hosts", "names of machines"),
        ("/etc/machine-id", "machine identity"),
        ("/etc/ssh/ssh_host_rsa_key", "machine identity"),
        ("/etc/mtab", "mount table"),
        ("/data/spool/events", "own folder"),
    ],
)
def test_a_rule_leaves_it_out(path: str, name: str) -> None:
    rule = RULE.rule_on_path(path)
    assert rule is not None
    assert rule.name == name


def test_homes_may_lie_in_one_another_and_be_the_root_folder() -> None:
    rules = Exclusions(homes=["/root", "/root/people/me", "/"])
    for home in ("", "/root", "/root/people/me", "/home/u"):
        assert (found := rules.rule_on_path(f"{home}/.kube/config")) is not None
        assert found.name == "credentials"
    assert rules.rule_on_path("/etc/profile") is None


def test_settings_move_credentials() -> None:
    env = {"HF_HOME": "/data/hf/", "KUBECONFIG": "/data/a:/data/b", "NETRC": "/data/netrc", "DOCKER_CONFIG": ""}
    rules = Exclusions(credentials=credentials_of(env))
    assert all(rules.rule_on_path(path) for path in ("/data/hf/token", "/data/a", "/data/b", "/data/netrc"))
    assert rules.rule_on_path("/data/hf/hub/model") is None


def test_the_owner_leaves_out_and_keeps_by_patterns() -> None:
    rules = Exclusions(leave_out=["~/.tool/*.key", "/opt/app/login/"], keep=["~/.kube", "/opt/app/login/public"])
    for path in ("/root/.tool/a.key", "/home/u/.tool/deep/b.key", "/opt/app/login", "/opt/app/login/token"):
        assert (found := rules.forbidding_rule(path)) is not None
        assert found.name == "left out by the owner"
    for path in ("/root/.kube/config", "/opt/app/logins", "/srv/.tool/a.key"):
        assert rules.forbidding_rule(path) is None
    assert rules.is_kept("/opt/app/login/public/a")
    # No option makes the machine's own files part of a snapshot.
    assert Exclusions(keep=["/proc/*"]).rule_on_path("/proc/1/status") is not None


def test_files_in_a_scratch_folder_are_left_out_but_not_forbidden() -> None:
    assert RULE.rule_on_path("/tmp/project/file") is not None
    assert RULE.forbidding_rule("/tmp/project/file") is None
    assert RULE.forbidding_rule("/root/.azure/deep/file") is not None


@pytest.mark.parametrize(
    "path",
    [
        "/srv/app/uv.lock",
        "/srv/app/package-lock.json",
        "/root/.ssh/known_hosts",
        "/root/.ssh/config",
        "/root/.cache/huggingface/hub/model.bin",
        "/root/.cache/torch/kernel.so",
        "/usr/lib/python3/dist-packages/x/__pycache__/y.cpython-311.pyc",
        "/etc/passwd",
        "/etc/ld.so.cache",
        "/etc/hosts.allow",
        "/var/lib/dpkg/status",
        "/usr/share/man/man5/core.5",
        "/srv/tmp/x",
        "/rooted/.netrc",
        "/srv/.netrc",
        "/opt/envs/pkgs/x",
        "/opt/x/site-packages/tool/daemon.pid",
        "/data/spooled",
        "/processes",
    ],
)
def test_what_looks_alike_is_kept(path: str) -> None:
    assert RULE.rule_on_path(path) is None


def test_only_empty_lock_files_are_transient() -> None:
    assert RULE.rule_for("/srv/build/lock", size=0) is not None
    assert RULE.rule_for("/srv/env/.lock", size=0) is not None
    assert RULE.rule_for("/srv/build/lock", size=3) is None
    assert RULE.rule_for("/srv/lock", kind="directory", size=0) is None
    assert RULE.rule_for("/srv/node_modules/x/a.lock", size=0) is None
    assert RULE.rule_for("/srv/block", size=0) is None


def test_sockets_and_devices_are_left_out_wherever_they_are() -> None:
    assert RULE.rule_for("/srv/x", kind="socket") is not None
    assert RULE.rule_for("/srv/x", kind="device") is not None
    assert RULE.rule_for("/srv/x", kind="fifo") is None


def test_a_rule_tells_whether_a_start_misses_what_it_leaves_out() -> None:
    assert (found := RULE.rule_on_path("/root/.netrc")) is not None
    assert found.warn
    assert (found := RULE.rule_on_path("/var/log/x")) is not None
    assert not found.warn
    assert RULE.rule_on_path("/usr/bin/tool") is None


def test_real_folders_are_those_of_known_homes() -> None:
    folders = RULE.places(lambda rule: rule.passthrough)
    assert {"/proc", "/tmp", "/root/.cache/pip", "/data/people/me/.cache/uv", "/data/spool", "/data/pip"} <= set(
        folders
    )
    assert not [path for path in folders if "~" in path or "pkgs" in path]


def test_settings_name_further_caches() -> None:
    env = {"PIP_CACHE_DIR": "/c/pip/", "UV_CACHE_DIR": "relative", "XDG_CACHE_HOME": "/x"}
    assert caches_of(env) == ["/c/pip", "/x/pip", "/x/uv", "/x/yarn"]
    assert caches_of({"PIP_CACHE_DIR": "/"}) == []


def test_every_rule_says_why_and_has_a_name_of_its_own() -> None:
    assert all(rule.reason and rule.name for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)
