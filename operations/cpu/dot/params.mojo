"""What the tasks of a dot-product launch read and write, and the place of a register
tile in a task's block."""

from std.collections import Optional

from ...conv.access import ActivationSource
from ...conv.fields import PANEL
from ...conv.memory import Reads, Writes
from ...conv.panels import PanelLayout
from ...conv.problem import ConvProblem
from ..epilogue import TileStore
from ..register_output import RegisterOutput
from .block_diagonal import BlockDiagonal
from .mma import FilterTile
from .scheduler import Block, Blocking


@fieldwise_init
struct DotParams[Source: ActivationSource](ImplicitlyCopyable, Movable):
    """What all tasks of a launch read.

    Parameters:
        Source: How the activation is reached.
    """

    var activation: Self.Source
    var filter: Reads[Self.Source.dtype]
    """Packed."""
    var zero_point: Int32
    """Of the activation."""
    var panel: PanelLayout
    """The order of a panel's elements, as it is multiplied."""
    var diagonal: Optional[BlockDiagonal]
    """The packed panels, if groups share them and are multiplied as one."""
    var output: TileStore
    var stored: Optional[RegisterOutput[Self.Source.dtype]]
    """The output, if register tiles may store it themselves."""
    var problem: ConvProblem
    """As the unit multiplies it, see `multiplied_problem`."""
    var blocking: Blocking
    var images_inside: Bool
    """The order of the tasks, see `Block`."""


@fieldwise_init
struct DotScratch[dtype: DType](ImplicitlyCopyable, Movable):
    """A worker's memory.

    Parameters:
        dtype: Of the activations.
    """

    var sums: Writes[DType.float32]
    var offsets: Writes[DType.int32]
    var block: Writes[Self.dtype]
    """What is copied of activations, of each group of a task."""
    var rows: Writes[Self.dtype]
    """Rows that are copied of a block which is not finite."""
    var filter: Writes[Self.dtype]
    """Panels that are widened, few filters one behind the other, or a
    block-diagonal panel."""


@fieldwise_init
struct Place(ImplicitlyCopyable, Movable):
    """Where a register tile lies in its block."""

    var panel: Int
    """The first."""
    var panels: Int
    var line: Int
    """The first."""
    var lines: Int
    var first: Int
    """Position of each line."""
    var rows: Int
    """Positions of each line."""
    var stage: Int
    """The buffer of its sums."""


@always_inline
def filter_tile(
    params: DotParams, block: Block, panel: Int, panels: Int
) -> FilterTile[params.Source.dtype]:
    """Some packed panels of a block, from its `panel`th on."""
    ref problem = params.problem
    var elements = params.panel.elements()
    if params.diagonal:
        elements = params.diagonal.value().packed.elements()
    var first = block.group * problem.panels() + block.panel + panel
    return FilterTile[params.Source.dtype](
        params.filter.unsafe_offset(first * elements),
        elements,
        problem.panel_filters(block.panel + panel, panels),
    )
