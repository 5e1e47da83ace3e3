"""A convolution as the tiles of an implicit GEMM: how many tiles there are,
which pixels a tile has, and the steps of its sum. The host computes this once
and passes it to the kernel.
"""

from std.math import ceildiv
from std.utils import IndexList

from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ..relays import Relays
from ..split_k import SplitK
from ...conv.problem import SPATIAL, ConvProblem
from .traversal import Traversal


@fieldwise_init
struct TileGeometry(
    DeviceValue, ImplicitlyCopyable, Movable, TrivialRegisterPassable
):
    """A problem as the kernel sees it: the traversal over pixels, the steps of
    a tile's sum, and how many tiles there are."""

    var rank: UInt32
    """Of the activation's descriptor."""
    var width: Divisor
    """Pixels of a row of the traversal: the output's, or the padded input's if
    tiles have a halo."""
    var height: Divisor
    """Rows of the traversal at one depth."""
    var depth: Divisor
    """Depths of the traversal of an image."""
    var rows: UInt32
    """Of the traversal, over all depths and images."""
    var columns: UInt32
    """Pixels of a row of the output."""
    var filters: UInt32
    """Of all groups."""
    var group_filters: UInt32
    """Of a group."""
    var step_w: Int32
    var step_h: Int32
    var step_d: Int32
    """Input pixels between two steps of the traversal: the strides."""
    var start_w: Int32
    var start_h: Int32
    var start_d: Int32
    """The traversal's first input pixel: minus the padding."""
    var taps_w: UInt32
    var taps_h: UInt32
    var taps_d: UInt32
    var dilation_w: UInt32
    var dilation_h: UInt32
    var dilation_d: UInt32
    var slices: UInt32
    """Stages that the channels of one tap fill."""
    var slice_channels: UInt32
    """Channels of a stage, the first ones of its rows."""
    var clusters_m: UInt32
    """Tiles of a whole cluster along the pixels."""
    var group_clusters: Divisor
    """Tiles of a whole cluster along the filters of a group."""
    var clusters_n: Divisor
    """The same, of all groups."""
    var inner: Divisor
    """Tiles along the dimension that neighbours are counted along first: the
    filters, unless `pixels_first`."""
    var pixels_first: Bool
    """Whether neighbours are tiles along the pixels."""
    var split_k: SplitK
    """How blocks share a tile's sum."""
    var relays: Relays
    """Which tiles a launch's clusters take."""
    var idle_stages: UInt32
    """Stages of the activation ring that loads leave empty, so as not to run
    too far ahead; none, or at least 2."""
    var keeps_filters: Bool
    """Whether all tiles of a block have the same filters, loaded once."""

    @staticmethod
    def of(
        traversal: Traversal,
        halo: Int,
        cluster_pixels: Int,
        cluster_filters: Int,
    ) -> TileGeometry:
        """Cuts a problem into tiles.

        Args:
            traversal: The problem's, which a descriptor holds.
            halo: Pixels that a stage holds beyond its tile's.
            cluster_pixels: Pixels of the tiles of a whole cluster.
            cluster_filters: Their filters.

        Returns:
            The cut.
        """
        var group_clusters = ceildiv(traversal.filters, cluster_filters)
        return TileGeometry(
            rank=UInt32(traversal.rank),
            width=Divisor(traversal.width(halo)),
            height=Divisor(traversal.output[1]),
            depth=Divisor(traversal.output[0]),
            rows=UInt32(traversal.rows()),
            columns=UInt32(traversal.output[2]),
            filters=UInt32(traversal.filters * traversal.groups),
            group_filters=UInt32(traversal.filters),
            step_w=Int32(traversal.stride[2]),
            step_h=Int32(traversal.stride[1]),
            step_d=Int32(traversal.stride[0]),
            start_w=Int32(-traversal.pad_before[2]),
            start_h=Int32(-traversal.pad_before[1]),
            start_d=Int32(-traversal.pad_before[0]),
            taps_w=UInt32(traversal.filter[2]),
            taps_h=UInt32(traversal.filter[1]),
            taps_d=UInt32(traversal.filter[0]),
            dilation_w=UInt32(traversal.dilation[2]),
            dilation_h=UInt32(traversal.dilation[1]),
            dilation_d=UInt32(traversal.dilation[0]),
            slices=UInt32(traversal.slices()),
            slice_channels=UInt32(traversal.row_channels()),
            clusters_m=UInt32(ceildiv(traversal.pixels(halo), cluster_pixels)),
            group_clusters=Divisor(group_clusters),
            clusters_n=Divisor(group_clusters * traversal.groups),
            inner=Divisor(group_clusters * traversal.groups),
            pixels_first=False,
            split_k=SplitK(),
            relays=Relays(),
            idle_stages=0,
            keeps_filters=False,
        )

    def end_groups(mut self, filters: Int):
        """Cuts the filters into groups that all read the same channels.

        Args:
            filters: Of a group, and of a cluster's tiles: a divisor of all.
        """
        self.group_filters = UInt32(filters)
        self.group_clusters = Divisor(1)
        self.clusters_n = Divisor(Int(self.filters) // filters)
        self.inner = self.clusters_n
        self.pixels_first = False

    def count_pixels_first(mut self):
        """Counts tiles along the pixels first."""
        self.inner = Divisor(Int(self.clusters_m))
        self.pixels_first = True

    @always_inline
    def place(self, index: UInt32) -> Tuple[UInt32, UInt32]:
        """Where a tile stands along the pixels and along the filters, counted in
        whole clusters.

        Args:
            index: The tile.
        """
        var outer, inner = self.inner.split(index)
        if self.pixels_first:
            return inner, outer
        return outer, inner

    def split(mut self, halo: Int, count: Int):
        """Divides the tiles' sums among blocks.

        Args:
            halo: Pixels that a stage holds beyond its tile's.
            count: Blocks that share a tile, which the configuration does not
                refuse.
        """
        self.split_k = SplitK(self.rounds(halo), count)

    def narrow(mut self, traversal: Traversal):
        """Divides the channels into equal slices, one a stage, so that no load
        reaches beyond the channels. The rest of each row of a stage must have
        been cleared (`pipeline.chunks.clear_rows`)."""
        self.slice_channels = UInt32(traversal.slice_channels())

    @always_inline
    def rounds(self, halo: Int) -> UInt32:
        """Activation stages of a tile's sum.

        Args:
            halo: Pixels that a stage holds beyond its tile's. If it is 0, a
                stage serves one tap.
        """
        var rows = self.taps_d * self.taps_h * self.slices
        return rows if halo > 0 else rows * self.taps_w

    @always_inline
    def steps(self, halo: Int, rounds: UInt32) -> UInt32:
        """Filter stages of some activation stages.

        Args:
            halo: Pixels that a stage holds beyond its tile's.
            rounds: Activation stages.
        """
        return rounds * self.taps_w if halo > 0 else rounds

    @always_inline
    def tiles(self) -> UInt32:
        """Tiles of the problem, counted in whole clusters."""
        return self.clusters_m * self.clusters_n.value

    @always_inline
    def pixels(self) -> UInt32:
        """Pixels of the output, where tiles have no halo."""
        return self.rows * self.columns

    @always_inline
    def pixel(self, index: UInt32) -> Pixel:
        """The pixel of the traversal's step `index`.

        Args:
            index: Counted over all images.
        """
        var row, w = self.width.split(index)
        return Pixel(w, row)

    @always_inline
    def is_output(self, pixel: Pixel) -> Bool:
        """Whether a pixel of the traversal is one of the output: neither beyond
        a row's end nor after the last image."""
        return pixel.w < self.columns and pixel.row < self.rows

    @always_inline
    def output_row(self, pixel: Pixel) -> UInt32:
        """The row of a pixel in the output `[N*Z*P*Q, K]`.

        Args:
            pixel: The pixel, with `is_output`.
        """
        return pixel.row * self.columns + pixel.w

    @always_inline
    def load_start(self, pixel: Pixel, group: UInt32) -> LoadStart:
        """Where the load of a tile's pixels starts.

        Args:
            pixel: The tile's first.
            group: The tile's.
        """
        var plane, h = self.height.split(pixel.row)
        var image, d = self.depth.split(plane)
        return LoadStart(
            Int32(pixel.w) * self.step_w + self.start_w,
            Int32(h) * self.step_h + self.start_h,
            Int32(d) * self.step_d + self.start_d,
            Int32(image + group),
        )


@fieldwise_init
struct LoadStart(TrivialRegisterPassable):
    """The input pixel at which a load starts."""

    var w: Int32
    var h: Int32
    var d: Int32
    var image: Int32
    """Or, of a grouped convolution, the group."""


@fieldwise_init
struct Pixel(TrivialRegisterPassable):
    """A step of the traversal, in steps, not in input pixels."""

    var w: UInt32
    var row: UInt32
    """Counted over all depths and images."""


@fieldwise_init
struct Tap(TrivialRegisterPassable):
    """A step of a tile's sum: a position of the filter, and a slice of the
    channels. Positions of a filter row are innermost, then slices."""

    var w: UInt32
    var h: UInt32
    var d: UInt32
    var slice: UInt32

    @always_inline
    def __init__(out self):
        """The first step."""
        self.w = 0
        self.h = 0
        self.d = 0
        self.slice = 0

    @always_inline
    def skip(mut self, halo: Int, geometry: TileGeometry, rounds: UInt32):
        """Moves on from the first step.

        Args:
            halo: Pixels that a stage holds beyond its tile's.
            geometry: The problem.
            rounds: By how many activation stages.
        """
        var left = rounds
        if halo == 0:
            left, self.w = divmod(left, geometry.taps_w)
        left, self.slice = divmod(left, geometry.slices)
        self.d, self.h = divmod(left, geometry.taps_h)

    @always_inline
    def step(mut self, halo: Int, geometry: TileGeometry):
        """Moves to the next activation stage.

        Args:
            halo: Pixels that a stage holds beyond its tile's. If it is not
                0, a stage serves a whole filter row, and `w` stays 0.
            geometry: The problem.
        """
        if halo == 0:
            self.w += 1
            if self.w < geometry.taps_w:
                return
            self.w = 0
        self.slice += 1
        if self.slice < geometry.slices:
            return
        self.slice = 0
        self.h += 1
        if self.h < geometry.taps_h:
            return
        self.h = 0
        self.d += 1

    @always_inline
    def channel(self, geometry: TileGeometry) -> Int:
        """The first channel of the step's slice."""
        return Int(self.slice * geometry.slice_channels)

    @always_inline
    def position(self, geometry: TileGeometry) -> UInt32:
        """The tap's index in the filter."""
        var row = self.d * geometry.taps_h + self.h
        return row * geometry.taps_w + self.w


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """An output tile, or a block's share of its sum."""

    var pixel: UInt32
    """The first, counted along the traversal."""
    var filter: UInt32
    """The first, counted over all groups."""
    var group: UInt32
    var split: UInt32
    """Which of the blocks that share the tile."""
    var first: UInt32
    """Activation stages before the block's own."""
    var rounds: UInt32
    """Activation stages of the block."""

    @always_inline
    def __init__(out self):
        """No tile."""
        self.pixel = 0
        self.filter = 0
        self.group = 0
        self.split = 0
        self.first = 0
        self.rounds = 0

    @always_inline
    def filter_end(self, geometry: TileGeometry) -> UInt32:
        """The first filter after the tile's group. Columns of the tile from
        there on are no outputs."""
        return (self.group + 1) * geometry.group_filters


struct OutputShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """The output's spatial extents, to find an index from a pixel's."""

    var width: Divisor
    var height: Divisor
    var depth: Divisor

    def __init__(out self):
        """Of no problem."""
        self.width = Divisor(1)
        self.height = Divisor(1)
        self.depth = Divisor(1)

    def __init__(out self, problem: ConvProblem):
        """The output's shape."""
        self.width = Divisor(problem.output[2])
        self.height = Divisor(problem.output[1])
        self.depth = Divisor(problem.output[0])

    @always_inline
    def index(self, pixel: UInt32) -> Tuple[Int, IndexList[SPATIAL]]:
        """Image and position of a pixel.

        Args:
            pixel: Its row of the output `[N*Z*P*Q, K]`.
        """
        var row, w = self.width.split(pixel)
        var plane, h = self.height.split(row)
        var image, d = self.depth.split(plane)
        return Int(image), IndexList[SPATIAL](Int(d), Int(h), Int(w))
