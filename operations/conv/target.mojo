"""What an op asks of the target that it is registered for."""

from max.gpu.host import DeviceContext

from .known import KnownProblem
from .operands import Arguments
from .problem import ConvProblem, Geometry


trait Target:
    """A target, as an op sees it. Each has ops of its own, so that compiling a
    CPU's loads nothing of a GPU's kernels."""

    @staticmethod
    def convolve[
        known: KnownProblem, scaled: Bool
    ](
        problem: ConvProblem,
        arguments: Arguments,
        geometry: Geometry,
        ctx: DeviceContext,
    ) raises:
        """Runs a convolution, or enqueues it. Ops that need the same kernels
        share the compiled ones.

        Parameters:
            known: What is known of the problem: which kernels to compile.
            scaled: Whether each filter has a scale.

        Args:
            problem: The convolution, valid.
            arguments: Its operands, the filter in the layout that `geometry`
                names.
            geometry: The filter's layout, the kernel that is asked for and the
                precision are read.
            ctx: The device.

        Raises:
            If the requested kernel, or every one, cannot take the problem: why;
            what a driver refused.
        """
        ...
