"""The static persistent scheduler: which tiles a block computes, in what
order, and where they lie in the problem."""

from max.gpu import block_idx, grid_dim
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.utils import IndexList

from ..conv.problem import ConvProblem
from .config import Sm90Config, channel_slices, walk_width


struct Divisor(ImplicitlyCopyable, TrivialRegisterPassable):
    """Division of numbers below 2^31 by a number that the host knows: a
    multiplication and a shift (Granlund and Montgomery, "Division by Invariant
    Integers using Multiplication", PLDI 1994)."""

    var value: UInt32
    var multiplier: UInt32
    var shift: UInt32

    def __init__(out self, value: Int):
        """Prepares to divide.

        Args:
            value: From 1 to 2^31 - 1.
        """
        var bits = 0
        while 1 << bits < value:
            bits += 1
        self.value = UInt32(value)
        self.multiplier = UInt32(ceildiv(1 << (31 + bits), value))
        self.shift = UInt32(bits)

    @always_inline
    def split(self, number: UInt32) -> Tuple[UInt32, UInt32]:
        """Quotient and remainder.

        Args:
            number: Below 2^31.
        """
        var product = UInt64(number) * UInt64(self.multiplier)
        var quotient = UInt32(product >> UInt64(31 + self.shift))
        return quotient, number - quotient * self.value


@fieldwise_init
struct TileGeometry(
    DevicePassable, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the kernel sees it: the walk over pixels, the steps of a
    tile's sum, and how many tiles there are."""

    var width: Divisor
    """Pixels of a row of the walk: the output's, or the padded input's if
    tiles have a halo."""
    var height: Divisor
    """Rows of the walk."""
    var columns: UInt32
    """Pixels of a row of the output."""
    var images: UInt32
    var filters: UInt32
    var step_w: Int32
    var step_h: Int32
    """Input pixels between two steps of the walk: the strides."""
    var start_w: Int32
    var start_h: Int32
    """The walk's first input pixel: minus the padding."""
    var taps_w: UInt32
    var taps_h: UInt32
    var dilation_w: UInt32
    var dilation_h: UInt32
    var slices: UInt32
    """Stages that the channels of one tap fill."""
    var clusters_m: UInt32
    var clusters_n: Divisor
    """Tiles of a whole cluster, along pixels and filters."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return "TileGeometry"

    @staticmethod
    def of[
        in_type: DType
    ](config: Sm90Config, problem: ConvProblem) -> TileGeometry:
        """Cuts a problem into tiles.

        Parameters:
            in_type: Of the activation.

        Args:
            config: The configuration.
            problem: The convolution; `can_implement` has agreed.

        Returns:
            The cut.
        """
        var width = walk_width(problem, config.halo)
        var pixels = problem.batch * problem.output[1] * width
        return TileGeometry(
            width=Divisor(width),
            height=Divisor(problem.output[1]),
            columns=UInt32(problem.output[2]),
            images=UInt32(problem.batch),
            filters=UInt32(problem.filters),
            step_w=Int32(problem.stride[2]),
            step_h=Int32(problem.stride[1]),
            start_w=Int32(-problem.pad_before[2]),
            start_h=Int32(-problem.pad_before[1]),
            taps_w=UInt32(problem.filter[2]),
            taps_h=UInt32(problem.filter[1]),
            dilation_w=UInt32(problem.dilation[2]),
            dilation_h=UInt32(problem.dilation[1]),
            slices=UInt32(channel_slices[in_type](problem)),
            clusters_m=UInt32(ceildiv(pixels, config.tile_m * config.blocks_m)),
            clusters_n=Divisor(
                ceildiv(problem.filters, config.tile_n * config.blocks_n)
            ),
        )

    @always_inline
    def steps(self) -> UInt32:
        """Stages of a tile's sum."""
        return self.taps_h * self.taps_w * self.slices

    @always_inline
    def tiles(self) -> UInt32:
        """Tiles of the problem, counted in whole clusters."""
        return self.clusters_m * self.clusters_n.value

    @always_inline
    def pixel(self, index: UInt32) -> Pixel:
        """The pixel of the walk's step `index`.

        Args:
            index: Counted over all images.
        """
        var row, w = self.width.split(index)
        var image, h = self.height.split(row)
        return Pixel(Int32(w), Int32(h), Int32(image))

    @always_inline
    def is_output(self, pixel: Pixel) -> Bool:
        """Whether a pixel of the walk is one of the output: not beyond a row's
        end, nor behind the last image.

        Args:
            pixel: The pixel.
        """
        return (
            UInt32(pixel.w) < self.columns and UInt32(pixel.image) < self.images
        )

    @always_inline
    def output_offset(self, pixel: Pixel) -> Int:
        """Elements in front of a pixel of the output.

        Args:
            pixel: The pixel, with `is_output`.
        """
        var row = Int(pixel.image) * Int(self.height.value) + Int(pixel.h)
        return (row * Int(self.columns) + Int(pixel.w)) * Int(self.filters)


@fieldwise_init
struct Pixel(TrivialRegisterPassable):
    """A step of the walk, in steps, not in input pixels."""

    var w: Int32
    var h: Int32
    var image: Int32


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """An output tile: its first pixel, counted along the walk, and filter."""

    var pixel: UInt32
    var filter: UInt32


@fieldwise_init
struct TileScheduler[config: Sm90Config](TrivialRegisterPassable):
    """A block's tiles: those of a cluster go to its blocks, and clusters take
    tiles in turn, filters innermost, so that blocks that run at the same time
    read the same activations.

    Parameters:
        config: The configuration.
    """

    var index: UInt32
    var rank_m: UInt32
    var rank_n: UInt32

    @always_inline
    def __init__(out self):
        """The block's first tile."""
        comptime size = UInt32(Self.config.cluster_size())
        var cluster, rank = divmod(UInt32(block_idx.x), size)
        var rank_n, rank_m = divmod(rank, UInt32(Self.config.blocks_m))
        self.index = cluster
        self.rank_m = rank_m
        self.rank_n = rank_n

    @always_inline
    def valid(self, geometry: TileGeometry) -> Bool:
        """Whether there is a tile left.

        Args:
            geometry: The problem.
        """
        return self.index < geometry.tiles()

    @always_inline
    def tile(self, geometry: TileGeometry) -> Tile:
        """The block's tile.

        Args:
            geometry: The problem.
        """
        var m, n = geometry.clusters_n.split(self.index)
        comptime blocks_m = UInt32(Self.config.blocks_m)
        comptime blocks_n = UInt32(Self.config.blocks_n)
        return Tile(
            (m * blocks_m + self.rank_m) * UInt32(Self.config.tile_m),
            (n * blocks_n + self.rank_n) * UInt32(Self.config.tile_n),
        )

    @always_inline
    def advance(mut self, tiles: UInt32 = 1):
        """Moves on.

        Args:
            tiles: By how many of the block's tiles.
        """
        comptime size = UInt32(Self.config.cluster_size())
        self.index += tiles * (UInt32(grid_dim.x) // size)
