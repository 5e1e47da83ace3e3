"""What a visitor of a GPU's epilogue is: work on a tile's values between
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

from std.collections import Optional

from ...conv.device_value import DeviceValue
from ...conv.memory import Writes
from ...conv.problem import ConvProblem
from ..im2col.tiles import Tile, TileGeometry
from ..stream import Stream
from ..tma.copy import SharedAddress
from .chain import Chain
from .layout import Fragments, VisitLayout

comptime LOOPED = -1
"""The form of a visitor that takes whatever its others do not."""


@fieldwise_init
struct LaunchShape(ImplicitlyCopyable, Movable):
    """A launch as a visitor's host side sees it."""

    var problem: ConvProblem
    var reducers: Int
    """How many sum up values in an order of their own: `Visited.reducer` is
    below."""


@fieldwise_init
struct Visited[Values: Fragments](TrivialRegisterPassable):
    """A thread, and the part of a tile that its consumer stores.

    Parameters:
        Values: Where its values lie.
    """

    var geometry: TileGeometry
    """The problem."""
    var tile: Tile
    """The consumer's part; its `pixel` and `filter` are the consumer's first.
    """
    var place: Self.Values
    """Where in a sub-tile the thread's values lie."""
    var reducer: UInt32
    """Whose sums these values belong to: a consumer of the grid, or, where it
    is not known beforehand who stores a tile, the tile's place along the
    pixels."""
    var memory: SharedAddress
    """The consumer's shared memory for the visitor."""

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
        return self.tile.pixel + subtile.block * UInt32(
            Self.Values.layout.pixels
        )

    @always_inline
    def filter(self, subtile: Subtile) -> UInt32:
        """The first filter of a sub-tile, counted over all groups.

        Args:
            subtile: The sub-tile.
        """
        return self.tile.filter + subtile.part * UInt32(
            Self.Values.layout.filters
        )


@fieldwise_init
struct Subtile(TrivialRegisterPassable):
    """A sub-tile of a consumer's part of a tile."""

    var part: UInt32
    """Its place along the filters."""
    var block: UInt32
    """Its place along the pixels."""
    var count: UInt32
    """Sub-tiles that the consumer visited before it, in all tiles."""


trait EpilogueVisitor(DeviceValue, TrivialRegisterPassable):
    """Work between multiply and store. A value of it is what a launch passes to
    the device: the host writes operands (pointers to device memory) into it,
    `refusal` says whether they go with configuration and problem, and
    `prepared`, once a launch, adds what only the launch knows."""

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

    comptime any_filters: Bool = False
    """Whether it runs with pixels of the output that are no multiple of 16
    bytes, where the kernel's threads store them."""

    comptime starts: Bool = False
    """Whether it has a `start`."""

    def then[Next: EpilogueVisitor](self, next: Next) -> Chain[Self, Next]:
        """This visitor, and behind it another one.

        Parameters:
            Next: Of the other.

        Args:
            next: The other.
        """
        return Chain(self, next)

    # The host.

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        """Why it cannot work on a problem.

        Args:
            layout: How a consumer's values are cut up.
            problem: The convolution, valid.

        Returns:
            The reason, or None if it can.
        """
        return None

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        """Shared memory that each consumer has for it, a multiple of 1024.

        Args:
            layout: How a consumer's values are cut up.
        """
        return 0

    @staticmethod
    def shares(layout: VisitLayout) -> Bool:
        """Whether it needs the barrier between `reduce` and `postreduce`.

        Args:
            layout: How a consumer's values are cut up.
        """
        return False

    def workspace_elements(self, shape: LaunchShape) -> Int:
        """Elements of float32 in device memory that a launch needs for it, for
        the caller to provide.

        Args:
            shape: The launch.
        """
        return 0

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        """What is passed to the device.

        Args:
            shape: The launch; there was no `refusal`.
            workspace: As many elements as `workspace_elements` said.
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
    def start[Values: Fragments](self, at: Visited[Values]):
        """Before the consumer's first tile.

        Parameters:
            Values: The generation's.

        Args:
            at: The thread; of no tile.
        """
        pass

    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        """What can be fetched before a tile is multiplied.

        Parameters:
            Values: The generation's.

        Args:
            at: The thread and its tile.
        """
        ...

    @always_inline
    def previsit[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """Before a sub-tile's first fragment.

        Parameters:
            Values: The generation's.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    def visit[
        Values: Fragments, form: Int, size: Int
    ](
        self,
        mut state: Self.State,
        at: Visited[Values],
        subtile: Subtile,
        group: UInt32,
        residual: Values.Residual,
        values: SIMD[DType.float32, size],
    ) -> SIMD[DType.float32, size]:
        """What becomes of a fragment's values.

        Parameters:
            Values: The generation's.
            form: Below `forms`, or `LOOPED`.
            size: Values of the fragment.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
            group: Which fragment of the sub-tile, as the generation counts
                them.
            residual: The sub-tile's.
            values: What the visitor before made of them; the sums at first.
        """
        ...

    @always_inline
    def reduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """After a sub-tile's last fragment.

        Parameters:
            Values: The generation's.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    @always_inline
    def postreduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        """After a barrier of the consumer's threads behind `reduce`.

        Parameters:
            Values: The generation's.

        Args:
            state: The thread's.
            at: The thread and its tile.
            subtile: The sub-tile.
        """
        pass

    @always_inline
    def end[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values]):
        """After a tile's last sub-tile.

        Parameters:
            Values: The generation's.

        Args:
            state: The thread's.
            at: The thread and its tile.
        """
        pass
