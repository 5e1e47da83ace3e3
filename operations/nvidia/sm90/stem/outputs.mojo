"""The epilogue and the stores of the Hopper stem kernel."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import size_of

from ....conv.access import OutputTarget
from ....conv.epilogue import Activation, Epilogue
from ....conv.fields import ACTIVATION_NONE, ACTIVATION_SILU
from ...limits import WARPGROUP
from ...epilogue.activations import (
    DeviceActivation,
    keep_branch,
    run_time,
    silu_of_half,
)
from ...pipeline.chunks import CHUNK_BYTES
from ..wgmma import MMA_M
from .geometry import StemConfig
from .pixels import GROUP_FILTERS, PART_FILTERS, StemFilters, StemRows


comptime WORD_BYTES = 4


@fieldwise_init
struct StemAhead[residual_words: Int, bias_words: Int](TrivialRegisterPassable):
    """What a thread loads for its outputs before they are multiplied. As words:
    the compiler would convert values where they are loaded, and so wait for
    them there.

    Parameters:
        residual_words: Of the thread's residual.
        bias_words: Of the bias of its filters.
    """

    var residual: SIMD[DType.uint32, Self.residual_words]
    """By pixels, then by filters; zeros if there is none."""
    var bias: SIMD[DType.uint32, Self.bias_words]
    """By filters; zeros if there is none."""


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


@fieldwise_init
struct StemOutputs[
    bias_type: DType,
    residual_type: DType,
    Output: OutputTarget,
    config: StemConfig,
]:
    """A thread's epilogue and stores."""

    comptime accumulators = MMA_M * Self.config.tile_n // WARPGROUP
    comptime Accumulated = SIMD[DType.float32, Self.accumulators]
    comptime parts = Self.config.tile_n // PART_FILTERS
    comptime residual_group = (
        GROUP_FILTERS * size_of[Self.residual_type]() // WORD_BYTES
    )
    """Words of the residual of a group of filters."""
    comptime bias_group = GROUP_FILTERS * size_of[
        Self.bias_type
    ]() // WORD_BYTES
    """Words of their bias."""
    comptime Ahead = StemAhead[
        2 * Self.parts * Self.residual_group, Self.parts * Self.bias_group
    ]
    comptime FusedWork = Epilogue[Self.bias_type, Self.residual_type]

    @staticmethod
    @always_inline
    def prefetch_residual(
        epilogue: Self.FusedWork, rows: StemRows, filters: StemFilters
    ):
        """Asks for what `load_ahead` will load of a residual in the L2."""
        comptime for half in range(2):
            comptime for part in range(Self.parts):
                var residual = epilogue.residual.unsafe_offset(
                    rows.element[half]() + filters.safe(part)
                )
                inlined_assembly[
                    "prefetch.global.L2 [$0];", NoneType, constraints="l"
                ](UInt64(Int(residual)))

    @staticmethod
    @always_inline
    def load_ahead(
        epilogue: Self.FusedWork,
        rows: StemRows,
        filters: StemFilters,
    ) -> Self.Ahead:
        """Loads the thread's residual and bias. It runs before a multiply, so
        that the loads overlap with it."""
        var ahead = Self.Ahead(0, 0)
        if filters.together and epilogue.has_residual:
            comptime for half in range(2):
                comptime for part in range(Self.parts):
                    comptime at = half * Self.parts + part
                    var loaded = epilogue.load_residual[
                        GROUP_FILTERS, GROUP_FILTERS
                    ](rows.element[half]() + filters.safe(part))
                    ahead.residual = ahead.residual.insert[
                        offset=at * Self.residual_group
                    ](bitcast[DType.uint32, Self.residual_group](loaded))
        if filters.together and epilogue.has_bias:
            comptime bytes = GROUP_FILTERS * size_of[Self.bias_type]()
            comptime for part in range(Self.parts):
                var loaded = epilogue.bias.unsafe_load[
                    width=GROUP_FILTERS, alignment=min(bytes, CHUNK_BYTES)
                ](filters.safe(part))
                ahead.bias = ahead.bias.insert[offset=part * Self.bias_group](
                    bitcast[DType.uint32, Self.bias_group](loaded)
                )
        return ahead

    @staticmethod
    @always_inline
    def _residual[
        half: Int
    ](ahead: Self.Ahead) -> SIMD[DType.float32, Self.accumulators // 2]:
        """The residual of one of the thread's pixels."""
        comptime words = Self.parts * Self.residual_group
        return bitcast[Self.residual_type, Self.accumulators // 2](
            _opaque(ahead.residual.slice[words, offset=half * words]())
        ).cast[DType.float32]()

    @staticmethod
    @always_inline
    def _bias[
        part: Int
    ](ahead: Self.Ahead) -> SIMD[DType.float32, GROUP_FILTERS]:
        """The bias of a group of filters."""
        return bitcast[Self.bias_type, GROUP_FILTERS](
            _opaque(
                ahead.bias.slice[
                    Self.bias_group, offset=part * Self.bias_group
                ]()
            )
        ).cast[DType.float32]()

    @staticmethod
    @always_inline
    def _finish(
        epilogue: Self.FusedWork,
        filters: StemFilters,
        values: Self.Accumulated,
        ahead: Self.Ahead,
    ) -> SIMD[Self.Output.dtype, Self.accumulators]:
        """Applies the epilogue to the thread's sums, and rounds them."""
        comptime width = Self.accumulators // 2
        var steps = run_time(1)
        if (
            epilogue.has_residual
            or epilogue.final_activation.code != ACTIVATION_NONE
        ):
            steps += 1
        var result = SIMD[Self.Output.dtype, Self.accumulators](0)
        comptime for half in range(2):
            # One pixel at a time, which takes fewer registers.
            var pixel = values.slice[width, offset=half * width]()
            comptime for part in range(Self.parts):
                comptime at = part * GROUP_FILTERS
                var filter = filters.safe(part)
                var group = pixel.slice[GROUP_FILTERS, offset=at]()
                if epilogue.has_scale:
                    group = epilogue.scaled[GROUP_FILTERS, GROUP_FILTERS](
                        group, filter
                    )
                group += Self._bias[part](ahead)
                pixel = pixel.insert[offset=at](group)
            # A loop, so that what evaluates activations is compiled once.
            for step in range(steps):
                var activation = epilogue.activation
                if step > 0:
                    activation = epilogue.final_activation
                    if epilogue.has_residual:
                        pixel = Self._residual[half](ahead).fma(
                            SIMD[DType.float32, width](epilogue.beta), pixel
                        )
                if activation.code == ACTIVATION_SILU:
                    keep_branch()
                    pixel = silu_of_half(pixel * 0.5)
                else:
                    pixel = _activated(activation, pixel)
            result = result.insert[offset=half * width](
                pixel.cast[Self.Output.dtype]()
            )
        return result

    @staticmethod
    @always_inline
    def store(
        epilogue: Self.FusedWork,
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        sums: Self.Accumulated,
        ahead: Self.Ahead,
    ):
        """Stores the thread's filters of its two pixels: groups of neighbours
        at once, or one by one where pixels are not aligned to groups."""
        var values = Self._in_order(sums)
        if not filters.together:
            Self._store_singly(epilogue, output, rows, filters, values)
            return
        Self._store_groups(
            output,
            rows,
            filters,
            Self._finish(epilogue, filters, values, ahead),
        )

    @staticmethod
    @always_inline
    def store_plain(
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        sums: Self.Accumulated,
    ):
        """As `store`, for an epilogue that changes nothing, and pixels that are
        aligned to groups."""
        Self._store_groups(
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
    def _store_groups(
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        values: SIMD[Self.Output.dtype, Self.accumulators],
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
                if pixel.exists and filters.exist(part):
                    var group = rounded.slice[GROUP_FILTERS, offset=at]()
                    comptime if Self.Output.stores:
                        output.store[GROUP_FILTERS](
                            Int(rows.tile.image),
                            pixel.position(rows.tile),
                            Int(filters.first) + further,
                            first + further,
                            group,
                        )
                    else:
                        output.data().unsafe_store[alignment=16](
                            first + further, group
                        )

    @staticmethod
    @always_inline
    def _store_singly(
        epilogue: Self.FusedWork,
        output: Self.Output,
        rows: StemRows,
        filters: StemFilters,
        values: Self.Accumulated,
    ):
        """Stores one filter of one pixel after the other."""
        for at in range(Self.accumulators):
            var value = values[0]
            comptime for j in range(1, Self.accumulators):
                value = values[j] if at == j else value
            var group, i = divmod(at, GROUP_FILTERS)
            var half, part = divmod(group, Self.parts)
            var pixel = rows.low if half == 0 else rows.high
            var filter = Int(filters.first) + part * PART_FILTERS + i
            if pixel.exists and filter < Int(filters.filters):
                var offset = rows.first_output + pixel.element + filter
                var result = epilogue.apply[1](value, filter, offset)
                output.store[1](
                    Int(rows.tile.image),
                    pixel.position(rows.tile),
                    filter,
                    offset,
                    result.cast[Self.Output.dtype](),
                )


@always_inline
def _activated[
    width: Int
](activation: Activation, values: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """An activation's values, as outputs of 16 bits need them."""
    if activation.code == ACTIVATION_NONE:
        return values
    keep_branch()
    return DeviceActivation.of(activation).apply[exact=False](values)
