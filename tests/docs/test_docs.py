"""The documents of formats, variables and terms, compared with the code: all of them must be documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
import pytest

from bootseer.cli.verbs import cli
from bootseer.report import model
from bootseer.report.analysis import compose, diff, verdict
from bootseer.trace.event import KINDS, MAX_LINE_BYTES, OUTCOMES, PHASES, VERSION, Event, decode
from bootseer.trace.identity import discover

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "bootseer").rglob("*.py"))
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if path.is_file()]
IDENTITY = {"BOOTSEER_JOB": "moe", "BOOTSEER_ATTEMPT": "3", "BOOTSEER_NODE": "n0"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\bbootseer (?P<verb>[a-z]+)\b(?P<rest>[^`\n]*)")
_NEXT_VERB = re.compile(r"\s+([a-z]+)\b(.*)")


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)


def fences(name: str, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(text(name)) if kind == language]


def section(name: str, heading: str) -> str:
    """The text below one heading of a document."""
    _, _, rest = text(name).partition(f"\n## {heading}\n")
    assert rest, f"{name} has no section {heading}"
    return rest.partition("\n## ")[0]


def first_cells(markdown: str) -> set[str]:
    """The code spans in the first columns of all tables."""
    return {
        word for row in re.findall(r"^\| (`[^|]*) \|", markdown, re.MULTILINE) for word in re.findall(r"`(.+?)`", row)
    }


def example_lines() -> list[bytes]:
    blocks = fences("formats/event.md", "text")
    return [line.encode() for block in blocks for line in block.splitlines() if re.search(r"@bootseer\d", line)]


@pytest.mark.parametrize("line", example_lines())
def test_each_example_line_is_an_event(line: bytes, tmp_path: Path) -> None:
    from bootseer.report.inputs import sources
    from bootseer.report.log_scan import scan

    (tmp_path / "job.log").write_bytes(line + b"\n")
    found = scan(sources([str(tmp_path)]))
    assert len(found.events) == 1
    assert not found.skipped


def test_examples_show_each_phase_of_the_version() -> None:
    lines = example_lines()
    assert {tag for line in lines for tag in re.findall(rb"@bootseer(\d)", line)} == {str(VERSION).encode()}
    plain = [decode(line) for line in lines if not line.startswith(b"{")]
    assert {event.phase for event in plain} == PHASES


def test_each_key_and_value_of_an_event_is_documented() -> None:
    keys = section("formats/event.md", "Keys")
    assert first_cells(keys) == set(Event._fields) - {"extra"}
    for word in (*PHASES, *OUTCOMES - {""}, *KINDS):
        assert f"`{word}`" in keys
    assert f"{MAX_LINE_BYTES:,} bytes" in text("formats/event.md")


def test_each_reason_for_a_skipped_line_is_documented() -> None:
    in_code = set(re.findall(r'Malformed\(\s*"(\w+)"', source()))
    in_code |= set(re.findall(r'skipped\[\s*"(\w+)"', source()))
    in_code |= set(re.findall(r'Malformed\("\w+" if .* else "(\w+)"\)', source()))
    in_code |= set(re.findall(r'^ +\("(\w+)", _of_\w+\(result', source(), re.MULTILINE))
    assert first_cells(section("formats/event.md", "What is skipped, and why")) == in_code


def test_each_stage_that_the_code_writes_is_documented() -> None:
    known = first_cells(section("formats/event.md", "Stages"))
    assert set(compose.STAGES) <= known
    assert set(compose.STAGES) <= first_cells(section("glossary.md", "Stages of every full startup"))
    written = set(re.findall(r'\bemit\(\s*"([a-z_.]+)"', source()))
    written |= set(re.findall(r'\bsession_stage\([^,]+, "([a-z_.]+)"', source()))
    written |= {f"model_initialization.{name}" for name in re.findall(r'STAGE \+ "(\w+)"', source())}
    written |= set(
        re.findall(r'"((?:model_initialization|environment_setup|image_loading|first_step)\.[a-z_]+)"', source())
    )
    assert written <= known


def test_the_python_example_writes_events() -> None:
    (program,) = fences("formats/event.md", "python")
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **IDENTITY}, capture_output=True, check=True
    )
    events = [decode(line) for line in ran.stderr.splitlines()]
    assert [event.phase for event in events] == ["begin", "end"]
    assert events[0].span == events[1].span
    assert_identity(events)


def test_the_shell_example_writes_an_event() -> None:
    (program,) = fences("formats/event.md", "sh")
    ran = subprocess.run(["sh", "-c", program], env={**os.environ, **IDENTITY}, capture_output=True, check=True)
    event = decode(ran.stderr)
    assert (event.stage, event.phase, event.wall_ns) == ("training_began", "instant", event.mono_ns)
    assert re.fullmatch("[0-9a-f]{16}", event.span)
    assert_identity([event])


def assert_identity(events: list[Event]) -> None:
    assert {(event.job, event.attempt, event.node) for event in events} == {("moe", 3, "n0")}


def dataclasses_of(module: object) -> list[type]:
    """The dataclasses without subclasses: the fields of base classes are documented with their subclasses."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and is_dataclass(each)]
    return [each for each in classes if not each.__subclasses__()]


