"""The library that a tuner asks: what the spaces of the kernels' configurations
are, which configurations they refuse, and what follows from the others. It runs
no kernel, and is built for this machine's CPU, whose register tile it knows.

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0. A space is opened once.
"""

from std.memory.alloc import unsafe_alloc

from library.call import free_sentence, reads, sentence, text_of, write
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.conv.kernel import kernel_name
from operations.cpu.direct.depthwise import Depthwise
from operations.cpu.direct.few_filters import FewFilters
from operations.cpu.direct.grouped import Grouped
from operations.cpu.dot.amx import Amx
from operations.cpu.dot.arm import MatrixUnit
from operations.cpu.dot.vectors import Avx512Bf16, Avx512Vnni, AvxVnni
from operations.cpu.dot.widening import Widening
from operations.cpu.openmp import OpenMpPool
from operations.tuning_cpu_gemm import TunedCpuGemm
from operations.tuning_dot import TunedDot
from operations.tuning_rows import TunedRows
from operations.tuning_sm100 import TunedSm100
from operations.tuning_sm90 import TunedSm90, TunedUnaligned
from operations.tuning_space import Counts, Facts, TunedKernel, Values
from operations.tuning_winograd import TunedWinograd

comptime DTYPES = [
    DType.float32,
    DType.bfloat16,
    DType.float16,
    DType.float8_e4m3fn,
    DType.float8_e5m2,
    DType.int8,
    DType.uint8,
]


comptime Memory = Pointer[NoneType, MutUntrackedOrigin]
"""The address of a space of any kernel."""

comptime SPACES = _Spaces[
    TunedRows[Depthwise[OpenMpPool]],
    TunedRows[Grouped[OpenMpPool]],
    TunedDot[Amx],
    TunedDot[Avx512Bf16],
    TunedDot[Avx512Vnni],
    TunedDot[AvxVnni],
    TunedDot[MatrixUnit[emulated=False]],
    TunedRows[FewFilters[OpenMpPool]],
    TunedWinograd,
    TunedDot[Widening],
    TunedCpuGemm,
    TunedSm90,
    TunedUnaligned,
    TunedSm100,
]
"""The kernels that have a space."""


trait Visitor:
    """What asks a space of any kernel."""

    def visit[Kernel: TunedKernel](mut self, mut space: Kernel):
        """Asks it.

        Parameters:
            Kernel: The kernel.

        Args:
            space: Its space.
        """
        ...


struct Space(Movable):
    """What a caller has opened: one kernel's."""

    var kernel: Int
    """A `KERNEL_*` code."""
    var memory: Memory

    def __init__(out self, kernel: Int, memory: Memory):
        """One that is open.

        Args:
            kernel: A `KERNEL_*` code.
            memory: The kernel's space.
        """
        self.kernel = kernel
        self.memory = memory


comptime Handle = Pointer[Space, MutUntrackedOrigin]


struct _Spaces[*Kernels: TunedKernel]:
    """Spaces by their kernels.

    Parameters:
        Kernels: Those that have one.
    """

    @staticmethod
    def open(
        kernel: Int,
        problem: ConvProblem,
        operands: Operands,
        units: Int,
        l2_bytes: Int,
    ) raises -> Space:
        """Opens a space that has something in it, as far as the problem
        decides."""
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.is_built:
                if kernel == Kernel.code:
                    var space = Kernel(
                        problem,
                        operands,
                        Device(_capability(kernel), units, l2_bytes),
                    )
                    var refusal = space.problem_refusal()
                    if refusal:
                        raise Error(
                            t"problem: {kernel_name(Kernel.code)} cannot take"
                            t" it: {refusal.value()}"
                        )
                    var memory = unsafe_alloc[Kernel](1)
                    memory.unsafe_write(space^)
                    return Space(kernel, memory.unsafe_bitcast[NoneType]())
        raise Error(t"kernel: {kernel_name(kernel)} has no space")

    @staticmethod
    def visit(space: Space, mut visitor: Some[Visitor]):
        """Asks an open space."""
        comptime for i in range(Self.Kernels.length):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.is_built:
                if space.kernel == Kernel.code:
                    visitor.visit(space.memory.unsafe_bitcast[Kernel]()[])


