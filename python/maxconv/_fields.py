"""The ops of a convolution, and the operands through which Python tells them what it is.

This module is the single statement of the ops' names, and of the order, the names and the codes of
their two host operands: ``geometry`` (int64) and ``scalars`` (float32). The Mojo side reads the
same from ``operations/conv/fields.mojo``, which this module writes::

    python -m maxconv._fields

It needs numpy only: neither MAX nor Mojo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLACKWELL_CAPABILITIES",
    "BLOCKED_FILTERS",
    "BLOCKED_IMAGES",
    "BLOCKS",
    "COPY_BYTES",
    "CPU_FEATURES_VARIABLE",
    "CPU_KERNELS",
    "DIAGONAL_CHANNELS",
    "DIAGONAL_TAPS",
    "DOT_KERNELS",
    "GEOMETRY",
    "GEOMETRY_LENGTH",
    "GPU_DTYPES",
    "GPU_KERNELS",
    "HOPPER_CAPABILITIES",
    "HOPPER_DTYPES",
    "INTERLEAVED",
    "INTERLEAVED_CPU_KERNELS",
    "INTERLEAVED_KERNELS",
    "INTERLEAVED_LAYOUT",
    "NORM",
    "NORM_SCALARS",
    "PANEL",
    "POOLING",
    "ROW_BYTES",
    "SCALARS",
    "SCALARS_LENGTH",
    "SEVERAL",
    "STEM_CHANNELS",
    "TILE_FILTERS",
    "Activation",
    "Counted",
    "CpuFeature",
    "Kernel",
    "Layout",
    "Op",
    "Precision",
    "encode_geometry",
    "encode_scalars",
    "mojo_source",
]

#: Output channels that lie side by side in a packed filter. It does not depend on the CPU, so that
#: a filter packed on one machine is right on another.
PANEL = 16

#: Bytes of a packed filter's row, those of one filter: a filter row of 16-bit products is filled up
#: with zeros to whole multiples. A tile of AMX takes as many at once.
ROW_BYTES = 64

#: Groups, channels or filters of which an op is told when it is compiled that there is more than
#: one, but not how many.
SEVERAL = -1

#: Bytes that a GPU's TMA moves at a time: pixels of a group's channels, and of its filters
#: in the output, are multiples of it, and so are the addresses.
COPY_BYTES = 16

#: Input channels that the stem's kernel takes, at most.
STEM_CHANNELS = 8

#: Filters of a group from which on a tile of the implicit GEMM is filled better than the lanes of
#: the grouped kernel.
TILE_FILTERS = 8

#: Neighbouring channels of a block of the interleaved layouts that a GPU takes, NC/xHWx and
#: C/xRSKx: those of one dp4a.
INTERLEAVED = 4

#: The interleaved layout of an activation on a GPU.
INTERLEAVED_LAYOUT = f"NC/{INTERLEAVED}HW{INTERLEAVED}"

#: Channels of a block, the x of NC/xHWx and C/xHWNx, that a CPU takes: powers of two.
BLOCKS = (4, 16, 32)

#: Names of the interleaved layouts of an image: channels of their blocks, and whether images are
#: neighbours.
BLOCKED_IMAGES = {
    **{f"NC/{x}HW{x}": (x, False) for x in BLOCKS},
    **{f"C/{x}HWN{x}": (x, True) for x in BLOCKS},
}

#: Names of the interleaved layouts of a filter, and channels of their blocks.
BLOCKED_FILTERS = {f"C/{x}RSK{x}": x for x in BLOCKS}

#: Channels of a group that the diagonal kernel of Hopper takes, at most.
DIAGONAL_CHANNELS = 32

#: Taps along h and w of the filters that it takes.
DIAGONAL_TAPS = (3, 5, 7)

#: Compute capability, times ten, of the GPUs that the Hopper kernels run on.
HOPPER_CAPABILITIES = (90,)

#: The same of the Blackwell kernel.
BLACKWELL_CAPABILITIES = (100, 103)

#: Storage types of activations and filters that GPUs take besides those of 16 and 32 bits.
GPU_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")

#: Those of them that only Hopper and Blackwell take.
HOPPER_DTYPES = ("float8_e5m2",)

#: Names of the elements of the ``geometry`` operand, in order.
GEOMETRY = (
    "spatial_rank",
    "stride_d",
    "stride_h",
    "stride_w",
    "dilation_d",
    "dilation_h",
    "dilation_w",
    "pad_before_d",
    "pad_before_h",
    "pad_before_w",
    "pad_after_d",
    "pad_after_h",
    "pad_after_w",
    "groups",
    "filter_t",
    "filter_r",
    "filter_s",
    "filter_layout",
    "kernel",
    "activation",
    "final_activation",
    "has_bias",
    "has_residual",
    "precision",
    "block_d",
    "block_h",
    "block_w",
    "crop_d",
    "crop_h",
    "crop_w",
    "zero_point",
    "residual_zero_point",
    "output_zero_point",
    "input_batch_last",
    "output_batch_last",
)

#: Names of the elements of the ``scalars`` operand, in order.
SCALARS = (
    "beta",
    "activation_p0",
    "activation_p1",
    "final_p0",
    "final_p1",
    "output_factor",
)

#: Names of the elements of the ``pooling`` operand, in order.
POOLING = ("ceil", "counted")

#: Names of the elements of a normalization's operands, of integers and of numbers, in order.
NORM = ("groups", "activation")
NORM_SCALARS = ("epsilon", "p0", "p1")

GEOMETRY_LENGTH = len(GEOMETRY)
SCALARS_LENGTH = len(SCALARS)


class Op(str, Enum):
    """Names under which the ops are registered; without dots, as MAX hands them to PyTorch too."""

    CONV_CPU = "maxconv_conv_cpu"
    CONV_GPU = "maxconv_conv_gpu"
    CONV_FUSED_INPUT_CPU = "maxconv_conv_fused_input_cpu"
    CONV_FUSED_INPUT_GPU = "maxconv_conv_fused_input_gpu"
    CONV_UNFUSED_CPU = "maxconv_conv_unfused_cpu"
    CONV_UNFUSED_GPU = "maxconv_conv_unfused_gpu"
    CONV_INTERLEAVED_CPU = "maxconv_conv_interleaved_cpu"
    CONV_INTERLEAVED_UNFUSED_CPU = "maxconv_conv_interleaved_unfused_cpu"
    CONV_INTERLEAVED_GPU = "maxconv_conv_interleaved_gpu"
    CONV_INTERLEAVED_UNFUSED_GPU = "maxconv_conv_interleaved_unfused_gpu"
    GROUP_NORM_GPU = "maxconv_group_norm_gpu"
    GROUP_NORM_UNFUSED_GPU = "maxconv_group_norm_unfused_gpu"
    RMS_NORM_GPU = "maxconv_rms_norm_gpu"
    RMS_NORM_UNFUSED_GPU = "maxconv_rms_norm_unfused_gpu"
    POOL_CPU = "maxconv_pool_cpu"
    POOL_GPU = "maxconv_pool_gpu"


class Layout(IntEnum):
    """How the elements of the flat filter operand are ordered.

    The names are those of two spatial dimensions; one and three dimensions use the same codes
    (``KRSC`` also stands for ``KSC`` and ``KTRSC``, and so on). ``INTERLEAVED`` is C/4RSK4.
    """

    PACKED = 0
    KRSC = 1
    RSCF = 2
    FCRS = 3
    INTERLEAVED = 4


class Kernel(IntEnum):
    """Which kernel runs; every one but ``AUTO`` raises where it cannot take the problem.

    ``CPU_KERNELS`` and ``GPU_KERNELS`` say what exists where.
    """

    AUTO = 0
    REFERENCE = 1
    IMPLICIT_GEMM = 2
    POINTWISE = 3
    DEPTHWISE = 4
    GROUPED = 5
    FEW_FILTERS = 6
    SM90 = 7
    STEM = 8
    SM100 = 9
    DIAGONAL = 10
    WINOGRAD = 11
    GEMV = 12
    SM80 = 13
    DP4A = 14
    WINDOW = 15
    UNALIGNED = 16
    AMX = 17
    AVX512_BF16 = 18
    AVX512_VNNI = 19
    AVX_VNNI = 20
    WIDENING = 21
    MMLA = 22


#: A CPU's dot-product GEMM, a kernel for each set of instructions.
DOT_KERNELS = (
    Kernel.AMX,
    Kernel.AVX512_BF16,
    Kernel.AVX512_VNNI,
    Kernel.AVX_VNNI,
    Kernel.MMLA,
    Kernel.WIDENING,
)

#: What runs on a CPU, and what on a GPU, in the order in which the registries ask them.
CPU_KERNELS = (
    Kernel.DEPTHWISE,
    Kernel.GROUPED,
    Kernel.AMX,
    Kernel.MMLA,
    Kernel.FEW_FILTERS,
    Kernel.AVX512_BF16,
    Kernel.AVX512_VNNI,
    Kernel.AVX_VNNI,
    Kernel.POINTWISE,
    Kernel.WINOGRAD,
    Kernel.WIDENING,
    Kernel.IMPLICIT_GEMM,
    Kernel.REFERENCE,
)
GPU_KERNELS = (
    Kernel.GEMV,
    Kernel.STEM,
    Kernel.WINDOW,
    Kernel.DIAGONAL,
    Kernel.DEPTHWISE,
    Kernel.FEW_FILTERS,
    Kernel.SM90,
    Kernel.UNALIGNED,
    Kernel.SM100,
    Kernel.SM80,
    Kernel.DP4A,
    Kernel.GROUPED,
    Kernel.IMPLICIT_GEMM,
    Kernel.REFERENCE,
)

#: Those that take a GPU's interleaved layouts, and nothing else.
INTERLEAVED_KERNELS = (Kernel.DP4A,)

#: Those that take a CPU's interleaved layouts, too.
INTERLEAVED_CPU_KERNELS = (*DOT_KERNELS, Kernel.REFERENCE)

#: Where the other kernels run.
EVERYWHERE = "every device"

#: Where a kernel runs that not every device of its kind has.
KERNEL_HOMES = {
    Kernel.POINTWISE: "CPUs",
    Kernel.WINOGRAD: "CPUs",
    **dict.fromkeys(DOT_KERNELS, "CPUs"),
    Kernel.GEMV: "GPUs",
    Kernel.SM80: "GPUs",
    Kernel.DP4A: "GPUs",
    Kernel.SM90: "GPUs of compute capability 9.0 (H100, H200)",
    Kernel.UNALIGNED: "GPUs of compute capability 9.0 (H100, H200)",
    Kernel.WINDOW: "GPUs of compute capability 9.0 (H100, H200)",
    Kernel.STEM: "GPUs of compute capability 9.0 (H100, H200)",
    Kernel.DIAGONAL: "GPUs of compute capability 9.0 (H100, H200)",
    Kernel.SM100: "GPUs of compute capability 10.0 and 10.3 (B200, B300)",
}


class CpuFeature(IntEnum):
    """Instructions that some CPUs have and kernels ask for, in sets a bit each."""

    AMX_BF16 = 0
    AVX512_BF16 = 1
    AMX_FP16 = 2
    AMX_INT8 = 3
    AVX512_VNNI = 4
    AVX_VNNI = 5
    ARM_BF16 = 6
    ARM_I8MM = 7

    @property
    def linux_name(self) -> str:
        """What ``/proc/cpuinfo`` calls it."""
        return self.name.lower().removeprefix("arm_")


#: The variable of the environment that leaves only some: names with commas between, none if it is
#: empty.
CPU_FEATURES_VARIABLE = "MAXCONV_CPU_FEATURES"


class Activation(IntEnum):
    """Activation functions of the epilogue; two float parameters (p0, p1) go with each.

    ``CLAMP`` reads (min, max), ``LEAKY_RELU`` reads (slope, unused), the others read none.
    """

    NONE = 0
    RELU = 1
    CLAMP = 2
    LEAKY_RELU = 3
    SIGMOID = 4
    SILU = 5
    HARD_SWISH = 6
    GELU = 7
    GELU_TANH = 8
    TANH = 9
    HARD_SIGMOID = 10


class Counted(IntEnum):
    """Which elements of a window a mean counts, besides those of the input."""

    INPUT = 0
    """No others."""
    PADDING = 1
    """The padding, but nothing behind it."""
    WINDOW = 2
    """All."""


class Precision(IntEnum):
    """What products of float32 operands keep; a kernel may keep more than it is asked for."""

    TF32 = 0
    FLOAT32 = 1


def _three(name: str, values: Sequence[int], rank: int, fill: int) -> tuple[int, ...]:
    if len(values) != rank:
        raise ValueError(
            f"{name}: {tuple(values)} has {len(values)} entries; {rank} spatial dimensions need "
            f"{rank}"
        )
    return (fill,) * (3 - rank) + tuple(values)


def encode_geometry(
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    pad_before: Sequence[int],
    pad_after: Sequence[int],
    filter_size: Sequence[int],
    groups: int = 1,
    filter_layout: Layout = Layout.PACKED,
    kernel: Kernel = Kernel.AUTO,
    activation: Activation = Activation.NONE,
    final_activation: Activation = Activation.NONE,
    has_bias: bool = False,
    has_residual: bool = False,
    precision: Precision = Precision.TF32,
    block: Sequence[int] | None = None,
    crop: Sequence[int] | None = None,
    zero_points: Sequence[int] = (0, 0, 0),
    batch_last: Sequence[bool] = (False, False),
) -> npt.NDArray[np.int64]:
    """Returns the ``geometry`` operand: int64, shape ``(GEOMETRY_LENGTH,)``.

    The sequences have one entry a spatial dimension, outermost first; their common length (1 to 3)
    is the spatial rank. Missing leading dimensions are filled with stride 1, dilation 1, padding 0
    and filter extent 1. ``block`` and ``crop`` say which pixels of a larger image the filters are
    (operations/conv/depth_to_space.mojo); ``None`` stands for blocks of one pixel. ``zero_points``
    are the integers that stand for 0 in activation, residual and output. ``batch_last`` says of
    activation and output whether they are C/xHWNx (operations/conv/interleave.mojo).

    Raises:
        ValueError: The sequences differ in length, or the spatial rank is not 1, 2 or 3.
    """
    rank = len(filter_size)
    if not 1 <= rank <= 3:
        raise ValueError(
            f"filter_size: {tuple(filter_size)} has {rank} entries; 1, 2 or 3 are allowed"
        )
    values: Mapping[str, int] = dict(
        zip(
            GEOMETRY,
            (
                rank,
                *_three("stride", stride, rank, 1),
                *_three("dilation", dilation, rank, 1),
                *_three("pad_before", pad_before, rank, 0),
                *_three("pad_after", pad_after, rank, 0),
                groups,
                *_three("filter_size", filter_size, rank, 1),
                int(filter_layout),
                int(kernel),
                int(activation),
                int(final_activation),
                int(has_bias),
                int(has_residual),
                int(precision),
                *_three("block", (1,) * rank if block is None else block, rank, 1),
                *_three("crop", (0,) * rank if crop is None else crop, rank, 0),
                *zero_points,
                *(int(last) for last in batch_last),
            ),
            strict=True,
        )
    )
    return np.array([values[name] for name in GEOMETRY], dtype=np.int64)


def encode_scalars(
    *,
    beta: float = 1.0,
    activation_parameters: tuple[float, float] = (0.0, 0.0),
    final_parameters: tuple[float, float] = (0.0, 0.0),
    output_factor: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Returns the ``scalars`` operand: float32, shape ``(SCALARS_LENGTH,)``."""
    values = [beta, *activation_parameters, *final_parameters, output_factor]
    return np.array(values, dtype=np.float32)


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _statement(name: str, value: object) -> list[str]:
    """Returns the lines of a constant, a list where it is a tuple, as ``mojo format`` has them."""
    if not isinstance(value, tuple):
        line = f"comptime {name} = {value}"
        return [line] if len(line) <= 80 else [f"comptime {name} = (", f"    {value}", ")"]
    kind = ": List[StaticString]" if value[0].startswith('"') else ""
    line = f"comptime {name}{kind} = [{', '.join(value)}]"
    if len(line) <= 80:
        return [line]
    return [f"comptime {name}{kind} = [", *(f"    {entry}," for entry in value), "]"]


