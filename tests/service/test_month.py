"""Weeks of a small fleet on both engines: all query results are correct. `benchmarks/service_month.py` times them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bootseer.service.database import Database
from fleet_month import Month

# Undone at once: modules of the benchmarks have the same names as packages of the tests.
with pytest.MonkeyPatch.context() as patched:
    patched.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    from service_month import wrong


def test_answers_of_a_month_are_its_truth(database_url: str) -> None:
    database = Database.open(database_url)
    try:
        month = Month(num_nodes=400, num_days=5, node_starts=4000, num_jobs=20, num_lemons=4)
        month.fill(database)
        with database.read() as connection:
            assert wrong(connection, month) == []
            month.truth.heard += 1
            assert wrong(connection, month) == ["15: coverage"], "a wrong answer would be told"
    finally:
        database.close()
