"""Inputs found in the text of setup scripts, in the ways people write them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.requirements import is_requirements_name
from bootseer.env.keys.script import Inputs, Reader, gather


def _read(folder: Path, text: str, env: dict[str, str] | None = None, *, program: bool = False) -> Inputs:
    """Parse a script in `folder`/scripts that runs in `folder`."""
    inputs = Inputs()
    path, variables = str(folder / "scripts/setup.sh"), {"HOME": str(folder / "home"), **(env or {})}
    reader = Reader(text, path, str(folder), variables, NodeFiles(FactCache(None)), inputs)
    (reader.read_program if program else reader.read_shell)()
    return inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "scripts/reqs/a.txt",
        "reqs.txt",
        "lib.sh",
        "tool.py",
        "data/x",
        "project/setup.py",
        "home/own.cfg",
        "locked/uv.lock",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "pip install -r reqs.txt",
        "pip3.11 install --requirement=reqs.txt",
        "python -m pip install -qr reqs.txt -r reqs.txt",
        "sudo -E /usr/bin/python3 -m pip install -rreqs.txt",
        "uv pip install --system -r reqs.txt",
        "uv pip sync reqs.txt",
        "if true; then pip install \\\n  -r 'reqs.txt'; fi",
        'REQ="reqs.txt"; pip install -r "$REQ"',
        "pip install -r ${REQ:-reqs.txt}",
        'bash -c "pip install -r reqs.txt"',
        "timeout 600 pip install -r $PWD/reqs.txt || exit 1",
        "x=$(pip install -r reqs.txt 2>&1)",
        "x=`pip install -r reqs.txt`",
        "bash <<EOF\npip install -r reqs.txt\nEOF",
        "(cd project && pip install -r ../reqs.txt)",
        "mkdir -p made/here && cd made/here && pip install -r ../../reqs.txt",
        "install() { pip install -r reqs.txt; }\ninstall",
        "X=$((1 << SHIFT))\npip install -r reqs.txt",
        "(( a = a << b ))\npip install -r reqs.txt",
        "cat >a <<'END-OF-FILE'\nx\nEND-OF-FILE\npip install -r reqs.txt",
        'cat >a <<"END OF FILE"\nx\nEND OF FILE\npip install -r reqs.txt',
        "cat >a <<!\nx\n!\npip install -r reqs.txt",
        'echo "run: cat <<EOF"\npip install -r reqs.txt\ncat <<EOF\nx\nEOF',
        "true # see <<EOF\npip install -r reqs.txt\ncat <<EOF\nx\nEOF",
        "cat <<'EOF' | sudo bash\npip install -r reqs.txt\nEOF",
        "cat > /opt/install <<EOF\npip install -r reqs.txt\nEOF",
        'eval "pip install -r reqs.txt"',
        "REQ=${REQ:-reqs.txt}\npip install -r $REQ",
        "if [ $GPU ]; then R=reqs.txt; else R=other.txt; fi\npip install -r $R",
        'case $GPU in 1) R=reqs;; *) R=other;; esac\npip install -r "$R.txt"',
        "for r in reqs other; do pip install -r $r.txt; done",
        "[ $GPU ] && MORE=-gpu\npip install -r reqs$MORE.txt",
        "pip install -r reqs$NOT_SET.txt",
        "F=reqs.txt; pip install -r $F; F=/opt/out; pip freeze > $F",
        "echo click >> reqs.txt; pip install -r reqs.txt",
        'run ${O[@]+"${O[@]}"} "$@"\npip install -r reqs.txt',
        "ARGS='-q -r reqs.txt'; pip install $ARGS",
        "pip install -r {reqs,other}.txt",
        "for r in {other,reqs}; do pip install -r $r.txt; done",
        "FILES='lib.sh reqs.txt'; for f in $FILES; do cat $f; done",
        "cat ${FILES:-lib.sh reqs.txt}",
        "# see \\\npip install -r reqs.txt",
        "pip install -r re\\\nqs.txt",
        "N=$(grep -c ')' x)\npip install -r reqs.txt\necho 'x'",
        "U=$(cat <<EOF\n1) don't\nEOF\n)\npip install -r reqs.txt\necho 'x'",
        'X="$(case $A in x) echo "a";; y) echo b;; esac)"\npip install -r reqs.txt',
        "M=\"${M:-don't}\"\npip install -r reqs.txt\necho 'x'; f() { x; }",
        "printf $'it\\'s'\npip install -r reqs.txt\necho 'x'",
    ],
)
def test_a_requirement_file_is_found_however_it_is_installed(folder: Path, text: str) -> None:
    assert str(folder / "reqs.txt") in _read(folder, text).requirement_files


@pytest.mark.parametrize(
    "text",
    [
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\npip install -r "$HERE/reqs/a.txt"',
        'HERE="$(dirname "$0")"; pip install -r $HERE/reqs/a.txt',
        'pip install -r "${BASH_SOURCE%/*}/reqs/a.txt"',
        'cd "$(dirname "$(readlink -f "$0")")"\npip install -r reqs/a.txt',
        "cd scripts\npip install -r reqs/a.txt",
        'cp "$(dirname "$0")/reqs/a.txt" reqs/a.txt\npip install -r reqs/a.txt',
        'pip install -r "$UNKNOWN/reqs/a.txt"',
        'pip install -r "$(git rev-parse --show-toplevel)/scripts/reqs/a.txt"',
    ],
)
def test_files_are_found_next_to_the_script(folder: Path, text: str) -> None:
    assert str(folder / "scripts/reqs/a.txt") in _read(folder, text).requirement_files


@pytest.mark.parametrize(
    "text", ["source lib.sh", ". ./lib.sh", "bash lib.sh -x", "sh -e lib.sh", "env A=1 bash lib.sh"]
)
def test_scripts_that_a_shell_reads_are_known_as_such(folder: Path, text: str) -> None:
    assert _read(folder, text).files[str(folder / "lib.sh")] is True


def test_programs_without_an_interpreter_line_and_scripts_named_like_requirements_are_followed(folder: Path) -> None:
    for name, text in (("setup.run", "./helper; bash requirements.sh"), ("helper", "pip install -r reqs.txt")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "requirements.sh").write_text("pip install -r scripts/reqs/a.txt")
    found = gather("setup.run", (), str(folder), {}, NodeFiles(FactCache(None)))
    assert list(found.requirement_files) == [str(folder / "reqs.txt"), str(folder / "scripts/reqs/a.txt")]


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e project",
        "pip install ./project[all]",
        "pip install -e 'project[dev]'",
        "cd project\npip install .",
        "cd project && python setup.py install",
    ],
)
def test_a_source_tree_that_is_installed_is_an_input(folder: Path, text: str) -> None:
    found = _read(folder, text)
    assert list(found.requirements.locals) == [str(folder / "project")]
    assert found.requirements.locals[str(folder / "project")] == ("-e" in text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cp -r data /srv/", ["data"]),
        ("python tool.py --input=data", ["data"]),
        ("cd data", []),
        ("mkdir -p data; chmod -R a+r data; ls data; [ -d data ]", []),
        ("export PATH=$PWD/data:$PATH", []),
        ("echo / ~ . .. /usr /tmp /opt data", []),
        ("cp -r /usr/share /srv/; rsync -a / /srv; cp -r ~ /srv", []),
    ],
)
def test_folders_count_where_a_program_reads_them(folder: Path, text: str, names: list[str]) -> None:
    assert list(_read(folder, text).folders) == [str(folder / name) for name in names]


def test_single_files_count_also_outside_of_the_job_but_not_those_of_packages(folder: Path) -> None:
    found = _read(folder, "cp ~/own.cfg /srv/own; /usr/bin/env true; cat /proc/version /etc/hostname")
    assert set(found.files) == {str(folder / "home/own.cfg"), "/etc/hostname"}


@pytest.mark.parametrize(
    "text",
    [
        "case $1 in\n  lib.sh | reqs.txt) true ;;\n  (tool.py) ;;&\n  *) true\nesac; case $1 in *) ;; esac; (true)",
        "X=$(case $1 in *) echo a;; lib.sh) echo b;; esac)",
        "rm -rf /etc/host* *; sudo rm -f tool.py",
        "cat > /opt/config <<EOF\nHost *\nEOF",
        "echo '*****'; [ $1 = '*' ]; find /opt -name '*' -delete; expr 2 \\* 3",
    ],
)
def test_files_that_the_script_does_not_read_are_no_inputs(folder: Path, text: str) -> None:
    """Otherwise an edit of the training code, or other files in another node's /tmp, would be a miss."""
    assert not _read(folder, text).files
    assert str(folder / "tool.py") in _read(folder, f"{text}\ncat *.py").files
    assert not _read(folder, 'add_argument("files", nargs="*")', program=True).files


