"""How the Blackwell implicit GEMM runs a problem: the candidate, the grid and the
geometry."""

from std.collections import Optional

from ...conv.operands import Device, Operands
from ...conv.problem import ConvProblem
from ...conv.search import Candidates, Found, cheapest
from ..epilogue.params import residual_refusal
from ..im2col.tiles import TileGeometry
from .candidates import Candidate, candidates
from .config import Conv2dConfig, GemmTypes
from .model import predict


@fieldwise_init
struct GemmPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the Blackwell implicit GEMM."""

    var candidate: Int
    """The configuration's index in the table."""
    var config: Conv2dConfig
    var seconds: Float64
    """The model's."""
    var geometry: TileGeometry
    var blocks: Int
    """Of the grid."""

    def __init__(
        out self,
        config: Conv2dConfig,
        problem: ConvProblem,
        *,
        candidate: Int = -1,
        seconds: Float64 = 0,
    ):
        """Cuts a problem for a configuration.

        Args:
            config: The configuration, whose `problem_refusal` has nothing
                against the problem.
            problem: The convolution, with at least one output.
            candidate: The configuration's index in the table, if it is one.
            seconds: The model's.
        """
        var traversal = config.traversal(problem)
        self.candidate = candidate
        self.config = config
        self.seconds = seconds
        self.geometry = config.geometry(traversal)
        self.blocks = config.blocks(traversal)

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var microseconds = round(self.seconds * 1e7) / 10
        writer.write(
            t"{self.config}: {microseconds} us by a model that no timing has"
            t" met"
        )


struct GemmCandidates(Candidates):
    """What the Blackwell implicit GEMM can run a problem with."""

    var rows: List[Int]
    """Of the table, which are offered."""
    var table: List[Candidate]
    var refusals: List[Optional[String]]
    """Why a row of the table cannot run for another reason: a visitor's."""
    var problem: ConvProblem
    var residual: Bool
    var device: Device

    def __init__(
        out self, problem: ConvProblem, operands: Operands, device: Device
    ):
        """The rows that are offered for the operands' types."""
        self.rows = List[Int]()
        self.table = candidates(GemmTypes.of(operands.types))
        for row in range(len(self.table)):
            if self.table[row].offered(operands.types):
                self.rows.append(row)
        self.refusals = List[Optional[String]](
            length=len(self.table), fill=Optional[String]()
        )
        self.problem = problem
        self.residual = operands.residual
        self.device = device

    def count(self) -> Int:
        """As many as there are rows."""
        return len(self.rows)

    def refusal(self, index: Int) -> Optional[String]:
        """Why a candidate cannot run the problem, or shares tiles where every
        multiprocessor has one."""
        var row = self.rows[index]
        var refusal = self.config_refusal(self.table[row].config)
        return refusal if refusal else self.refusals[row]

    def config_refusal(self, config: Conv2dConfig) -> Optional[String]:
        """`refusal` of a configuration that need not be in the table.

        Args:
            config: The configuration.
        """
        var refusal = config.problem_refusal(self.problem)
        if not refusal and self.residual:
            refusal = residual_refusal(config.num_epi_load_stages)
        if refusal or config.split_k() == 1:
            return refusal
        var waves = predict(config, self.problem, self.device.units).waves
        if waves > 1:
            return String(
                t"cluster_shape: {config.split_k()} blocks along K, but there"
                t" are {waves} waves of tiles"
            )
        return None

    def cost(self, index: Int) -> Float64:
        """The model's time, in seconds.

        Args:
            index: Of a candidate that does not refuse.
        """
        return predict(
            self.table[self.rows[index]].config,
            self.problem,
            self.device.units,
            self.residual,
        ).seconds

    def plan(self, found: Found) raises -> GemmPlan:
        """How to run the problem with what `cheapest` found.

        Args:
            found: The candidate.

        Raises:
            If there is none: why.
        """
        if found.index < 0:
            raise Error(t"sm100: {found.refusal}; problem {self.problem}")
        var row = self.rows[found.index]
        return GemmPlan(
            self.table[row].config,
            self.problem,
            candidate=row,
            seconds=found.cost,
        )


def plan_gemm(
    problem: ConvProblem, operands: Operands, device: Device
) raises -> GemmPlan:
    """The candidate that the model finds fastest.

    Args:
        problem: The convolution, with at least one output.
        operands: Its operands.
        device: The device.

    Raises:
        If no candidate can run the problem: why.
    """
    var table = GemmCandidates(problem, operands, device)
    return table.plan(cheapest(table))
