"""The CPU epilogue: a register tile, just written and still in L1, becomes
output."""

from std.collections import Optional
from std.sys.info import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch
from std.utils.numerics import inf

from ..conv.access import ActivationSource, OutputTarget
from ..conv.epilogue import Activation, Epilogue, clamped
from ..conv.fields import (
    ACTIVATIONS,
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    PANEL,
)
from ..conv.memory import CACHE_LINE, Reads, Writes
from ..conv.operands import Arguments
from ..conv.problem import ConvProblem
from .pixel import Pixel
from .rounding import rounded

comptime FORM_IDENTITY = 0
"""Nothing is done to a sum."""

comptime FORM_LIMITS = 1
"""A bias, then limits: no branch for each vector."""

comptime FORM_RESIDUAL = 2
"""A bias, limits, a residual and limits again."""

comptime FORM_STEPS = 3
"""Anything, in steps: each is a loop over the whole tile, so that what an
activation is is asked, and its constants are loaded, once a tile."""

comptime WIDTHS = [PANEL, 4, 1]
"""Filters that are treated at once: as many as are left."""

comptime STORED_PANELS = 2
"""Panels that a pixel is stored of at once: a cache line of 16-bit outputs."""


@fieldwise_init
struct Limits(ImplicitlyCopyable, Movable):
    """An activation that is a pair of comparisons."""

    var low: Float32
    var high: Float32

    @staticmethod
    def of(activation: Activation) -> Optional[Limits]:
        """The limits that an activation is, if it is.

        Args:
            activation: The activation.

        Returns:
            The limits, infinite ones for no activation.
        """
        comptime infinity = inf[DType.float32]()
        if activation.code == ACTIVATION_NONE:
            return Limits(-infinity, infinity)
        if activation.code == ACTIVATION_RELU:
            return Limits(0, infinity)
        if activation.code == ACTIVATION_CLAMP:
            return Limits(activation.p0, activation.p1)
        return None


struct Form[bias_type: DType, residual_type: DType](
    ImplicitlyCopyable, Movable
):
    """An epilogue, and which of the loops above its work fits."""

    var kind: Int
    var epilogue: Epilogue[Self.bias_type, Self.residual_type]
    var limits: Limits
    var final_limits: Limits

    def __init__(
        out self, epilogue: Epilogue[Self.bias_type, Self.residual_type]
    ):
        """Finds the loop.

        Args:
            epilogue: The epilogue.
        """
        self.epilogue = epilogue
        self.limits = Limits(0, 0)
        self.final_limits = Limits(0, 0)
        self.kind = FORM_IDENTITY
        if epilogue.is_identity():
            return
        self.kind = FORM_STEPS
        var limits = Limits.of(epilogue.activation)
        var final_limits = Limits.of(epilogue.final_activation)
        if epilogue.has_scale or not epilogue.has_bias:
            return
        if not limits or not final_limits:
            return
        self.limits = limits.value()
        self.final_limits = final_limits.value()
        if epilogue.has_residual:
            self.kind = FORM_RESIDUAL
        elif epilogue.final_activation.code == ACTIVATION_NONE:
            self.kind = FORM_LIMITS

    @always_inline
    def bias[
        kind: Int, width: Int
    ](self, filter: Int) -> SIMD[DType.float32, width]:
        """What is added to the sums of neighbouring filters.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            filter: The first filter.
        """
        comptime if kind == FORM_IDENTITY:
            return SIMD[DType.float32, width](0)
        else:
            return self.epilogue.bias.unsafe_load[width=width](filter).cast[
                DType.float32
            ]()

    @always_inline
    def apply[
        kind: Int, width: Int
    ](
        self,
        v: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
        offset: Int,
    ) -> SIMD[DType.float32, width]:
        """`Epilogue.apply`, of the form that this one has.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            v: Their accumulators.
            bias: What `bias` returned for them.
            offset: The first element's row-major offset in the output.

        Returns:
            The values to round and store.
        """
        comptime if kind == FORM_IDENTITY:
            return v
        else:
            var result = clamped(v + bias, self.limits.low, self.limits.high)
            comptime if kind == FORM_RESIDUAL:
                var residual = self.epilogue.residual.unsafe_load[width=width](
                    offset
                )
                result = residual.cast[DType.float32]().fma(
                    SIMD[DType.float32, width](self.epilogue.beta), result
                )
                result = clamped(
                    result, self.final_limits.low, self.final_limits.high
                )
            return result


@fieldwise_init
struct OutputTile(ImplicitlyCopyable, Movable):
    """Outputs that are stored together: rows of the implicit GEMM, which are
    pixels, by neighbouring filters."""

    var row: Int
    """The first."""
    var rows: Int
    var filter: Int
    """The first, counted over all groups."""
    var filters: Int


