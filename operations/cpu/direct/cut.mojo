"""A cut of the direct kernels into tasks, by numbers: what they can run of it."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.problem import ConvProblem
from ..named import NumberedCut, range_refusal
from .image_row import COLUMNS


def image_rows(problem: ConvProblem) -> Int:
    """Rows of all output images.

    Args:
        problem: The convolution, with at least one output.
    """
    return problem.gemm_m() // problem.output[2]


@fieldwise_init
struct RowCut(NumberedCut):
    """Tasks are some image rows by a block of filters or of columns."""

    var cuts_columns: Int
    """1 where blocks are of columns, 0 where they are of filters."""
    var rows: Int
    """Image rows of a task, of all images."""
    var block: Int
    """Filters or columns of a task."""

    @staticmethod
    def fields() -> List[StaticString]:
        return ["cuts_columns", "rows", "block"]

    @staticmethod
    def of_numbers(numbers: List[Int]) -> RowCut:
        return RowCut(
            cuts_columns=numbers[0], rows=numbers[1], block=numbers[2]
        )

    def numbers(self) -> List[Int]:
        return [self.cuts_columns, self.rows, self.block]

    def refusal(
        self, problem: ConvProblem, filter_unit: Int
    ) -> Optional[String]:
        """Why a problem cannot be run so, or None.

        Args:
            problem: The convolution, which the kernel takes.
            filter_unit: What a block of filters is a multiple of; 0 where the
                kernel's tasks have all filters.
        """
        var least = 1 if filter_unit == 0 else 0
        var refusal = range_refusal("cuts_columns", self.cuts_columns, least, 1)
        if not refusal:
            refusal = range_refusal("rows", self.rows, 1, image_rows(problem))
        if refusal:
            return refusal
        var unit = COLUMNS
        var extent = problem.output[2]
        if self.cuts_columns == 0:
            unit = filter_unit
            extent = problem.filters
        var most = ceildiv(extent, unit) * unit
        return range_refusal("block", self.block, unit, most, unit)