def test_a_wheel_that_the_script_downloads_is_no_input_of_the_next_start(folder: Path) -> None:
    (folder / "x.whl").write_text("")
    assert not _read(folder, "wget -O x.whl https://h.test/x.whl; pip install x.whl").requirements.locals
    assert _read(folder, "wget -O y.whl https://h.test/y.whl; pip install x.whl").requirements.locals


def test_text_with_many_variables_is_read_in_a_second_and_names_single_words(folder: Path) -> None:
    values = "".join(f"for V{number} in a b c d e; do\n" for number in range(6))
    text = f'{values}echo "*** $V0 $V1 $V2 $V3 $V4 $V5 reqs.txt $V0/$V1\n*** done"'
    began_s = time.process_time()
    assert set(_read(folder, text).files) == {str(folder / "reqs.txt")}
    assert time.process_time() - began_s < 1


def test_a_script_that_autoconf_has_made_is_not_read(folder: Path) -> None:
    head = "#! /bin/sh\n# Guess values for system-dependent variables and create Makefiles.\n"
    (folder / "configure").write_text(f"{head}# Generated by GNU Autoconf 2.71.\ncat reqs.txt *\n")
    (folder / "setup.sh").write_text("./configure --prefix=/opt/x")
    found = gather("setup.sh", (), str(folder), {}, NodeFiles(FactCache(None)))
    assert set(found.files) == {str(folder / "setup.sh"), str(folder / "configure")}
    assert found.cwd_reason


