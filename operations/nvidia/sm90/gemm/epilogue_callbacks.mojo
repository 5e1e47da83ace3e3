"""What a visitor of the Hopper epilogue is: work on a tile's values between
multiply and store, all in float32.

    consumer, once:      start
    for each tile:       begin, then the multiply
        each sub-tile:   previsit; visit, a fragment at a time; reduce
                         (its values are written to a buffer)
                         (a barrier of the consumer's threads)
                         postreduce
                         (its buffer is stored)
                         end

Each visitor is called back with what it keeps of a tile, its `State`. Visitors
are composed at compile time, `one.then(another)`; what one makes of
the values the next one sees.

What the graph compiler fused comes last: it is a visitor of the rounded values,
neighbouring filters of one pixel at a time (`conv.access.OutputTarget`).
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.collections import Optional

from ....conv.memory import Writes
from ....conv.problem import ConvProblem
from ...im2col.tiles import Tile, TileGeometry
from ...stream import Stream
from ...tma.copy import SharedAddress
from .config import Sm90Config
from .epilogue_chain import Chain
from .epilogue_config import CONSUMER_THREADS, SUBTILE_FILTERS
from .epilogue_fragment import Place, read_fragment

comptime LOOPED = -1
"""The form of a visitor that takes whatever its others do not."""


@fieldwise_init
struct VisitLayout(ImplicitlyCopyable, Movable):
    """How a consumer's values are cut up, for a visitor to compile to."""

    var swapped: Bool
    """Whether filters are the multiply's rows."""
    var parts: Int
    """Sub-tiles along the filters of a consumer's part of a tile."""
    var pixels: Int
    """Of a sub-tile."""
    var residual_type: DType
    """Of the residual: the output's."""
    var delayed: Bool
    """Whether a sub-tile's `postreduce` may come after the next one's
    `reduce`."""

    def values(self) -> Int:
        """Values of a sub-tile that one thread holds."""
        return self.pixels * SUBTILE_FILTERS // CONSUMER_THREADS


@fieldwise_init
struct LaunchShape(ImplicitlyCopyable, Movable):
    """A launch as a visitor's host side sees it."""

    var config: Sm90Config
    var problem: ConvProblem
    var blocks: Int
    """Of the grid."""

    def consumers(self) -> Int:
        """Consumers of the whole grid."""
        return self.blocks * self.config.consumers


@fieldwise_init
struct Visited[layout: VisitLayout](TrivialRegisterPassable):
    """A thread, and the part of a tile that its consumer stores.

    Parameters:
        layout: How the part is cut up.
    """

    var geometry: TileGeometry
    """The problem."""
    var tile: Tile
    """The consumer's part; its `pixel` and `filter` are the consumer's first.
    """
    var place: Place[Self.layout.swapped]
    """Where in a sub-tile the thread's values lie."""
    var thread: UInt32
    """Of the consumer."""
    var consumer: UInt32
    """Of the grid's."""
    var memory: SharedAddress
    """The consumer's shared memory for the visitor."""
    var name: UInt32
    """The named barrier of the consumer's threads."""

    @always_inline
    def filter_end(self) -> UInt32:
        """One beyond the last filter that there is."""
        return self.tile.filter_end(self.geometry)

    @always_inline
    def pixel(self, subtile: Subtile) -> UInt32:
        """The first pixel of a sub-tile, counted along the traversal.

        Args:
            subtile: The sub-tile.
        """
        return self.tile.pixel + subtile.block * UInt32(Self.layout.pixels)

    @always_inline
    def filter(self, subtile: Subtile) -> UInt32:
        """The first filter of a sub-tile, counted over all groups.

        Args:
            subtile: The sub-tile.
        """
        return self.tile.filter + subtile.part * SUBTILE_FILTERS


@fieldwise_init
struct Subtile(TrivialRegisterPassable):
    """A sub-tile of a consumer's part of a tile."""

    var part: UInt32
    """Its place along the filters."""
    var block: UInt32
    """Its place along the pixels."""
    var count: UInt32
    """Sub-tiles that the consumer visited before it, in all tiles."""


@fieldwise_init
struct Residual[layout: VisitLayout](TrivialRegisterPassable):
    """A sub-tile's residual in shared memory.

    Parameters:
        layout: As in `Visited`.
    """

    var present: Bool
    """Whether there is one."""
    var buffer: SharedAddress
    var place: Place[Self.layout.swapped]

    @always_inline
    def read[size: Int](self, group: UInt32) -> SIMD[DType.float32, size]:
        """The residual of a fragment, if it is `present`.

        Parameters:
            size: Values of the fragment.

        Args:
            group: As in `EpilogueVisitor.visit`.
        """
        return read_fragment[
            Self.layout.residual_type, Self.layout.pixels, size
        ](self.buffer, self.place, group)


