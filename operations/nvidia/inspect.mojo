"""The kernels of GPUs as PTX, without a GPU: for people, and for the tests."""

from max.gpu.host import get_gpu_target
from std.collections import Optional
from std.compile import compile_info
from std.sys.info import size_of

from ..conv.access import MemoryActivation, MemoryOutput
from ..conv.operands import Device, Operands, OperandTypes
from ..conv.problem import ConvProblem
from ..conv.kernel import ConvKernel


@fieldwise_init
struct PtxWriter[dtype: DType](Copyable, Movable):
    """Writes kernels as PTX for the GPU that this is compiled for, one file
    each.

    Parameters:
        dtype: Of activation and filter; of bias, residual and output too, but
            where it has 8 bits they are bfloat16.
    """

    comptime Source = MemoryActivation[Self.dtype]
    comptime out_type = (
        DType.bfloat16 if size_of[Self.dtype]() == 1 else Self.dtype
    )
    comptime types = OperandTypes.unfused(Self.dtype, Self.out_type)
    comptime Output = MemoryOutput[Self.out_type]

    var folder: String
    """Where to."""

    def write[
        declaration: TrivialRegisterPassable, //, kernel: declaration
    ](self, name: String, shared_bytes: Optional[Int] = None) raises:
        """Writes a kernel, and prints its file's name and its dynamic shared
        memory, or -1.

        Parameters:
            declaration: The kernel's type.
            kernel: The kernel.

        Args:
            name: Of the file.
            shared_bytes: Of a block; None if the problem decides.

        Raises:
            If the file cannot be written.
        """
        var info = compile_info[
            kernel, emission_kind="asm", target=get_gpu_target()
        ]()
        with open(String(t"{self.folder}/{name}.ptx"), "w") as file:
            file.write(String(info.asm))
        print(name, shared_bytes.or_else(-1))


trait GpuKernel(ConvKernel):
    """A kernel of a GPU's registry: unless it says otherwise, one that runs on
    every GPU, and that is chosen where it can run."""

    @staticmethod
    def device_refusal(capability: Int) -> Optional[String]:
        return None

    @staticmethod
    def suits(problem: ConvProblem, operands: Operands, device: Device) -> Bool:
        return True

    @staticmethod
    def inspect[dtype: DType](writer: PtxWriter[dtype]) raises:
        """Writes what an op compiles of the kernel, each configuration.

        Parameters:
            dtype: Of activation and filter; `type_refusal` is None for the
                writer's types.

        Args:
            writer: What writes them.

        Raises:
            If a file cannot be written.
        """
        ...
