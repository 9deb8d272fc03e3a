"""Which mount method is chosen on which machine."""

from __future__ import annotations

import pytest

from bootseer.mounts.method import Choice, Facts, MountMethod, choose

ALL = Facts()


@pytest.mark.parametrize(
    ("facts", "method"),
    [
        (ALL, MountMethod.EROFS_FILE),
        (Facts(erofs_file="old kernel"), MountMethod.EROFS_LOOP),
        (Facts(erofs_file="old kernel", loop="no devices"), MountMethod.FUSE_TREE),
        (Facts(mount="not root"), MountMethod.FUSE_TREE),
        (Facts(mount="not root", user_overlay="forbidden"), MountMethod.UNPACK),
        (Facts(fuse="no device"), MountMethod.EROFS_FILE),
        (Facts(fuse="no device", erofs_file="old kernel"), MountMethod.EROFS_LOOP),
        (Facts(fuse="no device", mount="not root"), MountMethod.UNPACK),
    ],
)
def test_the_best_method_that_works_is_chosen(facts: Facts, method: MountMethod) -> None:
    assert choose(facts).method == method


def test_each_better_method_is_refused_with_a_reason() -> None:
    assert choose(Facts(mount="not root", user_overlay="forbidden")) == Choice(
        MountMethod.UNPACK,
        (
            (MountMethod.EROFS_FILE, "not root"),
            (MountMethod.EROFS_LOOP, "not root"),
            (MountMethod.FUSE_TREE, "forbidden"),
        ),
    )