def _capability(kernel: Int) -> Int:
    """The compute capability, times ten, of what a kernel is asked for; 0 is a
    CPU."""
    if kernel == TunedSm90.code or kernel == TunedUnaligned.code:
        return 90
    return 100 if kernel == TunedSm100.code else 0


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a text."""
    free_sentence(text)


@export
def maxconv_open(
    kernel: Int64,
    numbers: Int64,
    types: Int64,
    residual: Int64,
    units: Int64,
    l2_bytes: Int64,
    made: Int64,
) abi("C") -> Int64:
    """Opens the space of a kernel and a problem.

    Args:
        kernel: A `KERNEL_*` code.
        numbers: The address of int64 as `ConvProblem.of_numbers` takes them.
        types: The address of two int64: the places in `maxconv_dtypes` of the
            types of input and output.
        residual: Whether one is added.
        units: The GPU's multiprocessors, or the CPU's threads.
        l2_bytes: Of the GPU's L2 cache; 0 where it is not known.
        made: The address of where to write the space's handle.
    """
    try:
        var read = List[Int]()
        for i in range(PROBLEM_NUMBERS):
            read.append(Int(reads[DType.int64](numbers)[unsafe_offset=i]))
        var problem = ConvProblem.of_numbers(read)
        if not problem.has_outputs():
            raise Error(t"problem: {problem} has no output to compute")
        var dtypes = materialize[DTYPES]()
        var operands = Operands.bare(
            OperandTypes.unfused(
                dtypes[Int(reads[DType.int64](types)[unsafe_offset=0])],
                dtypes[Int(reads[DType.int64](types)[unsafe_offset=1])],
            )
        )
        operands.residual = residual != 0
        var space = SPACES.open(
            Int(kernel), problem, operands, Int(units), Int(l2_bytes)
        )
        var handle = unsafe_alloc[Space](1)
        handle.unsafe_write(space^)
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


@fieldwise_init
struct _Closing(Visitor):
    """Frees a kernel's space."""

    def visit[Kernel: TunedKernel](mut self, mut space: Kernel):
        var memory = Pointer[Kernel, MutUntrackedOrigin](
            unsafe_from_address=Int(Pointer(to=space))
        )
        memory.unsafe_deinit_pointee()
        memory.unsafe_free()


@export
def maxconv_close(handle: Int64) abi("C"):
    """Frees what `maxconv_open` made."""
    var space = Handle(unsafe_from_address=Int(handle))
    var closing = _Closing()
    SPACES.visit(space[], closing)
    space.unsafe_deinit_pointee()
    space.unsafe_free()


@export
def maxconv_dtypes() abi("C") -> Int64:
    """The names of the types that spaces may be asked for, a text: a line each.
    """
    var text = String()
    for dtype in materialize[DTYPES]():
        text += String(t"{dtype}\n")
    return text_of(text)


@export
def maxconv_describe(handle: Int64) abi("C") -> Int64:
    """Describes a space: a text whose first line has the names of the fields,
    the second those of the counts, and each other one a name and its numbers.

    Args:
        handle: What `maxconv_open` made.
    """
    var describing = _Describing(Facts())
    SPACES.visit(Handle(unsafe_from_address=Int(handle))[], describing)
    return text_of(describing.facts.text)


@fieldwise_init
struct _Describing(Visitor):
    """Writes the text of `maxconv_describe`."""

    var facts: Facts

    def visit[Kernel: TunedKernel](mut self, mut space: Kernel):
        self.facts.text += StaticString(" ").join(Kernel.fields()) + "\n"
        self.facts.text += StaticString(" ").join(Kernel.counts()) + "\n"
        space.facts(self.facts)


@export
def maxconv_choice(handle: Int64) abi("C") -> Int64:
    """The configuration that a kernel's own search chooses, a text: its
    numbers, or nothing where the search is not asked.

    Args:
        handle: What `maxconv_open` made.
    """
    var choosing = _Choosing(String())
    SPACES.visit(Handle(unsafe_from_address=Int(handle))[], choosing)
    return text_of(choosing.text)


@fieldwise_init
struct _Choosing(Visitor):
    """Writes the text of `maxconv_choice`."""

    var text: String

    def visit[Kernel: TunedKernel](mut self, mut space: Kernel):
        for number in space.choice():
            self.text += String(t"{number} ")


@export
def maxconv_judge(
    handle: Int64, values: Int64, count: Int64, refusals: Int64, counts: Int64
) abi("C"):
    """Asks about configurations.

    Args:
        handle: What `maxconv_open` made.
        values: The address of int64 `[count, fields]`.
        count: How many configurations there are.
        refusals: The address of int64 `[count]`: where to write the address of
            the sentence, a text, or 0.
        counts: The address of float64 `[count, counts]`: where to write what
            follows from those that are not refused.
    """
    var judging = _Judging(
        reads[DType.int64](values),
        Int(count),
        Writes[DType.int64](unsafe_from_address=Int(refusals)),
        Writes[DType.float64](unsafe_from_address=Int(counts)),
    )
    SPACES.visit(Handle(unsafe_from_address=Int(handle))[], judging)


@fieldwise_init
struct _Judging(Visitor):
    """`maxconv_judge` of a kernel's space."""

    var values: Values
    var count: Int
    var refusals: Writes[DType.int64]
    var counts: Counts

    def visit[Kernel: TunedKernel](mut self, mut space: Kernel):
        var fields = len(Kernel.fields())
        var following = len(Kernel.counts())
        for i in range(self.count):
            var config = self.values.unsafe_offset(i * fields)
            var refusal = space.refusal(config)
            if refusal:
                self.refusals[unsafe_offset=i] = text_of(refusal.value())
            else:
                self.refusals[unsafe_offset=i] = 0
                space.count(config, self.counts.unsafe_offset(i * following))
