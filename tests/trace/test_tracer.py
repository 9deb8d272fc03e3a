"""The public API and the tracer below it: the spool's contents when code runs in stages."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

import bootseer
from bootseer.trace import tracer as module
from bootseer.trace.event import Event, decode
from bootseer.trace.sinks import FanOut, SpoolSink, StderrSink
from bootseer.trace.tracer import Tracer, from_environment, open_sink

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spool:
    """A folder to which the process's tracer writes, and its contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"BOOTSEER_TRACE": f"spool:{folder}", "BOOTSEER_JOB": "moe", "BOOTSEER_NODE": "n0"}

    def events(self) -> list[Event]:
        paths = sorted(self.folder.glob("*.events"), key=lambda path: path.name.split(".")[-2])
        return [decode(line) for path in paths for line in path.read_bytes().splitlines()]

    def story(self) -> list[str]:
        """`begin a`, `end a ok`, ... in the order written."""
        return [f"{event.phase} {event.stage} {event.outcome}".strip() for event in self.events()]


def set_process_tracer(tracer: Tracer | None) -> None:
    module._tracer, module._resolved, module._began = tracer, True, False


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool")
    tracer = from_environment(spool.env)
    assert tracer is not None
    set_process_tracer(tracer)
    yield spool
    set_process_tracer(None)


def test_nesting_gives_parents(spool: Spool) -> None:
    with bootseer.stage("a"), bootseer.stage("a.b", packages=2):
        pass
    with bootseer.stage("c"):
        pass
    events = spool.events()
    assert spool.story() == ["begin a", "begin a.b", "end a.b ok", "end a ok", "begin c", "end c ok"]
    a, b = events[0], events[1]
    assert (a.parent, b.parent, events[4].parent) == ("", a.span, "")
    assert [event.span for event in events[:4]] == [a.span, b.span, b.span, a.span]
    assert len({a.span, b.span, events[4].span}) == 3
    assert b.attrs == {"packages": 2}
    assert {(event.job, event.node, event.pid, event.trace) for event in events} == {
        ("moe", "n0", os.getpid(), a.trace)
    }
    assert len(a.trace) == 32
    assert events[2].mono_ns >= b.mono_ns


def test_exceptions_pass_and_are_reported(spool: Spool) -> None:
    with pytest.raises(ZeroDivisionError), bootseer.stage("outer"), bootseer.stage("inner"):
        _ = 1 / 0
    with pytest.raises(SystemExit), bootseer.stage("leaves"):
        sys.exit(3)
    assert [story for story in spool.story() if story.startswith("end")] == [
        "end inner failed",
        "end outer failed",
        "end leaves failed",
    ]
    assert [event.attrs.get("error") for event in spool.events() if event.phase == "end"] == [
        "ZeroDivisionError",
        "ZeroDivisionError",
        "SystemExit",
    ]
    with bootseer.stage("after"):
        pass
    assert spool.events()[-1].parent == ""


def test_notes_go_into_the_end(spool: Spool) -> None:
    with bootseer.stage("a", packages=1) as stage:
        stage.note(bytes=5, packages=2)
    begin, end = spool.events()
    assert (begin.attrs, end.attrs) == ({"packages": 1}, {"packages": 2, "bytes": 5})


def test_names_and_values_of_any_kind(spool: Spool) -> None:
    with bootseer.stage("Data Loading!", huge=10**5000, thing=object(), text="@bootseer1 {}"):
        pass
    with bootseer.stage(None):  # type: ignore[arg-type]
        pass
    assert spool.story()[::2] == ["begin data_loading", "begin none"]


def test_decorator(spool: Spool) -> None:
    @bootseer.stage("work", n=1)
    def work(depth: int) -> int:
        """Doc."""
        return depth if depth == 0 else work(depth - 1) + 1

    assert work(2) == 2
    assert (work.__name__, work.__doc__) == ("work", "Doc.")
    assert spool.story() == ["begin work"] * 3 + ["end work ok"] * 3
    spans = [event.span for event in spool.events()]
    assert spans[:3] == spans[:2:-1]
    with pytest.raises(TypeError):
        work()  # type: ignore[call-arg]
    assert spool.story()[-1] == "end work failed"


def test_decorated_coroutine_is_measured_to_its_end(spool: Spool) -> None:
    @bootseer.stage("outer")
    async def outer() -> str:
        await asyncio.sleep(0)
        return await inner()

    @bootseer.stage("inner")
    async def inner() -> str:
        await asyncio.sleep(0)
        return "done"

    assert inspect.iscoroutinefunction(outer)
    assert asyncio.run(outer()) == "done"
    assert spool.story() == ["begin outer", "begin inner", "end inner ok", "end outer ok"]
    assert spool.events()[1].parent == spool.events()[0].span


