"""The kernels of GPUs as PTX, without a GPU: for people, and for the tests."""

from max.gpu.host import get_gpu_target
from std.compile import compile_info
from std.sys.info import size_of

from ..conv.access import MemoryActivation, MemoryOutput
from ..conv.operands import OperandTypes
from .epilogue.conv_visitor import ConvVisitor
from .generic.depthwise import DepthwiseKernel
from .generic.depthwise_geometry import (
    DEPTHWISE_CANDIDATES,
    depthwise_candidate,
)
from .generic.depthwise_launch import Depthwise
from .generic.depthwise_strip_kernel import StripKernel
from .generic.depthwise_strips import STRIP_CANDIDATES, strip_candidate
from .generic.grouped import PIXELS, GroupedKernel
from .generic.implicit_gemm import (
    NARROW,
    SMALL,
    VECTOR,
    WIDE,
    DirectKernel,
    DirectTile,
)
from .generic.reference import reference_kernel
from .generic.rows import Rows
from .legality import has_diagonal_types, is_blackwell_type
from .sm100.candidates import candidates as blackwell_candidates
from .sm100.kernel import Conv2dFpropKernel
from .sm100.launch import Gemm as BlackwellGemm
from .sm90.diagonal.kernel import DiagonalKernel
from .sm90.diagonal.plan import DIAGONAL_CANDIDATES, diagonal_candidate
from .sm90.gemm.candidates import CANDIDATES, TABLE
from .sm90.gemm.kernel import ConvKernel
from .sm90.gemm.launch import Gemm as HopperGemm
from .sm90.stem.geometry import STEM_CANDIDATES, stem_candidate
from .sm90.stem.kernel import StemKernel
from .sm90.stem.launch import Stem


