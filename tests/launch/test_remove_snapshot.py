"""The removal of a suspect snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.artifact.signatures import Signatures
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import Action, decide
from bootseer.errors import PermanentError
from bootseer.launch.environment import restore
from bootseer.store.file import FileStore
from env.life.samples import KEY, document, store_objects
from signing_keys import make_key, trust


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
    task: Any = SimpleNamespace(store_uri=store.uri, open_store=lambda: FileStore(tmp_path))
    restore.remove_snapshot(task, suspect, "an import failed", once_a_day=True)
    assert catalog.find(KEY) == new
    assert capsys.readouterr().err == ""


def test_of_a_store_without_deletion_the_next_start_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = FileStore(tmp_path)
    store_objects(store)
    key = make_key(tmp_path / "key")
    signatures = Signatures(signing=(str(key),), trusted=trust(tmp_path / "trusted", key))
    catalog, damaged = Catalog(store, signatures=signatures), document(built_s=time.time() - 100)
    catalog.publish(damaged)

    def refuse(self: FileStore, name: str) -> None:
        raise PermanentError("this registry does not allow deletion")

    monkeypatch.setattr(FileStore, "delete", refuse)
    tracer = SimpleNamespace(emit=lambda *_, **__: None)
    task: Any = SimpleNamespace(
        store_uri=store.uri,
        open_store=lambda: FileStore(tmp_path),
        session=SimpleNamespace(span="", tracer=tracer),
        signatures=signatures,
    )
    restore.remove_snapshot(task, damaged, "parts are missing")
    assert "is removed from its store: the next start makes it anew" in capfd.readouterr().err
    decision = decide("auto", catalog.look(KEY), now_s=time.time())
    assert (decision.action, decision.code, decision.replace) == (Action.BUILD, "expired", True)
    assert catalog.publish(new := document(built_s=time.time()), replace=True)
    assert catalog.find(KEY) == new
