"""Visitors one behind the other, composed at compile time."""

from std.collections import Optional

from ....conv.memory import Writes
from ....conv.problem import ConvProblem
from ...stream import Stream
from .config import Sm90Config
from .epilogue_callbacks import (
    EpilogueVisitor,
    LaunchShape,
    Residual,
    Subtile,
    VisitLayout,
    Visited,
)


@fieldwise_init
struct ChainState[
    First: TrivialRegisterPassable, Second: TrivialRegisterPassable
](TrivialRegisterPassable):
    """The states of two visitors.

    Parameters:
        First: Of the first.
        Second: Of the second.
    """

    var first: Self.First
    var second: Self.Second


@fieldwise_init
struct Chain[First: EpilogueVisitor, Second: EpilogueVisitor](EpilogueVisitor):
    """Two visitors: the second sees what the first made of the values.

    Parameters:
        First: Of the first.
        Second: Of the second.
    """

    comptime State = ChainState[Self.First.State, Self.Second.State]
    comptime forms = Self.First.forms * Self.Second.forms
    comptime looped = Self.First.looped or Self.Second.looped
    comptime adds_residual = (
        Self.First.adds_residual or Self.Second.adds_residual
    )
    comptime discards = Self.Second.discards
    comptime starts = Self.First.starts or Self.Second.starts
    comptime shares = Self.First.shares or Self.Second.shares

    var first: Self.First
    var second: Self.Second

    @staticmethod
    def get_type_name() -> String:
        """The name in messages."""
        return String(
            Self.First.get_type_name(), ", ", Self.Second.get_type_name()
        )

    @staticmethod
    def _check():
        """Refuses chains that mean nothing."""
        comptime assert not Self.First.discards, (
            "a visitor that discards the output must be the last of its chain:"
            " the ones behind it would see values that nobody stores"
        )
        comptime assert (Self.First.forms == 1 and not Self.First.looped) or (
            Self.Second.forms == 1 and not Self.Second.looped
        ), (
            "a chain has at most one visitor that picks from several forms:"
            " each form of one would be compiled with each of the other"
        )

    def can_implement(
        self, config: Sm90Config, problem: ConvProblem
    ) -> Optional[String]:
        """See `EpilogueVisitor`."""
        Self._check()
        var refusal = self.first.can_implement(config, problem)
        if refusal:
            return refusal
        return self.second.can_implement(config, problem)

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        """See `EpilogueVisitor`; the first's comes first."""
        return Self.First.shared_bytes(layout) + Self.Second.shared_bytes(
            layout
        )

    def workspace(self, shape: LaunchShape) -> Int:
        """See `EpilogueVisitor`; the first's comes first."""
        return self.first.workspace(shape) + self.second.workspace(shape)

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        """See `EpilogueVisitor`."""
        return Self(
            self.first.prepared(shape, workspace),
            self.second.prepared(
                shape, workspace.unsafe_offset(self.first.workspace(shape))
            ),
        )

    def conclude(self, mut queue: Stream, shape: LaunchShape) raises:
        """See `EpilogueVisitor`."""
        self.first.conclude(queue, shape)
        self.second.conclude(queue, shape)

    @always_inline
    def reads_residual(self) -> Bool:
        """See `EpilogueVisitor`."""
        return self.first.reads_residual() or self.second.reads_residual()

    @always_inline
    def is_identity(self) -> Bool:
        """See `EpilogueVisitor`."""
        return self.first.is_identity() and self.second.is_identity()

    @always_inline
    def has_forms(self) -> Bool:
        """See `EpilogueVisitor`."""
        return self.first.has_forms() and self.second.has_forms()

    @always_inline
    def is_form[form: Int](self) -> Bool:
        """See `EpilogueVisitor`."""
        comptime if Self.First.forms > 1:
            return self.first.is_form[form]()
        else:
            return self.second.is_form[form]()

    @always_inline
    @staticmethod
    def _behind[layout: VisitLayout](at: Visited[layout]) -> Visited[layout]:
        """The second visitor's view of a thread: its own shared memory."""
        var other = at
        other.memory += UInt32(Self.First.shared_bytes(layout))
        return other

    @always_inline
    def start[layout: VisitLayout](self, at: Visited[layout]):
        """See `EpilogueVisitor`."""
        self.first.start(at)
        self.second.start(Self._behind(at))

    @always_inline
    def begin[layout: VisitLayout](self, at: Visited[layout]) -> Self.State:
        """See `EpilogueVisitor`."""
        return Self.State(
            self.first.begin(at), self.second.begin(Self._behind(at))
        )

    @always_inline
    def previsit[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """See `EpilogueVisitor`."""
        self.first.previsit(state.first, at, subtile)
        self.second.previsit(state.second, Self._behind(at), subtile)

    @always_inline
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
        """See `EpilogueVisitor`."""
        # A visitor with one form has no other.
        comptime one = Self.First.forms == 1 and not Self.First.looped
        comptime other = Self.Second.forms == 1 and not Self.Second.looped
        var result = self.first.visit[form=0 if one else form](
            state.first, at, subtile, group, residual, values
        )
        return self.second.visit[form=0 if other else form](
            state.second, Self._behind(at), subtile, group, residual, result
        )

    @always_inline
    def reduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """See `EpilogueVisitor`."""
        self.first.reduce(state.first, at, subtile)
        self.second.reduce(state.second, Self._behind(at), subtile)

    @always_inline
    def postreduce[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout], subtile: Subtile):
        """See `EpilogueVisitor`."""
        self.first.postreduce(state.first, at, subtile)
        self.second.postreduce(state.second, Self._behind(at), subtile)

    @always_inline
    def end[
        layout: VisitLayout
    ](self, mut state: Self.State, at: Visited[layout]):
        """See `EpilogueVisitor`."""
        self.first.end(state.first, at)
        self.second.end(state.second, Self._behind(at))
