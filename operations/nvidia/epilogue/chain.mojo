"""Visitors one behind the other, composed at compile time."""

from std.collections import Optional

from ...conv.memory import Writes
from ...conv.problem import ConvProblem
from ..stream import Stream
from .layout import Fragments, VisitLayout
from .callbacks import (
    EpilogueVisitor,
    LaunchShape,
    Subtile,
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

    def refusal(
        self, layout: VisitLayout, problem: ConvProblem
    ) -> Optional[String]:
        Self._check()
        var refusal = self.first.refusal(layout, problem)
        if refusal:
            return refusal
        return self.second.refusal(layout, problem)

    @staticmethod
    def shared_bytes(layout: VisitLayout) -> Int:
        """See `EpilogueVisitor`; the first's comes first."""
        return Self.First.shared_bytes(layout) + Self.Second.shared_bytes(
            layout
        )

    @staticmethod
    def shares(layout: VisitLayout) -> Bool:
        return Self.First.shares(layout) or Self.Second.shares(layout)

    def workspace_elements(self, shape: LaunchShape) -> Int:
        """See `EpilogueVisitor`; the first's comes first."""
        return self.first.workspace_elements(
            shape
        ) + self.second.workspace_elements(shape)

    def prepared(
        self, shape: LaunchShape, workspace: Writes[DType.float32]
    ) -> Self:
        return Self(
            self.first.prepared(shape, workspace),
            self.second.prepared(
                shape,
                workspace.unsafe_offset(self.first.workspace_elements(shape)),
            ),
        )

    def conclude(self, mut queue: Stream, shape: LaunchShape) raises:
        self.first.conclude(queue, shape)
        self.second.conclude(queue, shape)

    @always_inline
    def reads_residual(self) -> Bool:
        return self.first.reads_residual() or self.second.reads_residual()

    @always_inline
    def is_identity(self) -> Bool:
        return self.first.is_identity() and self.second.is_identity()

    @always_inline
    def has_forms(self) -> Bool:
        return self.first.has_forms() and self.second.has_forms()

    @always_inline
    def is_form[form: Int](self) -> Bool:
        comptime if Self.First.forms > 1:
            return self.first.is_form[form]()
        else:
            return self.second.is_form[form]()

    @always_inline
    @staticmethod
    def _behind[Values: Fragments](at: Visited[Values]) -> Visited[Values]:
        """The second visitor's view of a thread: its own shared memory."""
        var other = at
        other.memory += UInt32(Self.First.shared_bytes(Values.layout))
        return other

    @always_inline
    def start[Values: Fragments](self, at: Visited[Values]):
        self.first.start(at)
        self.second.start(Self._behind(at))

    @always_inline
    def begin[Values: Fragments](self, at: Visited[Values]) -> Self.State:
        return Self.State(
            self.first.begin(at), self.second.begin(Self._behind(at))
        )

    @always_inline
    def previsit[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        self.first.previsit(state.first, at, subtile)
        self.second.previsit(state.second, Self._behind(at), subtile)

    @always_inline
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
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        self.first.reduce(state.first, at, subtile)
        self.second.reduce(state.second, Self._behind(at), subtile)

    @always_inline
    def postreduce[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values], subtile: Subtile):
        self.first.postreduce(state.first, at, subtile)
        self.second.postreduce(state.second, Self._behind(at), subtile)

    @always_inline
    def end[
        Values: Fragments
    ](self, mut state: Self.State, at: Visited[Values]):
        self.first.end(state.first, at)
        self.second.end(state.second, Self._behind(at))
