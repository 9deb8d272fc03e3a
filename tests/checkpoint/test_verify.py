"""Verifying: each wrong byte is found, with its file, offset and part, and whether parity can repair it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer.checkpoint import verify as module
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.verify import Problem, verify
from bootseer.errors import NotFoundError
from bootseer.places.folder import FolderFile
from checkpoint.striped_files import content_of, part_paths, put_striped

_MIB = 1 << 20


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def only(problems: object) -> Problem:
    (problem,) = problems  # type: ignore[misc]
    assert isinstance(problem, Problem)
    return problem


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("size_bytes", [1, _MIB + 1, 7 * _MIB, 7 * _MIB + 5, 13 * _MIB - 1])
def test_intact_files_have_no_problems(files: Files, size_bytes: int, parity: bool) -> None:
    put_striped(files.place, "ckpt/model", content_of(size_bytes), stripes=3, parity=parity, segment_rows=2)
    files.place.write_bytes("ckpt/config", b"{}")
    heard: list[tuple[int, int]] = []
    found = verify(files, "ckpt", progress=lambda done, total: heard.append((done, total)))
    assert (found.num_files, found.num_striped, found.size_bytes) == (2, 1, size_bytes + 2)
    assert found.problems == []
    assert heard[-1] == (size_bytes + 2, size_bytes + 2)


@pytest.mark.parametrize("parity", [False, True])
def test_a_flipped_byte_is_found_where_it_is(files: Files, job: Path, parity: bool) -> None:
    head = put_striped(files.place, "ckpt/model", content_of(11 * _MIB), stripes=3, parity=parity, segment_rows=2)
    # Chunk 3 of the second segment is the second chunk of its first part.
    part = head.segments[1].parts[0]
    flip(job / "ckpt/.stripes" / head.id / part.name, _MIB + 17)
    problem = only(verify(files, "ckpt").problems)
    assert (problem.path, problem.offset, problem.length, problem.part) == ("ckpt/model", 9 * _MIB, _MIB, part.name)
    assert problem.repairable == parity
    assert verify(files, "ckpt/model").problems == [problem]


def test_two_wrong_chunks_of_a_row_are_both_named_and_not_repairable(files: Files, job: Path) -> None:
    head = put_striped(files.place, "model", content_of(6 * _MIB), stripes=3, parity=True)
    for path in part_paths("model", head)[:2]:
        flip(job / path, 5)
    problems = verify(files, "model").problems
    assert [(problem.offset, problem.repairable) for problem in problems] == [(0, False), (_MIB, False)]


def test_a_wrong_parity_is_found(files: Files, job: Path) -> None:
    head = put_striped(files.place, "model", content_of(6 * _MIB), stripes=3, parity=True)
    flip(job / part_paths("model", head)[3], 2 * _MIB - 1)
    problem = only(verify(files, "model").problems)
    assert problem.part == head.segments[0].all_parts[3].name
    assert "parity" in problem.what


def test_a_chunk_is_repairable_if_the_parity_is_wrong_in_other_rows_only(files: Files, job: Path) -> None:
    head = put_striped(files.place, "model", content_of(6 * _MIB), stripes=3, parity=True)
    first, parity = (job / part_paths("model", head)[number] for number in (0, 3))
    flip(parity, 0)
    flip(first, _MIB)
    assert [(problem.offset, problem.repairable) for problem in verify(files, "model").problems] == [
        (0, True),
        (3 * _MIB, True),
    ]
    flip(first, _MIB)
    flip(first, 0)
    assert not any(problem.repairable for problem in verify(files, "model").problems)


@pytest.mark.parametrize("lost", ["deleted", "cut"])
def test_a_lost_part_is_a_problem_of_each_of_its_chunks(files: Files, job: Path, lost: str) -> None:
    head = put_striped(files.place, "model", content_of(6 * _MIB), stripes=3, parity=True)
    path = job / part_paths("model", head)[1]
    if lost == "deleted":
        path.unlink()
    else:
        os.truncate(path, 100)
    problems = verify(files, "model").problems
    assert [(problem.offset, problem.repairable) for problem in problems] == [(_MIB, True), (4 * _MIB, True)]
    assert head.segments[0].parts[1].name in problems[0].what


@pytest.mark.parametrize("at", [20, 200])
def test_a_damaged_head_is_a_problem_of_its_file_and_other_files_are_still_verified(
    files: Files, job: Path, at: int
) -> None:
    put_striped(files.place, "ckpt/a", content_of(2 * _MIB), stripes=2)
    head = put_striped(files.place, "ckpt/b", content_of(2 * _MIB, 1), stripes=2)
    flip(job / "ckpt/a", at)
    flip(job / part_paths("ckpt/b", head)[0], 0)
    problems = verify(files, "ckpt").problems
    assert [problem.path for problem in problems] == ["ckpt/a", "ckpt/b"]


def test_a_checkpoint_whose_save_did_not_end_is_a_problem(files: Files) -> None:
    """Files of two saves may be mixed in it: a save over a checkpoint removes its .metadata first."""
    for name in ("step-1/__0_0.distcp", "step-1/.metadata", "step-2/__0_0.distcp"):
        files.place.make_folder(name.partition("/")[0], parents=True)
        files.place.write_bytes(name, b"data")
    problem = only(verify(files, "").problems)
    assert (problem.path, problem.length) == ("step-2", 0)
    assert "not saved completely" in problem.what
    assert only(verify(files, "step-2").problems) == problem
    assert verify(files, "step-2/__0_0.distcp").problems == []


def test_a_missing_file_cannot_be_verified(files: Files) -> None:
    with pytest.raises(NotFoundError):
        verify(files, "nothing")


def test_a_read_that_is_never_answered_is_a_problem_and_does_not_hang(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_striped(files.place, "file", content_of(4 * _MIB), stripes=2)
    monkeypatch.setattr(module, "_READ_S", 0.05)
    monkeypatch.setattr(FolderFile, "read_into", lambda *_, **__: None)
    found = only_words(verify(files, "file").problems)
    assert found == {"not read within 0 s"}


def only_words(problems: Sequence[Problem]) -> set[str]:
    return {problem.what for problem in problems}