def test_a_path_has_one_name(folder: Path) -> None:
    assert "/etc/hostname" in _read(folder, "D=/; cat $D/etc/hostname").files
    assert "/etc/hostname" in _read(folder, "cat /*/hostname").files


def test_a_glob_names_what_it_matches(folder: Path) -> None:
    for pattern in ("scripts/reqs/*.txt", "*/reqs/a.txt", "scr*/r?qs/*"):
        found = _read(folder, f"for f in {pattern}; do pip install -r $f; done")
        assert list(found.requirement_files) == [str(folder / "scripts/reqs/a.txt")]


@pytest.mark.parametrize(
    "text",
    [
        "echo $A",
        "PATH=/x:$A",
        "A=${A:-1}",
        "if x; then read A; fi; echo $A",
        "A=$(echo $A)",
        "A+=1; echo $A",
        "A=1 make; echo $A",
        "x && A=1; echo $A",
        "A=1 | x; echo $A",
        "(A=1); echo $A",
        "{ x || A=1; }; echo $A",
        "if x; then\nA=1\nfi; echo $A",
        "case x in 1) A=1;; esac; echo $A",
        "f() {\nA=1\n}; echo $A",
        "function f\n{\nexport A=1\n}; echo $A",
        "cat <<EOF\n$A\nEOF\nA=1",
        "cat > x <<EOF\nA=1\nEOF\necho $A",
        "python -c '\nA=1\n'; echo $A",
        "B=$(A=1); echo $A",
        "if x; then eval 'A=1'; fi; echo $A",
        'if [ -n "${A+x}" ]; then echo ${#A}; fi',
        "for v in A; do echo ${!v}; done",
        "cat <<EOF\n$A\nEOF",
        "cat > x <<'EOF'\necho $A\nEOF\nbash x",
        "printenv A",
        "python -c 'import os; os.environ[\"A\"]'",
    ],
)
def test_each_variable_of_the_start_that_is_named_counts(folder: Path, text: str) -> None:
    assert _read(folder, text, {"A": "1", "B": "2"}).variables == {"A"}
    assert not _read(folder, text).variables


def test_a_variable_that_only_a_comment_names_does_not_count(folder: Path) -> None:
    env = {"A": "1", "B": "2"}
    assert _read(folder, "#!/bin/sh\n# of $A\necho $B # not A", env).variables == {"B"}
    assert _read(folder, "# A\ncat > /opt/x <<EOF\n# $A\nEOF\necho '# B'", env).variables == {"A", "B"}


