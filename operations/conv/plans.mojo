"""The plans that a process keeps, by everything that they depend on, so that
each is found once."""

from std.collections import Dict, Optional
from std.ffi import _Global
from std.hash import Hasher
from std.utils.lock import BlockingScopedLock, BlockingSpinLock

from .operands import Operands
from .problem import SPATIAL, ConvProblem
from .registry import Device, Planned

comptime MAX_PLANS = 4096
"""Plans that a process keeps. When they are more, it drops all."""


@fieldwise_init
struct PlanKey(Equatable, Hashable, ImplicitlyCopyable, Movable):
    """What a plan depends on."""

    var problem: ConvProblem
    var operands: Operands
    var device: Device
    var requested: Int
    """The `KERNEL_*` code that was asked for."""
    var kernels: Int
    """What the op is compiled with, a bit each."""

    def __hash__[H: Hasher](self, mut hasher: H):
        """Mixes the extents alone, which tell nearly all plans of a process
        apart: hashing every field takes longer than the look-up.

        Parameters:
            H: The hash function.

        Args:
            hasher: What takes the numbers.
        """
        var mixed = UInt64(self.requested)
        ref problem = self.problem
        mixed = _mixed(mixed, problem.batch)
        mixed = _mixed(mixed, problem.channels)
        mixed = _mixed(mixed, problem.filters)
        comptime for axis in range(SPATIAL):
            mixed = _mixed(mixed, problem.input[axis])
            mixed = _mixed(mixed, problem.filter[axis] + problem.stride[axis])
        mixed.__hash__(hasher)


@always_inline
def _mixed(state: UInt64, number: Int) -> UInt64:
    """One step of FNV-1a (Fowler, Noll, Vo) with 64 bits a step."""
    return (state ^ UInt64(number)) * UInt64(0x100000001B3)


struct Plans(Movable):
    """The plans of a process."""

    var lock: BlockingSpinLock
    var kept: Dict[PlanKey, Planned]

    def __init__(out self):
        """None yet."""
        self.lock = BlockingSpinLock()
        self.kept = Dict[PlanKey, Planned]()


def _no_plans() -> Plans:
    return Plans()


comptime _PLANS = _Global["maxconv_plans_1", _no_plans]
"""Its name ends with the version of `PlanKey` and of every plan: ops that other
versions of this package compiled may live in the same process."""


def kept_plan(key: PlanKey) raises -> Optional[Planned]:
    """The plan that `keep_plan` was given for a key, if it is still there.

    Args:
        key: What the plan depends on.

    Raises:
        If the process has no room for plans.
    """
    var plans = _PLANS.get_or_create_ptr()
    with BlockingScopedLock(plans[].lock):
        return plans[].kept.get(key)


def keep_plan(key: PlanKey, planned: Planned) raises:
    """Keeps a plan.

    Args:
        key: What it depends on.
        planned: The plan.

    Raises:
        If the process has no room for plans.
    """
    var plans = _PLANS.get_or_create_ptr()
    with BlockingScopedLock(plans[].lock):
        if len(plans[].kept) >= MAX_PLANS:
            plans[].kept.clear()
        plans[].kept[key] = planned
