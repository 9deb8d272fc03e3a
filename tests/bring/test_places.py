"""Where things lie on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.bring.places import runtime_root


@pytest.mark.parametrize(
    ("environ", "uid", "root"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, 0, "/run/bootseer"),
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/run/user/5/bootseer"),
        ({"XDG_RUNTIME_DIR": "relative"}, 5, "/tmp/bootseer-5"),
        ({"XDG_RUNTIME_DIR": "/run/user/5", "BOOTSEER_RUNTIME": "/elsewhere"}, 5, "/elsewhere"),
        ({}, 5, "/tmp/bootseer-5"),
    ],
)
def test_where_the_runtime_folder_is(environ: dict[str, str], uid: int, root: str) -> None:
    assert runtime_root(environ, uid) == Path(root)
