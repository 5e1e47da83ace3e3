"""What a run's description may hold, as a JSON schema, and the check of a document against it.

The schema is the statement of what is allowed: ``ptxemu --schema`` prints it for editors
and other tools, and ``check`` reads it. ``check`` knows the keywords that the schema uses and
words its errors as the package does: field, value, what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .._hardware.device import SHARED_LIMIT, Rules
from ..tma import DataType, Interleave, L2Promotion, OobFill, Swizzle
from .arrays import DTYPES

__all__ = ["RULES", "SCALARS", "SCHEMA", "ConfigError", "check"]

#: Types of scalar arguments, as PTX writes them.
SCALARS = (
    *("b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64"),
    *("f16", "bf16", "f32", "f64"),
)

#: Rules of the ISA that a machine can do without: arguments of ``Machine``.
RULES = tuple(entry.name for entry in fields(Rules))

Schema = dict[str, Any]


class ConfigError(ValueError):
    """A run's description is wrong: names the field, its value and what is allowed."""


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(**properties: Schema) -> Schema:
    """An object with exactly one of some fields."""
    return {**_object((), **properties), "minProperties": 1, "maxProperties": 1}


def _integers(lowest: int | None = None, longest: int | None = None) -> Schema:
    entry: Schema = {"type": "integer"}
    if lowest is not None:
        entry["minimum"] = lowest
    schema: Schema = {"type": "array", "items": entry, "minItems": 1}
    return schema if longest is None else {**schema, "maxItems": longest}


_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_NATURAL: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}

_RANGE = _object(("low", "high"), low=_NUMBER, high=_NUMBER, seed=_NATURAL)

_FILL: Schema = {
    "anyOf": [
        {"enum": ["zeros", "arange", "poison", "unwritten"]},
        _one_of(value=_NUMBER, uniform=_RANGE, integers=_RANGE),
    ]
}

_ARRAY = _object(
    dtype={"enum": list(DTYPES)}, shape=_integers(1), fill=_FILL, file=_TEXT, offset=_NATURAL
)

_MAP_FIELDS: dict[str, Schema] = {
    "array": _TEXT,
    "data_type": {"enum": [entry.name for entry in DataType]},
    "global_dim": _integers(1, 5),
    "global_strides": _integers(0, 4),
    "element_strides": _integers(1, 5),
    "interleave": {"enum": [entry.name for entry in Interleave]},
    "swizzle": {"enum": [entry.name for entry in Swizzle]},
    "l2_promotion": {"enum": [entry.name for entry in L2Promotion]},
    "oob_fill": {"enum": [entry.name for entry in OobFill]},
}
_MAP_NEEDS = ("array", "data_type", "global_dim")

_TILED = _object((*_MAP_NEEDS, "box_dim"), **_MAP_FIELDS, box_dim=_integers(1, 5))

_IM2COL_NEEDS = (
    *_MAP_NEEDS,
    *("pixel_box_lower_corner", "pixel_box_upper_corner"),
    *("channels_per_pixel", "pixels_per_column"),
)

_IM2COL = _object(
    _IM2COL_NEEDS,
    **_MAP_FIELDS,
    pixel_box_lower_corner=_integers(None, 3),
    pixel_box_upper_corner=_integers(None, 3),
    channels_per_pixel=_POSITIVE,
    pixels_per_column=_POSITIVE,
)

_SCALAR = _object(("type", "value"), type={"enum": list(SCALARS)}, value=_NUMBER)

_FIELD = _object(
    ("offset",), offset=_NATURAL, type={"enum": list(SCALARS)}, value=_NUMBER, array=_TEXT
)

_STRUCT = _object(
    size=_POSITIVE, hex=_TEXT, fields={"type": "array", "items": _FIELD, "minItems": 1}
)

_ARGUMENT: dict[str, Schema] = {
    "array": _TEXT,
    "scalar": _SCALAR,
    "tiled": _TILED,
    "im2col": _IM2COL,
    "struct": _STRUCT,
}

