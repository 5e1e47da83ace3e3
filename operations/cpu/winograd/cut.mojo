"""A cut of the Winograd kernel that somebody names, instead of the search: what
the kernel can run of it."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import PANEL
from ...conv.problem import ConvProblem
from ..config import CPU_TILE
from ..named import NumberedCut, range_refusal
from .candidates import cache_refusal
from .scheduler import BLOCK_TILES, Cut, TileGrid, position_depth

comptime MOST_UNITS_AT_ONCE = 8
"""Register tiles side by side whose sums a task keeps at most."""


@fieldwise_init
struct WinogradCut(NumberedCut):
    """What a `Cut` is made of."""

    var shares_input: Int
    """1 where the input is transformed first, 0 where the filter is."""
    var tiles: Int
    """Output tiles of a task."""
    var unit_count: Int
    """Register tiles side by side over a task's filters."""
    var units_at_once: Int
    """Of those, how many have their sums kept at a time."""
    var slice: Int
    """Products of a position between two spills of the sums."""

    @staticmethod
    def fields() -> List[StaticString]:
        return [
            "shares_input",
            "tiles",
            "unit_count",
            "units_at_once",
            "slice",
        ]

    @staticmethod
    def of_numbers(numbers: List[Int]) -> WinogradCut:
        return WinogradCut(
            shares_input=numbers[0],
            tiles=numbers[1],
            unit_count=numbers[2],
            units_at_once=numbers[3],
            slice=numbers[4],
        )

    def numbers(self) -> List[Int]:
        return [
            self.shares_input,
            self.tiles,
            self.unit_count,
            self.units_at_once,
            self.slice,
        ]

    @staticmethod
    def of(cut: Cut) -> WinogradCut:
        """What a cut is made of.

        Args:
            cut: The cut.
        """
        return WinogradCut(
            shares_input=1 if cut.shares_input else 0,
            tiles=cut.tiles,
            unit_count=ceildiv(cut.panels, CPU_TILE.panels),
            units_at_once=ceildiv(cut.panels_at_once, CPU_TILE.panels),
            slice=cut.slice,
        )

    def cut(self, problem: ConvProblem) -> Cut:
        """The cut of a problem.

        Args:
            problem: The convolution, for which `shape_refusal` is None.
        """
        var cut = Cut(
            problem,
            shares_input=self.shares_input == 1,
            tiles=self.tiles,
            units=self.unit_count,
        )
        cut.panels_at_once = min(
            self.units_at_once * CPU_TILE.panels, cut.panels
        )
        cut.slice = self.slice
        return cut

    def refusal(self, problem: ConvProblem, input: DType) -> Optional[String]:
        """Why a problem cannot be run so, or would not stay in caches, or None.

        Args:
            problem: The convolution, which the kernel takes.
            input: The type of activation and filter.
        """
        var refusal = self.shape_refusal(problem, input)
        if refusal:
            return refusal
        return cache_refusal(problem, input, self.cut(problem))

    def shape_refusal(
        self, problem: ConvProblem, input: DType
    ) -> Optional[String]:
        """Why a problem cannot be run so, or None.

        Args:
            problem: The convolution, which the kernel takes.
            input: The type of activation and filter.
        """
        # Sums of integers are not added to.
        var most_shares = 0 if input.is_integral() else 1
        var refusal = range_refusal(
            "shares_input", self.shares_input, 0, most_shares
        )
        if not refusal:
            refusal = range_refusal(
                "tiles",
                self.tiles,
                CPU_TILE.rows,
                most_tiles(problem),
                CPU_TILE.rows,
            )
        var units = ceildiv(problem.panels(), CPU_TILE.panels)
        var shares = self.shares_input == 1
        if not refusal:
            refusal = range_refusal(
                "unit_count",
                self.unit_count,
                1,
                min(units, MOST_UNITS_AT_ONCE) if shares else units,
            )
        if not refusal:
            var most = min(self.unit_count, MOST_UNITS_AT_ONCE)
            refusal = range_refusal(
                "units_at_once",
                self.units_at_once,
                self.unit_count if shares else 1,
                most,
            )
        if refusal:
            return refusal
        return self._slice_refusal(position_depth(problem))

    def _slice_refusal(self, depth: Int) -> Optional[String]:
        """Why a task cannot go through its products so, or None."""
        if self.slice == depth:
            return None
        if self.shares_input == 0:
            return String(
                t"slice: {self.slice} is not {depth}: where the filter is"
                t" shared, sums are not spilled"
            )
        return range_refusal("slice", self.slice, PANEL, depth, PANEL)


def most_tiles(problem: ConvProblem) -> Int:
    """Output tiles of the largest task, in whole register tiles.

    Args:
        problem: The convolution.
    """
    var rows = CPU_TILE.rows
    var all = ceildiv(TileGrid(problem).count(), rows) * rows
    return min(all, BLOCK_TILES // rows * rows)