def mojo_source() -> str:
    """Returns the text of ``operations/conv/fields.mojo``."""
    groups: list[tuple[str, Sequence[tuple[str, object]]]] = [
        (
            "Elements of the geometry operand (int64, on the host).",
            [(f"GEOMETRY_{name.upper()}", i) for i, name in enumerate(GEOMETRY)]
            + [("GEOMETRY_LENGTH", GEOMETRY_LENGTH)],
        ),
        (
            "Elements of the scalars operand (float32, on the host).",
            [(f"SCALAR_{name.upper()}", i) for i, name in enumerate(SCALARS)]
            + [("SCALARS_LENGTH", SCALARS_LENGTH)],
        ),
        (
            "Elements of a pooling's own operand (int64, on the host): whether windows may reach"
            " behind the padding, and what a mean counts of a window besides the input.",
            [(f"POOLING_{name.upper()}", i) for i, name in enumerate(POOLING)]
            + [("POOLING_LENGTH", len(POOLING))]
            + [(f"COUNTED_{m.name}", m.value) for m in Counted],
        ),
        (
            "Elements of a normalization's own operands, on the host: of integers (int64),"
            " and of numbers (float32), the last two of which are the activation's.",
            [(f"NORM_{name.upper()}", i) for i, name in enumerate(NORM)]
            + [("NORM_LENGTH", len(NORM))]
            + [(f"NORM_SCALARS_{name.upper()}", i) for i, name in enumerate(NORM_SCALARS)]
            + [("NORM_SCALARS_LENGTH", len(NORM_SCALARS))],
        ),
        ("Registered ops.", [(f"OP_{op.name}", f'"{op.value}"') for op in Op]),
        ("Filter layouts.", [(f"LAYOUT_{m.name}", m.value) for m in Layout]),
        (
            "Kernels that a caller can ask for; their names and where they run, by code; what a"
            " CPU and a GPU have, in the order in which they are asked.",
            [
                *((f"KERNEL_{m.name}", m.value) for m in Kernel),
                ("KERNEL_NAMES", _texts(f'"{m.name.lower()}"' for m in Kernel)),
                ("KERNEL_HOMES", _texts(f'"{KERNEL_HOMES.get(m, EVERYWHERE)}"' for m in Kernel)),
                ("CPU_KERNELS", _texts(f"KERNEL_{m.name}" for m in CPU_KERNELS)),
                ("GPU_KERNELS", _texts(f"KERNEL_{m.name}" for m in GPU_KERNELS)),
            ],
        ),
        (
            "What some CPUs have, Linux's names for it by code, and what leaves some out.",
            [
                *((f"FEATURE_{feature.name}", feature.value) for feature in CpuFeature),
                ("FEATURE_NAMES", _texts(f'"{feature.linux_name}"' for feature in CpuFeature)),
                ("CPU_FEATURES_VARIABLE", f'"{CPU_FEATURES_VARIABLE}"'),
            ],
        ),
        (
            "Activations of the epilogue.",
            [
                *((f"ACTIVATION_{m.name}", m.value) for m in Activation),
                ("ACTIVATIONS", _texts(f"ACTIVATION_{m.name}" for m in Activation)),
            ],
        ),
        ("Products of float32.", [(f"PRECISION_{m.name}", m.value) for m in Precision]),
        (
            "Output channels side by side in a packed filter, and bytes of whole filter rows.",
            [("PANEL", PANEL), ("ROW_BYTES", ROW_BYTES)],
        ),
        ("A known number of which only that it is not 1 is known.", [("SEVERAL", SEVERAL)]),
        (
            "What a GPU's kernels take: bytes of a copy, channels of a stem, filters of a tile.",
            [
                ("COPY_BYTES", COPY_BYTES),
                ("STEM_CHANNELS", STEM_CHANNELS),
                ("TILE_FILTERS", TILE_FILTERS),
            ],
        ),
        (
            "Neighbouring channels of a block of the interleaved layouts: a GPU's, and a CPU's.",
            [("INTERLEAVED", INTERLEAVED), ("BLOCKS", _texts(BLOCKS))],
        ),
        (
            "What Hopper's diagonal kernel takes: channels of a group, taps along h and w.",
            [
                ("DIAGONAL_CHANNELS", DIAGONAL_CHANNELS),
                ("DIAGONAL_TAPS", _texts(DIAGONAL_TAPS)),
            ],
        ),
        (
            "Kernels of one generation: compute capabilities times ten, and types that are theirs.",
            [
                ("HOPPER_CAPABILITIES", _texts(HOPPER_CAPABILITIES)),
                ("BLACKWELL_CAPABILITIES", _texts(BLACKWELL_CAPABILITIES)),
                ("GPU_DTYPES", _texts(f"DType.{name}" for name in GPU_DTYPES)),
                ("HOPPER_DTYPES", _texts(f"DType.{name}" for name in HOPPER_DTYPES)),
            ],
        ),
    ]
    lines = [
        '"""Names of the ops, of their geometry and scalars operands, and of codes.',
        "",
        "Generated by `python -m maxconv._fields` from python/maxconv/_fields.py: edit that file.",
        '"""',
    ]
    for title, names in groups:
        lines += ["", f"# {title}"]
        for name, value in names:
            lines += _statement(name, value)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes ``operations/conv/fields.mojo`` of this checkout; returns the exit status."""
    target = Path(__file__).resolve().parents[2] / "operations" / "conv" / "fields.mojo"
    if not target.parent.is_dir():
        print(f"{target.parent} does not exist: run this from a checkout", file=sys.stderr)
        return 1
    target.write_text(mojo_source(), encoding="utf-8")
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
