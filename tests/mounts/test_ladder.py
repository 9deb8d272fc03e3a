"""Which way is chosen on which machine."""

from __future__ import annotations

import pytest

from bootseer.mounts.ladder import Choice, Facts, Way, choose

ALL = Facts()


@pytest.mark.parametrize(
    ("facts", "complete", "way"),
    [
        (ALL, False, Way.EROFS_FILE),
        (Facts(erofs_file="old kernel"), False, Way.EROFS_LOOP),
        (Facts(erofs_file="old kernel", loop="no devices"), False, Way.FUSE_TREE),
        (Facts(mount="not root"), False, Way.FUSE_TREE),
        (Facts(mount="not root", user_overlay="forbidden"), False, Way.UNPACK),
        (Facts(fuse="no device"), False, Way.UNPACK),
        (Facts(fuse="no device"), True, Way.EROFS_FILE),
        (Facts(fuse="no device", erofs_file="old kernel"), True, Way.EROFS_LOOP),
        (Facts(fuse="no device", mount="not root"), True, Way.UNPACK),
    ],
)
def test_the_best_way_that_works_is_chosen(facts: Facts, complete: bool, way: Way) -> None:
    assert choose(facts, complete=complete).way == way


def test_each_better_way_is_refused_with_a_reason() -> None:
    assert choose(Facts(mount="not root", user_overlay="forbidden")) == Choice(
        Way.UNPACK, ((Way.EROFS_FILE, "not root"), (Way.EROFS_LOOP, "not root"), (Way.FUSE_TREE, "forbidden"))
    )
