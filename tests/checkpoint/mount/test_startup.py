"""What is brought for the start of a job, in which order, and what is kept of it for the next one."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount.serving import Startup
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.writing import Writing
from bootseer.places.folder import FolderPlace
from checkpoint.mounted_place import MIB, until
from checkpoint.striped_files import in_memory
from stepwise_place import StepwisePlace

LARGE = 6 * MIB
STRIPED = Policy(stripes=2, part_bytes=4 * MIB, min_bytes_per_stripe=MIB)


class Job:
    """A place with two checkpoints of the same names, and what a node has."""

    def __init__(self, folder: Path) -> None:
        (folder / "place").mkdir()
        self.cache = folder / "cache"
        self.place = StepwisePlace(FolderPlace(folder / "place"))
        self.files = Files(self.place)
        self.said: list[str] = []
        self.opened: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self._ends: list[Callable[[], None]] = []
        writing = Writing(self.files, policy_of=lambda path: STRIPED, spool=folder / "spool")
        for step in ("step-1", "step-2"):
            self.files.make_folder(step)
            for name, size in (("used", LARGE), ("unused", LARGE), ("meta", 100)):
                writing.write_file(f"{step}/{name}", *in_memory(os.urandom(size)))
        writing.close()
        self.point_to("step-1")
        self.place.before = self._note

    def _note(self, step: str, path: str) -> None:
        if step == "open" and path.startswith("step-"):
            self.before(path)
            if "/.stripes/" not in path:
                self.opened.append(path)

    def point_to(self, step: str) -> None:
        self.place.write_bytes("latest", f"{step}\n".encode())

    def start(self, slot: str = "0 of 2", *, cached: bool = True) -> tuple[Startup, Reading]:
        reading = Reading(self.place, cache=Cache(self.cache / "blocks") if cached else None)
        startup = Startup(self.files, reading, slot, self.cache if cached else None, 64 * MIB, self.said.append)
        self._ends += [startup.drop, reading.close]
        return startup, reading

    def close(self) -> None:
        for end in self._ends:
            end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def place_bytes(reading: Reading) -> int:
    found = reading.facts()["place_bytes"]
    assert isinstance(found, int)
    return found


def test_a_node_of_many_without_a_record_prefetches_small_files(job: Job) -> None:
    startup, _ = job.start()
    startup.begin()
    assert job.opened == ["step-1/meta"]


def test_a_single_node_prefetches_the_latest_checkpoint(job: Job) -> None:
    startup, reading = job.start("")
    startup.begin()
    assert job.opened[0] == "step-1/meta", "what is small comes first"
    assert sorted(job.opened) == ["step-1/meta", "step-1/unused", "step-1/used"]
    until(lambda: place_bytes(reading) >= 2 * LARGE, "brought")


def test_the_record_of_one_start_applies_to_the_next_checkpoint(job: Job) -> None:
    first, _ = job.start()
    first.begin()
    first.note("step-1/used", 2 * MIB, MIB)
    first.note("step-1/used", 0, 100)
    first.end()
    first.note("step-1/unused", 0, LARGE)
    first.close()
    job.point_to("step-2")
    job.opened.clear()
    second, reading = job.start()
    second.begin()
    assert job.opened == ["step-2/meta", "step-2/used"]
    until(lambda: place_bytes(reading) >= 2 * MIB, "brought")
    assert place_bytes(reading) <= 2 * MIB + 100


def test_another_node_of_the_job_has_a_record_of_its_own(job: Job) -> None:
    first, _ = job.start("0 of 2")
    first.begin()
    first.note("step-1/used", 0, MIB)
    first.end()
    first.close()
    job.opened.clear()
    job.start("1 of 2")[0].begin()
    assert job.opened == ["step-1/meta"]


def test_an_invalid_record_is_logged_and_replaced(job: Job) -> None:
    first, _ = job.start()
    first.note("step-1/used", 0, MIB)
    first.end()
    first.close()
    (record,) = (job.cache / "checkpoints").iterdir()
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    record.write_text("{}")
    second, _ = job.start()
    second.begin()
    assert len(job.said) == 1
    assert "recorded anew" in job.said[0]
    second.note("step-1/used", 0, MIB)
    second.end()
    second.close()
    assert record.read_text() != "{}"


def test_a_file_that_is_gone_does_not_end_the_rest(job: Job) -> None:
    def remove(path: str) -> None:
        if path == "step-1/unused":
            job.place.inner.delete(path)

    job.before = remove
    startup, _ = job.start("")
    startup.begin()
    assert job.opened[-1] == "step-1/used"
    assert ["step-1/unused is not prefetched" in line for line in job.said] == [True]


def test_unmounting_ends_the_prefetch(job: Job) -> None:
    reached, gate = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        reached.set()
        assert gate.wait(120)

    job.before = wait
    startup, _ = job.start("")
    thread = threading.Thread(target=startup.begin)
    thread.start()
    assert reached.wait(120)
    startup.drop()
    gate.set()
    thread.join(120)
    assert not thread.is_alive()
    assert len(job.opened) == 1
    assert job.said == []


def test_without_checkpoints_only_the_top_folder_is_prefetched(tmp_path: Path) -> None:
    (tmp_path / "p/folder").mkdir(parents=True)
    (tmp_path / "p/top").write_bytes(b"x")
    (tmp_path / "p/folder/inside").write_bytes(b"x")
    place = StepwisePlace(FolderPlace(tmp_path / "p"))
    opened: list[str] = []
    place.before = lambda step, path: opened.append(path) if step == "open" else None
    reading = Reading(place)
    startup = Startup(Files(place), reading, "", None, MIB, opened.append)
    startup.begin()
    startup.drop()
    startup.close()
    reading.close()
    assert opened[-1] == "top"
    assert "folder/inside" not in opened
