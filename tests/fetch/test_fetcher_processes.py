"""Several processes of a node with one cache: each block is fetched once, and none waits for dead ones."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bootseer.artifact.objects import read_index
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.fetcher import Fetcher
from bootseer.store.open import open_store
from fetch import files
from fetch.files import BLOCK
from waiting import until


@pytest.fixture
def place(tmp_path, data):
    """A store in a folder, with a block file."""
    store = open_store(str(tmp_path / "store"))
    return store, files.written(store, data)


@pytest.fixture
def other(tmp_path, place):
    """Starts another process that fetches the same file into the same cache."""
    children = []
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}

    def start(task):
        arguments = [task, str(tmp_path / "store"), str(tmp_path / "cache"), msgspec.json.encode(place[1]).decode()]
        command = [sys.executable, files.__file__, *arguments]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.mark.slow
def test_three_processes_that_pull_the_same_file_fetch_each_block_once(other, place, data):
    children = [other("pull") for _ in range(3)]
    ends = []
    for child in children:
        output, errors = child.communicate(timeout=180)
        assert child.returncode == 0, errors
        ends.append(json.loads(output.splitlines()[-1]))
    assert {end["sha256"] for end in ends} == {hashlib.sha256(data).hexdigest()}
    assert sum(end["bytes"] for end in ends) == sum(stripe.size_bytes for stripe in place[1].stripes)


def test_the_block_of_a_killed_process_is_fetched_by_a_process_that_waits_for_it(other, place, cache, data):
    store, block_file = place
    child = other("hang")
    assert child.stdout.readline() == "request\n"
    cached = cache.open(read_index(store, block_file))
    fetcher = Fetcher(FetchSettings(hedge_s=60))
    fetcher.add(cached.index, store, cached)
    answers = []
    fetcher.read(0, 0, 2 * BLOCK, answers.append)
    until(lambda: fetcher.stats().requests_by_purpose[Purpose.DEMAND])
    assert not cached.claim(0)
    assert not cached.ready(0)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: answers)
    assert answers == [data[: 2 * BLOCK]]
    fetcher.close()
    cached.close()


@pytest.mark.parametrize(
    ("settings", "num_hedges"),
    [
        (FetchSettings(), 1),
        (FetchSettings(hedge_s=60, claim_s=0.1), 0),
        (FetchSettings(hedge_s=60, deadline_s=6.0), 0),
    ],
)
def test_a_block_of_a_process_that_hangs_is_fetched_after_a_while(other, place, cache, data, settings, num_hedges):
    store, block_file = place
    child = other("hang")
    assert child.stdout.readline() == "request\n"
    cached = cache.open(read_index(store, block_file))
    fetcher = Fetcher(settings)
    fetcher.add(cached.index, store, cached)
    assert fetcher.read_blocking(0, 0, BLOCK) == data[:BLOCK]
    assert fetcher.stats().hedges == num_hedges
    assert child.poll() is None
    fetcher.close()
    cached.close()
