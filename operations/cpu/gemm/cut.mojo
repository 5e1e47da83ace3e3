"""A cut of the implicit GEMM that somebody names, instead of the search: what the
kernel can run of it, and what there is to name."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import PANEL
from ...conv.operands import OperandTypes
from ...conv.problem import ConvProblem
from ..config import CPU_TILE, reads_in_place
from ..named import NumberedCut
from .candidates import FilterCut, blocking_of, cache_refusal
from .scheduler import (
    ACCESS_GATHER,
    ACCESS_MATRIX,
    ACCESS_STRIPS,
    MAX_BLOCK_TILES,
    Blocking,
    Tiling,
)
from .strips import longest_slice


@fieldwise_init
struct NamedCut(NumberedCut):
    """What a `Blocking` is made of."""

    var access: Int
    """An `ACCESS_*` code."""
    var tile_rows: Int
    """Output pixels of a register tile."""
    var tiles: Int
    """Register tiles of a task's pixels."""
    var filters: FilterCut
    var depth: Int
    """Products of a slice."""

    @staticmethod
    def fields() -> List[StaticString]:
        return [
            "access",
            "tile_rows",
            "tiles",
            "group_count",
            "unit_count",
            "depth",
        ]

    @staticmethod
    def of_numbers(numbers: List[Int]) -> NamedCut:
        return NamedCut(
            access=numbers[0],
            tile_rows=numbers[1],
            tiles=numbers[2],
            filters=FilterCut(numbers[3], numbers[4]),
            depth=numbers[5],
        )

    def numbers(self) -> List[Int]:
        return [
            self.access,
            self.tile_rows,
            self.tiles,
            self.filters.group_count,
            self.filters.unit_count,
            self.depth,
        ]

    @staticmethod
    def of(blocking: Blocking) -> NamedCut:
        """What a cut is made of.

        Args:
            blocking: The cut.
        """
        return NamedCut(
            access=blocking.access,
            tile_rows=blocking.tiling.rows,
            tiles=blocking.tiles,
            filters=FilterCut(blocking.group_count, blocking.units()),
            depth=blocking.depth,
        )

    def blocking(self, problem: ConvProblem, types: OperandTypes) -> Blocking:
        """The cut of a problem.

        Args:
            problem: The convolution, which `refusal` does not refuse.
            types: Of the operands.
        """
        return blocking_of(
            problem,
            self.access,
            line_tiling(problem, self.access, self.tile_rows),
            self.tiles,
            self.filters,
            problem.panel_layout(types.input),
            self.depth,
        )

    def refusal(
        self, problem: ConvProblem, types: OperandTypes
    ) -> Optional[String]:
        """Why a problem cannot be run so, or would not stay in caches, or None.

        Args:
            problem: The convolution, not depthwise.
            types: Of the operands.
        """
        var refusal = self.shape_refusal(problem, types)
        if refusal:
            return refusal
        return cache_refusal(self.blocking(problem, types))

    def shape_refusal(
        self, problem: ConvProblem, types: OperandTypes
    ) -> Optional[String]:
        """Why a problem cannot be run so, or None.

        Args:
            problem: The convolution, not depthwise.
            types: Of the operands.
        """
        var refusal = access_refusal(problem, types, self.access)
        if refusal:
            return refusal
        var rows = self.tile_rows
        if rows < 1 or rows > CPU_TILE.rows:
            return String(t"tile_rows: {rows} is not 1 to {CPU_TILE.rows}")
        var tiling = line_tiling(problem, self.access, rows)
        if tiling.rows != rows:
            return String(
                t"tile_rows: lines of {tiling.length} pixels are cut evenly"
                t" into tiles of {tiling.rows}, not {rows}"
            )
        var most_tiles = min(MAX_BLOCK_TILES, tiling.tiles())
        if self.tiles < 1 or self.tiles > most_tiles:
            return String(t"tiles: {self.tiles} is not 1 to {most_tiles}")
        var groups = problem.groups if self.access == ACCESS_STRIPS else 1
        if self.filters.group_count < 1 or self.filters.group_count > groups:
            return String(
                t"group_count: {self.filters.group_count} is not 1 to"
                t" {groups}: only strips serve several groups"
            )
        var units = ceildiv(problem.panels(), CPU_TILE.panels)
        if self.filters.unit_count < 1 or self.filters.unit_count > units:
            return String(
                t"unit_count: {self.filters.unit_count} is not 1 to {units}"
            )
        var longest = longest_depth(problem, types, self.access)
        if self.depth < PANEL or self.depth > longest:
            return String(t"depth: {self.depth} is not {PANEL} to {longest}")
        if self.depth % PANEL != 0:
            return String(t"depth: {self.depth} is no multiple of {PANEL}")
        return None


def line_tiling(problem: ConvProblem, access: Int, rows: Int) -> Tiling:
    """The output pixels in register tiles: strips keep to a row of the image.

    Args:
        problem: The convolution.
        access: An `ACCESS_*` code.
        rows: Pixels of a tile, at most.
    """
    var lines = 1
    var length = problem.gemm_m()
    if access == ACCESS_STRIPS:
        lines = length // problem.output[2]
        length = problem.output[2]
    return Tiling(lines, length, most_rows=rows)


def access_refusal(
    problem: ConvProblem, types: OperandTypes, access: Int
) -> Optional[String]:
    """Why tiles cannot read a problem's activation so, or None.

    Args:
        problem: The convolution.
        types: Of the operands.
        access: An `ACCESS_*` code.
    """
    if access == ACCESS_MATRIX:
        var in_place = reads_in_place(types.input, types.fused_input)
        if in_place and problem.groups == 1 and problem.is_pointwise():
            return None
        return String(
            "access: the activation is the matrix of one tap, stride 1, no"
            " padding and one group, of float32 with nothing fused in front"
        )
    if access == ACCESS_STRIPS:
        if longest_slice(problem) >= PANEL:
            return None
        return String("access: the channels of a strip are too few for a run")
    if access == ACCESS_GATHER:
        return None
    return String(t"access: {access} is not 0 to {ACCESS_MATRIX}")


def longest_depth(
    problem: ConvProblem, types: OperandTypes, access: Int
) -> Int:
    """Products of the longest slice: all, in whole `PANEL`s, as far as the runs
    of a strip go.

    Args:
        problem: The convolution.
        types: Of the operands.
        access: An `ACCESS_*` code.
    """
    var products = problem.panel_layout(types.input).depth()
    var longest = ceildiv(products, PANEL) * PANEL
    if access == ACCESS_STRIPS:
        longest = min(longest, longest_slice(problem) // PANEL * PANEL)
    return longest
