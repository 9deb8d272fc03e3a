"""Which mount method is chosen on which machine."""

from __future__ import annotations

import pytest

from bootseer.mounts.method import Choice, Facts, MountMethod, choose

ALL = Facts()


@pytest.mark.parametrize(
    ("facts", "complete", "method"),
    [
        (ALL, False, MountMethod.EROFS_FILE),
        (Facts(erofs_file="old kernel"), False, MountMethod.EROFS_LOOP),
        (Facts(erofs_file="old kernel", loop="no devices"), False, MountMethod.FUSE_TREE),
        (Facts(mount="not root"), False, MountMethod.FUSE_TREE),
        (Facts(mount="not root", user_overlay="forbidden"), False, MountMethod.UNPACK),
        (Facts(fuse="no device"), False, MountMethod.UNPACK),
        (Facts(fuse="no device"), True, MountMethod.EROFS_FILE),
        (Facts(fuse="no device", erofs_file="old kernel"), True, MountMethod.EROFS_LOOP),
        (Facts(fuse="no device", mount="not root"), True, MountMethod.UNPACK),
    ],
)
def test_the_best_method_that_works_is_chosen(facts: Facts, complete: bool, method: MountMethod) -> None:
    assert choose(facts, complete=complete).method == method


def test_each_better_method_is_refused_with_a_reason() -> None:
    assert choose(Facts(mount="not root", user_overlay="forbidden")) == Choice(
        MountMethod.UNPACK,
        (
            (MountMethod.EROFS_FILE, "not root"),
            (MountMethod.EROFS_LOOP, "not root"),
            (MountMethod.FUSE_TREE, "forbidden"),
        ),
    )
