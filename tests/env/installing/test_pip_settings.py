"""Reading pip's settings as pip does: compared with pip itself where possible."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bootseer.env.installing.pip_settings import settings, translate
from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.requirements import Requirements

pytestmark = pytest.mark.slow


def _settings(files, env=None):
    found = settings(env or {}, "/project", "/venv", "/home/me", files.get)
    return {each.name: (each.value, each.where) for each in found}


def test_later_files_outrank_earlier_ones_and_variables_outrank_all():
    files = {
        "/etc/xdg/pip/pip.conf": "[global]\ntimeout = 1\nretries = 1\nproxy = a\ncert = a\npre = yes\n",
        "/etc/pip.conf": "[global]\ntimeout = 2\nretries = 2\nproxy = b\ncert = b\n",
        "/home/me/.pip/pip.conf": "[global]\ntimeout = 3\nretries = 3\nproxy = c\n",
        "/home/me/.config/pip/pip.conf": "[global]\ntimeout = 4\nretries = 4\n",
        "/venv/pip.conf": "[global]\ntimeout = 5\n",
    }
    assert _settings(files, {"PIP_INDEX_URL": "x"}) == {
        "timeout": ("5", "/venv/pip.conf"),
        "retries": ("4", "/home/me/.config/pip/pip.conf"),
        "proxy": ("c", "/home/me/.pip/pip.conf"),
        "cert": ("b", "/etc/pip.conf"),
        "pre": ("yes", "/etc/xdg/pip/pip.conf"),
        "index-url": ("x", "PIP_INDEX_URL"),
    }


def test_the_section_of_the_command_outranks_the_global_one_of_any_file():
    files = {
        "/etc/pip.conf": "[install]\ntimeout = 1\n[list]\nformat = x\n",
        "/venv/pip.conf": "[global]\ntimeout = 2\n",
    }
    assert _settings(files) == {"timeout": ("1", "/etc/pip.conf")}


def test_a_named_file_replaces_the_user_s_and_outranks_the_environment_s():
    files = {
        "/home/me/.config/pip/pip.conf": "[global]\npre = yes\n",
        "/venv/pip.conf": "[global]\ntimeout = 1\n",
        "/mine.conf": "[global]\ntimeout = 2\n",
        "/project/own.conf": "[global]\ntimeout = 3\n",
    }
    assert _settings(files, {"PIP_CONFIG_FILE": "/mine.conf"}) == {"timeout": ("2", "/mine.conf")}
    assert _settings(files, {"PIP_CONFIG_FILE": "own.conf"}) == {"timeout": ("3", "/project/own.conf")}
    assert set(_settings(files, {"PIP_CONFIG_FILE": "/missing.conf"})) == {"pre", "timeout"}
    assert _settings(files, {"PIP_CONFIG_FILE": "/dev/null"}) == {}


def test_names_are_one_in_all_their_spellings():
    files = {"/etc/pip.conf": "[global]\nextra_index_url =\n    a\n    b\n--pre = yes\nempty =\n"}
    found = _settings(files, {"PIP_DEFAULT_TIMEOUT": "9", "PIP_VERSION": "24", "PIP_NO_INDEX": ""})
    assert found == {
        "extra-index-url": ("\na\nb", "/etc/pip.conf"),
        "pre": ("yes", "/etc/pip.conf"),
        "timeout": ("9", "PIP_DEFAULT_TIMEOUT"),
    }


def test_a_file_that_pip_could_not_read_is_reported():
    assert _settings({"/etc/pip.conf": "no section = here\n"}) == {"unreadable": ("", "/etc/pip.conf")}


@pytest.mark.parametrize("own", [True, False])
def test_pip_itself_finds_the_same(python, job_env, tmp_path, own):
    home = tmp_path / "home"
    config = home / "xdg" / "pip" / "pip.conf"
    for path, text in (
        (config, "[global]\ntimeout = 7\n[install]\nno-deps = yes\n"),
        (home / ".pip" / "pip.conf", "[global]\ntimeout = 8\nretries = 2\n"),
        (tmp_path / "environment" / "pip.conf", "[global]\nretries = 3\n"),
        (tmp_path / "own.conf", "[global]\nretries = 4\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    del job_env["PIP_CONFIG_FILE"]
    env = {**job_env, "XDG_CONFIG_HOME": str(home / "xdg"), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_PROXY": "p"}
    if own:
        env["PIP_CONFIG_FILE"] = str(tmp_path / "own.conf")

    def read(path):
        return Path(path).read_text() if Path(path).is_file() else None

    ours = {each.name: each.value for each in settings(env, str(tmp_path), python.prefix, str(home), read)}
    ran = subprocess.run(
        [python.executable, "-m", "pip", "config", "list"], env=env, capture_output=True, text=True, check=True
    )
    rank = {"global": 0, "install": 1, ":env:": 2}
    theirs = {}
    for line in sorted(ran.stdout.splitlines(), key=lambda line: rank[line.partition(".")[0]]):
        name, _, value = line.partition("=")
        if name != ":env:.config-file":
            theirs[name.partition(".")[2]] = value.strip("'")
    assert ours == theirs


@pytest.fixture
def translated(tmp_path):
    """`translated(text, ...)`: uv's arguments for the project's requirements files, the first with this text."""

    def call(text, files=(), env=None):
        for name, content in {"project/top.txt": text, **dict(files)}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        found = Requirements(env=env or {})
        found.add_files([("top.txt", False)], NodeFiles(FactCache(None)), str(tmp_path / "project"))
        return translate([], found, env or {}, lambda path: Path(path).exists())

    return call


def test_requirement_files_are_closed_over_what_they_include(translated):
    done = translated(
        "-r more/a.txt\n--constraint=more/c.txt  # why\n",
        {
            "project/more/a.txt": "-r b.txt\n-rb.txt\n--extra-index-url https://a/simple\n",
            "project/more/b.txt": "-r a.txt\n--pre\n",
            "project/more/c.txt": "--no-binary :all:\nx==1\n",
        },
    )
    assert done.environment["UV_INDEX"] == "https://a/simple"
    assert {"--prerelease=allow", "--no-binary"} < {*done.arguments}
    assert done.refusals == []


def test_what_cannot_be_read_is_reported(translated):
    (gone, remote) = translated("-r gone.txt\n-r https://host/r.txt\n").refusals
    assert "gone.txt: No such file" in gone
    assert remote == "https://host/r.txt cannot be read here"


@pytest.mark.parametrize("line", ["./pkg", "../pkg[extra]", "pkg @ file://{}/pkg", "git+https://h/r@main", "-e ."])
def test_requirements_whose_content_may_change_are_built_anew(translated, tmp_path, line):
    for name in ("pkg", "project/pkg"):
        (tmp_path / name).mkdir(parents=True)
    assert "--refresh" in translated(line.format(tmp_path)).arguments


@pytest.mark.parametrize("line", ["pkg==1.0", "./pkg-1-py3-none-any.whl", "pkg @ https://h/p-1.tar.gz", "# ./no"])
def test_requirements_with_a_fixed_content_are_not(translated, line):
    assert "--refresh" not in translated(line, {"project/pkg-1-py3-none-any.whl": ""}).arguments


def test_editables_from_version_control_digests_and_own_options_are_noted(translated):
    done = translated(
        "-e git+https://h/r#egg=r\na==1 \\\n  --hash=sha256:00 \\\n  --hash=sha256:11\nb --config-settings x=y\n"
    )
    assert "--require-hashes" in done.arguments
    assert done.refusals == [
        "the option config-settings of a requirement",
        "an editable requirement comes from version control, which uv does not install",
    ]


def test_an_option_that_is_cut_in_two_is_left_to_pip(translated):
    assert translated("--index-url https://host\\\n/simple\nx\n").refusals


def test_variables_are_put_in_and_comments_left_out(translated):
    text = "--index-url https://${TOKEN}@host/simple # ours\n--extra-index-url ${UNSET}\nx # y\n"
    done = translated(text, env={"TOKEN": "t"})
    assert done.environment["UV_DEFAULT_INDEX"] == "https://t@host/simple"
    assert done.environment["UV_INDEX"] == "${UNSET}"


def test_a_place_in_a_requirement_file_is_meant_from_there_if_it_is_there(translated, tmp_path):
    (tmp_path / "project/more/w").mkdir(parents=True)
    done = translated("-r more/a.txt", {"project/more/a.txt": "-f w\n-f gone\n"})
    assert done.environment["UV_FIND_LINKS"] == f"{tmp_path}/project/more/w"
