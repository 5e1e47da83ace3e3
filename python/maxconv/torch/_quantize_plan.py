"""Which tensors of a converted model become 8-bit integers, and which of them share a scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .._calibration import Quantization
from .._fields import Activation
from ._commuting import inputs_of, is_channelwise
from ._dtypes import DTYPES
from ._excitation import Product, is_mean
from ._modules import _Conv
from ._patterns import is_metadata, module_of, mutates
from ._quantize_forms import Form, as_convolution

__all__ = ["Layer", "Place", "Plan"]


@dataclass
class Means:
    """The mean of each channel of some images."""

    total: Tensor | float = 0.0
    """The sum of each channel's values, float64."""
    count: int = 0
    """How many values of a channel there are."""

    def observe(self, images: Tensor) -> None:
        """Takes images ``[N, C, *spatial]`` into account."""
        values = images.detach().transpose(0, 1).flatten(1)
        self.total = self.total + values.sum(1, dtype=torch.float64)
        self.count += values.shape[1]

    @property
    def mean(self) -> Tensor:
        """``[C]``, float64."""
        assert isinstance(self.total, Tensor)
        return self.total / self.count


#: Activations of which a multiple is the activation of that multiple.
_HOMOGENEOUS = (Activation.NONE, Activation.RELU, Activation.LEAKY_RELU)


@dataclass(eq=False)
class Place:
    """Tensors that share a scale and a zero point."""

    observed: list[Node]
    """Whose values decide: every element of the tensors is one of theirs."""
    members: set[Node]
    """Nodes that give integers; none where floats are made integers in front of convolutions."""
    readers: list[Layer] = field(default_factory=list)
    """Convolutions whose input it is."""
    adders: list[Layer] = field(default_factory=list)
    """Convolutions whose residual it is."""
    makers: list[Layer] = field(default_factory=list)
    """Convolutions that give it."""
    per_tensor: str = ""
    """Why channels cannot have scales of their own."""
    quantization: Quantization | None = None

    @property
    def rank(self) -> int:
        """Spatial dimensions of the tensors, if the channels have scales of their own."""
        return self.readers[0].conv.rank if self.readers else 0


@dataclass(eq=False)
class Layer:
    """A convolution of integers."""

    name: str
    """Its path in the model."""
    node: Node
    conv: _Conv
    input: Node
    residual: Node | None
    beta: float
    form: Form | None = None
    """What is around the convolution where it computes another layer."""
    product: Product | None = None
    """What it is, where it is none: the convolution is then that of the image."""
    factor: Node | None = None
    """The numbers of a product."""
    means: Means = field(default_factory=Means)
    """Of its input, in the convolution's form."""
    before: Place = field(init=False)
    """Of its input."""
    beside: Place | None = None
    """Of its residual, where that consists of integers somewhere."""
    after: Place | None = None
    """Of its output; ``None`` where that consists of floats."""

    @property
    def kind(self) -> str:
        """What it was."""
        if self.form is not None:
            return self.form.kind
        return type(self.product or self.conv).__name__

    def observe(self, x: Tensor) -> None:
        """Takes an input into account."""
        if self.form is not None:
            x = self.form.enter(x)
        self.means.observe(x if x.dim() == self.conv.rank + 2 else x.unsqueeze(0))

    @property
    def adds_integers(self) -> bool:
        """Whether the residual is read as integers: it has the output's type."""
        return self.residual is not None and self.after is not None


