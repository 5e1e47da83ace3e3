"""``torch.ops.maxconv.conv``: the one operator that PyTorch's dispatcher and compiler see.

It is functional (its output is new) and has a fake implementation, so that ``torch.compile`` takes
it into a graph as it stands. A schema has no dataclasses: ``call`` flattens ``ConvArguments`` for
it, and the implementations make them again.

PyTorch hands over each of an operator's lists and numbers at a cost that a small convolution
notices. ``torch.ops.maxconv.conv_encoded`` has them in one string: compiled graphs call it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch import Tensor, library

from .._arguments import ConvArguments, Flat
from .._checks import check_beside_upsample
from . import _plan
from ._dtypes import BY_NAME, NAMES

__all__ = ["call", "define"]

#: Permutation of ``[N, *spatial, C]`` to ``[N, C, *spatial]``, by rank.
_CHANNELS_FIRST: Final = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}

# What is no tensor is a ConvArguments, flat; ``call`` writes it, ``_unflatten`` reads it.
_SCHEMA: Final = (
    "conv(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, int[] stride,"
    " int[] padding, int[] dilation, int groups, int[] activations, float[] scalars,"
    " int? precision, str? out_dtype, int[] upsample, int[] zero_points, float? out_scale,"
    " bool channels_last, bool constant) -> Tensor"
)

#: What follows the tensors is that of ``_SCHEMA``, as JSON.
_ENCODED_SCHEMA: Final = (
    "conv_encoded(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale,"
    " str arguments) -> Tensor"
)


def call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    arguments: ConvArguments,
    channels_last: bool,
    constant: bool,
) -> Tensor:
    """Calls the operator; the tensors' types and devices are checked.

    Args:
        input: ``[N, C, *spatial]``.
        weight: ``[K, C / groups, *taps]``.
        bias: ``[K]``, or ``None``.
        residual: ``[N, K, *spatial]``, or ``None``.
        scale: ``[K]``, or ``None``.
        arguments: What is no tensor.
        channels_last: Whether the output is, in memory.
        constant: Whether the weight is a module's, packed once.

    Raises:
        ValueError: The sizes are those of no convolution.
    """
    output: Tensor = _operator(
        input, weight, bias, residual, scale, *arguments.flatten(), channels_last, constant
    )
    return output


def _unflatten(values: tuple[Any, ...]) -> tuple[Flat, bool, bool]:
    """Returns what follows the tensors in ``_SCHEMA``: arguments, ``channels_last``, ``constant``.

    The arguments are as ``ConvArguments.of_flat`` takes them.
    """
    stride, padding, dilation, groups, activations, scalars, *others = values
    precision, out_dtype, upsample, zero_points, out_scale, channels_last, constant = others
    flat = (
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        tuple(activations),
        tuple(scalars),
        precision,
        out_dtype,
        tuple(upsample),
        tuple(zero_points),
        out_scale,
    )
    return flat, channels_last, constant


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *others: Any,
) -> Tensor:
    """Runs the convolution."""
    flat, channels_last, constant = _unflatten(others)
    plan = _plan.find(input, weight, bias, residual, scale, flat, channels_last, constant)
    return plan.run(input, weight, bias, residual, scale)


@lru_cache(maxsize=4096)
def _decode(text: str) -> tuple[Flat, bool, bool]:
    """Returns the arguments of ``_ENCODED_SCHEMA``, as ``_unflatten`` does."""
    return _unflatten(tuple(json.loads(text)))


def _conv_encoded(*given: Any) -> Tensor:
    """Runs the convolution."""
    input, weight, bias, residual, scale, text = given
    plan = _plan.find(input, weight, bias, residual, scale, *_decode(text))
    return plan.run(input, weight, bias, residual, scale)


def _new_output(
    input: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype
) -> Tensor:
    """Returns an output that holds nothing; ``shape`` is channels last."""
    if channels_last:
        return input.new_empty(shape, dtype=dtype).permute(_CHANNELS_FIRST[len(shape)])
    return input.new_empty((shape[0], shape[-1], *shape[1:-1]), dtype=dtype)


def _conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *others: Any,
) -> Tensor:
    """Returns an output of the right shape and strides; checks sizes where all are known."""
    flat, channels_last, _ = _unflatten(others)
    arguments = ConvArguments.of_flat(flat)
    if input.is_cuda:
        arguments.refuse_integers()
    arguments.check_types(NAMES[input.dtype])
    if arguments.upsample is not None:
        kind = NAMES[input.dtype]
        check_beside_upsample(arguments.upsample, kind, residual=residual is not None)
    if all(type(size) is int for size in (*input.shape, *weight.shape)):
        _plan.check_sizes(input.shape, weight.shape, arguments)
    batch, filters, *spatial = _plan.output_shape(input.shape, weight.shape, arguments)
    dtype = input.dtype if arguments.out_dtype is None else BY_NAME[arguments.out_dtype]
    return _new_output(input, (batch, *spatial, filters), channels_last, dtype)


def _conv_encoded_fake(*given: Any) -> Tensor:
    """Returns an output as ``_conv_fake`` does."""
    *tensors, arguments = given
    return _conv_fake(*tensors, *json.loads(arguments))


# PyTorch takes a library's registrations back when the object goes.
_library = cast(Any, library.Library)("maxconv", "DEF")


def define(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Returns a new operator for CPUs and GPUs.

    Args:
        schema: Its name and arguments.
        run: Computes it.
        fake: Returns an output that holds nothing.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    library.register_fake(f"maxconv::{name}", fake, lib=_library)
    return getattr(torch.ops.maxconv, name).default


#: The operator; its arguments are those of ``_SCHEMA``.
_operator: Final = define(_SCHEMA, _conv, _conv_fake)

#: The operator with its arguments in a string, which ``json.dumps`` makes of a list.
_encoded_operator: Final = define(_ENCODED_SCHEMA, _conv_encoded, _conv_encoded_fake)
