"""The register tile of dot-product instructions: pixels by filter panels, a chunk
of `ROW_BYTES` of products of each a step."""

from std.collections import Optional
from std.math import ceildiv

from ...conv.fields import PANEL, ROW_BYTES
from ...conv.memory import CACHE_LINE, Reads, Writes
from ..accumulators import FilterSums
from ..gemm.candidates import L1_WAYS
from ..register_output import RegisterOutput
from ..unit import MultiplyUnit
from .tap_edges import Edges

comptime WORD = 4
"""Bytes whose products a lane adds up."""

comptime CHUNK_WORDS = ROW_BYTES // WORD
"""Words of a chunk."""


comptime L1_FILTER_BYTES = 24 * 1024
"""Packed filter that stays in L1 beside a register tile's activations and
outputs."""


comptime MAX_BLOCK_BYTES = 512 * 1024
"""Activations of the largest block: half of a common L2 cache."""


struct ActivationTile[dtype: DType](ImplicitlyCopyable, Movable):
    """The activations of register tiles: lines of pixels. Chunk j of pixel i of
    line l lies at `l * line_stride + i * row_stride + offsets[j]`.

    Parameters:
        dtype: Of the elements.
    """

    var elements: Reads[Self.dtype]
    var rows: Int
    """Pixels of a line."""
    var row_stride: Int
    """Elements between two pixels."""
    var offsets: Reads[DType.int32]
    """In elements."""
    var chunks: Int
    var row_chunks: Int
    """Chunks of a filter row."""
    var last_words: Int
    """Words of a filter row's last chunk that hold products: zeros of the
    filter follow."""
    var lines: Int
    var line_stride: Int
    """Elements between two lines."""
    var edges: Edges
    """Of the lines."""

    def __init__(
        out self,
        elements: Reads[Self.dtype],
        rows: Int,
        row_stride: Int,
        offsets: Reads[DType.int32],
        *,
        chunks: Int,
        row_chunks: Int,
        last_words: Int,
    ):
        """A line of which nothing is left out.

        Args:
            elements: See the fields, like the others.
            rows: The same.
            row_stride: The same.
            offsets: The same.
            chunks: The same.
            row_chunks: The same.
            last_words: The same.
        """
        self.elements = elements
        self.rows = rows
        self.row_stride = row_stride
        self.offsets = offsets
        self.chunks = chunks
        self.row_chunks = row_chunks
        self.last_words = last_words
        self.lines = 1
        self.line_stride = 0
        self.edges = Edges.none()

    @always_inline
    def words(self, chunk: Int) -> Int:
        """Words of a chunk that hold products.

        Args:
            chunk: Which one, from 0 to `chunks - 1`.
        """
        if (chunk + 1) % self.row_chunks == 0:
            return self.last_words
        return CHUNK_WORDS

    @always_inline
    def line(self, line: Int) -> Self:
        """A line.

        Args:
            line: Which one.
        """
        var one = self
        one.elements = self.elements.unsafe_offset(line * self.line_stride)
        one.edges.row += line * self.edges.row_step
        one.lines = 1
        return one

    @always_inline
    def behind(self, rows: Int) -> Self:
        """The pixels that are left of a line.

        Args:
            rows: How many to leave out.
        """
        var rest = self
        rest.elements = self.elements.unsafe_offset(rows * self.row_stride)
        rest.rows = self.rows - rows
        rest.edges.column += rows * self.edges.column_step
        return rest


