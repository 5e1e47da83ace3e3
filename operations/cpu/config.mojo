"""Configurations, and the only statement of what each kernel can take.

A configuration is a compile-time value; the geometry it is asked about is a
run-time one. `can_implement` answers with a reason, so that a forced kernel
that does not fit fails with a sentence.
"""

from std.collections import Optional
from std.sys.info import CompilationTarget, simd_width_of

from ..conv.fields import (
    KERNEL_DEPTHWISE,
    KERNEL_FEW_FILTERS,
    KERNEL_GROUPED,
    KERNEL_IMPLICIT_GEMM,
    KERNEL_POINTWISE,
    KERNEL_REFERENCE,
    KERNEL_SM100,
    KERNEL_SM90,
    KERNEL_STEM,
    PANEL,
)
from ..conv.problem import ConvProblem

comptime LANES = min(PANEL, simd_width_of[DType.float32]())
"""Lanes of a float32 register; a panel is `PANEL / LANES` registers wide."""


def vector_registers() -> Int:
    """How many vector registers the target's instruction set names."""
    comptime if CompilationTarget.is_x86():
        return 32 if CompilationTarget.has_avx512f() else 16
    return 32


@fieldwise_init
struct CpuTile(ImplicitlyCopyable, Movable):
    """The register tile of the CPU kernels and the block that feeds it.

    Args:
        rows: Output pixels of a register tile.
        panels: Filter panels of a register tile.
        max_depth: Products accumulated between two spills of a tile, chosen so
            that a row block of activations stays in L2.
        max_accumulators: Float32 values of the largest block of partial sums.
    """

    var rows: Int
    var panels: Int
    var max_depth: Int
    var max_accumulators: Int

    def columns(self) -> Int:
        """Filters of a register tile."""
        return self.panels * PANEL

    def elements(self) -> Int:
        """Accumulators of a register tile."""
        return self.rows * self.columns()

    @staticmethod
    def for_registers(lanes: Int, registers: Int) -> CpuTile:
        """The tile that fills a register file: accumulators, one register for
        each vector of the filter, one for the broadcast activation and one
        spare.

        Args:
            lanes: Float32 lanes of a register.
            registers: Registers that the instruction set names.

        Returns:
            The tile.
        """
        var panels = 2 if lanes == PANEL else 1
        var vectors = panels * PANEL // lanes
        var rows = (registers - vectors - 2) // vectors
        return CpuTile(
            rows=rows,
            panels=panels,
            max_depth=1152,
            max_accumulators=48 * 1024,
        )


comptime SOURCE_FLOAT32 = 0
"""The activation lies in memory as float32."""

comptime SOURCE_CONVERTED = 1
"""The activation lies in memory in another type."""

comptime SOURCE_FUSED = 2
"""The activation is made by what the graph compiler fused in front."""

comptime CPU_TILE = CpuTile.for_registers(LANES, vector_registers())
"""The tile of the machine that this is compiled for."""


comptime MAX_FEW_FILTERS = 8
"""Filters that the kernel for few of them takes: half a panel."""

comptime MAX_FEW_DEPTH = 16 * 1024
"""Products of a filter that the kernel for few of them unpacks: all filters
take 512 KiB at most."""


def kernel_name(kernel: Int) -> StaticString:
    """The name of a kernel code, as the Python layer spells it."""
    if kernel == KERNEL_REFERENCE:
        return "reference"
    if kernel == KERNEL_IMPLICIT_GEMM:
        return "implicit_gemm"
    if kernel == KERNEL_POINTWISE:
        return "pointwise"
    if kernel == KERNEL_DEPTHWISE:
        return "depthwise"
    if kernel == KERNEL_GROUPED:
        return "grouped"
    if kernel == KERNEL_FEW_FILTERS:
        return "few_filters"
    if kernel == KERNEL_SM90:
        return "sm90"
    if kernel == KERNEL_STEM:
        return "stem"
    if kernel == KERNEL_SM100:
        return "sm100"
    return "auto"


def _grouped_refusal(problem: ConvProblem) -> Optional[String]:
    """Why the grouped kernel cannot take a problem."""
    if problem.panel_groups() > 1:
        return None
    return String(
        t"grouped takes groups of 2, 4 or 8 channels and as many filters, in"
        t" all a multiple of {PANEL}; here {problem.groups} of"
        t" {problem.group_channels()} and {problem.group_filters()}"
    )


def _few_filters_refusal(problem: ConvProblem) -> Optional[String]:
    """Why the kernel for few filters cannot take a problem."""
    if problem.groups > 1 or problem.is_depthwise():
        return String(
            t"few_filters takes one group and no depthwise filter; here"
            t" {problem.groups} of {problem.group_channels()} channels and"
            t" {problem.group_filters()} filters"
        )
    if problem.filters > MAX_FEW_FILTERS:
        return String(
            t"few_filters takes up to {MAX_FEW_FILTERS} filters; here"
            t" {problem.filters}"
        )
    if problem.gemm_k() > MAX_FEW_DEPTH:
        return String(
            t"few_filters keeps filters of up to {MAX_FEW_DEPTH} products in"
            t" scratch memory; here {problem.gemm_k()}"
        )
    return None


def can_implement(
    kernel: Int, problem: ConvProblem, source: Int
) -> Optional[String]:
    """Why a CPU kernel cannot take a problem.

    Args:
        kernel: A `KERNEL_*` code.
        problem: The convolution.
        source: A `SOURCE_*` code.

    Returns:
        The reason, or None if the kernel can.
    """
    if kernel == KERNEL_SM90 or kernel == KERNEL_STEM:
        return String(
            t"{kernel_name(kernel)} runs on GPUs of compute capability 9.0 only"
        )
    if kernel == KERNEL_SM100:
        return String(
            "sm100 runs on GPUs of compute capability 10.0 and 10.3 only"
        )
    if source == SOURCE_FUSED and kernel != KERNEL_IMPLICIT_GEMM:
        return String(
            t"{kernel_name(kernel)} reads the activation from memory, but here"
            t" other work is fused in front of it"
        )
    if kernel == KERNEL_DEPTHWISE and not problem.is_depthwise():
        return String(
            t"depthwise takes one channel and one filter a group; here"
            t" {problem.group_channels()} and {problem.group_filters()}"
        )
    if problem.is_depthwise() and (
        kernel == KERNEL_IMPLICIT_GEMM or kernel == KERNEL_POINTWISE
    ):
        return String(
            t"{kernel_name(kernel)} reads filters in panels, which depthwise"
            t" filters are not packed into"
        )
    if problem.panel_groups() > 1 and (
        kernel == KERNEL_IMPLICIT_GEMM or kernel == KERNEL_POINTWISE
    ):
        return String(
            t"{kernel_name(kernel)} multiplies a panel by one group's channels,"
            t" but here {problem.panel_groups()} groups share a panel"
        )
    if kernel == KERNEL_GROUPED:
        return _grouped_refusal(problem)
    if kernel == KERNEL_FEW_FILTERS:
        return _few_filters_refusal(problem)
    if kernel == KERNEL_POINTWISE and not problem.is_pointwise():
        return String(
            t"pointwise takes one tap, stride 1 and no padding; here filter"
            t" {problem.filter}, stride {problem.stride}, padding"
            t" {problem.pad_before}/{problem.pad_after}"
        )
    if kernel == KERNEL_POINTWISE and source != SOURCE_FLOAT32:
        return String(
            "pointwise reads the activation where it lies, as float32 and with"
            " nothing fused in front"
        )
    return None
