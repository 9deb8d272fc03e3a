"""The fast option parser agrees with click's, or leaves the command line to it."""

from __future__ import annotations

import re

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli import run as run_verb
from bootseer.cli.options import plain
from bootseer.cli.run_options import OPTIONS

WORDS = sorted(flag for option in OPTIONS for flag in option.flags)
VALUES = [
    "",
    "a",
    "0",
    "7",
    "-1",
    "x y",
    "full",
    "restart",
    "spool",
    "stderr",
    "otlp=http://h:1",
    "--",
    "-q",
    "--job",
    "é",
]


def test_the_help_shows_each_option_once() -> None:
    shown = run_verb.run_command.get_help(click.Context(run_verb.run_command))
    found = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)
    options = [next(flag for flag in option.flags if flag.startswith("--")) for option in OPTIONS]
    assert sorted(found) == sorted([*options, "--help"])


def test_the_help_shows_limits_only_where_they_matter() -> None:
    shown = run_verb.run_command.get_help(click.Context(run_verb.run_command))
    assert "x>=0" in shown
    assert "0<=x<=86400" in shown
    assert "999999999" not in shown
    assert by_click(["--attempt", "999999999"]) is not None
    assert by_click(["--attempt", "1000000000"]) is None


def by_click(arguments: list[str]) -> dict[str, object] | None:
    try:
        context = run_verb.run_command.make_context("run", [*arguments, "--", "true"])
    except click.ClickException:
        return None
    return dict(context.params)


@given(
    st.lists(st.sampled_from(WORDS) | st.sampled_from(VALUES) | st.sampled_from([f"{w}=v" for w in WORDS]), max_size=7)
)
def test_whatever_plain_reads_click_reads_alike(arguments):
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    values = plain(arguments, OPTIONS)
    if values is not None:
        assert values == by_click(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--job", "moe", "-q"],
        ["--job=moe", "--attempt=3", "--num-nodes", "4", "--no-hook"],
        ["-r", "a.txt", "--requirements", "b.txt", "--trace-to", "stderr", "--trace-to", "otlp=http://c:4318"],
        ["--kind", "hot_update", "--spool", "/a folder", "--gpus", "0"],
    ],
)
def test_plain_lines_need_no_click(arguments):
    assert plain(arguments, OPTIONS) == by_click(arguments)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--jo", "x"], ["--attempt", "x"], ["--kind", "odd"], ["-qr", "f"], ["x"]]
)
def test_anything_else_is_left_to_click(arguments):
    assert plain(arguments, OPTIONS) is None
