"""Events and findings of a log that a test writes."""

from __future__ import annotations

import pytest

from bootseer.report import inputs
from bootseer.report.log_scan import scan
from bootseer.report.scanned import Scanned


@pytest.fixture
def found(tmp_path):
    def scan_bytes(log: bytes, name: str = "job.log", **options: object) -> Scanned:
        path = tmp_path / name
        path.write_bytes(log)
        return scan(inputs.sources([str(path)]), **options)  # type: ignore[arg-type]

    return scan_bytes
