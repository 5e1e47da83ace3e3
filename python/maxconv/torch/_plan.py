"""Plans: what of a call depends on shapes, strides, dtypes and arguments only.

A plan is made once, when such a call comes first: sizes are checked, the geometry is encoded, and a
kernel of the shared libraries (``_native``) is prepared. Running it takes the output from PyTorch's
allocator and hands pointers over: on a GPU to PyTorch's current stream, where nothing is waited
for, on a CPU to PyTorch's own threads.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._arguments import ConvArguments, Flat
from .._checks import (
    LAYOUTS,
    check_beside_upsample,
    check_bias,
    check_residual,
    filter_shape_parts,
    renamed,
)
from .._fields import COPY_BYTES, Layout, Precision
from .._library_files import Family
from .._native import Call, GpuTarget, Library, Prepared, host, prepare_gpu
from .._packing import packed_length
from .._problem import ConvProblem, encode, output_size
from .._subpixel import SubpixelAxis
from .._targets import architecture_of
from ._dtypes import BY_NAME, DTYPES, NAMES
from ._filters import OPERANDS, lacks_version, pack_on_host
from ._reorder import (
    channels_last_copy,
    channels_last_strides,
    contiguous_copy,
    contiguous_strides,
    lies,
    permuted_last,
)
from ._threads import parallel_function, threads
from ._upsample import folded_filter, repeated

__all__ = [
    "Direct",
    "Plan",
    "aligned",
    "check_sizes",
    "find",
    "gpu_target",
    "is_kept",
    "output_shape",
    "raw_stream",
    "rounding",
    "runners",
    "torch_precision",
]

# A member of an enumeration is slow to hash, and these are parts of a plan's key.
_TF32, _FLOAT32 = int(Precision.TF32), int(Precision.FLOAT32)

#: Returns a device's current stream, as CUDA's handle; ``None`` in a PyTorch without CUDA.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Described(NamedTuple):
    """What a plan knows of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _describe(tensor: Tensor | None) -> _Described | None:
    """Returns what a plan knows of a tensor."""
    return None if tensor is None else _Described(tensor.shape, tensor.stride(), tensor.dtype)


class _Tensors(NamedTuple):
    """The tensors of a call, as far as a plan knows them."""

    input: _Described
    weight: _Described
    bias: _Described | None
    residual: _Described | None
    scale: _Described | None


@lru_cache(maxsize=4096)
def check_sizes(
    input_shape: Sequence[int], weight_shape: Sequence[int], arguments: ConvArguments
) -> ConvProblem:
    """Checks the sizes, in the words of PyTorch's arguments.

    Args:
        input_shape: ``[N, C, *spatial]``.
        weight_shape: ``[K, C / groups, *taps]``.
        arguments: The call's.

    Raises:
        ValueError: They are those of no convolution.
    """
    batch, channels, *spatial = input_shape
    with renamed(filter="weight"):
        layout = LAYOUTS[arguments.rank][2]
        filters, taps, group_channels = filter_shape_parts(weight_shape, layout, arguments.rank)
        return ConvProblem.of(
            arguments,
            (batch, *spatial, channels),
            filters=filters,
            filter_size=taps,
            group_channels=group_channels,
        )


def output_shape(
    input_shape: Sequence[int], weight_shape: Sequence[int], arguments: ConvArguments
) -> tuple[int, ...]:
    """Returns the output's shape ``[N, K, *spatial]``; the sizes may be PyTorch's symbols."""
    taps = weight_shape[2:]
    before, after = arguments.pads(taps)
    factors = arguments.upsample or (1,) * arguments.rank
    spatial = (
        output_size(
            input_shape[2 + i] * factors[i],
            taps=taps[i],
            stride=arguments.stride[i],
            dilation=arguments.dilation[i],
            pad_before=before[i],
            pad_after=after[i],
        )
        for i in range(arguments.rank)
    )
    return (input_shape[0], weight_shape[0], *cast("tuple[int, ...]", tuple(spatial)))


def _is_channels_last(tensor: _Described) -> bool:
    """Whether the memory is ``[N, *spatial, C]``."""
    return _lies(tensor, channels_last_strides(tensor.shape))


def _lies(tensor: _Described, strides: Sequence[int]) -> bool:
    """Whether elements have the places of other strides, which are those of a dense tensor."""
    return lies(tensor.shape, tensor.stride, strides)


def _conversion(tensor: _Described | None) -> Callable[[Tensor], Tensor] | None:
    """Returns what makes an image or a filter channels last, if it is not."""
    if tensor is None or _is_channels_last(tensor):
        return None
    return channels_last_copy(tensor.shape, tensor.stride)


