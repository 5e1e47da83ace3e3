"""Rewrites a traced model: each convolution, with what follows it, becomes one call of a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .._subpixel import saves_products
from ..activations import NONE, ActivationSpec
from ._activations import as_argument
from ._folding import fold_computed
from ._formats import restore_formats
from ._fuse_norms import fuse_group_norms
from ._loading import guard, mark_normalized
from ._modules import _Conv
from ._patterns import (
    Addition,
    Normalization,
    activation_of,
    addition_of,
    is_identity,
    is_metadata,
    is_metadata_of_input,
    module_of,
    mutates,
    normalization_of,
    upsampling_of,
)
from ._report import ConversionReport, Left, Replaced
from ._sites import Refused, Site, find, fold, operands

__all__ = ["fuse"]


def fuse(
    model: GraphModule, prefix: str, channels_last: bool, whole: bool, report: ConversionReport
) -> None:
    """Replaces the convolutions of a traced model, with what can be fused into each, in place.

    Args:
        model: The model.
        prefix: What to put in front of names in the report.
        channels_last: Whether the replacements' outputs are channels last whatever their inputs
            are.
        whole: Whether nothing but the user reads what the model returns.
        report: Gets what was replaced and what was left, in the model's order.
    """
    fuser = _Fuser(model, prefix, channels_last)
    fuser.run(whole)
    report.replaced += reversed(fuser.replaced())
    report.left += reversed(fuser.left)


@dataclass
class _Chain:
    """A convolution and what follows it, as far as one kernel does it all."""

    node: Node
    site: Site
    path: str
    tail: Node = field(init=False)
    members: list[Node] = field(init=False)
    fused: list[str] = field(default_factory=list)
    note: str = ""
    refused: Node | None = None
    """The addition that the note is about."""
    activation: ActivationSpec = NONE
    final: ActivationSpec = NONE
    addition: Addition | None = None
    asides: list[Node] = field(default_factory=list)
    """Nodes that read what is not the kernel's to compute: a shape, a dtype."""
    place: Node = field(init=False)
    """Where the kernel is called: at the convolution, or where its residual is added."""

    def __post_init__(self) -> None:
        self.tail = self.place = self.node
        self.members = [self.node]

    @property
    def input(self) -> Node:
        """What the convolution reads."""
        given: Node = _input_of(self.site)
        return given

    @property
    def takes_norm(self) -> bool:
        """Whether nothing but normalizations was taken yet."""
        return not self.activation.kind and self.addition is None

    @property
    def takes_activation(self) -> bool:
        """Whether an activation has a place in the kernel."""
        return self.takes_norm or (self.addition is not None and not self.final.kind)

    @property
    def takes_addition(self) -> bool:
        """Whether a residual has a place in the kernel."""
        if isinstance(self.site.module, _Conv) and self.site.module.upsample != 1:
            return False
        return self.addition is None and (self.site.adds or self.site.module is None)

    def take(self, nodes: Iterable[Node], what: str) -> None:
        """Makes nodes that follow the tail part of the chain."""
        self.members += nodes
        self.tail = self.members[-1]
        self.fused.append(what)


def _input_of(site: Site) -> Any:
    return site.args[0] if site.args else site.kwargs["input"]


