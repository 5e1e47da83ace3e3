"""The library that a tuner asks: what the spaces of the kernels' configurations
are, which configurations they refuse, and what follows from the others. It runs
no kernel, and is built for this machine's CPU, whose register tile it knows.

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0. A space is opened once.
"""

from std.collections import Optional
from std.memory.alloc import unsafe_alloc

from library.call import free_sentence, reads, sentence, text_of, write
from operations.conv.memory import Writes
from operations.conv.operands import Device, Operands, OperandTypes
from operations.conv.problem import PROBLEM_NUMBERS, ConvProblem
from operations.conv.registry import kernel_name
from operations.tuning_cpu import TunedCpuGemm
from operations.tuning_sm100 import TunedSm100
from operations.tuning_sm90 import TunedSm90, TunedUnaligned
from operations.tuning_space import Facts, TunedKernel

comptime DTYPES = [
    DType.float32,
    DType.bfloat16,
    DType.float16,
    DType.float8_e4m3fn,
    DType.float8_e5m2,
    DType.int8,
    DType.uint8,
]


@fieldwise_init
struct Space(Movable):
    """What a caller has opened: one kernel's."""

    var cpu: Optional[TunedCpuGemm]
    var sm90: Optional[TunedSm90]
    var unaligned: Optional[TunedUnaligned]
    var sm100: Optional[TunedSm100]


comptime Handle = Pointer[Space, MutUntrackedOrigin]


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
        var space = Space(None, None, None, None)
        if Int(kernel) == TunedCpuGemm.code:
            space.cpu = _opened[TunedCpuGemm](problem, operands, 0, units)
        elif Int(kernel) == TunedSm90.code:
            space.sm90 = _opened[TunedSm90](problem, operands, 90, units)
        elif Int(kernel) == TunedUnaligned.code:
            space.unaligned = _opened[TunedUnaligned](
                problem, operands, 90, units
            )
        elif Int(kernel) == TunedSm100.code:
            space.sm100 = _opened[TunedSm100](problem, operands, 100, units)
        else:
            raise Error(t"kernel: {kernel_name(Int(kernel))} has no space")
        var handle = unsafe_alloc[Space](1)
        handle.unsafe_write(space^)
        write(made, Int64(Int(handle)))
        return 0
    except error:
        return sentence(error)


def _opened[
    Kernel: TunedKernel
](
    problem: ConvProblem, operands: Operands, capability: Int, units: Int64
) raises -> Kernel:
    """A space that has something in it, as far as the problem decides."""
    var space = Kernel(problem, operands, Device(capability, Int(units)))
    var refusal = space.problem_refusal()
    if refusal:
        raise Error(
            t"problem: {kernel_name(Kernel.code)} cannot take it:"
            t" {refusal.value()}"
        )
    return space^


@export
def maxconv_close(handle: Int64) abi("C"):
    """Frees what `maxconv_open` made."""
    var space = Handle(unsafe_from_address=Int(handle))
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
    ref space = Handle(unsafe_from_address=Int(handle))[]
    if space.cpu:
        return text_of(_description(space.cpu.value()))
    if space.sm90:
        return text_of(_description(space.sm90.value()))
    if space.unaligned:
        return text_of(_description(space.unaligned.value()))
    return text_of(_description(space.sm100.value()))


def _description[Kernel: TunedKernel](space: Kernel) -> String:
    """The text of `maxconv_describe`."""
    var facts = Facts()
    facts.text += StaticString(" ").join(Kernel.fields()) + "\n"
    facts.text += StaticString(" ").join(Kernel.counts()) + "\n"
    space.facts(facts)
    return facts.text


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
    ref space = Handle(unsafe_from_address=Int(handle))[]
    if space.cpu:
        _judge(space.cpu.value(), values, count, refusals, counts)
    elif space.sm90:
        _judge(space.sm90.value(), values, count, refusals, counts)
    elif space.unaligned:
        _judge(space.unaligned.value(), values, count, refusals, counts)
    else:
        _judge(space.sm100.value(), values, count, refusals, counts)


def _judge[
    Kernel: TunedKernel
](space: Kernel, values: Int64, count: Int64, refusals: Int64, counts: Int64):
    """`maxconv_judge` of a kernel's space."""
    var fields = len(Kernel.fields())
    var following = len(Kernel.counts())
    var read = reads[DType.int64](values)
    var text = Writes[DType.int64](unsafe_from_address=Int(refusals))
    var number = Writes[DType.float64](unsafe_from_address=Int(counts))
    for i in range(Int(count)):
        var config = read.unsafe_offset(i * fields)
        var refusal = space.refusal(config)
        if refusal:
            text[unsafe_offset=i] = text_of(refusal.value())
        else:
            text[unsafe_offset=i] = 0
            space.count(config, number.unsafe_offset(i * following))