@pytest.mark.parametrize("text", ["set -e\nexport A=/opt/x B\n", "cd /opt; A=/opt/x # a\n", "B=1 C=$(x) A=/opt/x\n"])
def test_the_start_s_value_of_a_variable_that_the_script_sets_at_first_does_not_count(folder: Path, text: str) -> None:
    """It is often a different folder in each job: `TMPDIR`."""
    (folder / "other").mkdir()
    found = _read(folder, f"{text}tar xf /opt/x.tar -C $A; load $A; echo x >> $A/log", {"A": str(folder / "other")})
    assert not found.variables
    assert not found.folders
    assert {"/opt/x", "/opt/x/log"} <= found.outputs


@pytest.mark.parametrize(
    "text",
    [
        "set -e\napt-get install -y x\npip install y\nexport A=1\necho done",
        "mkdir -p /opt/x && touch /opt/x/y > /dev/null 2>&1",
        "python -m venv /opt/env; source /opt/env/bin/activate",
        "curl -fsSL -o /opt/x https://h.test/x && curl -fsSLo /opt/y https://h.test/y",
        "uv venv /opt/env; conda create --prefix=/opt/conda python=3.11; pip wheel -w /opt/wheels y",
        "git clone https://h.test/r.git /opt/r",
        "cp project/setup.py /opt/",
        "command -v uv && for x in a b; do echo $x; done",
        "J=$(( $(nproc) / 2 )); (( J > 1 )); for ((i=0; i<J; i++)); do echo $i; done",
        '[[ -n "$A" && -f /opt/x ]] || exit 1',
        "while read -r x; do echo $x; done < /opt/x; systemctl start x",
        "f() { mkdir -p /opt/x; }\nfunction g {\n  true\n}\nf a; g",
        'case "$(uname -m)" in\n  x86_64|amd64) A=1 ;;\n  arm*) ;;\nesac\nfor x in 1 2; do break; done',
    ],
)
def test_the_working_folder_does_not_matter_to_commands_that_leave_it_alone(folder: Path, text: str) -> None:
    assert _read(folder, text).cwd_reason == ""


@pytest.mark.parametrize(
    "text",
    [
        "python -m venv env",
        "pip install --target=here y",
        "echo x > here",
        "wget https://h.test/x",
        "git clone https://h.test/r.git",
        "make install",
        "./configure",
        "python tool.py",
        "cp /opt/x here",
        "ln -s /opt/x",
        "uv venv",
        "python3 -I -m venv env",
        "conda create -y -p ./env python=3.11",
        "curl -fsSLo here https://h.test/x",
        "git lfs pull",
        "pip wheel y",
        "uv pip compile /opt/r.in -o r.txt",
        "tar xf /opt/x.tar",
        "$TOOL x",
        "f() { make; }\nf",
    ],
)
def test_the_working_folder_matters_to_commands_that_may_write_to_it(folder: Path, text: str) -> None:
    assert _read(folder, text).cwd_reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pip install click", "click"),
        ("pip install 'click>=8'", "click>=8"),
        ("pip install click==8.1.7", "dependencies of click==8.1.7"),
        ("pip install --no-deps click==8.1.7", ""),
        ("pip install $WHAT", "$WHAT (known when the setup runs)"),
        ("sudo -Eu app pip install click", "click"),
        ("sudo -uapp --group g -- pip install click", "click"),
        ("sudo env -u X timeout -k 5 600 pip install click", "click"),
        ("nice -n 10 ionice -c 2 pip install click", "click"),
        ("flock /opt/l nohup -- pip install click", "click"),
        ("flock -w 9 /opt/l -c 'pip install click'", "click"),
        ("su - app -c 'pip install click'", "click"),
        ("conda run -n env pip install click", "click"),
        ("PIP=pip\n$PIP install click", "click"),
        ("SUDO=sudo; PIP='python -m pip'; $SUDO ${PIP} install click", "click"),
        ("A='sudo $B x'; B='$A y'; $A", ""),
        ("conda install -y numpy", "conda numpy"),
        ("npm ci", "npm"),
        ("$(which pip) install click", "click"),
        ("xargs pip install < /opt/r.txt", "pip install (known when the setup runs)"),
        ("`command -v python3` -m pip install click", "click"),
        ("uv add --dev click 'rich==13.9'", "uv click"),
        ("uv sync --extra gpu; poetry install --with dev; cd project; pdm install", "uv, poetry, pdm"),
        ("uv sync --project locked --extra gpu; cd locked; uv run tool.py", ""),
        ("uv tool install ruff; pipx install black; pipx install black==24.1.0", "uv ruff, pipx black"),
        ("wget -O /opt/x https://me:pw@h.test/x?token=1", "download of https://h.test/x?token="),
        ("git -C /opt/r pull; aws s3 sync s3://b/w /opt/w", "git pull, download of s3://b/w"),
        ("echo a > /opt/r.txt; pip install -r /opt/r.txt", "/opt/r.txt (known when the setup runs)"),
        ("pip install -r r-$(uname -m).txt", "r-$.txt (known when the setup runs)"),
        (
            "hf download a/b; python -m spacy download c; pip download -d /opt d==1",
            "hf download, spacy download, dependencies of d==1",
        ),
        ("pip download -d /opt click; pip list; pip --version", "click"),
        ("cat > /opt/x <<EOF\npip install click\nEOF", "what setup.sh installs"),
    ],
)
def test_what_comes_in_any_version_is_reported(folder: Path, text: str, words: str) -> None:
    found = _read(folder, text)
    found.requirements.close()
    assert ", ".join(found.requirements.unpinned) == words


