"""The CPU epilogue: a register tile, just written and still in L1, becomes
output."""

from std.sys.info import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..conv.access import ActivationSource, OutputTarget
from ..conv.epilogue import Activation, Epilogue
from ..conv.fields import ACTIVATIONS, ACTIVATION_NONE, PANEL
from ..conv.memory import CACHE_LINE, Writes
from ..conv.operands import Arguments
from ..conv.problem import ConvProblem
from .accumulators import Accumulators, OutputTile
from .form import (
    FORM_IDENTITY,
    FORM_RESIDUAL,
    FORM_STEPS,
    Form,
    real_residual,
)
from .pixel import Pixel

comptime WIDTHS = [PANEL, 4, 1]
"""Filters that are treated at once: as many as are left."""

comptime STORED_PANELS = 2
"""Panels that a pixel is stored of at once: a cache line of 16-bit outputs."""


@always_inline
def _store_columns[
    kind: Int, width: Int, vectors: Int
](
    output: Some[OutputTarget],
    form: Form,
    problem: ConvProblem,
    tile: OutputTile,
    first: Int,
    accumulators: Accumulators,
):
    """Stores `vectors` times `width` filters of all pixels of a tile, from its
    `first`th on: applies the epilogue, rounds and stores."""
    comptime dtype = type_of(output).dtype
    var filter = tile.filter + first
    comptime sum_type = type_of(accumulators).dtype
    var bias = Array[SIMD[DType.float32, width], vectors](fill=0)
    var scale = Array[SIMD[DType.float32, width], vectors](fill=1)
    var excess = Array[SIMD[sum_type, width], vectors](fill=0)
    comptime for j in range(vectors):
        bias[j] = form.bias[kind, width](filter + j * width)
        scale[j] = form.scale[kind, width](filter + j * width)
        excess[j] = accumulators.excess[width](first + j * width)
    var pixel = Pixel(problem, tile.row)
    var offset = tile.row * problem.filters + filter
    var row = first
    for _ in range(tile.rows):
        comptime for j in range(vectors):
            comptime at = j * width
            var other = SIMD[DType.float32, width](0)
            comptime if kind == FORM_RESIDUAL:
                other = real_residual[width](
                    form.epilogue,
                    output,
                    pixel,
                    filter + at,
                    offset + at,
                )
            var value = form.apply[kind, width](
                accumulators.load[width](row + at, excess[j]),
                scale[j],
                bias[j],
                other,
            )
            output.store[width, alignment=1](
                pixel.n,
                pixel.at,
                filter + at,
                offset + at,
                rebind[SIMD[dtype, width]](form.stored(value)),
            )
        pixel.advance(problem)
        offset += problem.filters
        row += accumulators.row_stride


@always_inline
def _store_rows[
    kind: Int
](
    output: Some[OutputTarget],
    form: Form,
    problem: ConvProblem,
    tile: OutputTile,
    accumulators: Accumulators,
):
    """Stores a tile through the loop of `form.kind`."""
    var j = 0
    while j + STORED_PANELS * PANEL <= tile.filters:
        _store_columns[kind, PANEL, STORED_PANELS](
            output, form, problem, tile, j, accumulators
        )
        j += STORED_PANELS * PANEL
    comptime for width in WIDTHS:
        while j + width <= tile.filters:
            _store_columns[kind, width, 1](
                output, form, problem, tile, j, accumulators
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
    output: Some[OutputTarget],
    problem: ConvProblem,
    tile: OutputTile,
    sums: Writes[DType.float32],
    row_stride: Int,
):
    """Adds the residual, times its factor, to activated values, in place."""
    var pixel = Pixel(problem, tile.row)
    for i in range(tile.rows):
        var row = sums.unsafe_offset(i * row_stride)
        var first = (tile.row + i) * problem.filters + tile.filter
        var j = 0
        comptime for width in WIDTHS:
            while j + width <= tile.filters:
                var v = row.unsafe_load[width=width](j)
                var other = real_residual[width](
                    epilogue,
                    output,
                    pixel,
                    tile.filter + j,
                    first + j,
                )
                v = other.fma(SIMD[DType.float32, width](epilogue.beta), v)
                row.unsafe_store(j, v)
                j += width
        pixel.advance(problem)


