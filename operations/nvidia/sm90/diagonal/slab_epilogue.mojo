"""What happens to the sums of the slab kernel before they are stored."""

from ....conv.epilogue import Epilogue
from ....conv.fields import ACTIVATION_SILU
from ...epilogue.activations import DeviceActivation
from .plan import MATRIX
from .slabs import MEMBER_CHANNELS

comptime MEMBER_CHUNKS = MEMBER_CHANNELS // MATRIX
"""Chunks of 8 output channels of a warpgroup."""

comptime MEMBER_SUMS = 4 * MEMBER_CHUNKS
"""Of a tile and a thread."""

comptime MemberSums = SIMD[DType.float32, MEMBER_SUMS]
"""A thread's sums of a tile: for each chunk two neighbouring channels of a pixel,
then of the pixel a row below."""


struct SlabFusion[bias_type: DType, out_type: DType](TrivialRegisterPassable):
    """The epilogue's operands of a thread's channels, two of each chunk.

    Parameters:
        bias_type: Of the bias.
        out_type: Of the residual.
    """

    var scale: SIMD[DType.float32, 2 * MEMBER_CHUNKS]
    var bias: SIMD[DType.float32, 2 * MEMBER_CHUNKS]

    @always_inline
    def __init__(
        out self,
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        channel: UInt32,
        channels: UInt32,
    ):
        """Loads them.

        Args:
            epilogue: The epilogue.
            channel: The first one.
            channels: Of the problem.
        """
        self.scale = 0
        self.bias = 0
        comptime for chunk in range(MEMBER_CHUNKS):
            var at = channel + UInt32(chunk * MATRIX)
            # Any of the problem's, where a slab has fewer.
            if at >= channels:
                at = 0
            var scale = epilogue.scaled[2, 2](1, Int(at))
            var bias = epilogue.load_bias[2, 2](Int(at))
            comptime for i in range(2):
                self.scale[2 * chunk + i] = scale[i]
                self.bias[2 * chunk + i] = bias[i]

    @always_inline
    def activate(
        self,
        epilogue: Epilogue[Self.bias_type, Self.out_type],
        sums: MemberSums,
    ) -> MemberSums:
        """The steps in front of `Epilogue.add_residual`, SiLU as outputs of 16
        bits need it.

        Args:
            epilogue: The epilogue.
            sums: The sums.
        """
        var scale = MemberSums(0)
        var bias = MemberSums(0)
        comptime for i in range(MEMBER_SUMS):
            scale[i] = self.scale[i // 4 * 2 + i % 2]
            bias[i] = self.bias[i // 4 * 2 + i % 2]
        var biased = sums.fma(scale, bias)
        if epilogue.activation.code == ACTIVATION_SILU:
            return DeviceActivation.of(epilogue.activation).evaluate[
                DeviceActivation.SILU, MEMBER_SUMS, exact=False
            ](biased)
        # All at once would take more registers than there are.
        comptime half = MEMBER_SUMS // 2
        return epilogue.activation.apply[half](biased.slice[half]()).join(
            epilogue.activation.apply[half](biased.slice[half, offset=half]())
        )