struct FilterTile[dtype: DType](ImplicitlyCopyable, Movable):
    """The panels of a register tile.

    Parameters:
        dtype: Of the activations.
    """

    var elements: Reads[Self.dtype]
    """Beside uint8 the bits of int8."""
    var panel_stride: Int
    """Elements between two panels."""
    var filters: Int
    """Of the panels, the last of which may have fewer than the others."""
    var few: Int
    """Filters that are few, which do not lie in panels (few_filters.mojo), or 0.
    """
    var widens: Bool
    """Whether they are made wide, slice by slice."""
    var wide: Writes[Self.dtype]
    """Where, if they are."""

    def __init__(
        out self,
        elements: Reads[Self.dtype],
        panel_stride: Int,
        filters: Int,
        few: Int = 0,
    ):
        """Of panels as the unit multiplies them.

        Args:
            elements: See the fields, like the others.
            panel_stride: The same.
            filters: The same.
            few: The same.
        """
        self.elements = elements
        self.panel_stride = panel_stride
        self.filters = filters
        self.few = few
        self.widens = False
        self.wide = Writes[Self.dtype](unsafe_from_address=CACHE_LINE)

    @always_inline
    def panels(self) -> Int:
        """How many there are."""
        return ceildiv(self.filters, PANEL)


@fieldwise_init
struct Sums(ImplicitlyCopyable, Movable):
    """Where the sums of a register tile go."""

    var elements: Writes[DType.float32]
    """Bits of the sums' own type, `sum_type`."""
    var stride: Int
    """Elements between two pixels."""

    @always_inline
    def behind(self, rows: Int) -> Self:
        """Where those of later rows go.

        Args:
            rows: How many lie in front.
        """
        return Sums(
            self.elements.unsafe_offset(rows * self.stride), self.stride
        )


@fieldwise_init
struct TileOutput[dtype: DType](ImplicitlyCopyable, Movable):
    """Outputs of neighbouring pixels.

    Parameters:
        dtype: Theirs.
    """

    var output: RegisterOutput[Self.dtype]
    """Of the first pixel and the first panel."""
    var sums: FilterSums
    """Of the panels."""
    var filters: Int
    """Of the panels, the last of which may have fewer than the others; 0: the
    register tile stores none, and its sums go to memory."""

    @staticmethod
    def none() -> Self:
        """No outputs."""
        return Self(RegisterOutput[Self.dtype].nowhere(), FilterSums.none(), 0)

    @always_inline
    def at(self, pixel: Int) -> Self:
        """Those of later pixels.

        Args:
            pixel: How many lie in front.
        """
        return Self(self.output.at(pixel), self.sums, self.filters)


@fieldwise_init
struct OutputLines[dtype: DType](ImplicitlyCopyable, Movable):
    """Outputs of lines of pixels.

    Parameters:
        dtype: Theirs.
    """

    var first: TileOutput[Self.dtype]
    """Of the first line."""
    var pixels: Int
    """Between two lines."""

    @staticmethod
    def none() -> Self:
        """No outputs."""
        return Self(TileOutput[Self.dtype].none(), 0)

    @always_inline
    def are_stored(self) -> Bool:
        """Whether register tiles store them."""
        return self.first.filters > 0

    @always_inline
    def line(self, line: Int) -> TileOutput[Self.dtype]:
        """A line's.

        Args:
            line: Which one.
        """
        return self.first.at(line * self.pixels)