class Plan:
    """What becomes of a traced model.

    A convolution gives integers if all that read its output, also behind what only moves elements,
    are convolutions of integers. Floats become integers in front of each convolution that reads
    them.

    Args:
        model: A traced model, whose convolutions are maxconv's.
        prefix: What to put in front of names.
        kept: Names of convolutions that stay as they are.
        name: Of a model that is one convolution.
    """

    def __init__(
        self, model: GraphModule, prefix: str, kept: Collection[str], name: str | None = None
    ) -> None:
        self.model = model
        self.modules: Mapping[str, nn.Module] = dict(model.named_modules())
        self.layers: dict[Node, Layer] = {}
        self.places: list[Place] = []
        calls = Counter(n.target for n in model.graph.nodes if n.op == "call_module")
        #: Modules whose parameters the graph reads besides calling them.
        self.read = {
            str(n.target).rpartition(".")[0] for n in model.graph.nodes if n.op == "get_attr"
        }
        for node in model.graph.nodes:
            layer = self._layer(node, f"{prefix}{node.target}" if name is None else name)
            if layer is not None and layer.name not in kept and calls[node.target] == 1:
                self.layers[node] = layer
        self.means = [node for node in model.graph.nodes if is_mean(node, self.modules)]
        #: Whether a tensor may be written to between two of its readers.
        self.writes = any(mutates(node, self.modules) for node in model.graph.nodes)
        self.moving = {
            node: found
            for node in model.graph.nodes
            if (found := inputs_of(node, self.modules)) is not None
        }
        self.of_node: dict[Node, Place] = {}
        """The place of each node that gives integers."""
        self._join()
        self.entries: dict[Node, Place] = {}
        """The place of each node whose floats become integers in front of convolutions."""
        self._connect()
        for place in self.places:
            place.per_tensor = self._why_per_tensor(place)

    def _layer(self, node: Node, name: str) -> Layer | None:
        conv: nn.Module | None = module_of(node, self.modules)
        if isinstance(conv, Product):
            return self._product(node, name, conv)
        form = None
        if not isinstance(conv, _Conv):
            other = None if str(node.target) in self.read else as_convolution(conv, _given(node))
            if other is None:
                return None
            conv, form = other
        if conv.weight.dtype not in DTYPES:
            return None
        given = node.args[0] if node.args else node.kwargs.get("input")
        residual = node.kwargs.get("residual", node.args[1] if len(node.args) > 1 else None)
        beta = node.kwargs.get("beta", 1.0)
        known = isinstance(given, Node) and isinstance(beta, int | float)
        if not known or not (residual is None or isinstance(residual, Node)):
            return None
        assert isinstance(given, Node) and isinstance(beta, int | float)
        return Layer(name, node, conv, given, residual, float(beta), form)

    def _product(self, node: Node, name: str, product: Product) -> Layer | None:
        x, factor = node.args
        image = self.layers.get(x)  # type: ignore[arg-type] # a node
        if image is None or not isinstance(factor, Node):
            return None
        conv, given = image.conv, image.node
        return Layer(name, node, conv, given, None, 1.0, product=product, factor=factor)

    # Which give integers ------------------------------------------------------------------------

    def _join(self) -> None:
        """Puts nodes that must share a scale together, and finds the places that are integers."""
        parents: dict[Node, Node] = {}

        def root(node: Node) -> Node:
            while node in parents:
                node = parents[node]
            return node

        for node, inputs in self.moving.items():
            for x in inputs:
                if (x in self.layers or x in self.moving) and root(x) is not root(node):
                    parents[root(x)] = root(node)
        groups: dict[Node, list[Node]] = {}
        for node in self.model.graph.nodes:
            if node in self.layers or node in self.moving:
                groups.setdefault(root(node), []).append(node)
        whole = [
            members
            for members in groups.values()
            if any(node in self.layers for node in members)
            and all(self._may_be_integers(node) for node in members)
        ]
        while True:
            integral = {node for members in whole for node in members}
            wanted = [members for members in whole if self._are_wanted(members, integral)]
            if len(wanted) == len(whole):
                break
            whole = wanted
        for members in whole:
            makers = [self.layers[node] for node in members if node in self.layers]
            entering = {
                x for node in members for x in self.moving.get(node, ()) if x not in members
            }
            place = Place([*(m.node for m in makers), *entering], set(members), makers=makers)
            self.places.append(place)
            self.of_node.update(dict.fromkeys(members, place))
            for maker in makers:
                maker.after = place

    def _are_wanted(self, members: Collection[Node], integral: Collection[Node]) -> bool:
        """Whether somebody reads integers: not only sums whose results are floats."""
        readers = {self.layers[u] for node in members for u in node.users if u in self.layers}
        return any(layer.input in members or layer.node in integral for layer in readers)

    def _may_be_integers(self, node: Node) -> bool:
        """Whether all readers of a node take integers."""
        return all(self._takes_integers(node, user) for user in node.users)

    def _takes_integers(self, node: Node, user: Node) -> bool:
        if user in self.layers:
            return self.layers[user].factor is not node
        if is_metadata(user):
            return not (user.args[1:] and user.args[1] == "dtype")
        if user in self.means:
            return True
        return user in self.moving and node in self.moving[user]

    def _connect(self) -> None:
        """Gives every convolution the places of its input and residual."""
        for layer in self.layers.values():
            layer.before = self._entry(layer.input)
            layer.before.readers.append(layer)
            if layer.residual is None:
                continue
            if layer.after is not None or layer.residual in self.of_node:
                layer.beside = self._entry(layer.residual)
                layer.beside.adders.append(layer)

    def _entry(self, node: Node) -> Place:
        """Returns the place of a node that gives integers, or of one whose floats become some."""
        place = self.of_node.get(node) or self.entries.get(node)
        if place is None:
            place = self.entries[node] = Place([node], set())
            self.places.append(place)
        return place

    def moments(self, place: Place, node: Node) -> list[Node]:
        """Returns the nodes in front of which an observed node has the values of its place."""
        if node in self.layers and node in place.members:
            return [node.next]
        concerned = {*place.members, *(layer.node for layer in (*place.readers, *place.adders))}
        readers = [user for user in self.model.graph.nodes if user in node.users]
        readers = [user for user in readers if user in concerned]
        return readers if self.writes else readers[:1]

    # Scales for each channel --------------------------------------------------------------------

    def _why_per_tensor(self, place: Place) -> str:
        """Returns why the channels of a place cannot have scales of their own."""
        if place.adders:
            return f"it is the residual of {place.adders[0].name}"
        for node in place.members:
            if any(user in self.means for user in node.users):
                return "a mean reads it"
            if node not in self.layers and not is_channelwise(node, self.modules):
                return f"{node.name} moves elements from channel to channel"
        for layer in (*place.readers, *place.makers):
            if layer.form is not None or layer.product is not None:
                return f"{layer.name} is a {layer.kind}"
        if len({layer.conv.rank for layer in place.readers}) > 1:
            return "convolutions of several ranks read it"
        for layer in place.makers:
            if layer.residual is not None:
                return f"{layer.name} adds a residual"
            for spec in (layer.conv.activation, layer.conv.final_activation):
                if spec.kind not in _HOMOGENEOUS:
                    return f"scales do not pass {spec.kind.name.lower()} of {layer.name}"
        return ""


def _given(node: Node) -> list[object]:
    """Returns the arguments of a call, those with names too."""
    return [*node.args, *node.kwargs.values()]