def test_tasks_keep_their_own_parents(spool: Spool) -> None:
    async def worker(name: str) -> None:
        with bootseer.stage(name):
            await asyncio.sleep(0)
            with bootseer.stage(f"{name}.part"):
                await asyncio.sleep(0)

    async def main() -> None:
        with bootseer.stage("all"):
            await asyncio.gather(worker("a"), worker("b"))

    asyncio.run(main())
    begins = {event.stage: event for event in spool.events() if event.phase == "begin"}
    assert begins["a"].parent == begins["b"].parent == begins["all"].span
    assert begins["a.part"].parent == begins["a"].span
    assert begins["b.part"].parent == begins["b"].span


def test_decorated_generators_are_left_alone(spool: Spool) -> None:
    """Their call does no work, so a span around it would have 0 s; not observed is not 0."""

    @bootseer.stage("numbers")
    def numbers() -> Generator[int]:
        yield from (1, 2)

    @bootseer.stage("later")
    async def later() -> AsyncIterator[int]:
        yield 3

    async def collect() -> list[int]:
        return [number async for number in later()]

    assert list(numbers()) == [1, 2]
    assert asyncio.run(collect()) == [3]
    assert not spool.folder.exists()


def test_stage_inside_a_generator(spool: Spool) -> None:
    """The span covers the time in between, and is not the parent of later stages."""

    def numbers() -> Generator[int]:
        with bootseer.stage("produce"):
            yield 1

    with bootseer.stage("consume"):
        for _ in numbers():
            with bootseer.stage("use"):
                pass
    with bootseer.stage("after"):
        pass
    begins = {event.stage: event for event in spool.events() if event.phase == "begin"}
    assert begins["produce"].parent == begins["consume"].span
    assert begins["after"].parent == ""
    assert len(spool.events()) == 8


def test_a_stage_that_ends_in_another_context_raises_nothing(spool: Spool) -> None:
    def numbers() -> Generator[int]:
        with bootseer.stage("produce"):
            yield 1

    generator = numbers()
    contextvars.copy_context().run(next, generator)
    generator.close()
    assert spool.story() == ["begin produce", "end produce failed"]


