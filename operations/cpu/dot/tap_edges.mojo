"""Where the pixels of a register tile lie in the input image: which taps read
nothing but padding."""

comptime MASK_ROWS = 64
"""Filter rows that a mask has a bit for."""


comptime FEW_ALIKE = 3
"""Pixels for which no register tile of their own leaves out taps."""

comptime INSIDE = 0
"""Products that all pixels of a tile have, see `TapEdges`."""

comptime FIRST_OUTSIDE = 1
"""Those that its first pixel multiplies padding by."""

comptime LAST_OUTSIDE = 2
"""Those that its last pixel does."""

comptime OUTSIDE = 3
"""Those that all of them do."""


@fieldwise_init
struct TapEdges(ImplicitlyCopyable, Movable):
    """Which taps of a filter row lie beside the image for the pixels of a tile.
    """

    var begin: Int
    """The first that does not for all of them."""
    var first: Int
    """The first inside for the first pixel."""
    var last: Int
    """The first right of the image for the last pixel."""
    var end: Int
    """The first right of the image for all of them."""
    var any_outside: Bool
    """Whether some tap does for all of them."""
    var all_inside: Bool
    """Whether no tap does for any of them, or for one alone where that is not
    left out."""

    @always_inline
    def side(self, tap: Int) -> Int:
        """What a tap is, one of the codes above.

        Args:
            tap: Of the filter row.
        """
        if tap < self.begin or tap >= self.end:
            return OUTSIDE
        if tap < self.first:
            return FIRST_OUTSIDE
        return LAST_OUTSIDE if tap >= self.last else INSIDE


@fieldwise_init
struct Edges(ImplicitlyCopyable, Movable):
    """Where the lines of a tile lie in the input image: which filter rows lie
    beside it, and which taps of the others do."""

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
    var column: Int
    """The input column of the first pixel's first tap."""
    var column_step: Int
    """Input columns between two pixels."""
    var tap_step: Int
    """Input columns between two taps."""
    var taps: Int
    """Of a filter row."""
    var width: Int
    """Input columns."""
    var padding: UInt32
    """A word of padding, as it is multiplied."""
    var changes: Bool
    """Whether taps lie beside the image for more than `FEW_ALIKE` pixels."""

    @staticmethod
    def none() -> Edges:
        """Nothing is left out."""
        return Edges(0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, False)

    @always_inline
    def inside(self, line: Int) -> UInt64:
        """A bit for each filter row, set unless it lies beside the image.

        Args:
            line: Which of the tile's.
        """
        if self.rows == 0:
            return ~UInt64(0)
        var row = self.row + line * self.row_step
        var begin = _before(-row, self.dilation, self.rows)
        var end = _before(self.extent - row, self.dilation, self.rows)
        var ones = (UInt64(1) << UInt64(end - begin)) - 1
        if end - begin == MASK_ROWS:
            ones = ~UInt64(0)
        # Each slice's bit becomes its rows', which do not overlap.
        return (ones << UInt64(begin)) * self.slices

    @always_inline
    def alike(self, count: Int) -> Int:
        """How many pixels, the first ones of a line, have the same taps beside
        the image: a register tile of them leaves those out. Up to the next
        change; one within `FEW_ALIKE` pixels is not looked at.

        Args:
            count: Pixels of the line.
        """
        var least = count
        if not self.changes:
            return least
        for tap in range(self.taps):
            var origin = self.column + tap * self.tap_step
            var begin = _before(-origin, self.column_step, count)
            var end = _before(self.width - origin, self.column_step, count)
            if begin > FEW_ALIKE:
                least = min(least, begin)
            if end > FEW_ALIKE:
                least = min(least, end)
        return least

    @always_inline
    def leaves_out_rows(self, inside: UInt64, rows: Int) -> Bool:
        """Whether filter rows lie beside the image.

        Args:
            inside: What `inside` returned, shifted to the first of them.
            rows: How many.
        """
        if self.rows == 0:
            return False
        var all = ~UInt64(0)
        if rows < MASK_ROWS:
            all = (UInt64(1) << UInt64(rows)) - 1
        return inside & all != all

    @always_inline
    def of_taps(self, pixel: Int, count: Int) -> TapEdges:
        """The taps of neighbouring pixels.

        Args:
            pixel: The first, counted from the tile's.
            count: How many.
        """
        if self.tap_chunks == 0:
            return TapEdges(0, 0, Int.MAX, Int.MAX, False, True)
        var first = self.column + pixel * self.column_step
        var last = first + (count - 1) * self.column_step
        var taps = TapEdges(
            _before(-last, self.tap_step, self.taps),
            _before(-first, self.tap_step, self.taps),
            _before(self.width - last, self.tap_step, self.taps),
            _before(self.width - first, self.tap_step, self.taps),
            False,
            True,
        )
        taps.any_outside = taps.begin > 0 or taps.end < self.taps
        taps.all_inside = not taps.any_outside and (
            self.padding != 0 or (taps.first == 0 and taps.last == self.taps)
        )
        return taps


@always_inline
def _before(room: Int, step: Int, count: Int) -> Int:
    """Taps or pixels, of so many with `step` between two, within the first `room`
    positions."""
    var found = room
    if step != 1:
        found = -(-room // step)
    return max(0, min(count, found))
