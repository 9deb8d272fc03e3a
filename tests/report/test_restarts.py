"""Lines of other programs belong to the attempt and the restart in which they were written."""

from __future__ import annotations

import pytest

from bootseer.report import inputs
from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.trace.event import decode, encode
from fleet import Fleet
from startups import EPOCH_S, began, moment, span

LINES = Fleet(2).lines()


def test_lines_of_other_programs_belong_to_the_attempt_and_restart_in_which_they_were_written(found):
    """A requeued job appends to its log, and each attempt installs its packages."""

    def event(second: int, stage: str, **more: object) -> bytes:
        times = {"wall_ns": (1_795_168_800 + second) * 10**9, "mono_ns": (1000 + second) * 10**9}
        return encode(decode(LINES[0])._replace(**times, job="moe", node="n0", stage=stage, **more))

    def pip(minute: int) -> bytes:
        return b"".join(
            b"2026-11-20T10:%02d:%02dZ %s\n" % (minute, second, text)
            for second, text in ((5, b"Collecting torch"), (6, b"Collecting numpy"),
                                 (9, b"Successfully installed torch-2.1 numpy-2.0"))
        )  # fmt: skip

    log = [event(0, "run", phase="begin", span="1"), pip(0), event(600, "run", phase="end", span="1")]
    log += [pip(20), event(1300, "run", attempt=1, phase="begin", span="2"), pip(30)]
    log += [event(2400, "restart", attempt=1, restart=1, phase="begin", span="3"), pip(50)]
    installs = [one for one in found(b"".join(log)).events if one.stage == "environment_setup.install"]
    assert sorted({(one.attempt, one.restart, one.wall_ns // 60_000_000_000 % 60) for one in installs}) == [
        (0, 0, 0), (1, 0, 20), (1, 0, 30), (1, 1, 50)
    ]  # fmt: skip


def restarted(*, trains: bool) -> bytes:
    """A log of torchrun, whose workers fail and train from 17:57:00 on; with `trains` also before, from 17:55:40 on."""
    agent = "I1120 {}.000000 7 torch/distributed/elastic/agent/server/api.py:707] [default] {}\n"
    nccl = "[2026-11-20 {}] gpu-1:70{}:70 [0] NCCL INFO Rank comm 0x3 rank 0 nranks 2 commId 0x9 - Init {}\n"
    step = "[2026-11-20 {}] iteration {}/ 500 | consumed samples: {}56 | elapsed time per iteration (ms): 5570.0 |\n"
    lines = []
    for pid, (minute, second) in enumerate(((54, 40), (56, 0))):
        at = [f"17:{minute}:{after:02d}" for after in (1, 5, 6, 20, 30)]
        lines += [agent.format(at[0], "Rendezvous'ing worker group")]
        lines += [agent.format(at[1], "Rendezvous complete for workers. Result:")]
        lines += [agent.replace("[default] {}", "  restart_count={}").format(at[1], pid)]
        lines += [agent.format(at[2], "Starting worker group")]
        lines += [nccl.format(at[3], pid, "START"), nccl.format(at[4], pid, "COMPLETE")]
        if pid or trains:
            lines += [step.format(f"17:{minute + 1}:{second + 6 * n:02d}", n + 1, n + 1) for n in range(3)]
        if not pid:
            failed = "E1120 17:55:58.000000 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: "
            lines += [failed + "3) local_rank: 0 (pid: 8) of binary: python\n"]
            lines += [agent.format("17:55:59", "Worker group FAILED. 1/1 attempts left; will restart worker group")]
    return "".join(lines).encode()


@pytest.mark.parametrize("block", [300, 1 << 20])
@pytest.mark.parametrize("trains", [True, False])
def test_a_restart_by_torchrun_has_a_first_step_of_its_own(found, monkeypatch, trains, block):
    """Also of a log of gigabytes, in which lines about steps are not searched once the first ones are known."""
    monkeypatch.setattr(inputs, "_READ_BYTES", block)
    events = found(restarted(trains=trains)).events
    first, second = (analyse(events, Options(restart=number)) for number in (0, 1))
    assert first.startup.outcome == ("training_began" if trains else "unobserved")
    assert first.overhead.startup_s == (99 if trains else 29)
    assert (second.startup.outcome, second.overhead.startup_s) == ("training_began", 59)
    assert [row.work_s for row in second.stages if row.stage == "model_initialization.nccl_init"] == [10]
    assert [(one.by, one.startup_s) for one in second.restarts] == [("launcher", 59)]


def test_a_launcher_that_bootseer_started_again_belongs_to_that_restart(found):
    """torchrun begins to count at 0 each time. The failed start seemed to last until the next one's first line."""
    begin_s = 1_795_197_240 - EPOCH_S  # 17:54:00 UTC
    own = [one for stage in ("run", "command") for one in span(begin_s, begin_s + 900, stage)]
    own += [*span(begin_s + 60, begin_s + 63, "restart", restart=1), *began(begin_s + 99, restart=1)]
    line = "W1120 {}.000000 {} torch/distributed/run.py:803] Setting OMP_NUM_THREADS\n"
    log = line.format("17:54:02", 7) + line.format("17:55:07", 9)
    events = found(b"".join(map(encode, own)) + log.encode()).events
    assert [event.restart for event in events if event.stage == "launcher_start"] == [0, 1]
    assert analyse(events, Options(restart=0)).overhead.startup_s == 60


def test_a_late_line_of_a_killed_attempt_costs_no_other_line(found):
    """torchrun may outlive `bootseer run` by a moment: its last line is after the attempt, in the same zone."""
    begin_s = 1_795_197_225 - EPOCH_S  # 17:53:45 UTC
    own = [one for stage in ("run", "command") for one in span(begin_s, None, stage)]
    own += moment(begin_s + 200, "alive"), *began(begin_s + 150)
    again = [one for stage in ("run", "command") for one in span(begin_s + 800, begin_s + 900, stage)]
    own += [one._replace(attempt=1) for one in again]
    line = "E1120 {}.000000 7 torch/distributed/{} failed (exitcode: -9) local_rank: 0 (pid: 9) of binary: python\n"
    log = "".join(line.format(at, "elastic/multiprocessing/api.py:833]") for at in ("17:57:00", "17:57:08", "18:08:00"))
    result = found(b"".join(map(encode, own)) + log.encode())
    assert "other_zone" not in result.skipped
    assert [one.attempt for one in result.events if one.stage == "worker_failed"] == [0, 1, 1]
