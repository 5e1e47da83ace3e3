"""The register tile of dot-product instructions: pixels by filter panels, a chunk
of `ROW_BYTES` of products of each a step."""

from std.collections import Optional

from ...conv.fields import ROW_BYTES
from ...conv.memory import Reads, Writes
from ..output import PlainOutput
from ..unit import MultiplyUnit

comptime WORD = 4
"""Bytes whose products a lane adds up."""

comptime CHUNK_WORDS = ROW_BYTES // WORD
"""Words of a chunk."""


comptime MASK_ROWS = 64
"""Filter rows that a mask has a bit for."""


@fieldwise_init
struct Edges(ImplicitlyCopyable, Movable):
    """Where the lines of a tile lie in the input image: which filter rows lie
    beside it, and which taps of the others do for the first or the last pixel.
    """

    var row: Int
    """The input row of the first line's first tap."""
    var row_step: Int
    """Input rows between two lines."""
    var dilation: Int
    """Input rows between two filter rows."""
    var rows: Int
    """Filter rows of a slice; 0 where none is left out."""
    var extent: Int
    """Input rows."""
    var slices: UInt64
    """A bit for each filter row of a slice inside the image: its first one's."""
    var tap_chunks: Int
    """Chunks of a tap; 0 where no taps of a filter row are left out."""
    var left: Int
    """Taps of a filter row that lie left of the image for the first pixel."""
    var right: Int
    """The first tap that lies right of the image for the last pixel."""

    @staticmethod
    def none() -> Edges:
        """Nothing is left out."""
        return Edges(0, 0, 1, 0, 0, 0, 0, 0, 0)

    @always_inline
    def inside(self, line: Int) -> UInt64:
        """A bit for each filter row, set unless it lies beside the image.

        Args:
            line: Which of the tile's.
        """
        if self.rows == 0:
            return ~UInt64(0)
        var row = self.row + line * self.row_step
        var begin = self._rows_before(-row)
        var end = self._rows_before(self.extent - row)
        var ones = (UInt64(1) << UInt64(end - begin)) - 1
        if end - begin == MASK_ROWS:
            ones = ~UInt64(0)
        # Each slice's bit becomes its rows', which do not overlap.
        return (ones << UInt64(begin)) * self.slices

    @always_inline
    def _rows_before(self, room: Int) -> Int:
        """Filter rows that lie within so many input rows."""
        var rows = room
        if self.dilation != 1:
            rows = -(-room // self.dilation)
        return max(0, min(self.rows, rows))


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
    var panels: Int
    var filters: Int
    """0 unless they are few, which do not lie in panels (few_filters.mojo)."""
    var wide: Optional[Writes[Self.dtype]]
    """Where a slice of the panels is made wide, unless they are."""

    def __init__(
        out self,
        elements: Reads[Self.dtype],
        panel_stride: Int,
        panels: Int,
        filters: Int = 0,
    ):
        """Of panels as the unit multiplies them.

        Args:
            elements: See the fields, like the others.
            panel_stride: The same.
            panels: The same.
            filters: The same.
        """
        self.elements = elements
        self.panel_stride = panel_stride
        self.panels = panels
        self.filters = filters
        self.wide = None


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
struct OutputLines[dtype: DType](ImplicitlyCopyable, Movable):
    """Outputs of lines of pixels.

    Parameters:
        dtype: Theirs.
    """

    var output: PlainOutput[Self.dtype]
    """Of the first line's first pixel and the first panel."""
    var pixels: Int
    """Between two lines."""

    @always_inline
    def line(self, line: Int) -> PlainOutput[Self.dtype]:
        """A line's.

        Args:
            line: Which one.
        """
        return self.output.at(line * self.pixels)


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
        """Whether a register tile stores outputs itself where they are plain.

        Args:
            dtype: Of the operands and the outputs.
        """
        return False

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
        outputs: Optional[OutputLines[dtype]],
    ):
        """Multiplies a register tile.

        Parameters:
            dtype: Of the operands.

        Args:
            state: Of the registers, since `begin`.
            activation: The activations, at most `rows` times `tiles` of them.
            filter: The panels, at most as many as the rows leave room for.
            sums: Where the sums go, whole panels of each row.
            outputs: Where they go instead as outputs, if the unit
                `stores_outputs`.
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
