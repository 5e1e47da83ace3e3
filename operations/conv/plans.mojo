"""A plan as a value, and the plans that a process keeps, by everything that they
depend on."""

from std.collections import Optional
from std.ffi import _Global, external_call
from std.sys.info import size_of
from std.utils import StaticTuple
from std.utils.lock import BlockingScopedLock, BlockingSpinLock

from .operands import Device, Operands
from .problem import SPATIAL, ConvProblem

comptime PlanValue = ImplicitlyCopyable & Deinitable & Writable
"""A plan: everything that a launch needs, except pointers."""

comptime PLAN_WORDS = 64
"""Room for the largest plan, in words of 8 bytes."""


struct Planned(ImplicitlyCopyable, Movable):
    """A kernel and its plan for a problem, in a form that is the same for all
    kernels, so that a cache can hold it."""

    var kernel: Int
    """A `KERNEL_*` code."""
    var tuned: Bool
    """Whether somebody named how it runs, and no model chose it."""
    var words: StaticTuple[UInt64, PLAN_WORDS]

    def __init__[
        Plan: PlanValue
    ](out self, kernel: Int, plan: Plan, *, tuned: Bool = False):
        """Holds a kernel's plan.

        Parameters:
            Plan: Its type, which holds nothing but numbers.

        Args:
            kernel: A `KERNEL_*` code.
            plan: The plan.
            tuned: See the fields.
        """
        comptime assert (
            Plan.__copy_ctor_is_trivial
        ), "a plan holds nothing but numbers"
        comptime assert (
            size_of[Plan]() <= PLAN_WORDS * 8
        ), "a plan is larger than PLAN_WORDS"
        self.kernel = kernel
        self.tuned = tuned
        self.words = StaticTuple[UInt64, PLAN_WORDS]()
        Pointer(to=self.words).unsafe_bitcast[Plan]()[] = plan

    def get[Plan: PlanValue](self) -> Plan:
        """The plan.

        Parameters:
            Plan: The type of the kernel's plan.
        """
        return Pointer(to=self.words).unsafe_bitcast[Plan]()[]


@fieldwise_init
struct PlanKey(Equatable, ImplicitlyCopyable, Movable):
    """What a plan depends on."""

    var problem: ConvProblem
    var operands: Operands
    var device: Device
    var requested: Int
    """The `KERNEL_*` code that was asked for."""
    var kernels: Int
    """What the op is compiled with, a bit each."""

    def set(self) -> Int:
        """The set of the cache that the plan belongs to: a hash of the extents,
        which tell nearly all plans of a process apart."""
        # FNV-1a (Fowler, Noll, Vo) with 64 bits a step.
        var state = UInt64(self.requested)
        ref problem = self.problem
        state = _mixed(state, problem.batch)
        state = _mixed(state, problem.channels)
        state = _mixed(state, problem.filters)
        comptime for axis in range(SPATIAL):
            state = _mixed(state, problem.input[axis])
            state = _mixed(state, problem.filter[axis] + problem.stride[axis])
        # The low bits of a product know nothing of the high ones.
        return Int((state >> 32) % SETS)


@always_inline
def _mixed(state: UInt64, number: Int) -> UInt64:
    """One step of the hash."""
    return (state ^ UInt64(number)) * UInt64(0x100000001B3)


@fieldwise_init
struct KeptPlan(ImplicitlyCopyable, Movable):
    """A plan, and what it was made for."""

    var key: PlanKey
    var planned: Planned


comptime SETS = 512
"""Sets of the cache."""

comptime WAYS = 8
"""Plans of a set. A further one takes the place of the oldest."""


struct KeptSet(Movable):
    """The plans of a set."""

    var count: Int
    """How many were kept, those that others took the place of included."""
    var kept: Array[KeptPlan, WAYS]


struct Plans(Movable):
    """The plans of a process: a set-associative cache. A `Dict` of plans, or a
    list for each set, is more code in every op that is compiled."""

    var lock: BlockingSpinLock
    var sets: Pointer[KeptSet, MutUntrackedOrigin]
    """`SETS` of them, never freed."""

    def __init__(out self):
        """None yet."""
        self.lock = BlockingSpinLock()
        # Zeros are an empty set, and memory that no set uses stays unused.
        self.sets = external_call[
            "calloc", Pointer[KeptSet, MutUntrackedOrigin]
        ](SETS, size_of[KeptSet]())


def _no_plans() -> Plans:
    return Plans()


comptime _PLANS = _Global["maxconv_plans_10", _no_plans]
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
        ref set = plans[].sets[unsafe_offset=key.set()]
        for way in range(min(set.count, WAYS)):
            if set.kept[way].key == key:
                return set.kept[way].planned
    return None


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
        ref set = plans[].sets[unsafe_offset=key.set()]
        set.kept[set.count % WAYS] = KeptPlan(key, planned)
        set.count += 1
