"""Prefetching for the start of a job: which files, in which order, and the recorded list for the next start."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount import startup as startup_module
from bootseer.checkpoint.mount.startup import Startup
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import AccessError, TransientError
from bootseer.places.folder import FolderPlace
from checkpoint.mounted_place import MIB
from checkpoint.striped_files import in_memory
from stepwise_place import StepwisePlace
from waiting import until

LARGE = 6 * MIB
STRIPED = Policy(stripes=2, part_bytes=4 * MIB, min_bytes_per_stripe=MIB)


class Job:
    """A place with two checkpoints with the same file names, and a node's cache."""

    def __init__(self, folder: Path) -> None:
        (folder / "place").mkdir()
        self.folder = folder
        self.cache = folder / "cache"
        self.place = StepwisePlace(FolderPlace(folder / "place"))
        self.files = Files(self.place)
        self.said: list[str] = []
        self.opened: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self._ends: list[Callable[[], None]] = []
        for step in ("step-1", "step-2"):
            self.files.make_folder(step)
            for name, size in (("used", LARGE), ("unused", LARGE), ("meta", 100)):
                self.write(f"{step}/{name}", size)
        self.point_to("step-1")
        self.place.before = self._note

    def write(self, path: str, size: int) -> None:
        with closing(Writing(self.files, spool=self.folder / "spool")) as writing:
            writing.write_file(path, *in_memory(os.urandom(size)), policy=STRIPED)

    def _note(self, step: str, path: str) -> None:
        if step == "open" and path.startswith("step-"):
            self.before(path)
            if "/.stripes/" not in path:
                self.opened.append(path)

    def point_to(self, step: str) -> None:
        self.place.write_bytes("latest", f"{step}\n".encode())

    def start(self, slot: str = "0 of 2", *, cached: bool = True, node: str = "cache") -> tuple[Startup, Reading]:
        cache = self.cache.with_name(node) if cached else None
        reading = Reading(self.place, cache=Cache(cache / "blocks") if cache is not None else None)
        startup = Startup(self.files, reading, slot, cache, 64 * MIB, self.said.append)
        self._ends += [startup.end, reading.close]
        return startup, reading

    def record(
        self, slot: str, *reads: tuple[str, int, int], node: str = "cache", training_begins: bool = True
    ) -> None:
        """Run a start with these reads."""
        startup, _ = self.start(slot, node=node)
        startup.begin()
        for path, offset, length in reads:
            startup.note(path, offset, length)
        if training_begins:
            startup.training_began()
        startup.end()
        startup.close()

    def hot(self) -> list[Path]:
        return sorted((self.folder / "place/.stripes-hot").glob("*"))

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
    assert job.opened[0] == "step-1/meta", "small files are first"
    assert sorted(job.opened) == ["step-1/meta", "step-1/unused", "step-1/used"]
    until(lambda: place_bytes(reading) >= 2 * LARGE, "brought")


def test_files_that_do_not_fit_into_memory_are_prefetched_when_readers_have_freed_some(job: Job) -> None:
    reading = Reading(job.place, settings=ReadingSettings(memory_bytes=8 * MIB, idle_s=600.0))
    startup = Startup(job.files, reading, "", None, 64 * MIB, job.said.append)
    going = threading.Thread(target=startup.begin, daemon=True)
    going.start()
    until(lambda: place_bytes(reading) >= 5 * MIB, "a quarter of the memory is reserved for readers")
    small, first = job.opened
    with reading.open(first) as file:
        for number in range(6):
            file.read(number * MIB, MIB)
    until(lambda: len({*job.opened} - {small, first}) == 1, "the other file follows")
    startup.end()
    going.join(60)
    assert not going.is_alive()
    reading.close()


def test_a_checkpoint_of_one_file_is_prefetched(job: Job) -> None:
    job.write("step-3.pt", LARGE)
    job.point_to("step-3.pt")
    startup, _ = job.start("")
    startup.begin()
    assert job.opened == ["step-3.pt"]


def test_a_file_that_cannot_be_opened_does_not_end_the_prefetch(job: Job) -> None:
    def fail(path: str) -> None:
        if path == "step-1/meta":
            raise TransientError("the server is restarted")

    job.before = fail
    job.start("")[0].begin()
    assert sorted(job.opened) == ["step-1/unused", "step-1/used"]
    assert job.said == ["step-1/meta is not prefetched: the server is restarted"]


def test_large_ordinary_files_which_are_not_cached_are_not_prefetched(job: Job) -> None:
    for step in ("step-1", "step-2"):
        job.place.write_bytes(f"{step}/plain", bytes(LARGE))
    job.record("", ("step-1/plain", 0, LARGE), ("step-1/used", 0, LARGE))
    job.point_to("step-2")
    job.opened.clear()
    job.start("")[0].begin()
    assert job.opened == ["step-2/meta", "step-2/used"]