@functools.cache
def gpu_target(index: int) -> GpuTarget:
    """Returns what a GPU of PyTorch's is.

    Raises:
        ValueError: PyTorch finds no such GPU.
    """
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"device: cuda:{index}, but PyTorch finds {count} GPUs on this machine; the CPU and an "
            "NVIDIA GPU are allowed"
        )
    found: Any = torch.cuda.get_device_properties(index)
    capability = 10 * found.major + found.minor
    units = (found.multi_processor_count, found.L2_cache_size)
    return GpuTarget(architecture_of(capability), capability, *units)


class Direct(NamedTuple):
    """A call of a kernel without addresses of what changes from call to call."""

    library: Library
    run: Callable[..., Any]
    """Takes ``constants``, the addresses of ``operands`` and of the output, and what ``runners``
    returns; returns 0, or the address of a sentence."""
    constants: tuple[int, ...]
    operands: tuple[Tensor | None, ...]
    """Those whose values do not change are in the kernel's layout."""
    conversions: dict[int, Callable[[Tensor], Tensor]]
    """What brings operands into the kernel's layout in each call, by their places."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    keeps: Any
    """What must live as long."""
    device: int
    """The GPU's index, or -1: the CPU."""


def runners(index: int) -> tuple[int, ...]:
    """Returns who runs a call now.

    Args:
        index: A GPU's, or -1: the CPU.

    Returns:
        The GPU's current stream, or how many threads may run, and ``parallel_function``.
    """
    return (threads(), parallel_function()) if index < 0 else (raw_stream(index),)


def aligned(*addresses: int) -> bool:
    """Whether all addresses are multiples of ``COPY_BYTES``."""
    return functools.reduce(operator.or_, addresses) % COPY_BYTES == 0