@always_inline
def _store_columns[
    kind: Int, width: Int, vectors: Int
](
    output: Some[OutputTarget],
    form: Form,
    problem: ConvProblem,
    tile: OutputTile,
    first: Int,
    accumulators: Reads[DType.float32],
    row_stride: Int,
):
    """Stores `vectors` times `width` filters of all pixels of a tile, from its
    `first`th on: applies the epilogue, rounds and stores."""
    comptime dtype = type_of(output).dtype
    var filter = tile.filter + first
    var bias = Array[SIMD[DType.float32, width], vectors](fill=0)
    comptime for j in range(vectors):
        bias[j] = form.bias[kind, width](filter + j * width)
    var pixel = Pixel(problem, tile.row)
    var offset = tile.row * problem.filters + filter
    var row = accumulators.unsafe_offset(first)
    for _ in range(tile.rows):
        comptime for j in range(vectors):
            comptime at = j * width
            var value = form.apply[kind, width](
                row.unsafe_load[width=width](at), bias[j], offset + at
            )
            output.store[width, alignment=1](
                pixel.n,
                pixel.at,
                filter + at,
                offset + at,
                rounded[dtype](value),
            )
        pixel.advance(problem)
        offset += problem.filters
        row = row.unsafe_offset(row_stride)


@always_inline
def _store_rows[
    kind: Int
](
    output: Some[OutputTarget],
    form: Form,
    problem: ConvProblem,
    tile: OutputTile,
    accumulators: Reads[DType.float32],
    row_stride: Int,
):
    """Stores a tile through the loop of `form.kind`."""
    var j = 0
    while j + STORED_PANELS * PANEL <= tile.filters:
        _store_columns[kind, PANEL, STORED_PANELS](
            output, form, problem, tile, j, accumulators, row_stride
        )
        j += STORED_PANELS * PANEL
    comptime for width in WIDTHS:
        while j + width <= tile.filters:
            _store_columns[kind, width, 1](
                output, form, problem, tile, j, accumulators, row_stride
            )
            j += width


@no_inline
def _activate_tile[
    code: Int
](
    activation: Activation,
    values: Writes[DType.float32],
    rows: Int,
    columns: Int,
    row_stride: Int,
):
    """Replaces values by those of a function that the compiler knows.

    Parameters:
        code: The activation's.

    Args:
        activation: The function.
        values: The values.
        rows: Of the values.
        columns: Of the values.
        row_stride: Elements between two rows.
    """
    var known = Activation(code, activation.p0, activation.p1)
    for i in range(rows):
        var row = values.unsafe_offset(i * row_stride)
        var j = 0
        comptime for width in WIDTHS:
            while j + width <= columns:
                var v = row.unsafe_load[width=width](j)
                row.unsafe_store(j, known.apply[width](v))
                j += width


def _activate(
    activation: Activation,
    values: Writes[DType.float32],
    rows: Int,
    columns: Int,
    row_stride: Int,
):
    """Replaces values by those of a function; the arguments are those of
    `_activate_tile`."""
    comptime for i in range(len(ACTIVATIONS)):
        comptime code = ACTIVATIONS[i]
        comptime if code != ACTIVATION_NONE:
            if activation.code == code:
                _activate_tile[code](
                    activation, values, rows, columns, row_stride
                )


def _scale_and_add_bias(
    epilogue: Epilogue,
    tile: OutputTile,
    sums: Writes[DType.float32],
    row_stride: Int,
):
    """Scales a tile's sums and adds the bias, in place."""
    for i in range(tile.rows):
        var row = sums.unsafe_offset(i * row_stride)
        var j = 0
        comptime for width in WIDTHS:
            while j + width <= tile.filters:
                var v = row.unsafe_load[width=width](j)
                v = epilogue.scaled[width](v, tile.filter + j)
                v += epilogue.load_bias[width](tile.filter + j).cast[
                    DType.float32
                ]()
                row.unsafe_store(j, v)
                j += width


def _add_residual(
    epilogue: Epilogue,
    problem: ConvProblem,
    tile: OutputTile,
    sums: Writes[DType.float32],
    row_stride: Int,
):
    """Adds the residual, times its factor, to activated values, in place."""
    for i in range(tile.rows):
        var row = sums.unsafe_offset(i * row_stride)
        var first = (tile.row + i) * problem.filters + tile.filter
        var j = 0
        comptime for width in WIDTHS:
            while j + width <= tile.filters:
                var v = row.unsafe_load[width=width](j)
                var other = epilogue.load_residual[width](first + j)
                v = other.cast[DType.float32]().fma(
                    SIMD[DType.float32, width](epilogue.beta), v
                )
                row.unsafe_store(j, v)
                j += width


