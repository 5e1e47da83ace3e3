"""Which instructions the CPU has that runs this, asked at run time.

The compiler does not know: it takes the CPU of a virtual machine for another
one. What the kernel of the operating system lists in `/proc/cpuinfo` is there,
and its registers are saved.
"""

from std.collections import Optional
from std.ffi import _Global, external_call
from std.sys.info import CompilationTarget

from ..conv.fields import (
    CPU_FEATURES_VARIABLE,
    FEATURE_AMX_BF16,
    FEATURE_AMX_FP16,
    FEATURE_AMX_INT8,
    FEATURE_ARM_BF16,
    FEATURE_ARM_I8MM,
    FEATURE_AVX512_BF16,
    FEATURE_AVX512_VNNI,
    FEATURE_AVX_VNNI,
    FEATURE_NAMES,
)
from ..conv.known import UNKNOWN_FEATURES, KnownProblem
from ..conv.variables import variable

comptime AMX_BF16 = FEATURE_AMX_BF16
"""Tiles: `tdpbf16ps` (AMX-BF16)."""

comptime AVX512_BF16 = FEATURE_AVX512_BF16
"""Vectors: `vdpbf16ps` (AVX512-BF16)."""

comptime AMX_FP16 = FEATURE_AMX_FP16
"""Tiles: `tdpfp16ps` (AMX-FP16)."""

comptime AMX_INT8 = FEATURE_AMX_INT8
"""Tiles: `tdpbssd` and `tdpbusd` (AMX-INT8)."""

comptime AVX512_VNNI = FEATURE_AVX512_VNNI
"""Vectors: `vpdpbusd` of 512 bits (AVX512-VNNI)."""

comptime AVX_VNNI = FEATURE_AVX_VNNI
"""Vectors: `vpdpbusd` of 256 bits (AVX-VNNI)."""

comptime ARM_BF16 = FEATURE_ARM_BF16
"""Matrices: `bfmmla` (FEAT_BF16)."""

comptime ARM_I8MM = FEATURE_ARM_I8MM
"""Matrices: `smmla` and `usmmla` (FEAT_I8MM)."""

comptime ANY_CPU = len(FEATURE_NAMES)
"""Nothing: every CPU has it."""

comptime _TILES = (1 << AMX_BF16) | (1 << AMX_FP16) | (1 << AMX_INT8)
"""What a process may use only if the operating system permits it, a bit
each."""

comptime _ARCH_PRCTL = 158
"""The number of the system call."""

comptime _ARCH_REQ_XCOMP_PERM = 0x1023
"""Asks that the threads of the process may use a component of the registers'
state (Linux, Documentation/arch/x86/xstate.rst)."""

comptime _TILE_DATA = 18
"""AMX's tiles as such a component."""


def _words(text: String) -> List[String]:
    """What commas, blanks and tabs separate."""
    var words = List[String]()
    for part in text.replace(",", " ").replace("\t", " ").split(" "):
        words.append(String(part))
    return words^


def _listed() -> List[String]:
    """The features of the first processor, as Linux has them."""
    try:
        with open("/proc/cpuinfo", "r") as file:
            # All processors are alike, and asking each for its clock is slow.
            for line in file.read(8192).split("\n"):
                if line.startswith("flags") or line.startswith("Features"):
                    return _words(String(line))
    except:
        pass
    return List[String]()


def _allowed() -> Optional[List[String]]:
    """The names in `CPU_FEATURES_VARIABLE`, if it is set."""
    var value = variable[CPU_FEATURES_VARIABLE]()
    if not value:
        return None
    return _words(value.value())


def _detect() -> Int:
    """The features that are there and allowed, a bit each."""
    var found = 0
    comptime if CompilationTarget.is_linux():
        var listed = _listed()
        var allowed = _allowed()
        comptime for feature in range(len(FEATURE_NAMES)):
            comptime name = String(FEATURE_NAMES[feature])
            if name in listed and (not allowed or name in allowed.value()):
                found |= 1 << feature
    comptime if CompilationTarget.is_x86():
        comptime if not CompilationTarget.has_avx512f():
            # Kernels of this build cannot name the registers.
            found &= ~((1 << AVX512_BF16) | (1 << AVX512_VNNI))
        if found & _TILES != 0:
            var refused = external_call["syscall", Int](
                _ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA
            )
            if refused != 0:
                found &= ~_TILES
    return found


comptime _FOUND = _Global["maxconv_cpu_features_3", _detect]


def has_feature(feature: Int) -> Bool:
    """Whether the CPU has instructions, and the process may use them.

    Args:
        feature: One of the codes above.
    """
    if feature == ANY_CPU:
        return True
    try:
        return _FOUND.get_or_create_ptr()[] & (1 << feature) != 0
    except:
        return False


def has_fast_bfloat16_dots() -> Bool:
    """Whether `vdpbf16ps` multiplies more in a cycle than the multiply-adds of
    float32: not on CPUs with AMX, which begin one in two cycles (111 GFLOP/s
    beside 223 were measured on one core), and two multiply-adds in each."""
    try:
        var tiles_too = (1 << AVX512_BF16) | (1 << AMX_BF16)
        return _FOUND.get_or_create_ptr()[] & tiles_too == 1 << AVX512_BF16
    except:
        return False


def may_have(known: KnownProblem, feature: Int) -> Bool:
    """Whether the CPU that an op is compiled for may have instructions.

    Args:
        known: What is known of it.
        feature: One of the codes above.
    """
    return feature == ANY_CPU or known.features & (1 << feature) != 0


def must_have(known: KnownProblem, feature: Int) -> Bool:
    """Whether the CPU that an op is compiled for is known to have instructions,
    and the process to be allowed them.

    Args:
        known: What is known of it.
        feature: One of the codes above.
    """
    if known.features == UNKNOWN_FEATURES:
        return feature == ANY_CPU
    return may_have(known, feature) and not _TILES & (1 << feature)


def feature_refusal(feature: Int) -> Optional[String]:
    """Why instructions cannot be used, or None.

    Args:
        feature: One of the codes above.
    """
    if has_feature(feature):
        return None
    return String(
        t"this CPU has no {materialize[FEATURE_NAMES]()[feature]}, or"
        t" {CPU_FEATURES_VARIABLE} leaves it out"
    )
