"""The encoding of keys, and the descriptions of their differences."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.keys.key import SCHEMA, RequestKey, difference, digest_of, key_digest, shortened

_TEXTS = st.text(max_size=8)


def _key(components: dict[str, str], details: dict[str, tuple[str, ...]] | None = None) -> RequestKey:
    return RequestKey(key_digest(components), components, details or {}, {}, (), (), {})


@given(st.lists(_TEXTS, max_size=4), st.lists(_TEXTS, max_size=4))
def test_different_parts_never_give_the_same_digest(one: list[str], two: list[str]) -> None:
    assert (digest_of(one) == digest_of(two)) == (one == two)


@given(st.dictionaries(_TEXTS, _TEXTS, max_size=4), st.dictionaries(_TEXTS, _TEXTS, max_size=4))
def test_only_equal_components_have_equal_digests(one: dict[str, str], two: dict[str, str]) -> None:
    assert (key_digest(one) == key_digest(two)) == (one == two)
    assert key_digest(dict(reversed(one.items()))) == key_digest(one)


@given(st.dictionaries(_TEXTS, _TEXTS, max_size=5), st.dictionaries(_TEXTS, _TEXTS, max_size=5))
def test_differences_are_exactly_the_components_that_differ(old: dict[str, str], new: dict[str, str]) -> None:
    found = {row.name for row in difference(old, _key(new))}
    assert found == {name for name in old | new if old.get(name, 0) != new.get(name, 0)}


def test_the_digest_is_what_the_documentation_says() -> None:
    data = b"".join(len(part).to_bytes(8, "big") + part for part in (SCHEMA.encode(), b"a", b"1", b"b", b"2"))
    assert key_digest({"b": "2", "a": "1"}) == hashlib.sha256(data).hexdigest()


def test_bytes_that_are_no_text_have_a_digest() -> None:
    assert key_digest({"file \udcff": "1"}) != key_digest({"file \udcfe": "1"})


def test_a_difference_says_what_came_went_and_changed() -> None:
    old, new = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    key = _key({"tree": new, "libc": "glibc 2.36", "gone? no": "1"}, {"tree": ("a 1", "b 3", "d 4")})
    rows = {row.name: row for row in difference({"tree": old, "libc": "glibc 2.31", "was": "x"}, key)}
    assert rows["tree"].words == "its content changed"
    assert rows["libc"].words == "glibc 2.31 -> glibc 2.36"
    assert rows["was"].words == "is not in the key any more"
    assert rows["gone? no"].words == "was not in the key"
    (row, *_) = difference({"tree": old}, key, {"tree": ("a 1", "b 2", "c 9")})
    assert row.words == "added d; removed c; changed b"


def test_a_value_is_shortened() -> None:
    assert shortened("sha256:" + "a" * 64 + " 3 files") == "sha256:aaaaaaaaaaaa 3 files"
    assert shortened("a" * 100) == "a" * 69 + "..."
