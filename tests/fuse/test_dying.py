"""Who is being killed, as /proc shows it. That a killed thread is seen: `test_writable_session` and `test_killed`."""

from __future__ import annotations

import os
import threading

from bootseer.fuse.callers import is_dying


def test_who_lives_or_cannot_be_seen_is_not_dying() -> None:
    assert not is_dying(os.getpid())
    assert not is_dying(threading.get_native_id())
    assert not is_dying(0)
    assert not is_dying(2**22 + 1)