trait EpilogueVisitor(DevicePassable, TrivialRegisterPassable):
    """Work between multiply and store. A value of it is what a launch passes to
    the device: the host writes operands (pointers to device memory) into it,
    `can_implement` says whether they go with configuration and problem, and
    `prepared`, once a launch, adds what only the launch knows.
    """

    comptime State: TrivialRegisterPassable
    """What a thread keeps of a tile."""

    comptime forms: Int = 1
    """Ways in which `visit` is compiled, for a launch to pick from
    (`is_form`)."""

    comptime looped: Bool = False
    """Whether there is the form `LOOPED`, whose sub-tiles are not unrolled."""

    comptime whole_subtiles: Bool = False
    """Whether an unrolled sub-tile is one fragment: there is more to overlap,
    and more to keep in registers."""

    comptime adds_residual: Bool = False
    """Whether it may read the residual."""

    comptime discards: Bool = False
    """Whether no output is stored. Such a visitor is a chain's last."""

    comptime starts: Bool = False
    """Whether it has a `start`."""

    comptime shares: Bool = False
    """Whether it needs the barrier between `reduce` and `postreduce`."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    def then[Next: EpilogueVisitor](self, next: Next) -> Chain[Self, Next]:
        """This visitor, and behind it another one.

        Parameters:
            Next: Of the other.

        Args:
            next: The other.
        """
        return Chain(self, next)

    # The host.

    def can_implement(
        self, config: Sm90Config, problem: ConvProblem
    ) -> Optional[String]:
        """Why it cannot work with a configuration on a problem.

        Args:
            config: The configuration.
            problem: The convolution, valid.

        Returns:
            The reason, or None if it can.
        """
        return None

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        """Shared memory that each consumer has for it, a multiple of 1024.

        Args:
            layout: As in `Visited`.
        """
        return 0

    def workspace(self, shape: LaunchShape) -> Int:
        """Values of float32 in device memory that a launch has for it.

        Args:
            shape: The launch.
        """
        return 0

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        """What is passed to the device.

        Args:
            shape: The launch; `can_implement` has agreed.
            workspace: As many values as `workspace` said.
        """
        return self

    def conclude(self, mut queue: Stream, shape: LaunchShape) raises:
        """Enqueues what follows the kernel.

        Args:
            queue: Where to run; nothing is waited for.
            shape: The launch; this visitor has been `prepared` for it.

        Raises:
            What the driver refused.
        """
        pass

    # What a launch asks, the same for all threads.

    @always_inline
    def reads_residual(self) -> Bool:
        """Whether this launch has a residual."""
        return Self.adds_residual

    @always_inline
    def is_identity(self) -> Bool:
        """Whether nothing needs to be visited in this launch."""
        return False

    @always_inline
    def has_forms(self) -> Bool:
        """Whether a form other than `LOOPED` may take this launch."""
        return True

    @always_inline
    def is_form[form: Int](self) -> Bool:
        """Whether a form takes this launch, which `has_forms`.

        Parameters:
            form: From 0 to `forms - 1`.
        """
        return True

    # The consumer.

    @always_inline
    def start[layout: VisitLayout](self, at: Visited[layout]):
        """Before the consumer's first tile.

        Parameters:
            layout: As in `Visited`.

        Args:
            at: The thread; of no tile.
        """
        pass

    def begin[layout: VisitLayout](self, at: Visited[layout]) -> Self.State:
        """What can be fetched before a tile is multiplied.

        Parameters:
            layout: As in `Visited`.

        Args:
            at: The thread and its tile.
        """
        ...

    @always_inline
    def previsit[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """Before a sub-tile's first fragment.

        Parameters:
            layout: As in `Visited`.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    def visit[
        layout: VisitLayout, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[layout],
        subtile: Subtile,
        group: UInt32,
        residual: Residual[layout],
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """What becomes of a fragment's values.

        Parameters:
            layout: As in `Visited`.
            form: Below `forms`, or `LOOPED`.
            size: Values of the fragment.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
            group: Of the fragment's first values, as in `Place.matrices`.
            residual: The sub-tile's.
            values: What the visitor before made of them; the sums at first.
        """
        ...

    @always_inline
    def reduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """After a sub-tile's last fragment.

        Parameters:
            layout: As in `Visited`.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    @always_inline
    def postreduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """After a barrier of the consumer's threads behind `reduce`.

        Parameters:
            layout: As in `Visited`.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    @always_inline
    def end[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout]):
        """After a tile's last sub-tile.

        Parameters:
            layout: As in `Visited`.

        Args:
            state: The thread's.
            at: The thread and its tile.
        """
        pass