@pytest.mark.parametrize("kind", dataclasses_of(model), ids=lambda kind: kind.__name__)
def test_each_field_of_the_report_is_documented(kind: type) -> None:
    documented = first_cells(section("formats/report.md", kind.__name__))
    missing = {each.name for each in fields(kind)} - documented
    assert not missing, f"docs/formats/report.md, {kind.__name__}: {sorted(missing)}"


def test_the_values_in_reports_are_documented() -> None:
    said = text("formats/report.md")
    buckets = [verdict.bucket(gpus) for gpus in (1, 11, 101, 501, 1001, 2001, 3001)]
    for word in (model.SCHEMA, model.WORK, model.WAIT, model.UNTRACKED, *buckets):
        assert f"`{word}`" in said


@pytest.mark.parametrize("kind", [diff.Difference, diff.StageChange, diff.FactChange], ids=lambda kind: kind.__name__)
def test_each_field_of_the_difference_is_documented(kind: type) -> None:
    documented = first_cells(section("formats/diff.md", kind.__name__))
    missing = {each.name for each in fields(kind)} - documented
    assert not missing, f"docs/formats/diff.md, {kind.__name__}: {sorted(missing)}"


def test_the_limits_of_diff_are_those_of_the_code() -> None:
    rule, limits = section("formats/diff.md", "When a stage counts as changed"), diff.Limits()
    assert f"`--min-share` ({limits.min_share:.2f})" in rule
    assert f"`--min-seconds` ({limits.min_s})" in rule
    assert f"fewer than {diff.MIN_TESTED} nodes" in rule


def test_each_variable_in_the_code_is_documented_and_each_documented_one_is_in_the_code() -> None:
    own = re.compile(r"\bBOOTSEER_[A-Z_]*[A-Z]\b")
    families = "SLURM|SLURMD|PET|TORCHX|TORCHELASTIC|SKYPILOT|OMPI|PMI|PMIX|OTEL|XDG|POD|NODE|CUDA|NVIDIA|WORLD"
    launchers = re.compile(rf'"((?:{families})_[A-Z_]+)"')
    code, said = source(), text("variables.md")
    assert set(own.findall(code)) == set(own.findall(said))
    assert {name for name in launchers.findall(code) if name not in said} == set()


def test_the_order_of_the_job_s_variables_is_as_documented() -> None:
    row = next(
        line for line in section("variables.md", "Identity of a start").splitlines() if line.startswith("| job ")
    )
    names = re.findall(r"`([A-Z]+_[A-Z_]+)`", row)
    names.remove("SLURM_ARRAY_TASK_ID")
    names.remove("SLURM_JOB_NAME")
    env = {name: name.lower() for name in names}
    for name in names:
        assert discover(env, hostname="h").job == name.lower()
        del env[name]


def found_command(name: str, rest: str) -> tuple[str, click.Command, str] | None:
    """The name of a command, including subcommands (`image hotset show`), the command, and the text after it."""
    context = click.Context(cli)
    command = cli.get_command(context, name)  # type: ignore[attr-defined]
    while isinstance(command, click.Group):
        match = _NEXT_VERB.match(rest)
        inner = command.get_command(context, match[1]) if match else None
        if match is None or inner is None:
            break
        name, command, rest = f"{name} {match[1]}", inner, match[2]
    return (name, command, rest) if command is not None else None


def commands() -> list[tuple[str, str, str]]:
    """(document, command, option) of each `bootseer COMMAND --option` in the documents, without the user's command."""
    found = []
    for path in DOCUMENTS:
        for match in _COMMAND.finditer(path.read_text(encoding="utf-8")):
            command = found_command(match["verb"], match["rest"])
            if command is None:
                continue
            name, _, rest = command
            own = re.split(r"\s--(?:\s|$)|[|)]", rest)[0]
            options = re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", own)
            found += [(str(path.relative_to(ROOT)), name, option) for option in options]
    return sorted(set(found))


def test_each_image_in_the_documents_names_its_registry() -> None:
    from bootseer.image.reference import parse_reference

    for path in DOCUMENTS:
        for name in re.findall(r"--image ([a-z][^\s`]*)", path.read_text(encoding="utf-8")):
            parse_reference(name)


def test_what_jobs_and_the_chart_need_in_a_cluster_is_in_the_document() -> None:
    said = text("kubernetes.md")
    for path in [*(ROOT / "deploy" / "examples").glob("*.yaml"), ROOT / "deploy/helm/bootseer/values.yaml"]:
        needed = r"(?:secretName|serviceAccountName|tokensSecret): ([a-z-]+)"
        for name in re.findall(needed, path.read_text(encoding="utf-8")):
            assert f"{name} " in said or f"{name}," in said, f"{path.name} needs {name}"


@pytest.mark.parametrize(("document", "verb", "option"), commands())
def test_each_option_in_the_documents_exists(document: str, verb: str, option: str) -> None:
    first, _, rest = verb.partition(" ")
    command = found_command(first, f" {rest}")
    assert command is not None
    context = click.Context(command[1])
    known = {
        name for parameter in command[1].get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert option in known, f"{document}: bootseer {verb} has no option {option}"
