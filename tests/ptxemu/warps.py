"""Runs a few instructions in one warp, with a value for each lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu import Machine

Array = npt.NDArray[Any]

HEADER = ".version 8.8\n.target {}\n.address_size 64\n"


def entry(
    body: str, parameters: Sequence[str], name: str = "kernel", target: str = "sm_90a"
) -> str:
    """A kernel's text; parameters are ``u64 a`` and the like."""
    listed = ",\n".join(f"  .param .{parameter}" for parameter in parameters)
    return f"{HEADER.format(target)}.visible .entry {name}(\n{listed}\n)\n{{\n{body}\n}}\n"


def lanes(body: str, result: npt.DTypeLike, *inputs: Array | Sequence[Any], seed: int = 0) -> Array:
    """Runs instructions with ``%a``, ``%b``, ... loaded from the inputs and ``%o`` stored.

    Args:
        body: The instructions; they may declare registers.
        result: The type of ``%o``.
        inputs: Values of up to 32 lanes each, the first one again in the rest.
        seed: The machine's.
    """
    machine = Machine("sm_90a", sms=1, seed=seed)
    kind = np.dtype(result)
    code, arguments, parameters = [".reg .b64 %ad, %lane;", ".reg .b32 %l;"], [], []
    code += ["mov.u32 %l, %laneid;", "cvt.u64.u32 %lane, %l;"]
    for name, values in zip("abcde", inputs, strict=False):
        array = np.asarray(values)
        full = np.full(32, array[0], array.dtype)
        full[: len(array)] = array
        arguments.append(machine.alloc(full))
        parameters.append(f"u64 in_{name}")
        code += _access(f"in_{name}", name, full.dtype, store=False)
    out = machine.alloc(np.full(32, 0x5A, np.uint8).repeat(kind.itemsize).view(kind))
    bits = _bits(kind)
    code += [f".reg .b{bits} %o;", body]
    code += _access("out", "o", kind, store=True, declare=False)
    text = entry("\n".join([*code, "ret;"]), [*parameters, "u64 out"])
    machine.load(text).launch("kernel", block=32, args=[*arguments, out])
    return out.read()


def _bits(kind: np.dtype[Any]) -> int:
    return max(16, 8 * kind.itemsize)


def _access(
    parameter: str, name: str, kind: np.dtype[Any], store: bool, declare: bool = True
) -> list[str]:
    size = kind.itemsize
    code = [f".reg .b{_bits(kind)} %{name};"] if declare else []
    code += [f"ld.param.u64 %ad, [{parameter}];", f"mad.lo.s64 %ad, %lane, {size}, %ad;"]
    if store:
        return [*code, f"st.global.b{8 * size} [%ad], %{name};"]
    return [*code, f"ld.global.b{8 * size} %{name}, [%ad];"]
