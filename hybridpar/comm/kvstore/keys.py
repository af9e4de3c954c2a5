"""The keys and values of one call, in all the shapes that MXNet takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.comm.kvstore.arrays import is_array
from hybridpar.comm.kvstore.reducer import Key, name_of
from hybridpar.comm.kvstore.sparse import RowSparse


def pairs(keys: Any, values: Any, what: str) -> list[tuple[Key, list[Any]]]:
    """Every key of a call once, in the order of first appearance, with all values that were given for it.

    Args:
        keys: one key, or a list of keys, which may be nested and may repeat.
        values: for one key an array or a list of arrays (one for each device); for a list of keys as many of those.
        what: names the call in errors.

    Raises:
        TypeError: int and str keys in one call, a key of another type, or values that are no arrays.
        ValueError: not as many values as keys, or a key without a value.
    """
    if type(keys) in (str, int) and is_value(values):
        return [(keys, [values])]
    grouped: dict[Key, list[Any]] = {}
    first: Key | None = None
    for key, value in _flat(keys, values, what):
        if first is None:
            first = key
        elif type(key) is not type(first):
            raise TypeError(
                f"{what}: expected keys of one type in a call, got {first!r} and {key!r}; use all int or all str keys"
            )
        grouped.setdefault(key, []).append(value)
    return list(grouped.items())


def new_pairs(keys: Any, values: Any, known: Mapping[Key, object]) -> list[tuple[Key, Any]]:
    """Every key of a call that initialises it, with its one value.

    Args:
        keys, values: as for ``pairs``.
        known: what the store has by key so far.

    Raises:
        ValueError: a key is known, or comes twice; see also ``pairs``.
        TypeError: int and str keys in one store; see also ``pairs``.
    """
    found = []
    example = next(iter(known), None)
    for key, arrays in pairs(keys, values, "init"):
        if key in known or len(arrays) > 1:
            raise ValueError(f"init: {name_of(key)} is initialised already; every key is initialised once")
        if example is not None and type(key) is not type(example):
            raise TypeError(
                f"init: expected keys of one type in a store, got {example!r} and {key!r}; use all int or all str "
                "keys, or another store"
            )
        found.append((key, arrays[0]))
    return found


def is_value(value: object) -> bool:
    """Whether ``value`` is one array, dense or sparse."""
    return is_array(value) or isinstance(value, RowSparse)


def _flat(keys: Any, values: Any, what: str) -> Iterator[tuple[Key, Any]]:
    if isinstance(keys, list | tuple):
        if not isinstance(values, list | tuple) or len(values) != len(keys):
            got = f"{len(values)}" if isinstance(values, list | tuple) else f"one {type(values).__name__}"
            raise ValueError(f"{what}: expected as many values as keys, {len(keys)}, got {got}")
        for key, value in zip(keys, values, strict=True):
            yield from _flat(key, value, what)
        return
    key = _checked(keys, what)
    if is_value(values):
        yield key, values
        return
    if not isinstance(values, list | tuple):
        raise TypeError(f"{what} of key {key!r}: expected an array or a list of arrays, got {type(values).__name__}")
    if not values:
        raise ValueError(f"{what} of key {key!r}: expected at least one array, got an empty list")
    for value in values:
        if not is_value(value):
            raise TypeError(f"{what} of key {key!r}: expected arrays, got {type(value).__name__}")
        yield key, value


def _checked(key: Any, what: str) -> Key:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, bool) or not hasattr(key, "__index__") or is_array(key):
        raise TypeError(f"{what}: expected int or str keys, got {type(key).__name__}")
    return operator.index(key)