class Plan:
    """A call without its pointers; ``run`` does the rest.

    Args:
        tensors: What is known of them.
        arguments: What is no tensor.
        channels_last: Whether the output is, in memory.
        packed: Whether the filter comes from ``OPERANDS``, derived once for a weight.
        precision: The ``Precision`` of float32.
        index: The GPU's, or -1: the CPU.

    Raises:
        ValueError: The sizes are those of no convolution, or no kernel takes it.
    """

    __slots__ = (
        "_axes",
        "_bias_converts",
        "_call",
        "_convert_input",
        "_convert_residual",
        "_converts",
        "_dtype",
        "_family",
        "_filter_converts",
        "_form",
        "_groups",
        "_index",
        "_layout",
        "_packed",
        "_prepared",
        "_scale_converts",
        "_shape",
        "_strides",
        "_transposes",
        "_unaligned",
        "_unaligned_lock",
    )

    def __init__(
        self,
        tensors: _Tensors,
        arguments: ConvArguments,
        *,
        channels_last: bool,
        packed: bool,
        precision: int,
        index: int,
    ) -> None:
        input, weight, bias, residual, scale = tensors
        if index >= 0:
            arguments.refuse_integers()
        arguments.check_types(NAMES[input.dtype])
        problem = check_sizes(input.shape, weight.shape, arguments)
        batch, *spatial, filters = cast("tuple[int, ...]", problem.output_shape)
        if bias is not None:
            check_bias(bias.shape, filters)
        if scale is not None:
            check_bias(scale.shape, filters, "scale")
        self._shape = (batch, filters, *spatial)
        if residual is not None:
            check_residual(residual.shape, self._shape)
        if problem.upsamples:
            kind = NAMES[input.dtype]
            check_beside_upsample(problem.upsample, kind, residual=residual is not None)
        self._axes: tuple[SubpixelAxis, ...] = problem.subpixel_axes if problem.upsamples else ()
        # Of a string the hash is kept.
        self._form = f"sub-pixel {self._axes} {arguments.groups}"
        self._index, self._packed, self._groups = index, packed, arguments.groups
        self._dtype = input.dtype if arguments.out_dtype is None else BY_NAME[arguments.out_dtype]
        self._plan_output(channels_last)
        self._plan_operands(tensors)
        self._prepared: Prepared | None = None
        self._unaligned: Prepared | None = None
        self._unaligned_lock = threading.Lock()
        if 0 in self._shape:
            return
        geometry, scalars = encode(
            problem,
            arguments,
            filter_layout=self._layout,
            has_bias=bias is not None,
            has_residual=residual is not None,
            precision=Precision(precision),
        )
        # Where there is no bias, one type for all; a bias has no type of 8 bits.
        no_bias = input.dtype if input.dtype in DTYPES else torch.float32
        self._family = Family(
            NAMES[input.dtype],
            NAMES[no_bias if bias is None else bias.dtype],
            NAMES[self._dtype],
            scaled=scale is not None,
            depth_to_space=problem.upsamples,
        )
        self._call = Call.of(
            cast("tuple[int, ...]", problem.input_shape),
            (batch, *spatial, filters),
            self._filter_elements(problem.subpixel, NAMES[weight.dtype]),
            geometry,
            scalars,
        )
        self._prepared = self._prepare(aligned=True)

    def _plan_output(self, channels_last: bool) -> None:
        """Decides where the kernel's output, channels last, is the caller's."""
        last = channels_last_strides(self._shape)
        first = contiguous_strides(self._shape)
        same = lies(self._shape, last, first)
        self._transposes = not channels_last and not same
        self._strides = first if same and not channels_last else last

    def _plan_operands(self, tensors: _Tensors) -> None:
        """Decides which operands are converted in each call, and the filter's layout."""
        input, weight, bias, residual, scale = tensors
        self._convert_input = _conversion(input)
        self._convert_residual = _conversion(residual)
        self._bias_converts = bias is not None and (bias.stride != (1,) or bool(self._axes))
        self._scale_converts = scale is not None and (scale.stride != (1,) or bool(self._axes))
        krsc = _is_channels_last(weight)
        if self._index >= 0:
            self._layout, self._filter_converts = Layout.KRSC, not krsc or bool(self._axes)
        elif self._axes:
            self._layout = Layout.PACKED if self._packed else Layout.KRSC
            self._filter_converts = True
        elif self._packed:
            self._layout, self._filter_converts = Layout.PACKED, True
        else:
            self._layout = Layout.KRSC if krsc else Layout.FCRS
            first = _lies(weight, contiguous_strides(weight.shape))
            self._filter_converts = not krsc and not first
        self._converts = (
            self._convert_input is not None
            or self._convert_residual is not None
            or self._filter_converts
            or self._bias_converts
            or self._scale_converts
        )

    def _filter_elements(self, problem: ConvProblem, dtype: str) -> int:
        """Returns how many elements a filter of a type has in its layout."""
        if self._layout is not Layout.PACKED:
            return int(problem.filters) * int(problem.group_channels) * problem.taps
        return packed_length(
            problem.filter_size,
            filters=int(problem.filters),
            group_channels=int(problem.group_channels),
            groups=int(problem.groups),
            dtype=dtype,
        )

    def _prepare(self, *, aligned: bool) -> Prepared:
        if self._index < 0:
            return host(self._family).prepare(self._call)
        target = gpu_target(self._index)
        return prepare_gpu(self._family, self._index, target, self._call, aligned=aligned)

    def run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        """Convolves tensors of which the plan knows everything but their addresses.

        Returns:
            ``[N, K, *spatial]``, in memory that no other tensor shares.

        Raises:
            ValueError: The driver refused the launch; the message says why.
        """
        # Converted tensors have names here, so that they live until the call has ended.
        filter = weight
        if self._converts:
            if self._convert_input is not None:
                input = self._convert_input(input)
            if self._filter_converts:
                filter = self._filter(weight)
            if self._bias_converts and bias is not None:
                bias = self._vector(bias)
            if self._convert_residual is not None and residual is not None:
                residual = self._convert_residual(residual)
            if self._scale_converts and scale is not None:
                scale = self._vector(scale)
        output = input.new_empty_strided(self._shape, self._strides, dtype=self._dtype)
        prepared = self._prepared
        if prepared is None:
            return output.contiguous() if self._transposes else output
        x, f, y = input.data_ptr(), filter.data_ptr(), output.data_ptr()
        b = 0 if bias is None else bias.data_ptr()
        r = 0 if residual is None else residual.data_ptr()
        s = 0 if scale is None else scale.data_ptr()
        if self._index >= 0 and (x | f | b | r | s | y) % COPY_BYTES:
            prepared = self._prepared_unaligned()
        prepared.run(x, f, b, r, s, y, *runners(self._index))
        return contiguous_copy(output) if self._transposes else output

    def direct(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
    ) -> Direct | None:
        """Returns what ``run`` does with such tensors, of which the weight stays as it is.

        Returns:
            ``None`` where PyTorch does a part of it in each call, and on a GPU where an address is
            at no multiple of ``COPY_BYTES``.
        """
        prepared = self._prepared
        kept = self._packed or not self._filter_converts
        if prepared is None or self._transposes or not kept:
            return None
        if self._bias_converts or self._scale_converts:
            return None
        filter = self._filter(weight) if self._filter_converts else weight
        operands = input, filter, bias, residual, scale
        if self._index >= 0 and not aligned(*(0 if t is None else t.data_ptr() for t in operands)):
            return None
        found = {0: self._convert_input, 3: self._convert_residual}
        return Direct(
            prepared.library,
            prepared.function,
            (prepared.handle,),
            operands,
            {place: convert for place, convert in found.items() if convert is not None},
            self._shape,
            self._strides,
            self._dtype,
            (prepared, filter),
            self._index,
        )

    def _vector(self, vector: Tensor) -> Tensor:
        """Returns one value for each of the kernel's filters, one after the other."""
        if not self._axes:
            return vector.contiguous()
        return repeated(vector, self._axes, self._groups)

    def _filter(self, weight: Tensor) -> Tensor:
        """Returns the filter in the kernel's layout."""
        if self._axes:
            return self._folded(weight)
        if self._index < 0:
            return OPERANDS.packed(weight, self._groups) if self._packed else weight.contiguous()
        if self._packed:
            kept = OPERANDS.transposed(weight)
            if kept is not None:
                return kept
        return permuted_last(weight)

    def _folded(self, weight: Tensor) -> Tensor:
        """Returns the filter of the sub-pixel form in the kernel's layout."""

        def make() -> Tensor:
            folded = folded_filter(weight, self._axes, self._groups)
            if self._layout is Layout.PACKED:
                return pack_on_host(folded, self._groups)
            return permuted_last(folded)

        if not self._packed:
            return make()
        kept: Tensor | None = OPERANDS.derived(weight, self._form, make)
        return make() if kept is None else kept

    def _prepared_unaligned(self) -> Prepared:
        """Returns the call for operands of which one is at no multiple of ``COPY_BYTES``."""
        with self._unaligned_lock:
            if self._unaligned is None:
                self._unaligned = self._prepare(aligned=False)
            return self._unaligned