trait DotUnit(MultiplyUnit):
    """Instructions that add up neighbouring products, and their register
    tile."""

    comptime kernel: Int
    """The `KERNEL_*` code."""
    comptime tiles: Int
    """Register tiles, pixels behind pixels, whose sums are stored together: what
    a store costs beside its outputs is shared."""
    comptime single_rows: Int
    """Pixels up to which a tile takes `single_panels`."""
    comptime single_panels: Int
    """Filter panels of a small tile."""
    comptime together_bytes: Int = L1_FILTER_BYTES
    """Packed filter by which a pixel is multiplied before the next one is."""
    comptime matrix_ways: Int = L1_WAYS // 2
    """Lines of a set of L1 that pixels of a register tile may take where they lie
    in memory, before they compete with what else is read."""
    comptime block_bytes: Int = MAX_BLOCK_BYTES
    """Activations of the largest block that the search looks at, where a pixel is
    multiplied by all panels of the block before the next one is."""
    comptime step_words: Int
    """Words of a pixel that are read together: only so many of the zeros that
    fill up a filter row are multiplied."""

    @staticmethod
    def feature(dtype: DType) -> Optional[Int]:
        """What the CPU must have to multiply a type, a code of features.mojo,
        or None if there are no such instructions.

        Args:
            dtype: Of the operands.
        """
        ...

    @staticmethod
    def flips(dtype: DType) -> Bool:
        """Whether activations are multiplied as unsigned numbers, 128 above
        what they are: with their first bit flipped.

        Args:
            dtype: Of the activations.
        """
        return False

    @staticmethod
    def spread(dtype: DType) -> Int:
        """Elements of a block's memory that an activation takes: 2 where words
        are widened once a block (widening.mojo), otherwise 1.

        Args:
            dtype: Of the activations.
        """
        return 1

    @staticmethod
    def stores_outputs(dtype: DType) -> Bool:
        """Whether a register tile stores outputs itself where the epilogue allows
        it (register_output.mojo).

        Args:
            dtype: Of the operands and the outputs.
        """
        return False

    @staticmethod
    def sum_store_feature(dtype: DType) -> Optional[Int]:
        """What the CPU must have, a code of features.mojo, so that `store_sums`
        may be called; None where it never may.

        Args:
            dtype: Of the operands and the outputs.
        """
        return None

    @staticmethod
    def store_sums[
        dtype: DType
    ](sums: Sums, rows: Int, tile: TileOutput[dtype]):
        """Stores outputs of sums in memory, where `sum_store_feature` is there.

        Parameters:
            dtype: Of the operands and the outputs.

        Args:
            sums: The sums.
            rows: Pixels.
            tile: The outputs.
        """
        pass

    @staticmethod
    def tiles_at_once(dtype: DType, chunks: Int) -> Int:
        """Register tiles that are multiplied before the next panels are, where
        they store their outputs themselves.

        Args:
            dtype: Of the operands.
            chunks: Of the products of an output.
        """
        return Self.tiles

    @staticmethod
    def joins_groups(dtype: DType) -> Bool:
        """Whether groups that share a panel are multiplied as one
        (block_diagonal.mojo).

        Args:
            dtype: Of activation and filter.
        """
        return False

    @staticmethod
    def takes_few(dtype: DType) -> Bool:
        """Whether there is a register tile of few filters (few_filters.mojo).

        Args:
            dtype: Of the activations.
        """
        return False

    @staticmethod
    def tile_rows(rows: Int) -> Int:
        """Pixels of the first register tile of so many.

        Args:
            rows: How many are left, at least 1.
        """
        ...

    @staticmethod
    def build_refusal() -> Optional[String]:
        """Why it is not compiled for the compiler's target, or None."""
        ...

    @staticmethod
    def begin() -> Int:
        """Prepares the registers of the calling thread for a task.

        Returns:
            Their state, for `multiply`.
        """
        ...

    @staticmethod
    def end():
        """Gives the registers back."""
        ...

    @staticmethod
    def multiply[
        dtype: DType
    ](
        mut state: Int,
        activation: ActivationTile[dtype],
        filter: FilterTile[dtype],
        sums: Sums,
        outputs: OutputLines[dtype],
    ):
        """Multiplies a register tile.

        Parameters:
            dtype: Of the operands.

        Args:
            state: Of the registers, since `begin`.
            activation: The activations, at most `rows` times `tiles` of them.
            filter: The panels, at most as many as the rows leave room for.
            sums: Where the sums go, whole panels of each row.
            outputs: Where they go instead as outputs, if there are any: the
                unit `stores_outputs`.
        """
        ...

    @staticmethod
    def chunk_cycles(rows: Int, panels: Int) -> Float64:
        """How long a step of a register tile takes where its operands are in
        L1, by a model of the instructions, in cycles.

        Args:
            rows: Pixels of the tile.
            panels: Its panels.
        """
        ...