def test_threads_start_at_the_root(spool: Spool) -> None:
    def worker(name: str) -> None:
        with bootseer.stage(name), bootseer.stage("part"):
            pass

    with bootseer.stage("main"):
        threads = [threading.Thread(target=worker, args=(f"w{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    begins = [event for event in spool.events() if event.phase == "begin"]
    roots = {event.span for event in begins if event.stage.startswith("w")}
    assert {event.parent for event in begins if event.stage.startswith("w")} == {""}
    assert {event.parent for event in begins if event.stage == "part"} == roots
    assert len(list(spool.folder.iterdir())) == 1


def test_one_stage_object_in_many_threads(spool: Spool) -> None:
    """All callers share a decorator, but not their spans."""
    start = threading.Barrier(4)

    @bootseer.stage("shared")
    def work() -> None:
        start.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = spool.events()
    begins = sorted(event.span for event in events if event.phase == "begin")
    ends = sorted(event.span for event in events if event.phase == "end")
    assert begins == ends
    assert len(set(begins)) == 4


def test_past_moments_keep_both_clocks_together(spool: Spool) -> None:
    tracer = module.process_tracer()
    assert tracer is not None
    tracer.emit("s", "instant")
    tracer.emit("s", "instant", wall_ns=spool.events()[0].wall_ns - 500_000_000_000)
    tracer.emit("s", "instant", mono_ns=spool.events()[0].mono_ns - 500_000_000_000)
    tracer.emit("s", "instant", wall_ns=7, mono_ns=8)
    now, by_wall, by_mono, both = spool.events()
    tolerance_ns = 20_000_000_000  # the two clocks are read one after the other, and one may be set in between
    for past in (by_wall, by_mono):
        assert abs((now.wall_ns - past.wall_ns) - (now.mono_ns - past.mono_ns)) < tolerance_ns
    assert (both.wall_ns, both.mono_ns) == (7, 8)


def test_training_began_counts_once(spool: Spool) -> None:
    threads = [threading.Thread(target=functools.partial(bootseer.training_began, step=1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bootseer.training_began()
    (event,) = spool.events()
    assert (event.stage, event.phase, event.attrs) == ("training_began", "instant", {"by": "api", "step": 1})


def test_traceparent_is_honoured_and_set(spool: Spool) -> None:
    tracer = from_environment({**spool.env, "TRACEPARENT": f"00-{TRACE}-{SPAN}-01"})
    assert tracer is not None
    assert tracer.environment() == {"TRACEPARENT": f"00-{TRACE}-{SPAN}-01"}
    with tracer.span("outer") as outer, tracer.span("inner") as inner:
        assert tracer.environment() == {"TRACEPARENT": f"00-{TRACE}-{inner.id}-01"}
        assert tracer.environment(outer.id) == {"TRACEPARENT": f"00-{TRACE}-{outer.id}-01"}
    first = spool.events()[0]
    assert (first.trace, first.parent) == (TRACE, SPAN)


@pytest.mark.parametrize("text", ["", "garbage", f"00-{'0' * 32}-{SPAN}-01"])
def test_bad_traceparent_starts_a_new_trace(spool: Spool, text: str) -> None:
    tracer = from_environment({**spool.env, "TRACEPARENT": text})
    assert tracer is not None
    assert len(tracer.trace) == 32
    assert set(tracer.trace) != {"0"}
    assert (tracer.parent, tracer.environment()) == ("", {})


def test_a_chain_of_processes_is_one_trace(spool: Spool) -> None:
    script = "import bootseer\nwith bootseer.stage('child'): pass\n"
    tracer = module.process_tracer()
    assert tracer is not None
    with tracer.span("parent") as parent:
        env = {**os.environ, **spool.env, **tracer.environment()}
        subprocess.run([sys.executable, "-c", script], env=env, timeout=180, check=True)
    child = next(event for event in spool.events() if event.stage == "child")
    assert (child.trace, child.parent) == (tracer.trace, parent.id)
    assert child.pid != os.getpid()
    assert len(list(spool.folder.iterdir())) == 2


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BOOTSEER_TRACE": ""},
        {"BOOTSEER_TRACE": "spool:FOLDER", "BOOTSEER_DISABLE": "1"},
        {"BOOTSEER_TRACE": "unheard,of:words"},
        {"BOOTSEER_TRACE": "spool:"},
    ],
)
def test_off_leaves_nothing_and_says_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    script = (
        "import bootseer\n"
        "@bootseer.stage('a')\n"
        "def f(): return 5\n"
        "with bootseer.stage('b', n=1) as stage:\n"
        "    stage.note(bytes=5)\n"
        "    assert f() == 5\n"
        "bootseer.training_began()\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BOOTSEER")}
    env = {key: value.replace("FOLDER", str(tmp_path / "spool")) for key, value in env.items()}
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**clean, **env}, cwd=tmp_path, capture_output=True, timeout=300, check=True
    )
    assert (ended.stdout, ended.stderr) == (b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_off_is_decided_once_and_resolved_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment({"BOOTSEER_TRACE": "spool:/nonexistent", "BOOTSEER_DISABLE": "1"}) is None
    set_process_tracer(None)
    monkeypatch.setenv("BOOTSEER_TRACE", "spool:/nonexistent")
    assert module.process_tracer() is None


def test_a_full_or_missing_spool_never_reaches_the_job() -> None:
    tracer = from_environment({"BOOTSEER_TRACE": "spool:/proc/bootseer"})
    assert tracer is not None
    with tracer.span("a"):
        pass
    assert tracer.sink.lost == 2
    assert tracer.identity.job == "unnamed"


def test_sink_words(tmp_path: Path) -> None:
    assert isinstance(open_sink(f"spool:{tmp_path}", "n"), SpoolSink)
    assert isinstance(open_sink("stderr", "n"), StderrSink)
    both = open_sink(f" stderr , spool:{tmp_path}/a:b ,,later:x", "n")
    assert isinstance(both, FanOut)
    assert [type(sink) for sink in both.sinks] == [StderrSink, SpoolSink]


def test_fork_in_the_middle_of_a_stage(spool: Spool) -> None:
    """A forked worker's stages belong to the stage that forked it, and are written to a separate file."""
    tracer = module.process_tracer()
    assert isinstance(tracer, Tracer)
    script = (
        "import bootseer, os\n"
        "with bootseer.stage('outer'):\n"
        "    child = os.fork()\n"
        "    with bootseer.stage('inner'): pass\n"
        "    if child == 0: os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **spool.env}, timeout=180, check=True)
    events = spool.events()
    outer = next(event for event in events if event.stage == "outer")
    inner = [event for event in events if event.stage == "inner" and event.phase == "begin"]
    assert {event.parent for event in inner} == {outer.span}
    assert len({event.pid for event in inner}) == len({event.span for event in inner}) == 2
    assert len(list(spool.folder.iterdir())) == 2