def test_files_named_before_a_wrapped_program_are_inputs(folder: Path) -> None:
    (folder / "env/conda-meta").mkdir(parents=True)
    found = _read(folder, "conda run -p ./env pip list\nxargs -a tool.py echo\nT=$PWD/lib.sh; $T")
    assert list(found.environments) == [str(folder / "env")]
    assert set(found.files) == {str(folder / "tool.py"), str(folder / "lib.sh")}


def test_the_environment_that_uv_finds_in_the_working_folder_is_an_input(folder: Path) -> None:
    (folder / ".venv").mkdir()
    (folder / ".venv/pyvenv.cfg").write_text("")
    assert list(_read(folder, "uv pip install click").environments) == [str(folder / ".venv")]
    assert not _read(folder, "uv venv; uv pip install click").environments


def test_files_for_options_of_installers_are_inputs(folder: Path) -> None:
    found = _read(folder, "uv pip install --excludes tool.py --later-option=lib.sh --another reqs.txt click")
    assert set(found.files) == {str(folder / name) for name in ("tool.py", "lib.sh", "reqs.txt")}


def test_groups_of_a_project_are_read_from_its_file(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("[dependency-groups]\ndev = ['click']\n")
    for text in ("pip install --group dev", "uv pip install --group=pyproject.toml:dev"):
        (folder / "setup.sh").write_text(text)
        found = gather("setup.sh", (), str(folder), {}, NodeFiles(FactCache(None))).requirements
        assert str(folder / "pyproject.toml") in found.files
        assert list(found.unpinned) == ["dependencies of pyproject.toml"]


def test_the_folder_of_programs_that_read_a_list_of_their_own_is_an_input(folder: Path) -> None:
    for program, name in (("pipenv sync", "Pipfile"), ("just setup", "justfile"), ("nox -s install", "noxfile.py")):
        assert not _read(folder, program).folders
        (folder / name).write_text("")
        assert list(_read(folder, program).folders) == [str(folder)]


def test_the_code_of_a_project_counts_only_where_it_is_installed(folder: Path) -> None:
    """Otherwise each edit of the training code would be a miss."""
    for name in ("uv.lock", "poetry.lock", "poetry.toml", ".python-version"):
        (folder / name).write_text("")
    alone = "[project]\nname = 'x'\ndependencies = ['click']\n"
    build = "[build-system]\nrequires = []\n"
    of_poetry = "[tool.poetry]\npackage-mode = false\n"
    for text, project, lock in (
        ("uv sync --frozen", alone, "uv.lock"),
        ("uv sync --no-install-project", alone + build, "uv.lock"),
        ("/opt/uv sync", f"{alone}{build}[tool.uv]\npackage = false\n", "uv.lock"),
        ("poetry install --no-root", alone + build, "poetry.lock"),
        ("poetry install", of_poetry, "poetry.lock"),
    ):
        (folder / "pyproject.toml").write_text(project)
        found = _read(folder, text)
        assert not found.folders
        names = {"pyproject.toml", lock, ".python-version"} | ({"poetry.toml"} if "poetry" in text else set())
        assert set(found.files) == {str(folder / name) for name in names}
        assert found.cwd_reason
    for text, project in (
        ("uv sync", alone + build),
        ("uv run tool.py", alone),
        ("uv sync", f"{alone}[tool.uv.sources]\ny = {{ path = 'y' }}\n"),
        ("poetry install", alone),
        ("uv sync --no-install-project", "dynamic = ['dependencies']"),
        ("uv sync", f"{alone}[tool.uv]\nfind-links = ['wheels']\n"),
        ("uv sync", f"{alone}[[tool.uv.index]]\nurl = './wheels'\n"),
    ):
        (folder / "pyproject.toml").write_text(project)
        assert list(_read(folder, text).folders) == [str(folder)]


def test_a_local_repository_that_is_cloned_is_asked_for_its_commit(folder: Path) -> None:
    found = _read(folder, "git clone --depth 1 -b dev project /opt/x\ngit clone https://t@h.test/r.git /opt/y")
    assert list(found.requirements.repositories) == [
        (f"git+file://{folder / 'project'}", "dev"),
        ("git+https://h.test/r.git", ""),
    ]


@pytest.mark.parametrize("text", ["x=$(hostname -s)", "cat > hosts <<EOF\n$(hostname) slots=8\nEOF"])
def test_a_program_that_tells_the_name_of_the_node_counts_as_the_variable(folder: Path, text: str) -> None:
    assert _read(folder, text).variables == {"HOSTNAME"}
    assert not _read(folder, f"# {text.splitlines()[0]}").variables
    assert _read(folder, "import socket; socket.gethostname()", program=True).variables == {"HOSTNAME"}


def test_a_program_in_python_tells_files_and_variables(folder: Path) -> None:
    text = "import os\nos.environ['FLAVOUR'], os.environ.get(\"SIZE\"), os.getenv('COLOUR')\nopen('reqs.txt')"
    found = _read(folder, text, {"FLAVOUR": "", "SIZE": "1", "COLOUR": "2", "SHAPE": "3"}, program=True)
    assert found.variables == {"FLAVOUR", "SIZE", "COLOUR"}
    assert str(folder / "reqs.txt") in found.files
    assert not found.requirements.unpinned


@pytest.mark.parametrize("call", ["os.system('pip install -r reqs.txt')", "run(['uv', 'pip', 'sync', 'reqs.txt'])"])
def test_what_a_program_in_python_installs_has_no_version(folder: Path, call: str) -> None:
    found = _read(folder, call, program=True)
    assert str(folder / "reqs.txt") in found.requirement_files
    assert list(found.requirements.unpinned) == ["what setup.sh installs"]


@given(st.text(alphabet="abc $(){}'\"`\\;|&<>\n=/.-#~*[", max_size=60))
def test_no_text_makes_the_shell_reader_fail(text: str) -> None:
    inputs = Inputs()
    Reader(text, "/nowhere/x.sh", "/nowhere", {}, NodeFiles(FactCache(None), lambda path: False), inputs).read_shell()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["$(" * 20_000, '"$(\n' * 2_000, "`" * 20_001 + "$(" * 30])
def test_what_is_nested_too_deeply_is_a_problem(tmp_path: Path, text: str) -> None:
    assert any("too deeply" in problem for problem in _read(tmp_path, text).requirements.problems)


def test_a_variable_that_grows_by_itself_is_followed(folder: Path) -> None:
    """Each expansion of a value that contains its own variable would multiply the possible values."""
    appended = "".join(f'ARGS="$ARGS -r reqs.txt --pre{number}"; ' for number in range(30))
    found = _read(folder, f"{appended}pip install $ARGS; ls $ARGS; cat $L/reqs.txt; L=$L/..", {"L": "."})
    assert str(folder / "reqs.txt") in found.files


def test_a_command_that_grows_in_eval_and_a_home_that_is_read_end(folder: Path) -> None:
    _read(folder, 'RUN="pip install x"; RUN="eval $RUN"; $RUN; eval "$RUN"')
    _read(folder, "unset HOME; for HOME in; do :; done; cat ~/x", {"HOME": ""})


def test_setup_py_stays_a_requirement(folder: Path) -> None:
    assert is_requirements_name("/a/setup.py")
    assert is_requirements_name("requirements.yml")
    assert not is_requirements_name("requirements.sh")