_COMPARISON = _object(
    ("array", "expected"),
    array=_TEXT,
    expected=_TEXT,
    rtol={"type": "number", "minimum": 0},
    atol={"type": "number", "minimum": 0},
)

SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A run of a kernel on ptxemu",
    **_object(
        ("block", "arguments"),
        arch={"enum": list(SHARED_LIMIT)},
        sms=_POSITIVE,
        relaxed={"type": "array", "items": {"enum": list(RULES)}},
        seeds=_integers(0),
        kernel=_TEXT,
        grid=_integers(1, 3),
        block=_integers(1, 3),
        cluster=_integers(1, 3),
        shared_bytes=_NATURAL,
        budget=_POSITIVE,
        arrays={"type": "object", "additionalProperties": _ARRAY},
        arguments={
            "type": "array",
            "items": _one_of(
                **_ARGUMENT,
                members={"type": "array", "items": _one_of(**_ARGUMENT), "minItems": 1},
            ),
        },
        print={"type": "array", "items": _TEXT},
        save={"type": "object", "additionalProperties": _TEXT},
        compare={"type": "array", "items": _COMPARISON},
    ),
}

_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
}


def check(value: object, schema: Schema = SCHEMA, where: str = "") -> None:
    """Checks a document, as ``json.loads`` returns it.

    Args:
        value: It, or a part of it.
        schema: What is allowed there.
        where: The part's name, ``arrays.x.shape[0]``; empty for the whole.

    Raises:
        ConfigError: With the first field that is wrong, its value, and what is allowed.
    """
    if "anyOf" in schema:
        # Alternatives differ in the JSON type, which chooses one.
        schemas = [entry for entry in schema["anyOf"] if _fits(value, entry)]
        if not schemas:
            allowed = " or ".join(_allowed(entry) for entry in schema["anyOf"])
            _refuse(where, value, f"{allowed} is allowed")
        check(value, schemas[0], where)
    elif "enum" in schema:
        if value not in schema["enum"] or not isinstance(value, str):
            _refuse(where, value, f"one of {_allowed(schema)} is allowed")
    elif not _fits(value, schema):
        _refuse(where, value, f"{_allowed(schema)} is allowed")
    elif isinstance(value, Mapping):
        _check_object(value, schema, where)
    elif isinstance(value, list):
        _check_list(value, schema, where)
    elif "minimum" in schema and isinstance(value, int | float) and value < schema["minimum"]:
        _refuse(where, value, f"at least {schema['minimum']} is allowed")


def _check_object(value: Mapping[str, object], schema: Schema, where: str) -> None:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    prefix = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            raise ConfigError(f"{prefix}{name} is missing; {_allowed(_inner(schema, name))}")
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        _refuse(where, value, f"exactly one of {', '.join(known)} is allowed")
    for name, entry in value.items():
        if name not in known and others is False:
            raise ConfigError(f"{prefix}{name} is no field; {', '.join(known)} are allowed")
        check(entry, _inner(schema, name), f"{prefix}{name}")


def _inner(schema: Schema, name: str) -> Schema:
    found: Schema = schema.get("properties", {}).get(name) or schema["additionalProperties"]
    return found


def _check_list(value: list[object], schema: Schema, where: str) -> None:
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    if len(value) < fewest or (most is not None and len(value) > most):
        allowed = f"{fewest} or more" if most is None else f"{fewest} to {most}"
        _refuse(where, value, f"{allowed} entries are allowed")
    for index, entry in enumerate(value):
        check(entry, schema["items"], f"{where}[{index}]")


def _fits(value: object, schema: Schema) -> bool:
    """Whether a value is of the JSON type of a schema."""
    kind = "string" if "enum" in schema else schema["type"]
    if isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    types: dict[str, Any] = {
        "object": Mapping,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
    }
    return isinstance(value, types[kind])


def _allowed(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(entry) for entry in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(json.dumps(entry) for entry in schema["enum"])
    return _NAMES[schema["type"]]


def _refuse(where: str, value: object, allowed: str) -> None:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:60] + " ..."
    raise ConfigError(f"{where or 'the file'}: {shown}; {allowed}")
