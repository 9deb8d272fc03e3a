"""Configuration files of installers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.key_settings import Configuration, configuration


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path


def _settings(home: Path, **env: str) -> Configuration:
    found = configuration(
        {"HOME": str(home), "XDG_CONFIG_DIRS": str(home / "xdg"), **env},
        str(home / "job"),
        "",
        NodeFiles(FactCache(None)),
    )
    ours = [line for line in found.lines if "test" in line or "netrc" in line or "secret" in line or "only" in line]
    return found._replace(lines=tuple(ours))


def _write(home: Path, name: str, text: str) -> None:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text(text)


def test_indexes_of_pip_come_in_order_and_without_credentials(home: Path) -> None:
    _write(
        home,
        ".config/pip/pip.conf",
        "[global]\nindex_url = https://u:p@a.test/\n[install]\nextra-index-url=\n https://b.test/\n https://c.test/\n",
    )
    assert _settings(home).lines == (
        "pip global index-url = https://a.test/",
        "pip install extra-index-url = https://b.test/ https://c.test/",
    )


def test_settings_without_effect_on_the_installation_are_left_out(home: Path) -> None:
    _write(
        home, ".pip/pip.conf", "[global]\ncache-dir=/test\ntimeout=3\ndisable-pip-version-check=test\nonly-binary=x\n"
    )
    assert _settings(home).lines == ("pip global only-binary = x",)


def test_uv_reads_the_project_and_the_user(home: Path) -> None:
    _write(
        home,
        "job/pyproject.toml",
        "[tool.uv]\ncache-dir='/test'\n[[tool.uv.index]]\nname='x'\nurl='https://u:p@a.test/'\n",
    )
    _write(home, ".config/uv/uv.toml", "extra-index-url = ['https://b.test/']\n")
    assert _settings(home).lines == ("uv extra-index-url = https://b.test/", "uv index.url = https://a.test/")
    assert _settings(home, UV_NO_CONFIG="1").lines == ()


def test_of_a_netrc_only_its_presence_is_reported(home: Path) -> None:
    _write(home, ".netrc", "machine a.test login b password hunter2\n")
    assert _settings(home).lines == ()  # credentials are not part of it, unless an index may need them
    assert _settings(home, PIP_EXTRA_INDEX_URL="https://a.test/simple").lines == ("netrc is there",)


def test_secrets_of_conda_and_pip_are_not_disclosed(home: Path) -> None:
    _write(home, ".condarc", "channels:\n  - https://conda.test/t/x\nauth_token: hunter2\n# hunter2 test\n")
    _write(home, ".config/pip/pip.conf", "[global]\npassword = hunter2\n")
    assert "hunter2" not in repr(_settings(home))
    assert "conda https = - https://conda.test/t/x" in _settings(home).lines


def test_folders_of_wheels_are_found_wherever_they_are_named(home: Path) -> None:
    for name in ("one", "two", "job/three"):
        (home / name).mkdir()
    _write(home, ".config/pip/pip.conf", "[global]\nfind-links = ~/one https://x.test/\n")
    found = _settings(home, PIP_FIND_LINKS="three", UV_FIND_LINKS=f"file://{home}/two")
    assert set(found.find_links) == {f"{home}/one", f"{home}/two", f"{home}/job/three"}


@pytest.mark.parametrize("name", [".config/pip/pip.conf", ".config/uv/uv.toml", "job/pyproject.toml", ".condarc"])
def test_damaged_files_are_no_error(home: Path, name: str) -> None:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_bytes(b"\xff\x00[[[=\n= x\n")
    _settings(home)