@fieldwise_init
struct Emitter[dtype: DType, arch: StaticString, wanted: StaticString](
    ImplicitlyCopyable, Movable
):
    """Writes kernels as PTX, one file each.

    Parameters:
        dtype: Of activation and filter; of bias, residual and output too, but
            where it has 8 bits they are bfloat16.
        arch: What to compile for, as `sm_90a`.
        wanted: The name of the kernel, as Python has it, or nothing for all.
    """

    comptime Source = MemoryActivation[Self.dtype]
    comptime out_type = (
        DType.bfloat16 if size_of[Self.dtype]() == 1 else Self.dtype
    )
    comptime types = OperandTypes.unfused(Self.dtype, Self.out_type)
    comptime Output = MemoryOutput[Self.out_type]

    var folder: String
    """Where to."""

    @staticmethod
    def is_wanted(kernel: StaticString) -> Bool:
        """Whether a kernel is asked for.

        Args:
            kernel: Its name, as Python has it.
        """
        return Self.wanted == "" or Self.wanted == kernel

    @staticmethod
    def has_diagonal() -> Bool:
        """Whether depthwise convolutions, and groups of few channels, run on
        tensor cores."""
        return Self.arch == "sm_90a" and has_diagonal_types(Self.types)

    def write[
        declaration: TrivialRegisterPassable, //, kernel: declaration
    ](self, name: String, shared_bytes: Int) raises:
        """Writes a kernel, and prints its file's name and its dynamic shared
        memory.

        Parameters:
            declaration: The kernel's type.
            kernel: The kernel.

        Args:
            name: Of the file.
            shared_bytes: Of a block; -1 if the problem decides.

        Raises:
            If the file cannot be written.
        """
        var info = compile_info[
            kernel, emission_kind="asm", target=get_gpu_target[Self.arch]()
        ]()
        with open(String(t"{self.folder}/{name}.ptx"), "w") as file:
            file.write(String(info.asm))
        print(name, shared_bytes)

    def write_tile[tile: DirectTile, width: Int](self, name: String) raises:
        """Writes an implicit GEMM.

        Parameters:
            tile: Its tile.
            width: Elements of one load.

        Args:
            name: Of the file.

        Raises:
            If the file cannot be written.
        """
        comptime kernel = DirectKernel[
            Self.Source, Self.Output, Self.out_type, Self.out_type, tile, width
        ].run
        self.write[kernel](
            name, tile.staged_bytes() + Rows[tile.pixels].bytes()
        )

    def write_general(self) raises:
        """Writes the kernels that run on every GPU.

        Raises:
            If a file cannot be written.
        """
        comptime if is_blackwell_type(Self.dtype):
            return
        comptime if Self.is_wanted("reference"):
            comptime kernel = reference_kernel[
                Self.Source, Self.Output, Self.out_type, Self.out_type
            ]
            self.write[kernel]("reference", 0)
        comptime if Self.is_wanted("implicit_gemm"):
            self.write_tile[WIDE, VECTOR]("implicit_gemm-wide-vector")
            self.write_tile[WIDE, 1]("implicit_gemm-wide")
            self.write_tile[NARROW, VECTOR]("implicit_gemm-narrow-vector")
            self.write_tile[NARROW, 1]("implicit_gemm-narrow")
            self.write_tile[SMALL, VECTOR]("implicit_gemm-small-vector")
            self.write_tile[SMALL, 1]("implicit_gemm-small")
        comptime if Self.is_wanted("grouped"):
            comptime kernel = GroupedKernel[
                Self.Source, Self.Output, Self.out_type, Self.out_type
            ].run
            self.write[kernel]("grouped", Rows[PIXELS].bytes())
        comptime if Self.is_wanted("depthwise") and not Depthwise.type_refusal(
            Self.types
        ):
            comptime for index in range(DEPTHWISE_CANDIDATES):
                comptime kernel = DepthwiseKernel[
                    Self.Source,
                    Self.dtype,
                    Self.dtype,
                    Self.Output,
                    depthwise_candidate[Self.dtype](index),
                ].run
                self.write[kernel](String(t"depthwise-{index}"), -1)
            # Where tensor cores take it, no op is compiled with strips.
            comptime if not Self.has_diagonal():
                comptime for index in range(STRIP_CANDIDATES):
                    comptime kernel = StripKernel[
                        Self.dtype,
                        Self.dtype,
                        Self.dtype,
                        Self.Output,
                        strip_candidate[Self.dtype](index),
                    ].run
                    self.write[kernel](String(t"depthwise-strip-{index}"), -1)

    def write_hopper(self) raises:
        """Writes the kernels for compute capability 9.0.

        Raises:
            If a file cannot be written.
        """
        comptime if Self.is_wanted("stem") and not Stem.type_refusal(
            Self.types
        ):
            comptime for index in range(STEM_CANDIDATES):
                comptime kernel = StemKernel[
                    Self.dtype,
                    Self.dtype,
                    Self.dtype,
                    Self.Output,
                    stem_candidate(index),
                ].run
                self.write[kernel](String(t"stem-{index}"), -1)
        comptime if Self.is_wanted("diagonal") and Self.has_diagonal():
            comptime for index in range(DIAGONAL_CANDIDATES):
                comptime kernel = DiagonalKernel[
                    Self.dtype,
                    Self.dtype,
                    Self.Output,
                    diagonal_candidate(index),
                ].run
                self.write[kernel](String(t"diagonal-{index}"), -1)
        comptime if Self.is_wanted("sm90") and not HopperGemm.type_refusal(
            Self.types
        ):
            comptime for index in range(CANDIDATES):
                comptime if TABLE[index].offered(Self.types):
                    comptime config = TABLE[index].config
                    comptime kernel = ConvKernel[
                        Self.dtype,
                        Self.Output,
                        ConvVisitor[Self.out_type],
                        config,
                    ].run
                    self.write[kernel](
                        String(t"sm90-{index}"), config.shared_bytes()
                    )

    def write_blackwell(self) raises:
        """Writes the kernels for compute capability 10.0 and 10.3: every
        configuration, and with a residual the defaults.

        Raises:
            If a file cannot be written.
        """
        comptime if Self.is_wanted("sm100") and not BlackwellGemm.type_refusal(
            Self.types
        ):
            comptime table = blackwell_candidates[
                Self.dtype, Self.dtype, Self.out_type
            ]()
            comptime for index in range(len(table)):
                comptime config = table[index].config
                comptime Kernel = Conv2dFpropKernel[
                    Self.dtype,
                    Self.dtype,
                    Self.Output,
                    ConvVisitor[Self.out_type],
                    config,
                ]
                self.write[Kernel.run](
                    String(t"sm100-{index}"), config.shared_bytes()
                )
                comptime if index < 2:
                    self.write[Kernel.run_with_residual](
                        String(t"sm100-{index}-residual"),
                        config.shared_bytes(),
                    )
