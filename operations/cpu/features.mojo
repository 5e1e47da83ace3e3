"""Which instructions the CPU has that runs this, asked at run time.

The compiler does not know: it takes the CPU of a virtual machine for another
one. What the kernel of the operating system lists in `/proc/cpuinfo` is there,
and its registers are saved.
"""

from std.collections import Optional
from std.ffi import _Global, external_call
from std.sys.info import CompilationTarget

from ..conv.variables import variable

comptime AMX_BF16 = 0
"""Tiles: `tdpbf16ps` (AMX-BF16)."""

comptime AVX512_BF16 = 1
"""Vectors: `vdpbf16ps` (AVX512-BF16)."""

comptime AMX_FP16 = 2
"""Tiles: `tdpfp16ps` (AMX-FP16)."""

comptime AMX_INT8 = 3
"""Tiles: `tdpbssd` and `tdpbusd` (AMX-INT8)."""

comptime AVX512_VNNI = 4
"""Vectors: `vpdpbusd` of 512 bits (AVX512-VNNI)."""

comptime AVX_VNNI = 5
"""Vectors: `vpdpbusd` of 256 bits (AVX-VNNI)."""

comptime ARM_BF16 = 6
"""Matrices: `bfmmla` (FEAT_BF16)."""

comptime ARM_I8MM = 7
"""Matrices: `smmla` and `usmmla` (FEAT_I8MM)."""

comptime ANY_CPU = 8
"""Nothing: every CPU has it."""

comptime _NAMES: List[StaticString] = [
    "amx_bf16",
    "avx512_bf16",
    "amx_fp16",
    "amx_int8",
    "avx512_vnni",
    "avx_vnni",
    "bf16",
    "i8mm",
]
"""The names that Linux has for them, by code."""

comptime ALLOWED_VARIABLE = "MAXCONV_CPU_FEATURES"
"""The variable that leaves only some: names with commas between, none if it is
empty."""

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
    """The names in `ALLOWED_VARIABLE`, if it is set."""
    var value = variable[ALLOWED_VARIABLE]()
    if not value:
        return None
    return _words(value.value())


def _detect() -> Int:
    """The features that are there and allowed, a bit each."""
    var found = 0
    comptime if CompilationTarget.is_linux():
        var listed = _listed()
        var allowed = _allowed()
        comptime for feature in range(len(_NAMES)):
            comptime name = String(_NAMES[feature])
            if name in listed and (not allowed or name in allowed.value()):
                found |= 1 << feature
    comptime if CompilationTarget.is_x86():
        comptime if not CompilationTarget.has_avx512f():
            # Kernels of this build cannot name the registers.
            found &= ~((1 << AVX512_BF16) | (1 << AVX512_VNNI))
        comptime tiles = ((1 << AMX_BF16) | (1 << AMX_FP16) | (1 << AMX_INT8))
        if found & tiles != 0:
            var refused = external_call["syscall", Int](
                _ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA
            )
            if refused != 0:
                found &= ~tiles
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


def feature_refusal(feature: Int) -> Optional[String]:
    """Why instructions cannot be used, or None.

    Args:
        feature: One of the codes above.
    """
    if has_feature(feature):
        return None
    return String(
        t"this CPU has no {materialize[_NAMES]()[feature]}, or"
        t" {ALLOWED_VARIABLE} leaves it out"
    )