def test_prefetched_files_are_closed_at_the_end_of_the_start_or_if_they_are_too_many(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        job.place.write_bytes(f"step-1/small-{number}", bytes(100))
    monkeypatch.setattr(startup_module, "_MAX_OPEN", 4)
    startup, reading = job.start()
    startup.begin()
    assert len(job.opened) == 10
    assert len(reading._files) == 4
    startup.end()
    assert reading._files == {}


def test_a_latest_without_a_valid_name_counts_as_none(job: Job) -> None:
    job.place.write_bytes("latest", b"/ckpt/step-1\n")
    job.start()[0].begin()
    assert job.opened == ["step-2/meta"]


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


def test_another_node_of_the_job_has_its_own_record(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, MIB))
    job.opened.clear()
    job.start("1 of 2")[0].begin()
    assert job.opened == ["step-1/meta"], "the list of a single other slot may be of that slot's shard"


def test_a_new_node_in_a_slot_uses_the_record_of_the_previous_one(job: Job) -> None:
    job.record("1 of 2", ("step-1/used", 0, 2 * MIB), node="old")
    job.point_to("step-2")
    job.opened.clear()
    startup, reading = job.start("1 of 2", node="new")
    startup.begin()
    assert job.opened == ["step-2/meta", "step-2/used"]
    until(lambda: place_bytes(reading) >= 2 * MIB, "brought")
    assert place_bytes(reading) <= 2 * MIB + 100


def test_a_slot_without_a_record_prefetches_ranges_that_two_others_have_read(job: Job) -> None:
    job.record("", ("step-1/unused", 0, LARGE))
    job.record("0 of 2", ("step-1/used", 0, 2 * MIB), ("step-1/unused", 0, MIB))
    job.record("1 of 2", ("step-1/unused", MIB, MIB), ("step-1/used", MIB, 2 * MIB))
    job.opened.clear()
    startup, reading = job.start("3 of 4", node="new")
    startup.begin()
    assert job.opened == ["step-1/meta", "step-1/used"], "not another node's shard"
    until(lambda: place_bytes(reading) >= MIB, "brought")
    assert place_bytes(reading) <= MIB + 100


def test_lists_that_are_being_written_are_not_used(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, MIB))
    job.record("1 of 2", ("step-1/used", 0, MIB))
    for name in (".attempts-0123456789abcdef", ".attempts-fedcba9876543210"):
        (job.folder / "place/.stripes-hot" / name).touch()
    job.said.clear()
    job.opened.clear()
    job.start("3 of 4", node="new")[0].begin()
    assert job.opened == ["step-1/meta", "step-1/used"]
    assert job.said == []


def test_lists_of_different_numbers_of_nodes_are_not_compared(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, LARGE))
    job.record("0 of 4", ("step-1/used", 0, LARGE))
    job.opened.clear()
    job.start("7 of 8", node="new")[0].begin()
    assert job.opened == ["step-1/meta"]


def test_a_start_with_the_same_reads_writes_nothing_to_the_place(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, MIB), ("step-1/unused", 0, MIB))
    (published,) = job.hot()
    before = published.stat()
    job.point_to("step-2")
    job.record("0 of 2", ("step-2/unused", 0, MIB), ("step-2/used", 0, MIB), node="other")
    assert published.stat().st_ino == before.st_ino
    job.record("0 of 2", ("step-2/used", 0, MIB))
    assert job.hot() == [published], "replaced as a whole"
    assert published.stat().st_ino != before.st_ino


def test_the_number_of_lists_is_limited_if_slots_have_new_names_in_each_start(job: Job) -> None:
    job.record("0 of 3", ("step-1/used", 0, MIB))
    added = job.hot()
    for number in range(10):
        job.record(f"pod-{number} of 2", ("step-1/used", 0, MIB), node=f"cache-{number}")
        added += set(job.hot()) - set(added)
    assert job.hot() == sorted([added[0], *added[-6:]]), "lists of another number of nodes are kept"


def test_a_start_that_fails_before_it_has_read_everything_keeps_the_list(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, 4 * MIB))
    (published,) = job.hot()
    before = published.read_bytes()
    job.record("0 of 2", ("step-1/used", MIB, MIB), training_begins=False)
    assert published.read_bytes() == before
    job.record("0 of 2", ("step-1/used", MIB, MIB), ("step-1/unused", 0, MIB), training_begins=False)
    assert published.read_bytes() != before, "the job reads other files now"
    job.record("0 of 2", ("step-1/used", MIB, MIB))
    assert json.loads(published.read_bytes())["ranges"] == [["used", True, MIB, MIB]]