@no_inline
def _apply_steps(
    epilogue: Epilogue,
    output: Some[OutputTarget],
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
        _add_residual(epilogue, output, problem, tile, sums, row_stride)
    _activate(
        epilogue.final_activation, sums, tile.rows, tile.filters, row_stride
    )


@no_inline
def _to_floats(accumulators: Accumulators, tile: OutputTile):
    """Replaces sums by the numbers that they are."""
    var row = 0
    for _ in range(tile.rows):
        var j = 0
        comptime for width in WIDTHS:
            while j + width <= tile.filters:
                accumulators.elements.unsafe_store(
                    row + j,
                    accumulators.load[width](
                        row + j, accumulators.excess[width](j)
                    ),
                )
                j += width
        row += accumulators.row_stride


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
        _Operands, ConvProblem, OutputTile, Accumulators[DType.float32]
    ) thin -> None
    var _store_integers: def(
        _Operands, ConvProblem, OutputTile, Accumulators[DType.int32]
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
            Call.Source,
            Call.Output,
            Call.bias_type,
            Call.residual_type,
            DType.float32,
        ]
        self._store_integers = _store_integer_tile[
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
        self._store(
            self._operands,
            problem,
            tile,
            Accumulators[DType.float32].floats(accumulators, row_stride),
        )

    def store_integers(
        self,
        problem: ConvProblem,
        tile: OutputTile,
        accumulators: Accumulators[DType.int32],
    ):
        """Applies the epilogue to a tile of integer sums in memory and stores
        it.

        Args:
            problem: The convolution.
            tile: Which outputs.
            accumulators: Their sums, which the epilogue may overwrite.
        """
        self._store_integers(self._operands, problem, tile, accumulators)


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
    sum_type: DType,
](
    operands: _Operands,
    problem: ConvProblem,
    tile: OutputTile,
    accumulators: Accumulators[sum_type],
):
    """Stores a tile through the loop that the epilogue's form has."""
    ref arguments = operands.unsafe_bitcast[
        Arguments[Source, Output, bias_type, residual_type]
    ]()[]
    # A copy: as far as the compiler knows, a store may change an operand.
    var output = arguments.output
    var form = Form[
        bias_type, residual_type, Source.dtype.is_integral(), Output.dtype
    ](arguments.epilogue, arguments.quantization)
    if form.kind == FORM_STEPS:
        comptime if sum_type == DType.int32:
            _to_floats(accumulators, tile)
        _apply_steps(
            form.epilogue,
            output,
            problem,
            tile,
            accumulators.elements,
            accumulators.row_stride,
        )
        form.kind = FORM_IDENTITY
        comptime if sum_type == DType.int32:
            _store_rows[FORM_IDENTITY](
                output,
                form,
                problem,
                tile,
                Accumulators[DType.float32].floats(
                    accumulators.elements, accumulators.row_stride
                ),
            )
            return
    comptime for kind in range(FORM_STEPS):
        if form.kind == kind:
            _store_rows[kind](output, form, problem, tile, accumulators)


def _store_integer_tile[
    Source: ActivationSource,
    Output: OutputTarget,
    bias_type: DType,
    residual_type: DType,
](
    operands: _Operands,
    problem: ConvProblem,
    tile: OutputTile,
    accumulators: Accumulators[DType.int32],
):
    """`_store_tile` of integer sums, which only products of integers have."""
    comptime if Source.dtype.is_integral():
        _store_tile[Source, Output, bias_type, residual_type, DType.int32](
            operands, problem, tile, accumulators
        )
