"""Writing a striped file whose bytes are all there, and stay until it is written: a local file, or memory.

Called by `writing`, for `bootseer ckpt put` and for the adapters that hold whole files.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.pipeline import Pipeline
from bootseer.checkpoint.writing.publication import Progress, Publication, Written
from bootseer.checkpoint.writing.segment import SegmentWriter
from bootseer.checkpoint.writing.settings import WritingSettings
from bootseer.checkpoint.writing.sick import SickNodes
from bootseer.checkpoint.writing.source import Replayable
from bootseer.io.executor import Executor

_LOOK_S = 0.5


class _Count:
    """What the workers have done. Safe to use from many threads."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.sent = 0
        self.num_ended = 0
        self.failed: SegmentWriter | None = None

    def on_sent(self, length: int) -> None:
        with self.change:
            self.sent += length
            self.change.notify()

    def on_end(self, segment: SegmentWriter) -> None:
        with self.change:
            self.num_ended += 1
            if segment.error is not None:
                self.failed = self.failed or segment
            self.change.notify()


def write_replayed(
    publication: Publication,
    source: Replayable,
    policy: Policy,
    *,
    workers: Executor,
    sick: SickNodes,
    settings: WritingSettings,
    verify: str,
    progress: Progress | None,
) -> Written:
    """Write a file and show it. Whatever fails leaves nothing behind. `progress` is called in this thread."""
    count = _Count()
    pipeline = Pipeline(publication.target(sick), workers, source.read, count.on_end, count.on_sent)
    segments: list[SegmentWriter] = []
    try:
        for start, length, stripes in policy.segments_of(source.size_bytes):
            segments.append(pipeline.add(start, stripes=stripes))
            segments[-1].grow(start + length, seal=True)
        _wait(count, pipeline, len(segments), source.size_bytes, progress)
        results = [segment.result for segment in segments if segment.result is not None]
        written = publication.publish(results, verify=verify)
    except BaseException:
        for segment in segments:
            pipeline.cancel(segment)
        # What is still on its way makes files in the folder that is to be removed.
        pipeline.wait_idle(settings.end_s)
        publication.remove_rest()
        raise
    return replace(written, num_retries=sum(segment.num_retries for segment in segments))


def _wait(count: _Count, pipeline: Pipeline, num_segments: int, size_bytes: int, progress: Progress | None) -> None:
    """Wait for all segments. Raises their errors, and `TransientError` when nothing moves for minutes."""
    told = -1
    while True:
        with count.change:
            while not (count.failed or count.num_ended == num_segments or (progress and count.sent > told)):
                count.change.wait(_LOOK_S)
                pipeline.check_moves()
            failed, is_over, sent = count.failed, count.num_ended == num_segments, count.sent
        if failed is not None and failed.error is not None:
            raise failed.error
        if progress is not None and sent != told:
            told = sent
            progress(sent, size_bytes)
        if is_over:
            return
