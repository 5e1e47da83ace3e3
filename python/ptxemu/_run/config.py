"""A run's description: from JSON to a machine, its arrays and a kernel's arguments."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import DevicePointer, EmulatorError, Machine, TensorMap, Trace
from .._machine import BUDGET
from ..tma import DataType, Interleave, L2Promotion, OobFill, Swizzle, packed_strides
from .arrays import DTYPES, Array, decode, encode, filled
from .schema import ConfigError, check

__all__ = ["Comparison", "Config", "Result", "read_config"]

_ENUMS = {
    "interleave": Interleave,
    "swizzle": Swizzle,
    "l2_promotion": L2Promotion,
    "oob_fill": OobFill,
}


@dataclass(frozen=True)
class Comparison:
    """An array held against what is expected of it.

    Attributes:
        array: Its name.
        wrong: Elements that differ by more than is allowed.
        count: All elements.
        largest: The largest difference; NaN if that cannot be said.
        first: The first element that is wrong: its index, its value, the expected one.
    """

    array: str
    wrong: int
    count: int
    largest: float
    first: tuple[tuple[int, ...], float, float] | None


@dataclass(frozen=True)
class Result:
    """What a kernel did under one seed.

    Attributes:
        seed: The machine's.
        instructions: That all warps ran; None if the kernel was stopped.
        error: What stopped it.
        arrays: All arrays afterwards, as numbers, by name.
        comparisons: Those that the description asks for; none if the kernel was stopped.
    """

    seed: int
    instructions: int | None
    error: EmulatorError | None
    arrays: dict[str, Array]
    comparisons: list[Comparison]

    @property
    def is_right(self) -> bool:
        """Whether the kernel ended and every comparison holds."""
        return self.error is None and not any(entry.wrong for entry in self.comparisons)


def read_config(path: Path) -> Config:
    """Reads a description.

    Raises:
        ConfigError: With the field that is wrong, its value and what is allowed.
        OSError: The file cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: {error}; JSON is allowed") from error
    try:
        return Config(document, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class Config:
    """A description that has been checked.

    Args:
        document: As ``json.loads`` returns it.
        folder: That its file names are relative to.

    Attributes:
        arrays: Their elements at first, by name.
        dtypes: Their types, by name.

    Raises:
        ConfigError: A field is wrong.
    """

    def __init__(self, document: Any, folder: Path) -> None:
        check(document)
        self.document: Mapping[str, Any] = document
        self.folder = folder
        self.dtypes: dict[str, str] = {}
        self.arrays: dict[str, Array] = {}
        for name, entry in document.get("arrays", {}).items():
            self.dtypes[name], self.arrays[name] = self._array(f"arrays.{name}", entry)
        self._check_names()
        self._expected = [
            self._expectation(f"compare[{index}]", entry)
            for index, entry in enumerate(document.get("compare", ()))
        ]

    @property
    def seeds(self) -> list[int]:
        """The machine's seeds, one run each."""
        return [int(seed) for seed in self.document.get("seeds", [0])]

    @property
    def printed(self) -> list[str]:
        """Arrays to print."""
        return list(self.document.get("print", ()))

    @property
    def saved(self) -> dict[str, Path]:
        """Files for arrays, by the array's name."""
        return {n: self.folder / file for n, file in self.document.get("save", {}).items()}

    def run(self, ptx: str, seed: int, trace: Trace | None = None) -> Result:
        """Runs the kernel once.

        Raises:
            ConfigError: An argument or the launch does not fit the kernel.
            PtxSyntaxError: The text is no PTX.
            UnsupportedError: It has an instruction that the emulator does not have.
        """
        document = self.document
        rules = dict.fromkeys(document.get("relaxed", ()), False)
        machine = Machine(document.get("arch", "sm_90a"), document.get("sms", 132), seed, **rules)
        pointers = {
            name: machine.alloc(elements, written=self._fill(name) != "unwritten")
            for name, elements in self.arrays.items()
        }
        module = machine.load(ptx)
        error, instructions = None, None
        try:
            instructions = module.launch(
                name=document.get("kernel", ""),
                grid=document.get("grid", [1]),
                block=document["block"],
                cluster=document.get("cluster", [1]),
                shared_bytes=document.get("shared_bytes", 0),
                args=self._arguments(pointers),
                budget=document.get("budget", BUDGET),
                trace=trace,
            )
        except EmulatorError as stopped:
            error = stopped
        except (TypeError, ValueError) as refused:
            raise ConfigError(str(refused)) from refused
        arrays = {name: decode(p.read(), self.dtypes[name]) for name, p in pointers.items()}
        compared = [] if error else [self._compare(arrays, *entry) for entry in self._expected]
        return Result(seed, instructions, error, arrays, compared)

    def _fill(self, name: str) -> object:
        return self.document["arrays"][name].get("fill")

    def _array(self, where: str, entry: Mapping[str, Any]) -> tuple[str, Array]:
        if "file" in entry:
            for other in ("fill", "shape"):
                if other in entry:
                    raise ConfigError(f"{where}.{other}: not with file; one of the two is allowed")
            values = self._load(f"{where}.file", entry["file"])
            dtype = entry.get("dtype", values.dtype.name)
            if dtype not in DTYPES:
                raise ConfigError(f"{where}.file: {dtype}; {', '.join(DTYPES)} are allowed")
            is_raw = values.dtype == DTYPES[dtype]
            return dtype, values if is_raw else encode(values, dtype)
        for needed in ("dtype", "shape"):
            if needed not in entry:
                raise ConfigError(f"{where}.{needed} is missing; it, or file, is needed")
        return entry["dtype"], filled(entry["dtype"], entry["shape"], entry.get("fill", "poison"))

    def _load(self, where: str, file: str) -> Array:
        try:
            loaded: Array = np.load(self.folder / file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {file!r}: {error}; an .npy file is allowed") from error
        return loaded

    def _check_names(self) -> None:
        """Every array that is named somewhere is one of ``arrays``."""
        document = self.document
        named = [(f"print[{k}]", name) for k, name in enumerate(self.printed)]
        named += [(f"save.{name}", name) for name in document.get("save", {})]
        for index, entry in enumerate(document.get("compare", ())):
            named.append((f"compare[{index}].array", entry["array"]))
        for index, argument in enumerate(document["arguments"]):
            named += _names(argument, f"arguments[{index}]")
        for where, name in named:
            if name not in self.arrays:
                known = ", ".join(self.arrays) or "none"
                raise ConfigError(f"{where}: {name!r} is none of arrays; {known} are allowed")

    def _arguments(self, pointers: Mapping[str, DevicePointer]) -> list[object]:
        made = []
        for index, argument in enumerate(self.document["arguments"]):
            (kind, value), *_ = argument.items()
            where = f"arguments[{index}].{kind}"
            try:
                made.append(self._argument(kind, value, where, pointers))
            except (ValueError, TypeError) as error:
                text = str(error)
                raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error
        return made

    def _argument(
        self, kind: str, value: Any, where: str, pointers: Mapping[str, DevicePointer]
    ) -> object:
        if kind == "array":
            return pointers[value]
        if kind == "scalar":
            return _scalar(value["type"], value["value"], where)
        if kind == "struct":
            return _struct(value, where, pointers)
        if kind == "members":
            entries = [next(iter(entry.items())) for entry in value]
            return tuple(
                self._argument(name, inner, f"{where}[{k}].{name}", pointers)
                for k, (name, inner) in enumerate(entries)
            )
        fields = dict(value)
        data_type = DataType[fields.pop("data_type")]
        address = int(pointers[fields.pop("array")])
        dims = fields.pop("global_dim")
        strides = fields.pop("global_strides", None) or packed_strides(dims, data_type)
        for name, enumeration in _ENUMS.items():
            if name in fields:
                fields[name] = enumeration[fields[name]]
        make = TensorMap.tiled if kind == "tiled" else TensorMap.im2col
        return make(data_type, address, dims, strides, **fields)

    def _expectation(self, where: str, entry: Mapping[str, Any]) -> tuple[Any, Array]:
        expected = self._load(f"{where}.expected", entry["expected"])
        name = entry["array"]
        if expected.shape != self.arrays[name].shape:
            raise ConfigError(
                f"{where}.expected: {entry['expected']!r} has the shape {expected.shape}; "
                f"{self.arrays[name].shape} is allowed"
            )
        return entry, expected

    def _compare(
        self, arrays: Mapping[str, Array], entry: Mapping[str, Any], expected: Array
    ) -> Comparison:
        found = arrays[entry["array"]]
        rtol, atol = entry.get("rtol", 0), entry.get("atol", 0)
        if rtol == atol == 0:
            # Exactly, integers of 64 bits too.
            same = (found == expected) | ((found != found) & (expected != expected))
        else:
            same = np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
        with np.errstate(invalid="ignore"):
            difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
        wrong = np.argwhere(~same)
        first = None
        if len(wrong):
            index = tuple(int(entry) for entry in wrong[0])
            first = index, float(found[index]), float(expected[index])
        largest = float(np.max(np.where(same & np.isnan(difference), 0, difference), initial=0))
        return Comparison(entry["array"], len(wrong), found.size, largest, first)


def _names(argument: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """The arrays that an argument names, each with the field that does."""
    (kind, value), *_ = argument.items()
    if kind == "array":
        return [(f"{where}.array", value)]
    if kind in ("tiled", "im2col"):
        return [(f"{where}.{kind}.array", value["array"])]
    if kind == "members":
        entries = [_names(entry, f"{where}.members[{k}]") for k, entry in enumerate(value)]
        return [name for names in entries for name in names]
    fields = enumerate(value.get("fields", ()))
    return [
        (f"{where}.struct.fields[{k}].array", field["array"])
        for k, field in fields
        if "array" in field
    ]


def _scalar(kind: str, value: float, where: str) -> bytes:
    """A scalar's bytes.

    Raises:
        ConfigError: An integer type does not hold the value.
    """
    size = int(kind.lstrip("bfsu")) // 8
    if kind == "bf16":
        return encode(value, "bfloat16").tobytes()
    if kind.startswith("f"):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    low = -(1 << (8 * size - 1)) if kind[0] in "bs" else 0
    high = (1 << (8 * size - (kind[0] == "s"))) - 1
    if not float(value).is_integer() or not low <= value <= high:
        raise ConfigError(f"{where}: {value} for {kind}; integers from {low} to {high} are allowed")
    return (int(value) % (1 << (8 * size))).to_bytes(size, "little")


def _struct(value: Mapping[str, Any], where: str, pointers: Mapping[str, DevicePointer]) -> bytes:
    """A struct's bytes: ``hex``, or zeros of ``size``, with ``fields`` written over them."""
    try:
        data = bytearray.fromhex(value.get("hex", ""))
    except ValueError as error:
        raise ConfigError(
            f"{where}.hex: {error}; pairs of hexadecimal digits are allowed"
        ) from error
    size = value.get("size", len(data))
    if len(data) > size or not size:
        raise ConfigError(f"{where}.size: {size}; at least {max(1, len(data))} is allowed")
    data = data.ljust(size, b"\0")
    for index, field in enumerate(value.get("fields", ())):
        place = f"{where}.fields[{index}]"
        if "array" in field:
            new = int(pointers[field["array"]]).to_bytes(8, "little")
        elif "type" in field and "value" in field:
            new = _scalar(field["type"], field["value"], place)
        else:
            raise ConfigError(f"{place}: {dict(field)}; array, or type and value, is allowed")
        if field["offset"] + len(new) > size:
            raise ConfigError(
                f"{place}.offset: {field['offset']}; up to {size - len(new)} is allowed"
            )
        data[field["offset"] : field["offset"] + len(new)] = new
    return bytes(data)
