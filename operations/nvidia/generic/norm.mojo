"""What the kernels of normalizations share: where a pixel lies in its image,
and what follows the normalization.
"""

from std.utils import IndexList

from ...conv.access import OutputTarget
from ...conv.device_value import DeviceValue
from ...conv.divisor import Divisor
from ...conv.problem import SPATIAL
from ..epilogue.activations import DeviceActivation


@fieldwise_init
struct PixelSizes(DeviceValue, TrivialRegisterPassable):
    """Where a pixel lies in its image, for outputs that the graph compiler fused
    something behind; others never ask."""

    var pixels: Divisor
    """Of an image."""
    var rows: Divisor
    """H."""
    var columns: Divisor
    """W."""

    @staticmethod
    def of(size: IndexList[SPATIAL]) -> PixelSizes:
        """Those of images.

        Args:
            size: `[D, H, W]`, none of which is 0.
        """
        return PixelSizes(
            Divisor(size[0] * size[1] * size[2]),
            Divisor(size[1]),
            Divisor(size[2]),
        )

    @always_inline
    def at[Output: OutputTarget](self, pixel: UInt32) -> IndexList[SPATIAL]:
        """A pixel's position; zeros for outputs that are memory.

        Parameters:
            Output: How the output is reached.

        Args:
            pixel: Of its image.
        """
        comptime if Output.computes or Output.stores:
            var line, w = self.columns.split(pixel)
            var plane, h = self.rows.split(line)
            return IndexList[SPATIAL](Int(plane), Int(h), Int(w))
        return IndexList[SPATIAL](0, 0, 0)

    @always_inline
    def of_all[
        Output: OutputTarget
    ](self, pixel: UInt32) -> Tuple[Int, IndexList[SPATIAL]]:
        """An image and a pixel's position; zeros for outputs that are memory.

        Parameters:
            Output: How the output is reached.

        Args:
            pixel: Of all images.
        """
        comptime if Output.computes or Output.stores:
            var image, own = self.pixels.split(pixel)
            return Int(image), self.at[Output](own)
        return 0, IndexList[SPATIAL](0, 0, 0)


@always_inline
def activated[
    size: Int, //, *, exact: Bool
](activation: DeviceActivation, value: SIMD[DType.float32, size]) -> SIMD[
    DType.float32, size
]:
    """The activation of normalized values.

    Parameters:
        size: How many: 1, or an even number.
        exact: Whether float32 shall hold it; otherwise 16 bits.

    Args:
        activation: The activation.
        value: The values.
    """
    comptime if size > 1:
        return activation.apply[size, exact=exact](value)
    # It takes values by pairs.
    var pair = SIMD[DType.float32, 2](value[0])
    return activation.apply[2, exact=exact](pair)[0]
