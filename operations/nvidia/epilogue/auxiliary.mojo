"""The visitor that stores values as they are where it stands, beside the output:
a second tensor, such as the values in front of an activation."""

from std.collections import Optional
from std.sys.info import size_of

from ...conv.access import MemoryOutput, OutputTarget
from ...conv.fields import COPY_BYTES
from ...conv.memory import Writes
from ...conv.problem import ConvProblem
from ..im2col.tiles import OutputShape
from ..im2col.traversal import ROW_BYTES
from ..tma.copy import SharedAddress
from .callbacks import EpilogueVisitor, LaunchShape, Subtile, Visited
from .layout import Fragments, VisitLayout
from .steps import Stateless


@fieldwise_init
struct RowOutput[Output: OutputTarget](EpilogueVisitor):
    """Rounds the values and hands them to a tensor of the output's shape,
    neighbouring filters of one pixel at a time; visitors behind it see them
    unrounded.

    Of what the graph compiler made of a consumer of the values (`StoredOutput`,
    `ComputedOutput`) this is the visitor. `AuxiliaryOutput` is that of a tensor
    in memory.

    The values pass through shared memory of this visitor's: each sub-tile is
    written, and read behind the consumer's barrier.

    Parameters:
        Output: The tensor, `[N, *output, K]`.
    """

    comptime State = Stateless
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

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        comptime assert (
            Self.dtype.is_half_float() or Self.dtype == DType.float32
        ), "an auxiliary output is of bfloat16, float16 or float32"
        comptime bytes = size_of[Self.dtype]()
        if bytes == 4 and not (layout.keeps_filters() or layout.whole_pixels()):
            return String(
                t"an auxiliary output of {Self.dtype} needs filters as the"
                t" multiply's rows"
            )
        if layout.whole_pixels() and layout.filters * bytes > ROW_BYTES:
            return String(
                t"an auxiliary output of {Self.dtype} passes through rows of up"
                t" to {ROW_BYTES} bytes; here {layout.filters} filters"
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
        return layout.pixels * layout.filters * size_of[Self.dtype]()

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        return layout.buffers() * Self._buffer_bytes(layout)

    @staticmethod
    def shares(layout: VisitLayout) -> Bool:
        return True

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        return Self(self.output, OutputShape(shape.problem))

    @staticmethod
    @always_inline
    def _buffer[
        Values: Fragments
    ](at: Visited[Values], subtile: Subtile) -> SharedAddress:
        """Where a sub-tile is in shared memory."""
        comptime buffers = UInt32(Values.layout.buffers())
        comptime bytes = UInt32(Self._buffer_bytes(Values.layout))
        return at.memory + subtile.count % buffers * bytes

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """Keeps nothing."""
        return Stateless()

    @always_inline
    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        at.place.write[Self.dtype](Self._buffer(at, subtile), group, values)
        return values

    @always_inline
    def postreduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        at.place.store_rows(
            self.output,
            self.shape,
            at.geometry,
            Self._buffer(at, subtile),
            at.pixel(subtile),
            at.filter(subtile),
            at.filter_end(),
        )


comptime AuxiliaryOutput[dtype: DType] = RowOutput[MemoryOutput[dtype]]
"""A second tensor in memory, `[N, *output, K]`."""