@lru_cache(maxsize=4096)
def _find(
    input: _Described,
    weight: _Described,
    bias: _Described | None,
    residual: _Described | None,
    scale: _Described | None,
    flat: Flat,
    channels_last: bool,
    packed: bool,
    precision: int,
    index: int,
) -> Plan:
    """Returns the plan of all calls that are alike."""
    return Plan(
        _Tensors(input, weight, bias, residual, scale),
        ConvArguments.of_flat(flat),
        channels_last=channels_last,
        packed=packed,
        precision=precision,
        index=index,
    )


def find(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    flat: Flat,
    channels_last: bool,
    constant: bool,
) -> Plan:
    """Returns the plan of a call; the arguments are those of the operator.

    Args:
        input: ``[N, C, *spatial]``.
        weight: ``[K, C / groups, *taps]``.
        bias: ``[K]``, or ``None``.
        residual: ``[N, K, *spatial]``, or ``None``.
        scale: ``[K]``, or ``None``.
        flat: What is no tensor.
        channels_last: Whether the output is, in memory.
        constant: Whether the weight is a module's, packed once.

    Raises:
        ValueError: The sizes are those of no convolution, or no kernel takes it.
        LibraryError: A library cannot be built; see ``maxconv.library_path``.
    """
    return _find(
        *(
            _describe(input),
            _describe(weight),
            _describe(bias),
            _describe(residual),
            _describe(scale),
        ),
        flat,
        channels_last,
        is_kept(weight, constant),
        rounding(input, flat),
        input.get_device(),
    )


def is_kept(weight: Tensor, constant: bool) -> bool:
    """Whether what is derived from a weight can be kept: writes to it are counted."""
    return constant and not lacks_version(weight)


def rounding(input: Tensor, flat: Flat) -> int:
    """Returns the ``Precision`` of a call's products; one where it makes no difference."""
    if input.dtype != torch.float32:
        return _TF32
    precision = flat[6]
    if not input.is_cuda:
        return _TF32 if precision is None else precision
    return torch_precision() if precision is None else precision


def torch_precision() -> int:
    """Returns the ``Precision`` that PyTorch's own convolutions have on a GPU now."""
    cudnn: Any = torch.backends.cudnn
    # From PyTorch 2.9 on operators have settings of their own, and asking for all raises where
    # these differ.
    setting = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    rounds = cudnn.allow_tf32 if setting is None else setting == "tf32"
    return _TF32 if rounds else _FLOAT32
