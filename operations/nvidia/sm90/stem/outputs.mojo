"""The epilogue and the stores of the Hopper stem kernel."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of

from ....conv.access import OutputTarget
from ....conv.epilogue import Activation, Epilogue
from ....conv.fields import (
    ACTIVATION_CLAMP,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
    ACTIVATION_SILU,
)
from ....conv.memory import Reads
from ...epilogue.activations import DeviceActivation, keep_branch, silu_of_half
from ...run_time import run_time
from ...limits import WARPGROUP
from ...pipeline.chunks import CHUNK_BYTES
from ...pipeline.device_memory import prefetch_line, store_if
from ...tma.copy import SharedAddress
from ..wgmma import MMA_M
from .geometry import GROUP_FILTERS, PART_FILTERS, StemConfig
from .pixels import StemFilters, StemRows
from .staging import load_shared, load_words_if
from .storage import OUTPUT_BYTES

comptime WORD_BYTES = 4


@always_inline
def _opaque[
    width: Int
](words: SIMD[DType.uint32, width]) -> SIMD[DType.uint32, width]:
    """The same words, which the compiler takes for others: their conversions
    stay behind."""
    var result = words
    comptime for i in range(width):
        result[i] = inlined_assembly["", UInt32, constraints="=r,0,~{memory}"](
            words[i]
        )
    return result


@always_inline
def _floats[
    dtype: DType, count: Int
](words: SIMD[DType.uint32, _]) -> SIMD[DType.float32, count]:
    """The elements of words, as float32.

    Parameters:
        dtype: Of the elements.
        count: How many.

    Args:
        words: As many as they fill.
    """
    comptime if dtype == DType.bfloat16:
        # A cast takes two instructions for the upper half of a word.
        var result = SIMD[DType.float32, count](0)
        comptime for i in range(count // 2):
            result[2 * i] = bitcast[DType.float32, 1](words[i] << 16)
            result[2 * i + 1] = bitcast[DType.float32, 1](
                words[i] & UInt32(0xFFFF0000)
            )
        return result
    return bitcast[dtype, count](words).cast[DType.float32]()


@fieldwise_init
struct StemEpilogue[dtype: DType](ImplicitlyCopyable, Movable):
    """What happens to sums behind scale and bias, of which shared memory has a
    table (filters.mojo).

    Parameters:
        dtype: Of the residual.
    """

    var first: Activation
    var last: Activation
    var residual: Reads[Self.dtype]
    var has_residual: Bool
    var beta: Float32

    @staticmethod
    @always_inline
    def of(epilogue: Epilogue[_, Self.dtype]) -> Self:
        """The steps of an epilogue.

        Args:
            epilogue: As the op has it.
        """
        return Self(
            epilogue.activation,
            epilogue.final_activation,
            epilogue.residual,
            epilogue.has_residual,
            epilogue.beta,
        )

    @staticmethod
    @always_inline
    def none() -> Self:
        """The steps that change nothing."""
        return Self.of(Epilogue[Self.dtype, Self.dtype].identity())

    @always_inline
    def halves(self) -> Bool:
        """Whether the first activation takes half the values: scale and bias
        are halved in the table."""
        return self.first.code == ACTIVATION_SILU


@fieldwise_init
struct StemOutputs[
    residual_type: DType, Output: OutputTarget, config: StemConfig
]:
    """A thread's epilogue and stores.

    Parameters:
        residual_type: Of the residual.
        Output: How the output is reached.
        config: The configuration.
    """

    comptime accumulators = MMA_M * Self.config.tile_n // WARPGROUP
    comptime Accumulated = SIMD[DType.float32, Self.accumulators]
    comptime Rounded = SIMD[Self.Output.dtype, Self.accumulators]
    comptime parts = Self.config.tile_n // PART_FILTERS
    comptime group_words = (
        GROUP_FILTERS * size_of[Self.residual_type]() // WORD_BYTES
    )
    """Words of the residual of a group of filters."""
    comptime Residual = SIMD[DType.uint32, 2 * Self.parts * Self.group_words]
    """A thread's residual, by pixels, then by filters. As words: the compiler
    would convert values where they are loaded, and so wait for them there."""
    comptime Steps = StemEpilogue[Self.residual_type]
    comptime in_runs = (
        not (Self.Output.computes or Self.Output.stores)
        and size_of[Self.residual_type]() == OUTPUT_BYTES
    )
    """Whether runs are moved where groups are not aligned: nothing asks for
    single pixels."""

    @staticmethod
    @always_inline
    def prefetch_residual(
        steps: Self.Steps, rows: StemRows, filters: StemFilters
    ):
        """Asks for what `load_residual` will load in the L2."""
        comptime for half in range(2):
            comptime for part in range(Self.parts):
                var residual = steps.residual.unsafe_offset(
                    rows.element[half]() + filters.safe(part)
                )
                prefetch_line(residual)

    @staticmethod
    @always_inline
    def load_groups(
        steps: Self.Steps, rows: StemRows, filters: StemFilters
    ) -> Self.Residual:
        """The thread's residual, loaded by groups of filters, or zeros. It runs
        before a multiply, so that the loads overlap with it."""
        comptime chunk_words = CHUNK_BYTES // WORD_BYTES
        comptime chunk = CHUNK_BYTES // size_of[Self.residual_type]()
        var words = Self.Residual(0)
        comptime for half in range(2):
            var pixel = rows.pixel[half]()
            var first = rows.first_output + pixel.element + Int(filters.first)
            # A predicate that threads do not share stays a register.
            var wanted = pixel.exists and steps.has_residual
            comptime for part in range(Self.parts):
                comptime at = (half * Self.parts + part) * Self.group_words
                comptime further = part * PART_FILTERS
                comptime for i in range(Self.group_words // chunk_words):
                    words = words.insert[offset=at + i * chunk_words](
                        load_words_if(
                            wanted and filters.exists(further),
                            steps.residual.unsafe_offset(
                                first + further + i * chunk
                            ),
                        )
                    )
        return words

    @staticmethod
    @always_inline
    def load_singly(
        steps: Self.Steps, rows: StemRows, filters: StemFilters
    ) -> Self.Residual:
        """As `load_groups`, filter by filter."""
        var values = SIMD[Self.residual_type, Self.accumulators](0)
        if not steps.has_residual:
            return 0
        comptime for half in range(2):
            comptime for part in range(Self.parts):
                comptime for i in range(GROUP_FILTERS):
                    comptime at = (half * Self.parts + part) * GROUP_FILTERS + i
                    comptime further = part * PART_FILTERS + i
                    if filters.exists(further):
                        values[at] = steps.residual[
                            unsafe_offset=rows.element[half]()
                            + Int(filters.first)
                            + further
                        ]
        return Self.words_of(values)

    @staticmethod
    @always_inline
    def words_of(
        values: SIMD[Self.residual_type, Self.accumulators]
    ) -> Self.Residual:
        """A thread's residual as words."""
        return bitcast[DType.uint32, 2 * Self.parts * Self.group_words](values)

    @staticmethod
    @always_inline
    def store_plain(
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        sums: Self.Accumulated,
    ):
        """As `store_groups`, of an epilogue that changes nothing."""
        Self.store_groups(
            output,
            rows,
            filters,
            Self._in_order(sums).cast[Self.Output.dtype](),
        )

    @staticmethod
    @always_inline
    def _in_order(sums: Self.Accumulated) -> Self.Accumulated:
        """The sums by pixels, then by filters."""
        var values = Self.Accumulated(0)
        comptime for half in range(2):
            comptime for part in range(Self.parts):
                comptime for i in range(GROUP_FILTERS):
                    comptime at = (half * Self.parts + part) * GROUP_FILTERS + i
                    values[at] = sums[
                        4 * (4 * part + i // 2) + 2 * half + i % 2
                    ]
        return values

    @staticmethod
    @always_inline
    def _scaled(
        values: Self.Accumulated, factors: SharedAddress
    ) -> Self.Accumulated:
        """Values times the scales of their filters, plus the biases.

        Args:
            values: By pixels, then by filters.
            factors: Of the thread's first filter of the multiply.
        """
        comptime four = 4
        var result = values
        comptime for part in range(Self.parts):
            comptime for i in range(0, GROUP_FILTERS, four):
                comptime at = (part * PART_FILTERS + i) * size_of[
                    DType.float32
                ]()
                comptime biases = Self.config.tile_n * size_of[DType.float32]()
                var scale = load_shared[DType.float32, four](
                    factors + UInt32(at)
                )
                var bias = load_shared[DType.float32, four](
                    factors + UInt32(at + biases)
                )
                comptime for half in range(2):
                    comptime to = (half * Self.parts + part) * GROUP_FILTERS + i
                    result = result.insert[offset=to](
                        result.slice[four, offset=to]().fma(scale, bias)
                    )
        return result

    @staticmethod
    @always_inline
    def finish(
        steps: Self.Steps,
        sums: Self.Accumulated,
        factors: SharedAddress,
        residual: Self.Residual,
    ) -> Self.Rounded:
        """Scales a thread's sums, adds the bias, activates, adds the residual,
        activates again, and rounds.

        Args:
            steps: The epilogue.
            sums: As the multiply leaves them.
            factors: Of the thread's first filter of the multiply.
            residual: Of the same pixels and filters.

        Returns:
            The outputs, by pixels, then by filters.
        """
        var result = Self._scaled(Self._in_order(sums), factors)
        var count = run_time(1)
        if steps.has_residual or steps.last.code != ACTIVATION_NONE:
            count += 1
        # A loop, so that what evaluates activations is compiled once.
        for step in range(count):
            var activation = steps.first
            if step > 0:
                activation = steps.last
                if steps.has_residual:
                    result = _floats[Self.residual_type, Self.accumulators](
                        _opaque(residual)
                    ).fma(Self.Accumulated(steps.beta), result)
            result = Self._activated(
                activation, result, step == 0 and steps.halves()
            )
        return result.cast[Self.Output.dtype]()

    @staticmethod
    @always_inline
    def _activated(
        activation: Activation, values: Self.Accumulated, halved: Bool
    ) -> Self.Accumulated:
        """An activation's values, as outputs of 16 bits need them.

        Args:
            activation: Which.
            values: The values; half of them, if the table is halved.
            halved: Whether it is: then SiLU.
        """
        comptime quarter = Self.accumulators // 4
        var result = values
        # What is most frequent is a branch of its own.
        if halved:
            keep_branch()
            return silu_of_half(result)
        if (
            activation.code == ACTIVATION_RELU
            or activation.code == ACTIVATION_CLAMP
        ):
            keep_branch()
            return DeviceActivation.of(activation).evaluate[
                DeviceActivation.LIMITS
            ](result)
        if activation.code != ACTIVATION_NONE:
            # A quarter after the other, which takes fewer registers, and in a
            # loop, so that the formulas are compiled once.
            for _ in range(run_time(4)):
                var first = DeviceActivation.of(activation).apply[exact=False](
                    result.slice[quarter, offset=0]()
                )
                result = result.shift_left[quarter]()
                result = result.insert[offset=3 * quarter](first)
        return result

    @staticmethod
    @always_inline
    def store_groups(
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        values: Self.Rounded,
    ):
        """Stores rounded values, groups of neighbouring filters at once."""
        var rounded = values
        comptime if Self.Output.computes:
            # All fused work, then all stores, so that its loads overlap.
            comptime for half in range(2):
                comptime for part in range(Self.parts):
                    comptime at = (half * Self.parts + part) * GROUP_FILTERS
                    rounded = rounded.insert[offset=at](
                        output.compute[GROUP_FILTERS](
                            Int(rows.tile.image),
                            rows.pixel[half]().position(rows.tile),
                            filters.safe(part),
                            rounded.slice[GROUP_FILTERS, offset=at](),
                        )
                    )
        comptime for half in range(2):
            var pixel = rows.pixel[half]()
            var first = rows.first_output + pixel.element + Int(filters.first)
            comptime for part in range(Self.parts):
                comptime at = (half * Self.parts + part) * GROUP_FILTERS
                comptime further = part * PART_FILTERS
                var exists = pixel.exists and filters.exists(further)
                var group = rounded.slice[GROUP_FILTERS, offset=at]()
                comptime if Self.Output.stores:
                    if exists:
                        output.store[GROUP_FILTERS](
                            Int(rows.tile.image),
                            pixel.position(rows.tile),
                            Int(filters.first) + further,
                            first + further,
                            group,
                        )
                else:
                    # Without a branch, behind which values would be rounded.
                    var to = output.data().unsafe_offset(first + further)
                    comptime words = CHUNK_BYTES // size_of[DType.uint32]()
                    store_if(
                        UInt64(Int(to)),
                        bitcast[DType.uint32, words](group),
                        exists,
                    )

    @staticmethod
    @always_inline
    def store_singly(
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        values: Self.Rounded,
    ):
        """Stores one filter of one pixel after the other."""
        for at in range(Self.accumulators):
            var value = values[0]
            comptime for j in range(1, Self.accumulators):
                value = values[j] if at == j else value
            var group, i = divmod(at, GROUP_FILTERS)
            var half, part = divmod(group, Self.parts)
            var pixel = rows.low if half == 0 else rows.high
            var further = part * PART_FILTERS + i
            if pixel.exists and filters.exists(further):
                var filter = Int(filters.first) + further
                output.store[1](
                    Int(rows.tile.image),
                    pixel.position(rows.tile),
                    filter,
                    rows.first_output + pixel.element + filter,
                    value,
                )
