"""Frozen dataclasses to JSON and back: what crosses between the stages can be saved, read, diffed and edited."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import pathlib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from memscale._errors import MemScaleError, shortened, shown

T = TypeVar("T")


def dumps(value: object) -> str:
    """The same value gives the same bytes on every machine."""
    return json.dumps(encode(value), indent=1, sort_keys=True, allow_nan=False) + "\n"


def loads(text: str) -> Any:
    """What the text says; `ValueError` for anything that is not JSON, also where it is nested too deeply to be read."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def save(value: object, path: pathlib.Path) -> None:
    """Write it as a whole: whoever reads the file, or is killed while it is written, never has half of it.

    An `OSError` names the file that was asked for, not the one beside it.
    """
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.write_text(dumps(value), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def load(kind: type[T], path: pathlib.Path, what: str) -> T:
    """What `save` wrote of this kind; `MemScaleError` says why the file is not `what` it should be."""
    try:
        found: T = decode(kind, loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise MemScaleError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError) as error:
        raise MemScaleError(f"{path} is not {what}: {shortened(str(error))}") from error
    return found


def _refuse_constant(name: str) -> Any:
    """Python reads NaN and Infinity, which are no JSON, and `dumps` does not write them."""
    raise ValueError(f"{name} is not a number")


def encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if any(dataclasses.is_dataclass(key) for key in value):
            return _encode_pairs(value)
        return {str(encode(key)): encode(item) for key, item in value.items()}
    return value


def _encode_pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    """A list of pairs, in the order of the keys' JSON: an object of JSON has only text for keys."""
    pairs = [[encode(key), encode(item)] for key, item in value.items()]
    return sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))


def decode(kind: Any, data: Any) -> Any:
    """`data` as `kind`: a dataclass, a union, a tuple, a mapping, an enum or a plain value; else `ValueError`.

    A class that says its `kinds()` stands for the union of them.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type[Any]", kind), data)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, data)
    if hasattr(kind, "kinds"):
        return _decode_union(kind.kinds(), data)
    if origin is tuple:
        return _decode_tuple(args, data)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _decode_mapping(args, data)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    return _decode_plain(kind, data)


def _decode_dataclass(kind: type[Any], data: Any) -> Any:
    if not isinstance(data, dict) or data.get("type", kind.__name__) != kind.__name__:
        raise ValueError(f"expected {kind.__name__}, got {shown(data)}")
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
    named = data.get("type") if isinstance(data, dict) else None
    for option in options:
        if dataclasses.is_dataclass(option) and getattr(option, "__name__", None) == named:
            return decode(option, data)  # what is wrong with it is said of this one alone
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
        raise ValueError(f"expected a list, got {shown(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode(args[0], item) for item in data)
    if len(data) != len(args):
        raise ValueError(f"expected {len(args)} items, got {shown(data)}")
    return tuple(decode(arg, item) for arg, item in zip(args, data, strict=True))


def _decode_mapping(args: tuple[Any, ...], data: Any) -> Any:
    if dataclasses.is_dataclass(args[0]) and data != {}:  # an empty mapping does not show what its keys would be
        return dict(_decode_tuple((types.GenericAlias(tuple, args), ...), data))
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object, got {shown(data)}")
    return {decode(args[0], key): decode(args[1], item) for key, item in data.items()}


def _decode_number(kind: Any, data: int | float) -> int | float:
    if kind is int and not isinstance(data, int):
        raise ValueError(f"expected int, got {shown(data)}")
    largest = 2**63 if kind is int else sys.float_info.max
    if not -largest <= data <= largest:  # also inf, as which 1e999 is read
        raise ValueError(f"{shown(data)} is larger than what is counted or measured here")
    return kind(data)  # type: ignore[no-any-return]


def _decode_plain(kind: Any, data: Any) -> Any:
    if kind is Any:
        return data
    if kind in (int, float) and isinstance(data, int | float) and not isinstance(data, bool):
        return _decode_number(kind, data)
    if typing.get_origin(kind) is typing.Literal:
        if data not in typing.get_args(kind):
            raise ValueError(f"{shown(data)} is none of {typing.get_args(kind)}")
        return data
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"expected {kind.__name__}, got {shown(data)}")
    return data
