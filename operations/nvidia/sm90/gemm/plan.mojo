"""How the Hopper implicit GEMM runs a problem: the candidate, the blocks that
share a tile, the grid and the geometry."""

from std.collections import Optional
from std.math import ceildiv

from ...epilogue.work import FusedWork
from ....conv.fields import COPY_BYTES, STEM_CHANNELS
from ....conv.known import NARROW_FILTERS
from ....conv.memory import element_bytes
from ....conv.operands import Device, Operands, OperandTypes
from ....conv.problem import ConvProblem
from ....conv.search import Candidates, Found, cheapest, refusal_of_all
from ...im2col.tiles import TileGeometry
from ...im2col.traversal import Traversal
from ...relays import Relays
from .candidates import Candidate, candidate, candidates
from .config import SPLIT_COUNTS, Sm90Config
from .legality import problem_refusal, stores_any_filters
from .grid import Grid, tile_clusters
from .model import predicted_seconds
from .pace import Pace
from .split_k import split_refusal
from .tuned import tuned_choice


@fieldwise_init
struct GemmPlan(ImplicitlyCopyable, Movable, Writable):
    """A launch of the Hopper implicit GEMM."""

    var candidate: Int
    """The configuration's index in the table."""
    var split_k: Int
    """Blocks that share a tile."""
    var seconds: Float64
    """The model's."""
    var tuned: Bool
    """Whether measurements have chosen the candidate, and not the model."""
    var geometry: TileGeometry
    var cluster: Int
    """Blocks of a cluster."""
    var blocks: Int
    """Of a relay."""
    var relays: Int
    """Of the grid, which take over from one another."""

    def __init__(
        out self,
        config: Sm90Config,
        traversal: Traversal,
        device: Device,
        *,
        candidate: Int = -1,
        split_k: Int = 1,
        seconds: Float64 = 0,
        tuned: Bool = False,
        work: FusedWork = FusedWork(),
    ):
        """Cuts a problem for a configuration.

        Args:
            config: The configuration.
            traversal: Of a problem with at least one output, which neither
                `problem_refusal` nor `split_refusal` has anything against.
            device: The device.
            candidate: The configuration's index in the table, if it is one.
            split_k: Blocks that share a tile.
            seconds: The model's.
            tuned: Whether measurements have chosen the candidate.
            work: What the epilogue has to do.
        """
        self.tuned = tuned
        var grid = Grid.of(config, traversal, device.units, split_k)
        self.candidate = candidate
        self.split_k = split_k
        self.seconds = seconds
        self.geometry = grid.geometry(config, traversal)
        if split_k > 1:
            self.geometry.split(config.halo, split_k)
        elif grid.counts_pixels_first(config, self.geometry):
            self.geometry.count_pixels_first()
        self.cluster = config.cluster_size() * split_k
        self.blocks = grid.clusters * self.cluster
        self.relays = 1
        if split_k == 1:
            self.keep(Pace.of(config, traversal, grid, work), config)

    def keep(mut self, pace: Pace, config: Sm90Config):
        """Makes the launch keep a pace.

        Args:
            pace: The pace; free unless the configuration keeps one.
            config: The plan's configuration; no tile is shared.
        """
        var rounds = ceildiv(
            Int(self.geometry.tiles()) * self.cluster, self.blocks
        )
        self.geometry.relays = Relays(rounds, most=pace.relays)
        self.geometry.idle_stages = UInt32(
            config.num_act_pipeline_stages - pace.stages
        )
        self.relays = Int(self.geometry.relays.count)

    def write_to(self, mut writer: Some[Writer]):
        """Writes the plan on one line."""
        var microseconds = round(self.seconds * 1e7) / 10
        writer.write(candidate(self.candidate))
        if self.split_k > 1:
            writer.write(t", split-K {self.split_k}")
        writer.write(t": {microseconds} us by the model")
        if self.tuned:
            writer.write("; the fastest of those that were measured")


