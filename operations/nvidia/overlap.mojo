"""The device side of overlapping launches (programmatic dependent launch):
`Stream.overlaps` lets a kernel's blocks start while earlier kernels run, and the
blocks wait for them here."""

from max.gpu.primitives.grid_controls import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)


@always_inline
def wait_for_earlier_kernels():
    """Lets the blocks of the next kernel start, then waits until every earlier
    kernel has ended and its writes can be read. Every thread calls it, on every
    path: global memory is touched behind it alone, and no thread returns before
    it, or else the next kernel might read what an earlier one still writes. What
    needs no global memory stands in front of it. A further call takes no time.

    It is nothing where the target has no such launches (before compute
    capability 9.0): MAX then neither emits the instructions nor passes the
    launch's attribute.
    """
    launch_dependent_grids()
    wait_on_dependent_grids()
