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
from ..conv.quantization import Quantization
from .pixel import Pixel
from .rounding import Steps, rounded

comptime FORM_IDENTITY = 0
"""Nothing is done to a sum."""

comptime FORM_LIMITS = 1
"""A bias, then limits: no branch for each vector. Of integers a scale is in front,
and either may be missing."""

comptime FORM_RESIDUAL = 2
"""What `FORM_LIMITS` has, a residual and limits again."""

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
    def none() -> Limits:
        """No limits."""
        comptime infinity = inf[DType.float32]()
        return Limits(-infinity, infinity)

    @staticmethod
    def of(activation: Activation) -> Optional[Limits]:
        """The limits that an activation is, if it is.

        Args:
            activation: The activation.

        Returns:
            The limits, infinite ones for no activation.
        """
        if activation.code == ACTIVATION_NONE:
            return Limits.none()
        if activation.code == ACTIVATION_RELU:
            return Limits(0, inf[DType.float32]())
        if activation.code == ACTIVATION_CLAMP:
            return Limits(activation.p0, activation.p1)
        return None


struct Form[
    bias_type: DType, residual_type: DType, integers: Bool, output: DType
](ImplicitlyCopyable, Movable):
    """An epilogue, and which of the loops above its work fits.

    Parameters:
        bias_type: Of the bias.
        residual_type: Of the residual.
        integers: Whether operands are integers, which have a scale as a rule.
        output: Type of the output. One of integers has limits of its own, so
            that the last ones of the epilogue are part of them.
    """

    var kind: Int
    var epilogue: Epilogue[Self.bias_type, Self.residual_type]
    var quantization: Quantization
    var limits: Limits
    var final_limits: Limits
    var steps: Steps
    """To an output of integers."""

    def __init__(
        out self,
        epilogue: Epilogue[Self.bias_type, Self.residual_type],
        quantization: Quantization,
    ):
        """Finds the loop.

        Args:
            epilogue: The epilogue.
            quantization: What belongs to it.
        """
        self.epilogue = epilogue
        self.quantization = quantization
        self.limits = Limits(0, 0)
        self.final_limits = Limits(0, 0)
        self.steps = Self._steps(quantization, Limits.none())
        self.kind = FORM_IDENTITY
        if epilogue.is_identity():
            return
        self.kind = FORM_STEPS
        var limits = Limits.of(epilogue.activation)
        var final_limits = Limits.of(epilogue.final_activation)
        comptime if not Self.integers:
            if epilogue.has_scale or not epilogue.has_bias:
                return
        if not limits or not final_limits:
            return
        self.limits = limits.value()
        self.final_limits = final_limits.value()
        if epilogue.has_residual:
            self.kind = FORM_RESIDUAL
            self.steps = Self._steps(quantization, self.final_limits)
        elif epilogue.final_activation.code == ACTIVATION_NONE:
            self.kind = FORM_LIMITS
            self.steps = Self._steps(quantization, self.limits)

    @staticmethod
    def _steps(quantization: Quantization, limits: Limits) -> Steps:
        """The steps to an output of integers behind limits."""
        comptime if Self.output.is_integral():
            return Steps.of[Self.output](quantization, limits.low, limits.high)
        return Steps(1, 0, 0, 0)

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
        elif Self.integers:
            return self.epilogue.load_bias[width](filter)
        else:
            return self.epilogue.bias.unsafe_load[width=width](filter).cast[
                DType.float32
            ]()

    @always_inline
    def scale[
        kind: Int, width: Int
    ](self, filter: Int) -> SIMD[DType.float32, width]:
        """What the sums of neighbouring filters are multiplied with, 1 unless
        operands are integers.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            filter: The first filter.
        """
        comptime if kind != FORM_IDENTITY and Self.integers:
            return self.epilogue.scaled[width](
                SIMD[DType.float32, width](1), filter
            )
        return SIMD[DType.float32, width](1)

    @always_inline
    def stored[
        width: Int, //
    ](self, value: SIMD[DType.float32, width]) -> SIMD[Self.output, width]:
        """Values as the output has them.

        Parameters:
            width: How many.

        Args:
            value: What `apply` returned.
        """
        comptime if Self.output.is_integral():
            return self.steps.apply[Self.output](value)
        else:
            return rounded[Self.output](value)

    @always_inline
    def _limited[
        width: Int, //, last: Bool
    ](self, v: SIMD[DType.float32, width], limits: Limits) -> SIMD[
        DType.float32, width
    ]:
        """Values within limits; `stored` has the last ones of integers."""
        comptime if last and Self.output.is_integral():
            return v
        else:
            return clamped(v, limits.low, limits.high)

    @always_inline
    def apply[
        kind: Int, width: Int
    ](
        self,
        v: SIMD[DType.float32, width],
        scale: SIMD[DType.float32, width],
        bias: SIMD[DType.float32, width],
        residual: SIMD[DType.float32, width],
    ) -> SIMD[DType.float32, width]:
        """`Epilogue.apply`, of the form that this one has.

        Parameters:
            kind: `self.kind`, known to the compiler; not `FORM_STEPS`.
            width: How many filters.

        Args:
            v: Their accumulators.
            scale: What `scale` returned for them.
            bias: What `bias` returned for them.
            residual: What `real_residual` returned for them, if `kind` is
                `FORM_RESIDUAL`.

        Returns:
            The values to round and store.
        """
        comptime if kind == FORM_IDENTITY:
            return v
        else:
            var sum = v + bias
            comptime if Self.integers:
                sum = v.fma(scale, bias)
            var result = self._limited[kind == FORM_LIMITS](sum, self.limits)
            comptime if kind == FORM_RESIDUAL:
                result = residual.fma(
                    SIMD[DType.float32, width](self.epilogue.beta), result
                )
                result = self._limited[True](result, self.final_limits)
            return result


