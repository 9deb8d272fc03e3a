"""JSON documents from stores and from this node, validated when they are read.

A document is a frozen dataclass (or a `msgspec.Struct`) whose annotations define what is valid: types, limits and
patterns (`Annotated[int, Meta(ge=0)]`); further checks raise `ValueError` in `__post_init__`. Unknown keys, from a
later version, are kept in the field `more`, if the class has one, and written again by `encode`. The bytes are parsed
by `json` and converted by msgspec: our documents hold non-UTF-8 paths as lone surrogates, which msgspec's own parser
rejects. Decides and touches nothing.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, TypeVar

import msgspec

from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import parse_object

_MORE = "more"
_MAX_PROBLEM = 300
_T = TypeVar("_T")


class OtherVersionError(PermanentError):
    """A document that another version of BootSeer wrote, and may still use."""


def readable(kind: type[_T]) -> type[_T]:
    """A decorator for each kind of document.

    msgspec (0.22) examines a type at its first use, and crashes the process if several threads do so at the same time:
    here it is done while the type's module is imported.
    """
    msgspec.json.Decoder(kind)
    return kind


def decode(
    data: bytes,
    kind: type[_T],
    label: str,
    *,
    limit: int,
    schema: str | tuple[str, ...],
    other_version: type[PermanentError] = OtherVersionError,
) -> _T:
    """Parse the document in `data`, of at most `limit` bytes. `label` names it in errors: `environment document`.

    Raises `CorruptError`, and `other_version` when its key `schema` is not (one of) `schema`.
    """
    value = parse_object(data, label, limit)
    known = (schema,) if isinstance(schema, str) else schema
    if value.pop("schema", None) not in known:
        raise other_version(f"{label}: another version, this BootSeer reads {' and '.join(known)}")
    return convert(value, kind, label)


def convert(value: object, kind: type[_T], label: str) -> _T:
    """Convert parsed JSON to a `kind`. Raises `CorruptError` with the name of the first invalid field."""
    known = _names(kind)  # type: ignore[arg-type] # mypy takes a type variable for unhashable
    if isinstance(value, dict) and _MORE in known:
        value = {
            **{name: field for name, field in value.items() if name in known and name != _MORE},
            _MORE: {name: field for name, field in value.items() if name not in known or name == _MORE},
        }
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{label}: {printable(str(error)[:_MAX_PROBLEM])}") from error


def encode(document: object, schema: str, **fields: Any) -> bytes:
    """Deterministic JSON with the key `schema`. `fields` replace those of the document.

    Raises `TypeError` or `ValueError` for what JSON cannot represent.
    """
    value: dict[str, Any] = msgspec.to_builtins(document, str_keys=True)
    value = {**value.pop(_MORE, {}), **value, **fields, "schema": schema}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def printable(text: str) -> str:
    """The text without control characters, which could affect the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@cache
def _names(kind: type) -> frozenset[str]:
    # `msgspec.inspect` would do, but takes longer than all other work on a document.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return frozenset(getattr(kind, "__struct_encode_fields__", [field.name for field in fields]))