@no_inline
def _apply_steps(
    epilogue: Epilogue,
    problem: ConvProblem,
    tile: OutputTile,
    sums: Writes[DType.float32],
    row_stride: Int,
):
    """`Epilogue.apply`, a step after the other, of a tile of sums in place."""
    if epilogue.has_scale or epilogue.has_bias:
        _scale_and_add_bias(epilogue, tile, sums, row_stride)
    _activate(epilogue.activation, sums, tile.rows, tile.filters, row_stride)
    if epilogue.has_residual:
        _add_residual(epilogue, problem, tile, sums, row_stride)
    _activate(
        epilogue.final_activation, sums, tile.rows, tile.filters, row_stride
    )


comptime _Operands = Pointer[NoneType, ImmUntrackedOrigin]
"""An op's `Arguments`, whose types a caller does not know."""


struct TileStore(ImplicitlyCopyable, Movable):
    """The epilogue and the output of a launch, behind pointers to functions.
    Output, bias and residual have other types in nearly every op, the output's
    because of what the graph compiler fused. What calls this is compiled once
    for all of them."""

    var has_residual: Bool
    var _operands: _Operands
    var _prefetch: def(_Operands, ConvProblem, OutputTile) thin -> None
    var _store: def(
        _Operands, ConvProblem, OutputTile, Writes[DType.float32], Int
    ) thin -> None

    def __init__(out self, ref arguments: Arguments):
        """Of an op.

        Args:
            arguments: The op's operands, which outlive the launch.
        """
        self.has_residual = arguments.epilogue.has_residual
        self._operands = (
            Pointer(to=arguments)
            .unsafe_bitcast[NoneType]()
            .as_imm()
            .unsafe_origin_cast[ImmUntrackedOrigin]()
        )
        comptime Call = type_of(arguments)
        self._prefetch = _prefetch_tile[
            Call.Source, Call.Output, Call.bias_type, Call.residual_type
        ]
        self._store = _store_tile[
            Call.Source, Call.Output, Call.bias_type, Call.residual_type
        ]

    def prefetch(self, problem: ConvProblem, tile: OutputTile):
        """Asks for the memory that `store` will read and write, so that it
        arrives while the tile is being multiplied: the rows of a tile lie too
        far apart for the hardware to guess.

        Args:
            problem: The convolution.
            tile: Which outputs.
        """
        self._prefetch(self._operands, problem, tile)

    def store(
        self,
        problem: ConvProblem,
        tile: OutputTile,
        accumulators: Writes[DType.float32],
        row_stride: Int,
    ):
        """Applies the epilogue to a tile of sums in memory and stores it.

        Args:
            problem: The convolution.
            tile: Which outputs.
            accumulators: Their sums, which the epilogue may overwrite.
            row_stride: Elements between two rows of the sums.
        """
        self._store(self._operands, problem, tile, accumulators, row_stride)


def _prefetch_tile[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](operands: _Operands, problem: ConvProblem, tile: OutputTile):
    """Asks for a tile's output, and for its residual if there is one."""
    comptime to_write = PrefetchOptions().for_write().high_locality()
    comptime to_read = PrefetchOptions().for_read().high_locality()
    comptime line = CACHE_LINE // size_of[Output.dtype]()
    ref arguments = operands.unsafe_bitcast[
        Arguments[Source, Output, bias_type, residual_type]
    ]()[]
    ref epilogue = arguments.epilogue
    for i in range(tile.rows):
        var offset = (tile.row + i) * problem.filters + tile.filter
        for j in range(0, tile.filters, line):
            comptime if not Output.stores:
                prefetch[params=to_write](
                    arguments.output.data().unsafe_offset(offset + j)
                )
            if epilogue.has_residual:
                prefetch[params=to_read](
                    epilogue.residual.unsafe_offset(offset + j)
                )


def _store_tile[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](
    operands: _Operands,
    problem: ConvProblem,
    tile: OutputTile,
    accumulators: Writes[DType.float32],
    row_stride: Int,
):
    """Stores a tile through the loop that the epilogue's form has."""
    ref arguments = operands.unsafe_bitcast[
        Arguments[Source, Output, bias_type, residual_type]
    ]()[]
    # A copy: as far as the compiler knows, a store may change an operand.
    var output = arguments.output
    var form = Form(arguments.epilogue)
    if form.kind == FORM_STEPS:
        _apply_steps(form.epilogue, problem, tile, accumulators, row_stride)
        form.kind = FORM_IDENTITY
    comptime for kind in range(FORM_STEPS):
        if form.kind == kind:
            _store_rows[kind](
                output, form, problem, tile, accumulators.as_imm(), row_stride
            )
