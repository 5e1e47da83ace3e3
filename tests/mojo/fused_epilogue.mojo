"""The epilogue that kernels are emitted with: nothing, or all of it, with
placeholders for pointers, which the reader replaces."""

from operations.conv.epilogue import Activation, Epilogue
from operations.conv.fields import (
    ACTIVATION_LEAKY_RELU,
    ACTIVATION_NONE,
    ACTIVATION_RELU,
)
from operations.conv.memory import Reads

comptime SCALE_AT = 0x1111000000000000
comptime BIAS_AT = 0x2222000000000000
comptime RESIDUAL_AT = 0x3333000000000000


def epilogue_of[dtype: DType](fused: Bool) -> Epilogue[DType.float32, dtype]:
    """Nothing, or scale, bias, ReLU and residual."""
    var none = Activation(ACTIVATION_NONE, 0, 0)
    return Epilogue[DType.float32, dtype](
        has_bias=fused,
        has_residual=fused,
        has_scale=fused,
        scale=Reads[DType.float32](unsafe_from_address=SCALE_AT),
        bias=Reads[DType.float32](unsafe_from_address=BIAS_AT),
        residual=Reads[dtype](unsafe_from_address=RESIDUAL_AT),
        beta=1,
        activation=Activation(ACTIVATION_RELU, 0, 0) if fused else none,
        final_activation=none,
    )


def unscaled_of[dtype: DType]() -> Epilogue[DType.float32, dtype]:
    """Bias, leaky ReLU of slope 1/2, residual, and ReLU."""
    var epilogue = epilogue_of[dtype](True)
    epilogue.has_scale = False
    epilogue.activation = Activation(ACTIVATION_LEAKY_RELU, 0.5, 0)
    epilogue.final_activation = Activation(ACTIVATION_RELU, 0, 0)
    return epilogue
