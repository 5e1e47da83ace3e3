"""The library of the peak of this machine's CPU, for the benchmark. It runs on
threads of its caller's.

A function that fails returns the address of the sentence that says why, which
the caller frees; others return 0.
"""

from library.call import TYPE, free_sentence, sentence, text_of, write
from operations.cpu.openmp import OpenMpPool, Parallel
from operations.cpu.peak import peak_unit, run_peak


@export
def maxconv_free(text: Int64) abi("C"):
    """Frees a text."""
    free_sentence(text)


@export
def maxconv_unit(
    threads: Int64, parallel: Parallel, made: Int64
) abi("C") -> Int64:
    """Names what multiplies.

    Args:
        threads: How many threads may run.
        parallel: See `Parallel`; not called.
        made: The address of where to write that of the name, a text.
    """
    try:
        write(
            made, text_of(peak_unit[TYPE](OpenMpPool(parallel, Int(threads))))
        )
        return 0
    except error:
        return sentence(error)


@export
def maxconv_multiply(
    chunks: Int64, threads: Int64, parallel: Parallel, made: Int64
) abi("C") -> Int64:
    """Multiplies as fast as the unit can.

    Args:
        chunks: As `run_peak` takes them.
        threads: How many threads may run.
        parallel: See `Parallel`; not called for a single thread.
        made: The address of where to write how many products were computed.
    """
    try:
        var pool = OpenMpPool(parallel, Int(threads))
        write(made, Int64(run_peak[TYPE](pool, Int(chunks))))
        return 0
    except error:
        return sentence(error)
