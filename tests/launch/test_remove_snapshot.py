"""The removal of a suspect snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.env.life.catalog import Catalog
from bootseer.launch.environment import restore
from bootseer.store.file import FileStore
from env.life.samples import KEY, document, store_objects


def test_what_another_start_makes_while_the_removed_ones_are_listed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FileStore(tmp_path)
    store_objects(store)
    catalog, suspect = Catalog(store), document(built_s=time.time() - 100)
    catalog.publish(suspect)
    new = document(built_s=time.time())

    def slowly(self: Catalog, key: str, since_s: float) -> bool:
        catalog.remove(key, time.time())
        catalog.publish(new)
        return False

    monkeypatch.setattr(Catalog, "has_removed", slowly)
    task: Any = SimpleNamespace(store_uri=store.uri, options=SimpleNamespace(plain_http=False))
    restore._remove(task, suspect, "an import failed", once_a_day=True)
    assert catalog.find(KEY) == new
    assert capsys.readouterr().err == ""