class _Fuser:
    def __init__(self, model: GraphModule, prefix: str, channels_last: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.prefix = prefix
        self.channels_last = channels_last
        self.modules = dict(model.named_modules())
        self.calls = Counter(node.target for node in self.graph.nodes if node.op == "call_module")
        # Both in the reverse of the model's order.
        self.chains: list[_Chain] = []
        self.left: list[Left] = []
        self.taken: set[Node] = set()
        self.forced: set[Node] = set()
        self.reasons: dict[Node, str] = {}

    def run(self, whole: bool) -> None:
        computed = [operand for node in self.graph.nodes for operand in operands(node)]
        fold_computed(self.model, self.modules, computed)
        # Backwards, so that of two convolutions that are added the later one adds the other's
        # output: then neither moves past the other.
        for node in reversed(list(self.graph.nodes)):
            site = find(self.model, self.modules, node)
            path = self._path(node)
            if isinstance(site, Refused):
                self.left.append(Left(path, site.kind, site.reason))
            elif site is not None:
                enlarged = self._enlarged(node, site)
                chain = _Chain(node, site if enlarged is None else enlarged, path)
                if enlarged is not None:
                    chain.fused.append("upsample")
                self._grow(chain)
                self._emit(chain)
        self._report_norms()
        norms = fuse_group_norms(self.model, self.modules)
        if self.channels_last:
            self._allow_strides()
            restore_formats(self.model, self.forced, norms, whole)
        self._drop_unused()
        self.graph.lint()
        self.model.recompile()

    def replaced(self) -> list[Replaced]:
        """Returns what is done now, in the reverse of the model's order."""
        return [
            Replaced(
                chain.path,
                chain.site.kind,
                tuple(chain.fused),
                # What one convolution could not add, another one may have.
                "" if chain.refused in self.taken else chain.note,
            )
            for chain in self.chains
        ]

    def _path(self, node: Node) -> str:
        return f"{self.prefix}{node.target if node.op == 'call_module' else node.name}"

    def _report_norms(self) -> None:
        for node in reversed(self.graph.nodes):
            found = normalization_of(node, self.model, self.modules)
            if found is None:
                continue
            reason = found if isinstance(found, str) else self.reasons.get(node)
            reason = reason or "no convolution is in front of it"
            self.left.append(Left(self._path(node), self._kind(node), reason))

    def _kind(self, node: Node) -> str:
        module = module_of(node, self.modules)
        return "batch_norm" if module is None else type(module).__name__

    # What is in front ---------------------------------------------------------------------------

    def _enlarged(self, node: Node, site: Site) -> Site | None:
        """Returns a convolution that also enlarges its input, if an enlargement is in front."""
        module, given = site.module, _input_of(site)
        if not isinstance(module, _Conv) or not isinstance(given, Node):
            return None
        found = upsampling_of(given, self.modules, site.rank)
        if found is None or module.padding_mode != "zeros" or set(module.stride) != {1}:
            return None
        channels = module.in_channels // module.groups
        if not saves_products(found.factors, module.kernel_size, module.dilation, channels):
            return None
        if any(user is not node and not is_metadata_of_input(user) for user in given.users):
            return None
        if self._writer_between(given, node) is not None:
            return None
        module.upsample = found.factors
        given.replace_all_uses_with(found.image)
        self.graph.erase_node(given)
        if site.args:
            return replace(site, args=(found.image, *site.args[1:]))
        return replace(site, kwargs={**site.kwargs, "input": found.image})

    # Growing a chain ----------------------------------------------------------------------------

    def _grow(self, chain: _Chain) -> None:
        """Takes node after node into the chain."""
        node, passed = chain.tail, list[Node]()
        while True:
            users = [user for user in node.users if not is_metadata(user)]
            if len(users) != 1:
                self._explain_users(chain, node)
                return
            (user,) = users
            for aside in [aside for aside in node.users if aside is not user]:
                if is_metadata_of_input(aside):
                    aside.replace_input_with(node, chain.input)
                else:
                    chain.asides.append(aside)
            # What hands its input on is taken with what follows it, if that is taken.
            passed.append(user)
            if not is_identity(user, self.modules):
                if not self._take(chain, user, node, passed):
                    return
                passed = []
            node = user

    def _explain_users(self, chain: _Chain, node: Node) -> None:
        for user in node.users:
            if normalization_of(user, self.model, self.modules) is not None:
                takes = chain.takes_norm
                self.reasons[user] = f"{chain.path}, in front of it, has other readers too"
            elif activation_of(user, self.modules) is not None:
                takes = chain.takes_activation
            else:
                takes = chain.takes_addition and isinstance(addition_of(user, node), Addition)
            if takes:
                chain.note = f"{len(node.users)} nodes read its output"

    def _take(self, chain: _Chain, user: Node, node: Node, passed: list[Node]) -> bool:
        """Takes the reader of ``node``, as the last of ``passed``, if the kernel can do it."""
        norm = normalization_of(user, self.model, self.modules, chain.site.rank)
        if norm is not None:
            return user.args[0] is node and self._take_norm(chain, user, norm, passed)
        spec = activation_of(user, self.modules)
        if spec is not None:
            if not chain.takes_activation:
                return False
            if chain.addition is None:
                chain.activation = spec
            else:
                chain.final = spec
            chain.take(passed, spec.kind.name.lower())
            return True
        added = addition_of(user, node)
        if added is None or not chain.takes_addition:
            return False
        reason = added if isinstance(added, str) else self._why_not_moved(chain, user)
        if isinstance(added, str) or reason:
            chain.note, chain.refused = f"no residual: {reason}", user
            return False
        chain.addition, chain.place = added, user
        chain.take(passed, "residual")
        return True

    def _take_norm(
        self, chain: _Chain, user: Node, found: Normalization | str, passed: list[Node]
    ) -> bool:
        if isinstance(found, str):
            self.reasons[user] = found
        elif chain.site.module is None:
            self.reasons[user] = f"the weight of {chain.path} is computed in the model"
        elif not chain.takes_norm:
            self.reasons[user] = f"it follows {chain.fused[-1]}, not the convolution itself"
        else:
            fold(chain.site.module, found)
            mark_normalized(chain.site.module)
            chain.take(passed, f"{found.name} {self._path(user)}")
            return True
        return False

    def _why_not_moved(self, chain: _Chain, last: Node) -> str:
        """Returns why the convolution cannot be done where its residual is added."""
        if chain.site.module is None:
            return "its weight is computed in the model"
        if chain.asides:
            return f"{chain.asides[0].name} reads its shape before"
        writer = self._writer_between(chain.node, last, chain.members)
        return "" if writer is None else f"{writer.name}, in between, may write to a tensor"

    def _writer_between(self, first: Node, last: Node, passed: Sequence[Node] = ()) -> Node | None:
        """Returns a node between two others that may write to a tensor, but for some."""
        node = first.next
        while node is not last:
            passes = node in passed or is_identity(node, self.modules)
            if not passes and mutates(node, self.modules):
                return node
            node = node.next
        return None

    # Writing the result -------------------------------------------------------------------------

    def _emit(self, chain: _Chain) -> None:
        """Puts one call in the place of a chain's nodes."""
        module, site = chain.site.module, chain.site
        with self.graph.inserting_before(chain.place):
            if module is None:
                new = self._emit_function(chain)
            else:
                module.activation = chain.activation
                keywords: dict[str, Any] = dict(site.kwargs)
                if isinstance(module, _Conv):
                    module.final_activation = chain.final
                if chain.addition is not None:
                    keywords["residual"] = chain.addition.residual
                    if chain.addition.beta != 1.0:
                        keywords["beta"] = chain.addition.beta
                    assert isinstance(module, _Conv)
                    module.unequal_residual = "add_" if chain.addition.in_place else "add"
                guard(module)
                target = self._add(chain.node, module)
                new = self.graph.call_module(target, site.args, keywords)
                if self.channels_last:
                    # Otherwise the model as it was gave channels-last tensors itself.
                    if module.channels_last == "input":
                        self.forced.add(new)
                    module.channels_last = "always"
        chain.tail.replace_all_uses_with(new)
        for aside in chain.asides:
            aside.args = (new, *aside.args[1:])
        for member in reversed(chain.members):
            self.graph.erase_node(member)
        self.taken.update(chain.members)
        self.chains.append(chain)

    def _emit_function(self, chain: _Chain) -> Node:
        keywords = dict(chain.site.kwargs)
        if chain.activation.kind:
            keywords["activation"] = as_argument(chain.activation)
        assert chain.site.function is not None
        return self.graph.call_function(chain.site.function, chain.site.args, keywords)

    def _add(self, node: Node, module: nn.Module) -> str:
        """Puts a module where the convolution's was, or under the name of its function's node."""
        base = path = str(node.target if node.op == "call_module" else node.name)
        if node.op != "call_module" or self.calls[node.target] > 1:
            number = 0
            while path in self.modules or hasattr(self.model, path):
                number += 1
                path = f"{base}_{number}"
        self.model.add_submodule(path, module)
        self.modules[path] = module
        return path

    def _allow_strides(self) -> None:
        """Lets reshape stand for view, which refuses what channels last makes of some tensors."""
        for node in self.graph.nodes:
            if node.op != "call_method" or node.target not in ("view", "view_as"):
                continue
            to_dtype = any(isinstance(argument, torch.dtype) for argument in node.args)
            if to_dtype or "dtype" in node.kwargs:
                continue
            (base, *_) = node.args
            assert isinstance(base, Node)
            if not any(mutates(user, self.modules) for user in (*node.users, *base.users)):
                node.target = "reshape" if node.target == "view" else "reshape_as"

    def _drop_unused(self) -> None:
        """Removes what only replaced nodes used."""
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for name in [name for name, _ in self.model.named_parameters(recurse=False)]:
            if name not in used:
                delattr(self.model, name)
        self.model.delete_all_unused_submodules()
