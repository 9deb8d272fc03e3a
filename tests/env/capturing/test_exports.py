"""Real scripts in real shells: the variables that they leave, and that observing them has no effect on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer.env.capturing import exports
from bootseer.env.capturing.exports import ExportDiff
from bootseer.env.document import MAX_TEXT, Export, apply_exports

ENV = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "LANG": "C.UTF-8", "KEPT": "as it was"}
BASH = "#!/bin/bash\n"
SH = "#!/bin/sh\n"


class Ran(NamedTuple):
    left: ExportDiff
    code: int
    output: str
    error: str

    @property
    def told(self) -> list[tuple[str, str, str]]:
        return [(export.name, export.kind, export.value) for export in self.left.exports]


def run(
    tmp_path: Path,
    text: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    executable: bool = True,
    given: str = "",
    node_words: Sequence[str] = (),
) -> Ran:
    script, folder = tmp_path / "the setup.sh", tmp_path / "it's told"
    script.write_text(text)
    script.chmod(0o755 if executable else 0o644)
    folder.mkdir()
    env = ENV if env is None else env
    words, more = exports.capture_command(str(script), folder, env)
    before = {**env, **more}
    ended = subprocess.run(
        [*words, *arguments],
        env=before,
        cwd=tmp_path,
        input=given,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return Ran(
        exports.read_exports(folder, before, node_words=node_words), ended.returncode, ended.stdout, ended.stderr
    )


@pytest.mark.parametrize("head", [BASH, SH, "#!/usr/bin/env bash\n", "#!/usr/bin/env sh\n", ""])
@pytest.mark.parametrize("executable", [True, False])
def test_what_a_script_exports_is_reported_as_a_difference(tmp_path: Path, head: str, executable: bool) -> None:
    ran = run(
        tmp_path,
        f'{head}export A="1 2\n3" \'B=x\'; C=hidden; export PATH="/first:$PATH"; unset KEPT\n',
        executable=executable,
    )
    assert ran.told == [("A", "set", "1 2\n3"), ("B", "set", "x"), ("KEPT", "unset", ""), ("PATH", "prepend", "/first")]
    assert (ran.code, ran.output, ran.error) == (0, "", "")


@pytest.mark.parametrize("head", [BASH, SH])
def test_a_script_finds_arguments_name_input_and_exit_code_as_without_us(tmp_path: Path, head: str) -> None:
    text = f'{head}echo "$0|$#|$2"; read line; echo "$line"; cat; echo error >&2; exit 7\n'
    ran = run(tmp_path, text, "a", "b c", given="first\nsecond\n")
    assert ran.output == f"{tmp_path}/the setup.sh|2|b c\nfirst\nsecond\n"
    assert (ran.code, ran.error) == (7, "error\n")


@pytest.mark.parametrize("head", [BASH, SH])
def test_a_script_that_fails_keeps_its_exit_code(tmp_path: Path, head: str) -> None:
    ran = run(tmp_path, f"{head}set -eu\nexport A=1\n(exit 5)\nexport B=2\n")
    assert (ran.code, ran.output, ran.error) == (5, "", "")
    assert ran.told == [("A", "set", "1")]


@pytest.mark.parametrize("options", ["-e", "-u", "-eu -o pipefail -C", "-f", "-o posix", "-a"])
def test_options_of_the_shell_change_nothing(tmp_path: Path, options: str) -> None:
    ran = run(tmp_path, f"{BASH}set {options}\nexport A=1 HOLLOW\nIFS=,\numask 077\n")
    assert (ran.code, ran.error, ran.told) == (0, "", [("A", "set", "1")])


@pytest.mark.parametrize(
    "trap",
    ["trap 'echo \"end $?\"' EXIT", "trap -- 'echo \"end $?\"' 0", "trap 'echo \"end $?\"' INT EXIT TERM"],
)
def test_a_trap_of_the_script_itself_runs_with_its_exit_code(tmp_path: Path, trap: str) -> None:
    ran = run(tmp_path, f"{BASH}set -e\n{trap}\nexport A=1\n(exit 6)\n")
    assert (ran.code, ran.output, ran.error) == (6, "end 6\n", "")
    assert ran.told == [("A", "set", "1")]


@pytest.mark.parametrize("source", ["source", "[[ -z ${A-} ]] && ."])
def test_a_trap_of_a_file_that_the_script_sources_keeps_the_exports(tmp_path: Path, source: str) -> None:
    (tmp_path / "common.sh").write_text("cleanup() { echo end; }\ntrap cleanup EXIT\n")
    ran = run(tmp_path, f'{BASH}set -eu\n{source} "$(dirname "$0")/common.sh"\nexport A=1\n')
    assert (ran.told, ran.output) == ([("A", "set", "1")], "end\n")


def test_a_trap_that_ends_the_script_decides_its_exit_code(tmp_path: Path) -> None:
    ran = run(tmp_path, f"{BASH}trap 'exit 9' EXIT\nexport A=1\n")
    assert (ran.code, ran.told) == (9, [("A", "set", "1")])


def test_a_trap_that_is_taken_back_does_not_run_and_the_environment_is_reported(tmp_path: Path) -> None:
    ran = run(tmp_path, f"{BASH}trap 'echo no' EXIT\ntrap - EXIT\ntrap '' EXIT\ntrap EXIT\nexport A=1\n")
    assert (ran.code, ran.output, ran.told) == (0, "", [("A", "set", "1")])


def test_traps_for_errors_work_as_without_us(tmp_path: Path) -> None:
    ran = run(tmp_path, f"{BASH}trap 'echo error' ERR\nfalse\ntrap - ERR\ntrap 'echo end' EXIT\nfalse\nexport A=1\n")
    assert (ran.code, ran.output, ran.error) == (0, "error\nend\n", "")


def test_a_subshell_with_a_trap_of_its_own_tells_nothing(tmp_path: Path) -> None:
    ran = run(tmp_path, f"{BASH}(trap 'echo sub' EXIT; export B=2)\nexec true\n")
    assert (ran.output, ran.left) == ("sub\n", ExportDiff((), ()))


def test_subshells_and_nested_scripts_tell_nothing(tmp_path: Path) -> None:
    nested = tmp_path / "nested.sh"
    nested.write_text('#!/bin/bash\nexport NESTED=1\necho "${BASH_ENV-unset}"\n')
    nested.chmod(0o755)
    text = f"{BASH}trap 'true' EXIT\nexport A=1\n(trap 'echo sub' EXIT; export B=2)\n./nested.sh\nbash nested.sh\n"
    ran = run(tmp_path, text)
    assert (ran.output, ran.told) == ("sub\nunset\nunset\n", [("A", "set", "1")])


def test_functions_arrays_and_what_belongs_to_the_shell_are_no_exports(tmp_path: Path) -> None:
    text = f"{BASH}f() {{ :; }}; export -f f; cd /; export PS1=x; export -a L=(1 2); export A=1; bash -c :\n"
    assert [name for name, *_ in run(tmp_path, text).told if name != "L"] == ["A"]


def test_a_script_that_becomes_another_program_or_is_killed_tells_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, f"{BASH}export A=1\nexec true\n").left == ExportDiff((), ())
    shutil.rmtree(tmp_path / "it's told")
    ran = run(tmp_path, f"{BASH}export A=1\nkill -9 $$\n")
    assert (ran.left, ran.code) == (ExportDiff((), ()), -9)


def test_a_broken_path_of_the_script_does_not_break_the_hook(tmp_path: Path) -> None:
    for number, head in enumerate((BASH, SH)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run(folder, f"{head}export PATH=/nowhere\n").told == [("PATH", "set", "/nowhere")]


def test_other_programs_run_as_they_are(tmp_path: Path) -> None:
    ran = run(
        tmp_path, f"#!{sys.executable}\nimport os, sys\nos.environ['A'] = '1'\nprint(sys.argv[1])\nsys.exit(3)\n", "x"
    )
    assert (ran.code, ran.output, ran.left) == (3, "x\n", ExportDiff((), ()))


def test_options_on_the_line_of_the_interpreter_are_kept(tmp_path: Path) -> None:
    assert run(tmp_path, "#!/bin/sh -e\nfalse\necho no\n").output == ""
    shutil.rmtree(tmp_path / "it's told")
    assert run(tmp_path, "#!/bin/bash -e\nfalse\necho no\n").output == ""


def test_a_file_that_bash_reads_first_anyway_is_still_read(tmp_path: Path) -> None:
    first = tmp_path / "first.sh"
    first.write_text("FIRST=1\n")
    text = f'{BASH}echo "$FIRST"; echo "$BASH_ENV"; export A=1\n'
    ran = run(tmp_path, text, env={**ENV, "ROOM": str(tmp_path), "BASH_ENV": "$ROOM/first.sh"})
    assert (ran.output, ran.told) == ("1\n$ROOM/first.sh\n", [("A", "set", "1")])


def test_activating_an_environment_gives_the_job_its_programs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    ran = run(tmp_path, f"{BASH}source {tmp_path}/venv/bin/activate\n", env={**ENV, "PS1": "$ "})
    assert ran.told == [("PATH", "prepend", f"{tmp_path}/venv/bin"), ("VIRTUAL_ENV", "set", f"{tmp_path}/venv")]


def test_secrets_are_reported_and_not_kept(tmp_path: Path) -> None:
    token = "hf_" + "a1B2c3D4e5" * 4
    ran = run(tmp_path, f"{BASH}export A=1 DB_PASSWORD=pa55word INNOCENT={token} KEY_FILE=/etc/key\n")
    assert [name for name, *_ in ran.told] == ["A", "KEY_FILE"]
    assert ran.left.unsafe == (
        "it exports DB_PASSWORD, which looks like a secret",
        "it exports INNOCENT, which looks like a secret",
    )
    assert token not in repr(ran.left)


def test_what_belongs_to_this_node_is_reported_and_not_kept(tmp_path: Path) -> None:
    text = f"{BASH}export RANK=3 URL=http://node-17:80 ADDRESS=10.1.2.3 FINE=node-171 T=$(mktemp -d)\nrmdir $T\n"
    ran = run(tmp_path, text, node_words=["node-17", "10.1.2.3", "a"], env={**ENV, "TMPDIR": "/tmp"})
    assert [name for name, *_ in ran.told] == ["FINE"]
    assert [reason.partition(",")[0] for reason in ran.left.unsafe] == [
        "it exports ADDRESS",
        "it exports RANK",
        "it exports T",
        "it exports URL",
    ]


def test_values_around_a_present_one_are_put_around_it_again() -> None:
    before = {"PATH": "/bin", "LD": "/lib", "FLAGS": "-O2", "SAME": "1"}
    after = {"PATH": "/a:/b:/bin:/c", "LD": "/lib:/x", "FLAGS": "-O2 -g", "SAME": "1", "NEW": "n"}
    left = exports.difference(before, after)
    assert left.exports == (
        Export("FLAGS", "set", "-O2 -g"),
        Export("LD", "append", "/x"),
        Export("NEW", "set", "n"),
        Export("PATH", "prepend", "/a:/b"),
        Export("PATH", "append", "/c"),
    )
    assert apply_exports(left.exports, before) == after
    elsewhere = {"PATH": "/other", "SAME": "2"}
    assert apply_exports(left.exports, elsewhere) == {
        "PATH": "/a:/b:/other:/c",
        "LD": "/x",
        "FLAGS": "-O2 -g",
        "SAME": "2",
        "NEW": "n",
    }
    assert elsewhere == {"PATH": "/other", "SAME": "2"}


def test_no_export_is_kept_that_no_document_can_hold() -> None:
    left = exports.difference({}, {"LONG": "a:" * (MAX_TEXT // 2), "LONGER": "a:" * (MAX_TEXT // 2) + "b"})
    assert [export.name for export in left.exports] == ["LONG"]
    assert left.unsafe == ("it exports LONGER, which is too long",)


def test_half_a_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "environment").write_bytes(b"A=1\0B=")
    assert exports.read_exports(tmp_path, {}) == ExportDiff((), ())


def test_a_link_or_a_pipe_that_a_script_put_in_the_place_of_its_exports_is_none(tmp_path: Path) -> None:
    (tmp_path / "host").write_bytes(b"NAME=of the host\0\0")
    output = tmp_path / exports.OUTPUT
    output.symlink_to("host")
    assert exports.read_exports(tmp_path, {}) == ExportDiff((), ())
    output.unlink()
    os.mkfifo(output)
    assert exports.read_exports(tmp_path, {}) == ExportDiff((), ())
