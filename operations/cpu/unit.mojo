"""What multiplies: the instructions behind the register tiles, and how fast they
are where nothing is loaded."""

from std.sys._assembly import inlined_assembly
from std.sys.info import CompilationTarget

from ..conv.fields import PANEL
from ..conv.memory import Writes

comptime ONES = UInt32(0x3F803F80)
"""What operands hold: 1.0 twice in bfloat16, 1.9 in float16, and neither zeros
nor small numbers in integers, for which a core may need less power."""


trait MultiplyUnit:
    """Instructions that multiply and add, and their register tile."""

    comptime rows: Int
    """Pixels of the largest register tile."""
    comptime panels: Int
    """Its filter panels."""

    @staticmethod
    def instruction(dtype: DType) -> String:
        """The instruction, for people: its name, and the bits of a register
        where there are several widths.

        Args:
            dtype: Of activation and filter, of which kernels that multiply by
                the unit are built.
        """
        ...

    @staticmethod
    def multiply_registers[
        dtype: DType
    ](chunks: Int, sums: Writes[DType.float32]):
        """Multiplies the largest register tile by operands that stay in
        registers: as fast as the unit can. The numbers mean nothing.

        Parameters:
            dtype: Of activation and filter.

        Args:
            chunks: Steps, each `chunk_products` deep.
            sums: Where the sums go, `tile_outputs` of them: bits of the sums'
                own type.
        """
        ...


trait UnitVisitor:
    """What asks a unit that is chosen at run time."""

    def visit[U: MultiplyUnit](mut self) raises:
        """Asks it.

        Parameters:
            U: The unit.

        Raises:
            If threads refuse work.
        """
        ...


def tile_outputs[U: MultiplyUnit]() -> Int:
    """Sums of a unit's largest register tile.

    Parameters:
        U: The unit.
    """
    return U.rows * U.panels * PANEL


@always_inline
def opaque[
    dtype: DType, lanes: SIMDLength, //
](value: SIMD[dtype, lanes]) -> SIMD[dtype, lanes]:
    """A value in its register, of which the compiler no longer knows that it is
    the same. Takes no instruction. Without it products of one operand would be
    computed once, in front of the loop.

    Parameters:
        dtype: Of the elements.
        lanes: Elements of a register.

    Args:
        value: The value.
    """
    # `v` allows registers 16 to 31, which only AVX-512 has.
    comptime register: StaticString = (
        "=w,0" if CompilationTarget.has_neon() else (
            "=v,0" if CompilationTarget.has_avx512f() else "=x,0"
        )
    )
    return inlined_assembly[
        "",
        SIMD[dtype, lanes],
        constraints=register,
        has_side_effect=False,
    ](value)


@always_inline
def opaque_address(address: Int) -> Int:
    """The address of what has been written, of which the compiler no longer
    knows what it is: it is read from memory, an element after the other, instead
    of being taken out of registers.

    Args:
        address: The address.
    """
    return inlined_assembly["", Int, constraints="=r,0,~{memory}"](address)
