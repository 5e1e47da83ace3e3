"""The interleaved layouts NC/xHWx and C/xRSKx: x neighbouring channels lie side
by side, then neighbouring pixels, or filters.

An activation of `[N, C, H, W]` is `[N, C / x, H, W, x]` in memory, a filter of
`[K, C, R, S]` is `[C / x, R, S, K, x]`. One map holds both: a filter is an image
of its taps, one a row, by its filters. A load of 4 int8 is what one dp4a
multiplies, and neighbouring pixels and filters are neighbouring loads.
"""

from std.utils import IndexList

from .device_value import DeviceValue


@fieldwise_init
struct Interleaved[x: Int](DeviceValue, TrivialRegisterPassable):
    """Where the elements of an interleaved tensor lie.

        offset = c % x + x * w + s0 * h + s1 * (c / x) + s2 * n

    with `s0 = x * W`, `s1 = s0 * H` and `s2 = s1 * C / x`. The strides are held
    in blocks of x elements, as kernels access them.

    Parameters:
        x: Channels of a block.
    """

    var row: Int
    """Blocks from one row to the next: `s0 / x`."""
    var plane: Int
    """Blocks from one block of channels to the next: `s1 / x`."""
    var image: Int
    """Blocks from one image to the next: `s2 / x`."""

    @staticmethod
    def of_image(channels: Int, height: Int, width: Int) -> Self:
        """The map of `[N, C / x, H, W, x]`.

        Args:
            channels: A multiple of `x`.
            height: Rows of an image.
            width: Pixels of a row.
        """
        return Self(
            width, width * height, width * height * (channels // Self.x)
        )

    @staticmethod
    def of_filter(taps: Int, filters: Int) -> Self:
        """The map of `[C / x, R, S, K, x]`, whose `h` is the tap `r * S + s`
        and whose `w` is the filter; it has one image.

        Args:
            taps: Of a filter, `R * S`.
            filters: How many.
        """
        return Self(filters, filters * taps, 0)

    @always_inline
    def block(self, n: Int, piece: Int, h: Int, w: Int) -> Int:
        """The blocks in front of one.

        Args:
            n: The image.
            piece: Of the channels, `c / x`.
            h: The row.
            w: The pixel in the row.
        """
        return w + self.row * h + self.plane * piece + self.image * n

    @always_inline
    def offset(self, n: Int, c: Int, h: Int, w: Int) -> Int:
        """The elements in front of one.

        Args:
            n: The image.
            c: The channel.
            h: The row.
            w: The pixel in the row.
        """
        var piece, within = divmod(c, Self.x)
        return within + Self.x * self.block(n, piece, h, w)


def activation_layout(x: Int) -> String:
    """The name of an activation's layout.

    Args:
        x: Channels of a block; 0 for channels last.
    """
    return String("NHWC") if x == 0 else String(t"NC/{x}HW{x}")


def channels_last_shape[
    x: Int
](name: StaticString, shape: IndexList[5]) raises -> IndexList[4]:
    """The shape that a tensor has with its channels last.

    Parameters:
        x: Channels of a block.

    Args:
        name: The tensor's, for messages.
        shape: `[N, C / x, H, W, x]`.

    Returns:
        `[N, H, W, C]`.

    Raises:
        If the last dimension is another.
    """
    if shape[4] != x:
        raise Error(
            t"{name}: shape {shape} ends with {shape[4]}; in layout"
            t" {activation_layout(x)} it ends with {x}"
        )
    return IndexList[4](shape[0], shape[2], shape[3], shape[1] * x)
