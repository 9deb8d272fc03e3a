"""Which commands are the same workload, and which are not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.artifact.workload import workload_key


def key(line: str) -> str:
    return workload_key(line.split())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py --lr 0.1", "python train.py --lr 0.2"),
        ("python train.py --lr 0.1 --out /data/run1", "python3.11 ./train.py --out /data/run2 --lr=3e-4"),
        ("torchrun --nproc-per-node 8 train.py", "torchrun --nproc-per-node 4 --nnodes 2 train.py --seed 3"),
        ("python -m pkg.train --steps 10", "/usr/bin/python3 -m pkg.train --steps 20"),
        ("python job-123/train.py", "python job-77/train.py"),
        ("mytool train --batch 8", "mytool train --batch 16"),
        ("OMP_NUM_THREADS=4 python train.py", "OMP_NUM_THREADS=8 python train.py"),
    ],
)
def test_values_of_options_do_not_make_another_workload(one: str, other: str) -> None:
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py", "python evaluate.py"),
        ("python bert/train.py", "python llama/train.py"),
        ("python -m pkg.train", "python -m pkg.evaluate"),
        ("torchrun train.py", "python train.py"),
        ("mytool train", "mytool serve"),
        ("accelerate launch train.py", "accelerate test train.py"),
        ("python train.py", "python -m train"),
    ],
)
def test_other_programs_scripts_and_modules_are_other_workloads(one: str, other: str) -> None:
    assert key(one) != key(other)


def test_a_shell_s_text_counts_by_the_commands_in_it() -> None:
    def shell(text: str) -> str:
        return workload_key(["bash", "-c", text])

    assert shell("cd /a && python train.py --lr 0.1") == shell("cd /b &&  python train.py --lr 0.2")
    assert shell("python train.py; echo done") != shell("python evaluate.py; echo done")
    assert shell("unclosed ' quote") != shell("another ' quote")


def test_the_text_of_another_interpreter_counts_as_it_stands() -> None:
    assert workload_key(["python", "-c", "import torch"]) != workload_key(["python", "-c", "import numpy"])


def test_setup_and_role_are_part_of_the_key() -> None:
    command = ["python", "train.py"]
    keys = {workload_key(command), workload_key(command, setup="a"), workload_key(command, role="a")}
    assert len(keys) == 3


def test_a_key_begins_with_what_tells_most() -> None:
    assert key("torchrun --nproc-per-node 8 /app/train.py").startswith("train.py-")
    assert key("/usr/bin/trainer --x").startswith("trainer-")


@given(st.lists(st.text(), max_size=6))
def test_any_command_has_a_key_that_is_safe_in_names(words: list[str]) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,60}", workload_key(words))