@always_inline
def real_residual[
    width: Int
](
    epilogue: Epilogue,
    quantization: Quantization,
    output: Some[OutputTarget],
    pixel: Pixel,
    filter: Int,
    offset: Int,
) -> SIMD[DType.float32, width]:
    """The residual of neighbouring filters of one pixel, less its zero point.

    Parameters:
        width: How many filters.

    Args:
        epilogue: The epilogue, which has a residual.
        quantization: What belongs to it.
        output: The output, which says how the residual is laid out.
        pixel: The pixel.
        filter: The first filter.
        offset: The first element's row-major offset in the output.
    """
    var values = output.load_beside[width=width](
        epilogue.residual, pixel.n, pixel.at, filter, offset
    ).cast[DType.float32]()
    comptime if type_of(epilogue).residual_type.is_integral():
        values -= quantization.residual_zero_point
    return values


def finished[
    dtype: DType
](
    arguments: Arguments, sum: Float32, pixel: Pixel, filter: Int, offset: Int
) -> Scalar[dtype]:
    """An output of a sum: the definition that the loops below are held against.

    Parameters:
        dtype: Of the output.

    Args:
        arguments: The op's operands.
        sum: The sum.
        pixel: The output's pixel.
        filter: The filter.
        offset: The output's row-major offset.
    """
    ref epilogue = arguments.epilogue
    var v: SIMD[DType.float32, 1] = epilogue.scaled[1](
        sum, filter
    ) + epilogue.load_bias[1](filter)
    v = epilogue.activation.apply[1](v)
    if epilogue.has_residual:
        var other = real_residual[1](
            epilogue,
            arguments.quantization,
            arguments.output,
            pixel,
            filter,
            offset,
        )
        v = other.fma(epilogue.beta, v)
    v = epilogue.final_activation.apply[1](v)
    comptime if dtype.is_integral():
        var all = Limits.none()
        return Steps.of[dtype](arguments.quantization, all.low, all.high).apply[
            width=1, dtype
        ](v)
    else:
        return rounded[width=1, dtype](v)


@fieldwise_init
struct Accumulators[dtype: DType](ImplicitlyCopyable, Movable):
    """The sums of a tile, in memory.

    Parameters:
        dtype: Of the sums: float32, or int32 of which something is left to
            subtract.
    """

    var elements: Writes[DType.float32]
    """Bits of the sums."""
    var row_stride: Int
    """Elements between two rows of sums."""
    var filter_sums: Reads[DType.int32]
    """The filters' own sums, those of a panel side by side, if `dtype` is
    int32."""
    var panel_stride: Int
    """Elements between those of two panels."""
    var zero_point: Int32
    """How far above they are the activations were multiplied."""

    @staticmethod
    def floats(
        elements: Writes[DType.float32], row_stride: Int
    ) -> Accumulators[DType.float32]:
        """Sums that are complete.

        Args:
            elements: The sums.
            row_stride: Elements between two rows of them.
        """
        # Nothing at this address is read.
        return {
            elements,
            row_stride,
            Reads[DType.int32](unsafe_from_address=CACHE_LINE),
            0,
            0,
        }

    @always_inline
    def excess[width: Int](self, first: Int) -> SIMD[Self.dtype, width]:
        """What is to be subtracted from the sums of neighbouring filters.

        Parameters:
            width: How many filters.

        Args:
            first: The first filter of the tile.
        """
        comptime if Self.dtype == DType.int32:
            # Both may have wrapped; the difference has not.
            var panel, lane = divmod(first, PANEL)
            var sums = self.filter_sums.unsafe_load[width=width, alignment=1](
                panel * self.panel_stride + lane
            )
            return (sums * self.zero_point).cast[Self.dtype]()
        return SIMD[Self.dtype, width](0)

    @always_inline
    def load[
        width: Int
    ](self, at: Int, excess: SIMD[Self.dtype, width]) -> SIMD[
        DType.float32, width
    ]:
        """Neighbouring sums as numbers.

        Parameters:
            width: How many.

        Args:
            at: The first, counted from `elements`.
            excess: What `excess` returned for them.
        """
        comptime if Self.dtype == DType.int32:
            var sums = self.elements.unsafe_bitcast[Scalar[Self.dtype]]()
            return (sums.unsafe_load[width=width](at) - excess).cast[
                DType.float32
            ]()
        else:
            return self.elements.unsafe_load[width=width](at)


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
                    form.quantization,
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
    quantization: Quantization,
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
                    quantization,
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
    quantization: Quantization,
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
        _add_residual(
            epilogue, quantization, output, problem, tile, sums, row_stride
        )
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
            form.quantization,
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