struct GemmCandidates(Candidates):
    """What the Hopper implicit GEMM can run a problem with: rows of the table,
    each with tiles of one block's own or shared by several."""

    var rows: List[Int]
    """Of the table, which are offered."""
    var offered: List[Candidate]
    """What is there."""
    var refusals: List[Optional[String]]
    """Why a row cannot run for another reason: a visitor's."""
    var ways: Int
    """To share a tile: as many as `SPLIT_COUNTS`, or 1."""
    var problem: ConvProblem
    var traversal: Traversal
    var work: FusedWork
    var types: OperandTypes
    var any_filters: Bool
    """Whether pixels of the output may be no whole pieces, as far as types and
    work decide."""
    var device: Device

    def __init__(
        out self,
        problem: ConvProblem,
        operands: Operands,
        device: Device,
        *,
        unaligned: Bool = False,
    ):
        """The rows that are offered for the operands' types and the problem's
        filters.

        Args:
            problem: The convolution.
            operands: Its operands.
            device: The device.
            unaligned: Whether to look at what runs problems whose pixels are no
                whole pieces.
        """
        self.rows = List[Int]()
        self.offered = List[Candidate]()
        self.refusals = List[Optional[String]]()
        self.ways = comptime (len(SPLIT_COUNTS))
        var table = candidates()
        var narrow = problem.group_filters() <= NARROW_FILTERS
        var bytes = element_bytes(operands.types.input) * problem.channels
        var chunks = bytes % COPY_BYTES == 0
        for row in range(len(table)):
            if table[row].offered(
                operands.types,
                narrow=narrow,
                unaligned=unaligned,
                has_chunks=chunks,
                lacks_chunks=not chunks,
            ):
                self.rows.append(row)
                self.offered.append(table[row])
                self.refusals.append(None)
        self.problem = problem
        self.traversal = Traversal(problem, operands.types.input)
        self.work = FusedWork.of(operands)
        self.types = operands.types
        # Narrow groups fill little of a tile.
        self.any_filters = problem.groups == 1 and stores_any_filters(
            operands.types
        )
        self.device = device

    def count(self) -> Int:
        """Rows, times the ways to share a tile."""
        return len(self.rows) * self.ways

    def split_k(self, index: Int) -> Int:
        """Blocks that share a tile."""
        return materialize[SPLIT_COUNTS]()[index % self.ways]

    def row(self, index: Int) -> Int:
        """A candidate's row of the table."""
        return self.rows[index // self.ways]

    def config(self, index: Int) -> Sm90Config:
        """A candidate's configuration."""
        return self.offered[index // self.ways].config

    def refusal(self, index: Int) -> Optional[String]:
        """Why a candidate cannot run the problem, or would leave
        multiprocessors without a tile for nothing; or the model does not choose
        it."""
        if self.offered[index // self.ways].only_tuned:
            return String(
                "this configuration is chosen where it was measured alone"
            )
        var refusal = self.config_refusal(
            self.config(index), self.split_k(index)
        )
        return refusal if refusal else self.refusals[index // self.ways]

    def tuned(self) -> Optional[Found]:
        """What measurements chose for the problem on this device, if they have,
        and it is offered and can run it."""
        var choice = tuned_choice(
            self.problem, self.types, self.work, self.device
        )
        if not choice:
            return None
        ref row, split_k = choice.value()
        for i in range(len(self.rows)):
            if self.rows[i] != row:
                continue
            if self.config_refusal(self.offered[i].config, split_k):
                return None
            for index in range(i * self.ways, (i + 1) * self.ways):
                if self.split_k(index) == split_k:
                    return Found(index, self.cost(index), String(""))
        return None

    def config_refusal(
        self, config: Sm90Config, split_k: Int
    ) -> Optional[String]:
        """`refusal` of a configuration that need not be in the table.

        Args:
            config: The configuration.
            split_k: Blocks that share a tile.
        """
        var refusal = problem_refusal(
            config,
            self.traversal,
            self.types.output,
            whole_pieces=not self.any_filters,
        )
        if not refusal:
            refusal = _idle_refusal(config, self.traversal)
        if refusal or split_k == 1:
            return refusal
        refusal = split_refusal(config, self.traversal, split_k)
        if refusal:
            return refusal
        var clusters = tile_clusters(config, self.traversal) * split_k
        if clusters > 2 * self.device.units:
            return String(
                t"split_k: {clusters} blocks are more than two for each of"
                t" {self.device.units} multiprocessors"
            )
        return None

    def unaligned_refusal(self) -> Optional[String]:
        """Why a problem's pixels are not for the rows that take unaligned ones,
        or None."""
        var output = self.traversal.output_refusal(
            element_bytes(self.types.output)
        )
        if output and not self.any_filters:
            return output
        if self.problem.channels <= STEM_CHANNELS:
            return String(
                t"unaligned takes more than {STEM_CHANNELS} channels; here"
                t" {self.problem.channels}"
            )
        if output or self.traversal.channel_refusal():
            return None
        return String(
            t"unaligned takes pixels that are no multiples of {COPY_BYTES}"
            t" bytes, which those of {self.problem.channels} channels and of"
            t" {self.problem.filters} filters are"
        )

    def cost(self, index: Int) -> Float64:
        """The model's time, in seconds.

        Args:
            index: Of a candidate that does not refuse.
        """
        ref row = self.offered[index // self.ways]
        return row.correction * self.config_cost(
            row.config, self.split_k(index)
        )

    def config_cost(self, config: Sm90Config, split_k: Int) -> Float64:
        """The model's time of a configuration that need not be in the table, in
        seconds.

        Args:
            config: The configuration, which `config_refusal` does not refuse.
            split_k: Blocks that share a tile.
        """
        return predicted_seconds(
            config,
            self.problem,
            self.traversal,
            self.device.units,
            split_k,
            self.types,
            self.work,
        )

    def plan(self, found: Found, *, tuned: Bool = False) raises -> GemmPlan:
        """How to run the problem with what `cheapest` found.

        Args:
            found: The candidate.
            tuned: Whether measurements have found it.

        Raises:
            If there is none: why.
        """
        if found.index < 0:
            raise Error(t"sm90: {found.refusal}; problem {self.problem}")
        return GemmPlan(
            self.config(found.index),
            self.traversal,
            self.device,
            candidate=self.row(found.index),
            split_k=self.split_k(found.index),
            seconds=found.cost,
            tuned=tuned,
            work=self.work,
        )


def gemm_refusal(
    problem: ConvProblem,
    operands: Operands,
    device: Device,
    *,
    unaligned: Bool = False,
) -> Optional[String]:
    """Why no candidate can run a problem, or None.

    Args:
        problem: The convolution, valid.
        operands: Its operands.
        device: The device.
        unaligned: Whether to look at what runs problems whose pixels are no
            whole pieces.
    """
    var table = GemmCandidates(problem, operands, device, unaligned=unaligned)
    var refusal: Optional[String]
    if unaligned:
        refusal = table.unaligned_refusal()
    else:
        refusal = table.traversal.refusal(0)
        if not refusal:
            # Of every row; that of the last may be that the model does not choose it.
            refusal = table.traversal.output_refusal(
                element_bytes(operands.types.output)
            )
    return refusal if refusal else refusal_of_all(table)


def plan_gemm(
    problem: ConvProblem,
    operands: Operands,
    device: Device,
    *,
    unaligned: Bool = False,
) raises -> GemmPlan:
    """The candidate that was measured to be fastest, or else that the model finds
    fastest.

    Args:
        problem: The convolution, with at least one output.
        operands: Its operands.
        device: The device.
        unaligned: Whether to look at what runs problems whose pixels are no
            whole pieces.

    Raises:
        If no candidate can run the problem: why.
    """
    var table = GemmCandidates(problem, operands, device, unaligned=unaligned)
    var measured = table.tuned()
    if measured:
        return table.plan(measured.value(), tuned=True)
    return table.plan(cheapest(table))


def _idle_refusal(config: Sm90Config, traversal: Traversal) -> Optional[String]:
    """Why blocks of a cluster would have no filters, or None. Loads beyond the
    filter are slow, and the block that shares activations waits for them."""
    var tiles = ceildiv(traversal.filters, config.block_tile_shape[1])
    if tiles % config.cluster_shape[1] == 0:
        return None
    return String(
        t"cluster_shape: {config.cluster_shape[1]} blocks along N, but"
        t" {traversal.filters} filters are {tiles} tiles"
    )
