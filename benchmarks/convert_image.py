"""How fast is a given image converted? `CONVERT_IMAGE=oci:FOLDER make bench ARGS=convert_image`, with any image.

The other arm only decompresses the layers concurrently and verifies their digests: the minimum of any conversion.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

from harness import ROOT, Benchmark, Must, Outcome, timed

_CONVERT = "convert"
_VERIFY = "decompress and verify only"
_METHOD = (
    "one process; an OCI layout in a folder is read from the page cache if it fits; the store is a new folder on "
    "the same disk; megabytes of compressed layers per second"
)


def measure(quick: bool) -> Outcome:
    from bootseer.image.conversion.convert import convert
    from bootseer.image.reference import parse_reference
    from bootseer.image.sources.decompress import decompressed
    from bootseer.image.sources.source import SourceLayer, open_source, read_resumed
    from bootseer.store.open import open_store

    reference = os.environ.get("CONVERT_IMAGE")
    if not reference:
        raise SystemExit("convert_image: name the image, for example CONVERT_IMAGE=oci:FOLDER")
    samples: dict[str, list[float]] = {_CONVERT: [], _VERIFY: []}
    cpu_s: dict[str, list[float]] = {_CONVERT: [], _VERIFY: []}
    with closing(open_source(parse_reference(reference))) as source, tempfile.TemporaryDirectory(dir=ROOT) as folder:
        total = sum(layer.size_bytes for layer in source.layers)

        def convert_all() -> None:
            with closing(open_store(str(Path(folder) / "store"))) as store:
                convert(source, store)

        def verify(layer: SourceLayer) -> None:
            digest = hashlib.sha256()
            for piece in decompressed(read_resumed(layer)):
                digest.update(piece)

        def verify_all() -> None:
            with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
                list(pool.map(verify, source.layers))

        for _ in range(1 if quick else 3):
            for name, run in ((_CONVERT, convert_all), (_VERIFY, verify_all)):
                took_s, busy_s = timed(run)
                samples[name].append(total / took_s / 1e6)
                cpu_s[name].append(busy_s)
                shutil.rmtree(Path(folder) / "store", ignore_errors=True)
    return Outcome(
        parameters={"layers": len(source.layers), "compressed_bytes": total},
        samples=samples,
        unit="MB/s",
        baselines={_CONVERT: _VERIFY},
        must_reach=[Must("compressed bytes converted", median(samples[_CONVERT]), 150.0, "MB/s", at_least=True)],
        details={"processor seconds": cpu_s},
        method=_METHOD,
    )


BENCHMARK = Benchmark("convert_image", "How fast is a given image converted?", measure)
