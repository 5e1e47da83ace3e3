"""The interleaved layouts NC/xHWx, C/xHWNx and C/xRSKx: x neighbouring channels
lie side by side, then neighbouring pixels, images or filters.

An activation of `[N, C, H, W]` is `[N, C / x, H, W, x]` in memory, or with the
images last `[C / x, H, W, N, x]`; a filter of `[K, C, R, S]` is
`[C / x, R, S, K, x]`. One map holds them all: a filter is an image of its taps,
one a row, by its filters. 4 int8 are what one dp4a multiplies, 16 a vector.
"""

from std.bit import count_trailing_zeros
from std.collections import Optional
from std.utils import IndexList

from .device_value import DeviceValue
from .fields import BLOCKS

comptime ANY_BLOCK = -1
"""In place of the channels of a block: a call tells them, and the order."""

comptime BLOCKED_RANK = 5
"""Of an interleaved tensor."""


@fieldwise_init
struct BlockLayout(Equatable, ImplicitlyCopyable, Movable):
    """The layout of an activation or an output."""

    var x: Int
    """Channels of a block; 0 for channels last."""
    var batch_last: Bool
    """Whether images are neighbours, and not pixels."""

    def name(self) -> String:
        """As Python spells it."""
        if self.x == 0:
            return String("NHWC")
        if self.batch_last:
            return String(t"C/{self.x}HWN{self.x}")
        return String(t"NC/{self.x}HW{self.x}")

    def channels_last_shape(
        self, name: StaticString, shape: IndexList[BLOCKED_RANK]
    ) raises -> IndexList[4]:
        """The shape that a tensor has with its channels last.

        Args:
            name: The tensor's, for messages.
            shape: `[N, C / x, H, W, x]`, or `[C / x, H, W, N, x]`.

        Returns:
            `[N, H, W, C]`.

        Raises:
            If the last dimension is another.
        """
        if shape[4] != self.x:
            raise Error(
                t"{name}: shape {shape} ends with {shape[4]}; in layout"
                t" {self.name()} it ends with {self.x}"
            )
        if self.batch_last:
            return IndexList[4](shape[3], shape[1], shape[2], shape[0] * self.x)
        return IndexList[4](shape[0], shape[2], shape[3], shape[1] * self.x)


@fieldwise_init
struct Interleaved[known: Int = 0](DeviceValue, TrivialRegisterPassable):
    """Where the elements of an interleaved tensor lie.

        offset = c % x + x * (column * w + row * h + plane * (c / x) + image * n)

    The strides are held in blocks of x elements, as kernels access them. With the
    pixels of a row as neighbours `column` is 1, and this is

        c % x + x * w + s0 * h + s1 * (c / x) + s2 * n

    with `s0 = x * W`, `s1 = s0 * H` and `s2 = s1 * C / x`. With images as
    neighbours `image` is 1, and `column` N.

    Parameters:
        known: Channels of a block with neighbouring pixels, where a kernel is
            compiled for that alone; 0 for any layout.
    """

    var shift: Int
    """x is two to the power of it."""
    var batch_last: Bool
    """Whether images are neighbours."""
    var column: Int
    """Blocks from one pixel of a row to the next."""
    var row: Int
    """Blocks from one row to the next: `s0 / x`."""
    var plane: Int
    """Blocks from one block of channels to the next: `s1 / x`."""
    var image: Int
    """Blocks from one image to the next: `s2 / x`."""

    @staticmethod
    def of_image(channels: Int, height: Int, width: Int) -> Self:
        """The map of `[N, C / x, H, W, x]`, x being `known`.

        Args:
            channels: A multiple of `x`.
            height: Rows of an image.
            width: Pixels of a row.
        """
        return Self.of_layout(
            BlockLayout(Self.known, batch_last=False),
            IndexList[4](1, height, width, channels),
        )

    @staticmethod
    def of_layout(layout: BlockLayout, shape: IndexList[4]) -> Self:
        """The map of an activation.

        Args:
            layout: Its layout, not channels last; x is a power of two.
            shape: `[N, H, W, C]`, C a multiple of x.
        """
        var column = shape[0] if layout.batch_last else 1
        var row = column * shape[2]
        var plane = row * shape[1]
        return Self(
            count_trailing_zeros(layout.x),
            layout.batch_last,
            column,
            row,
            plane,
            1 if layout.batch_last else plane * (shape[3] // layout.x),
        )

    @staticmethod
    def of_filter(taps: Int, filters: Int, x: Int = Self.known) -> Self:
        """The map of `[C / x, R, S, K, x]`, whose `h` is the tap `r * S + s`
        and whose `w` is the filter; it has one image.

        Args:
            taps: Of a filter, `R * S`.
            filters: How many.
            x: Channels of a block, a power of two.
        """
        return Self(
            count_trailing_zeros(x), False, 1, filters, filters * taps, 0
        )

    @always_inline
    def x(self) -> Int:
        """Channels of a block."""
        comptime if Self.known > 0:
            return Self.known
        return 1 << self.shift

    @always_inline
    def split(self, c: Int) -> Tuple[Int, Int]:
        """A channel's block, and its place there.

        Args:
            c: The channel.
        """
        comptime if Self.known > 0:
            return divmod(c, Self.known)
        return c >> self.shift, c & (self.x() - 1)

    @always_inline
    def block(self, n: Int, piece: Int, h: Int, w: Int) -> Int:
        """The blocks in front of one.

        Args:
            n: The image.
            piece: Of the channels, `c / x`.
            h: The row.
            w: The pixel in the row.
        """
        var pixel = w
        comptime if Self.known == 0:
            pixel *= self.column
        return pixel + self.row * h + self.plane * piece + self.image * n

    @always_inline
    def offset(self, n: Int, c: Int, h: Int, w: Int) -> Int:
        """The elements in front of one.

        Args:
            n: The image.
            c: The channel.
            h: The row.
            w: The pixel in the row.
        """
        var piece, within = self.split(c)
        return within + self.x() * self.block(n, piece, h, w)

    @always_inline
    def index(self, n: Int, c: Int, h: Int, w: Int) -> IndexList[BLOCKED_RANK]:
        """The index of an element in the tensor.

        Args:
            n: The image.
            c: The channel.
            h: The row.
            w: The pixel in the row.
        """
        var piece, within = self.split(c)
        if self.batch_last:
            return IndexList[BLOCKED_RANK](piece, h, w, n, within)
        return IndexList[BLOCKED_RANK](n, piece, h, w, within)


def activation_layout(x: Int) -> String:
    """The name of what a kernel takes, for messages.

    Args:
        x: Channels of a block; 0 for channels last, or `ANY_BLOCK`.
    """
    if x == ANY_BLOCK:
        return String("an interleaved layout")
    return BlockLayout(x, batch_last=False).name()


def block_refusal(name: StaticString, layout: BlockLayout) -> Optional[String]:
    """Why a tensor cannot have a layout that a call tells, or None.

    Args:
        name: The tensor's, for messages.
        layout: Its layout.
    """
    var allowed = String()
    comptime for i in range(len(BLOCKS)):
        comptime x = BLOCKS[i]
        if layout.x == x:
            return None
        allowed += String(t"{', ' if i > 0 else ''}{x}")
    return String(
        t"{name}: layout {layout.name()} has blocks of {layout.x} channels;"
        t" blocks of {allowed} are allowed"
    )
