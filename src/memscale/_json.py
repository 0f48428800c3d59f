"""Frozen dataclasses to JSON and back: what crosses between the stages can be saved, read, diffed and edited."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def dumps(value: object) -> str:
    """The same value gives the same bytes on every machine."""
    return json.dumps(encode(value), indent=1, sort_keys=True, allow_nan=False) + "\n"


def loads(text: str) -> Any:
    """What the text says; `ValueError` for anything that is not JSON, also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    return value


def decode(kind: Any, data: Any) -> Any:
    """`data` as `kind`: a dataclass, a union, a tuple, a mapping, an enum or a plain value; else `ValueError`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type[Any]", kind), data)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, data)
    if origin is tuple:
        return _decode_tuple(args, data)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, Mapping):
            raise ValueError(f"expected an object, got {data!r:.200}")
        return {decode(args[0], key): decode(args[1], item) for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    return _decode_plain(kind, data)


def _decode_dataclass(kind: type[Any], data: Any) -> Any:
    if not isinstance(data, dict) or data.get("type", kind.__name__) != kind.__name__:
        raise ValueError(f"expected {kind.__name__}, got {data!r:.200}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = set(data) - known - {"type"}
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {sorted(unknown)}")
    missing = [f.name for f in dataclasses.fields(kind) if f.name not in data and _is_required(f)]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {missing}")
    return kind(**{name: decode(hints[name], data[name]) for name in known & set(data)})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode_union(options: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return decode(option, data)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _decode_tuple(args: tuple[Any, ...], data: Any) -> Any:
    if not isinstance(data, list):
        raise ValueError(f"expected a list, got {data!r:.200}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode(args[0], item) for item in data)
    if len(data) != len(args):
        raise ValueError(f"expected {len(args)} items, got {data!r:.200}")
    return tuple(decode(arg, item) for arg, item in zip(args, data, strict=True))


def _decode_plain(kind: Any, data: Any) -> Any:
    if kind is Any:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if typing.get_origin(kind) is typing.Literal:
        if data not in typing.get_args(kind):
            raise ValueError(f"{data!r:.200} is none of {typing.get_args(kind)}")
        return data
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"expected {kind.__name__}, got {data!r:.200}")
    return data
