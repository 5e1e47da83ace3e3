"""The visitor that stores values as they are where it stands, beside the output:
a second tensor, such as the values in front of an activation."""

from std.collections import Optional
from std.sys.info import size_of

from ....conv.access import MemoryOutput, OutputTarget
from ....conv.fields import COPY_BYTES
from ....conv.memory import Writes
from ....conv.problem import ConvProblem
from ...im2col.tiles import OutputShape
from ...tma.copy import SharedAddress
from .config import Sm90Config
from .epilogue_callbacks import (
    EpilogueVisitor,
    LaunchShape,
    Residual,
    Subtile,
    VisitLayout,
    Visited,
)
from .epilogue_config import HALF_BYTES, SUBTILE_FILTERS
from .epilogue_fragment import write_fragment
from .epilogue_rows import RowStore
from .epilogue_steps import Stateless


@fieldwise_init
struct RowOutput[Output: OutputTarget](EpilogueVisitor):
    """Rounds the values and hands them to a tensor of the output's shape,
    neighbouring filters of one pixel at a time; visitors behind it see them
    unrounded.

    Of what the graph compiler made of a consumer of the values (`StoredOutput`,
    `ComputedOutput`) this is the visitor. `AuxiliaryOutput` is that of a tensor
    in memory.

    The values pass through shared memory of this visitor's: each sub-tile's is
    written, and read behind the consumer's barrier; two take turns, so that
    none is overwritten while it is read, and three where a barrier comes one
    sub-tile late.

    Parameters:
        Output: The tensor, `[N, *output, K]`.
    """

    comptime State = Stateless
    comptime shares = True
    comptime dtype = Self.Output.dtype

    var output: Self.Output
    var shape: OutputShape

    def __init__(out self, output: Self.Output):
        """The tensor.

        Args:
            output: Its elements in device memory.
        """
        self.output = output
        self.shape = OutputShape()

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "RowOutput"

    def can_implement(
        self, config: Sm90Config, problem: ConvProblem
    ) -> Optional[String]:
        """See `EpilogueVisitor`."""
        comptime assert (
            Self.dtype.is_half_float() or Self.dtype == DType.float32
        ), "an auxiliary output is of bfloat16, float16 or float32"
        comptime bytes = size_of[Self.dtype]()
        if not config.swapped and bytes != HALF_BYTES:
            return String(
                t"an auxiliary output of {Self.dtype} needs filters as the"
                t" multiply's rows"
            )
        if problem.group_filters() * bytes % COPY_BYTES != 0:
            return String(
                t"an auxiliary output of {Self.dtype} is stored {COPY_BYTES}"
                t" bytes at a time; here {problem.group_filters()} output"
                t" channels in each group"
            )
        comptime if not Self.Output.stores:
            if Int(self.output.data()) % COPY_BYTES != 0:
                return String(
                    t"an auxiliary output begins at a multiple of {COPY_BYTES}"
                    t" bytes; here it does not"
                )
        return None

    @staticmethod
    def _buffer_bytes(layout: VisitLayout) -> Int:
        """Shared memory of a sub-tile."""
        return layout.pixels * SUBTILE_FILTERS * size_of[Self.dtype]()

    @staticmethod
    def _buffers(layout: VisitLayout) -> Int:
        """Sub-tiles in shared memory."""
        return 3 if layout.delayed else 2

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        """See `EpilogueVisitor`."""
        return Self._buffers(layout) * Self._buffer_bytes(layout)

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        """See `EpilogueVisitor`."""
        return Self(self.output, OutputShape(shape.problem))

    @staticmethod
    @always_inline
    def _buffer[
        layout: VisitLayout
    ](at: Visited[layout], subtile: Subtile) -> SharedAddress:
        """Where a sub-tile is in shared memory."""
        comptime buffers = UInt32(Self._buffers(layout))
        comptime bytes = UInt32(Self._buffer_bytes(layout))
        return at.memory + subtile.count % buffers * bytes

    @always_inline
    def begin[layout: VisitLayout](self, at: Visited[layout]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        layout: VisitLayout, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[layout],
        subtile: Subtile,
        group: UInt32,
        residual: Residual[layout],
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """See `EpilogueVisitor`."""
        write_fragment[Self.dtype, layout.pixels](
            Self._buffer(at, subtile), at.place, group, values
        )
        return values

    @always_inline
    def postreduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """See `EpilogueVisitor`."""
        comptime Rows = RowStore[Self.Output, layout.pixels, layout.swapped]
        var rows = Rows(at.place)
        comptime for panel in range(Rows.held):
            rows.store[panel](
                self.output,
                self.shape,
                at.geometry,
                rows.load[panel](Self._buffer(at, subtile)),
                at.pixel(subtile),
                at.filter(subtile),
                at.filter_end(),
            )


comptime AuxiliaryOutput[dtype: DType] = RowOutput[MemoryOutput[dtype]]
"""A second tensor in memory, `[N, *output, K]`."""