def test_a_failed_start_does_not_replace_the_list_of_a_later_one(job: Job) -> None:
    failed, _ = job.start("0 of 2")
    failed.begin()
    job.record("0 of 2", ("step-1/used", 0, 4 * MIB))
    (published,) = job.hot()
    before = published.read_bytes()
    failed.note("step-1/used", 0, MIB)
    failed.end()
    failed.close()
    assert published.read_bytes() == before


def test_a_list_of_a_later_version_is_not_replaced(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, MIB))
    (published,) = job.hot()
    newer = published.read_bytes().replace(b"checkpoint-hot/1", b"checkpoint-hot/2")
    published.write_bytes(newer)
    job.record("0 of 2", ("step-1/used", 0, 2 * MIB))
    assert published.read_bytes() == newer
    assert len(job.said) == 2
    assert "is not kept: a hot list of the version 'bootseer.checkpoint-hot/2'" in job.said[1]


def test_a_place_that_cannot_be_written_only_causes_a_message(job: Job) -> None:
    def refuse(step: str, path: str) -> None:
        if path.startswith(".stripes-hot") and step in ("make_folder", "write_bytes"):
            raise AccessError(f"no permission to write {path}")

    job.place.before = refuse
    job.record("0 of 2", ("step-1/used", 0, MIB))
    assert ["the hot list is not kept" in line for line in job.said] == [True]
    assert job.hot() == []


def test_paths_outside_of_the_checkpoint_in_a_list_are_ignored(job: Job) -> None:
    (job.folder / "secret").write_bytes(bytes(LARGE))
    job.record("0 of 2", ("step-1/used", 0, MIB))
    (published,) = job.hot()
    document = json.loads(published.read_bytes())
    hidden = next((job.folder / "place/step-1/.stripes").rglob("*-*"), None) or published
    for rows in (
        [["../secret", False, 0, MIB]],
        [["../../secret", True, 0, MIB]],
        [[str(hidden.relative_to(job.folder / "place")), False, 0, MIB], ["step-2/used", False, 0, MIB]],
    ):
        published.write_text(json.dumps(document | {"ranges": rows}))
        job.opened.clear()
        job.start("0 of 2", node="new")[0].begin()
        assert job.opened == ["step-1/meta"]


def test_a_folder_without_checkpoints_is_not_changed(job: Job) -> None:
    for name in ("latest", "step-1", "step-2"):
        job.place.inner.delete(name, recursive=True)
    (job.folder / "place/top").write_bytes(bytes(100))
    job.record("0 of 2", ("top", 0, 100))
    assert job.hot() == []


def test_without_latest_the_highest_step_is_the_next_checkpoint(job: Job) -> None:
    """With the names of transformers (`checkpoint-500`), Megatron (`iter_0000500`) and Orbax (`500`)."""
    job.place.inner.delete("latest")
    (job.folder / "place/step-2").rename(job.folder / "place/hidden")
    job.record("0 of 2", ("step-1/used", 0, MIB))
    (job.folder / "place/hidden").rename(job.folder / "place/step-10")
    job.opened.clear()
    job.start("0 of 2")[0].begin()
    assert job.opened == ["step-10/meta", "step-10/used"]
    job.opened.clear()
    job.start("", node="new")[0].begin()
    assert sorted(job.opened) == ["step-10/meta", "step-10/unused", "step-10/used"]


def test_an_invalid_record_is_logged_and_replaced(job: Job) -> None:
    job.record("0 of 2", ("step-1/used", 0, MIB))
    (record,) = job.hot()
    record.write_text("{}")
    second, _ = job.start()
    second.begin()
    assert len(job.said) == 1
    assert "is not used" in job.said[0]
    second.note("step-1/used", 0, MIB)
    second.end()
    second.close()
    assert record.read_text() != "{}"


def test_a_missing_file_does_not_end_the_prefetch(job: Job) -> None:
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
    startup.end()
    gate.set()
    thread.join(120)
    assert not thread.is_alive()
    assert len(job.opened) == 1
    assert job.said == []


def test_missing_pieces_delay_the_rest_and_none_is_requested_after_the_start(job: Job) -> None:
    requested, gate = threading.Semaphore(0), threading.Event()

    def hold(path: str) -> None:
        if "/.stripes/" in path:
            requested.release()
            assert gate.wait(120)

    job.before = hold
    startup, reading = job.start("")
    thread = threading.Thread(target=startup.begin)
    thread.start()
    assert requested.acquire(timeout=120)
    startup.end()
    thread.join(120)
    assert not thread.is_alive()
    gate.set()
    until(lambda: place_bytes(reading) >= MIB, "brought")
    assert place_bytes(reading) <= 2 * MIB + 100, "the small file was fast, so that two may be in flight"
    most = reading.facts()["most_memory_bytes"]
    assert isinstance(most, int)
    assert most <= 2 * MIB + 100


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
    startup.end()
    startup.close()
    reading.close()
    assert opened[-1] == "top"
    assert "folder/inside" not in opened
