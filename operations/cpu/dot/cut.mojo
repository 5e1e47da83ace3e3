"""A cut of the dot-product GEMM that somebody names, instead of the search: what
the kernel can run of it."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ..named import NumberedCut, range_refusal
from .candidates import (
    Extents,
    access_refusal,
    cache_refusal,
    make_blocking,
)
from .mma import DotUnit
from .scheduler import ACCESS_LINES, Blocking, Cut


@fieldwise_init
struct DotCut(NumberedCut):
    """What a `Blocking` is made of, and the threads that run it."""

    var access: Int
    """An `ACCESS_*` code."""
    var lines: Int
    """Rows of the output image of a block."""
    var columns: Int
    """Pixels of each."""
    var unit_count: Int
    """Register tiles side by side over a block's filters."""
    var threads: Int
    """That run it."""

    @staticmethod
    def fields() -> List[StaticString]:
        return ["access", "lines", "columns", "unit_count", "threads"]

    @staticmethod
    def of_numbers(numbers: List[Int]) -> DotCut:
        return DotCut(
            access=numbers[0],
            lines=numbers[1],
            columns=numbers[2],
            unit_count=numbers[3],
            threads=numbers[4],
        )

    def numbers(self) -> List[Int]:
        return [
            self.access,
            self.lines,
            self.columns,
            self.unit_count,
            self.threads,
        ]

    @staticmethod
    def of[U: DotUnit](blocking: Blocking, threads: Int) -> DotCut:
        """What a cut is made of.

        Parameters:
            U: The instructions.

        Args:
            blocking: The cut.
            threads: That run it.
        """
        ref cut = blocking.cut
        return DotCut(
            access=cut.access,
            lines=cut.lines,
            columns=cut.columns,
            unit_count=ceildiv(cut.panels, U.panels),
            threads=threads,
        )

    def blocking[
        U: DotUnit
    ](self, problem: ConvProblem, types: OperandTypes) -> Blocking:
        """The cut of a problem.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution, for which `shape_refusal` is None.
            types: Of the operands.
        """
        var panels = min(self.unit_count * U.panels, problem.panels())
        return make_blocking[U](
            problem, types, Cut(self.access, self.lines, self.columns, panels)
        )

    def refusal[
        U: DotUnit
    ](
        self, problem: ConvProblem, types: OperandTypes, threads: Int
    ) -> Optional[String]:
        """Why a problem cannot be run so, or would not stay in caches, or None.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution, which the kernel takes.
            types: Of the operands.
            threads: How many threads there are.
        """
        var refusal = self.shape_refusal[U](problem, types, threads)
        if refusal:
            return refusal
        return cache_refusal[U](types, self.blocking[U](problem, types))

    def shape_refusal[
        U: DotUnit
    ](
        self, problem: ConvProblem, types: OperandTypes, threads: Int
    ) -> Optional[String]:
        """Why a problem cannot be run so, or None.

        Parameters:
            U: The instructions.

        Args:
            problem: The convolution, which the kernel takes.
            types: Of the operands.
            threads: How many threads there are.
        """
        var refusal = range_refusal("access", self.access, 0, ACCESS_LINES)
        if not refusal:
            refusal = access_refusal[U](problem, types, self.access)
            if refusal:
                return String(t"access: {refusal.value()}")
        var extents = Extents.of(problem, self.access)
        var units = ceildiv(problem.panels(), U.panels)
        if not refusal:
            refusal = range_refusal("lines", self.lines, 1, extents.height)
        if not refusal:
            refusal = range_refusal("columns", self.columns, 1, extents.width)
        if not refusal:
            refusal = range_refusal("unit_count", self.unit_count, 1, units)
        if not refusal:
            refusal = range_refusal("threads", self.threads, 1, threads)
        return refusal
