"""``torch.compile(model, backend="maxconv")``: Inductor, with maxconv's convolutions."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ._aten import CONVOLUTION, KEPT, value
from ._constants import Constants, keep_weights
from ._inline import Decompositions, decompose
from ._layouts import prefer_channels_last
from ._rewrite import encode, replace_convolutions

__all__ = ["backend", "register"]

#: What PyTorch knows the backend by.
_NAME: Final = "maxconv"

_log = logging.getLogger("maxconv.torch")


class _OtherwiseError(Exception):
    """A graph needs gradients, or does not, unlike what was expected."""


def backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo's, for ``torch.compile(model, backend="maxconv")``.

    In a graph that needs no gradients, convolutions become maxconv's, each with the eval-mode
    BatchNorm, the activation, the residual and the activation behind it that follow it. Inductor
    compiles the rest. The logger ``maxconv.torch`` says at level ``INFO`` what was replaced, what
    was left, and why.

    Args:
        model: The graph.
        inputs: What stands for its inputs.
        mode: Inductor's: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or
            ``"max-autotune-no-cudagraphs"``.
        options: Inductor's, and ``"inductor"``: with ``False`` PyTorch's own kernels run the rest,
            and no compiler is needed.

    Returns:
        What runs the graph.

    Raises:
        TypeError: ``inductor`` is no bool.
        ValueError: ``freezing`` is asked for.
        RuntimeError: Inductor does not know the mode or an option.
    """
    # Importing torch imports none of these.
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    patches, generates = _read_options(mode, options)
    with inductor_config.patch(patches):
        table = select_decomp_table()
    whole = {target: rule for target, rule in table.items() if target not in KEPT}
    need = _what_needs_gradients(model, inputs)
    ours = partial(_without_gradients, table, generates)
    theirs = partial(_with_gradients, need)
    # PyTorch's cache of whole compilations knows a graph, but not its backend.
    with functorch_config.patch(enable_autograd_cache=False):
        # Whether a graph needs gradients shows when it is traced.
        for inner in (theirs, ours) if need and torch.is_grad_enabled() else (ours, theirs):
            try:
                compiled: Any = compile_fx(
                    model,
                    inputs,
                    inner_compile=inner,
                    config_patches=patches,
                    decompositions=whole if inner is ours else None,
                )
                return cast(Callable[..., Any], compiled)
            except _OtherwiseError:
                continue
    raise AssertionError("a graph needs gradients or needs none")


def _reset() -> None:
    """Forgets CUDA graphs; ``torch.compiler.reset()`` calls it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


cast(Any, backend).reset = _reset


def register() -> None:
    """Has ``torch.compile`` find the backend by its name where no installation does it."""
    if not entry_points(group="torch_dynamo_backends", name=_NAME):
        from torch._dynamo import register_backend

        register_backend(backend, name=_NAME)


def _read_options(
    mode: str | None, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], bool]:
    """Returns Inductor's configuration, and whether it generates code."""
    from torch._inductor import config

    others = dict(options or {})
    generates = others.pop("inductor", True)
    if not isinstance(generates, bool):
        kind = type(generates).__name__
        raise TypeError(f"options: inductor={generates!r} is a {kind}; True and False are allowed")
    # As PyTorch reads them for its own backend.
    reader: Any = torch._TorchCompileInductorWrapper
    patches: dict[str, Any] = reader(mode, others, None).config
    if patches.get("freezing", config.freezing):
        raise ValueError(
            "options: freezing=True would take the convolutions away from maxconv, which packs "
            "constant weights itself; False is allowed"
        )
    return patches, generates


# With gradients ---------------------------------------------------------------------------------


def _what_needs_gradients(model: GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Returns the names of a graph's tensors that require grad."""
    nodes = model.graph.find_nodes(op="placeholder")
    names = [
        _source(node)
        for node, tensor in zip(nodes, inputs, strict=False)
        if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    return names + [name for name, tensor in model.named_parameters() if tensor.requires_grad]


def _source(node: Node) -> str:
    """Returns where a graph's input is from, as ``L['self']._parameters['weight']``."""
    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)


def _with_gradients(need: list[str], model: GraphModule, inputs: Any, **others: Any) -> Any:
    """Compiles a graph as Inductor does."""
    from torch._inductor.compile_fx import compile_fx_inner

    count = len(model.graph.find_nodes(op="call_function", target=CONVOLUTION))
    if count and others.get("is_inference"):
        raise _OtherwiseError
    if count and not others.get("is_backward"):
        _warn(count, need)
    return compile_fx_inner(model, inputs, **others)


_warned = False


def _warn(count: int, need: list[str]) -> None:
    global _warned
    _log.info("%d convolutions left: gradients are needed for %s", count, ", ".join(need))
    if _warned:
        return
    _warned = True
    more = f" and {len(need) - 1} more" if len(need) > 1 else ""
    warnings.warn(
        f"backend='maxconv': gradients are needed for {need[0]}{more}, and maxconv computes none: "
        "PyTorch's own convolutions run this graph, and all others that need gradients; call the "
        "model under torch.no_grad() or torch.inference_mode() for maxconv's",
        stacklevel=2,
    )


# Without ----------------------------------------------------------------------------------------


def _without_gradients(
    table: Decompositions, generates: bool, model: GraphModule, inputs: Sequence[Any], **others: Any
) -> Any:
    """Replaces a graph's convolutions, and compiles the rest."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    if not others.get("is_inference"):
        raise _OtherwiseError
    static = others.get("static_input_idxs", ())
    captured = generates and config.triton.cudagraphs
    fake_mode: Any = detect_fake_mode(inputs)
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        constants = _rewrite(model, static, captured, table)
    kept = _drop_unused(model.graph, len(inputs))
    nodes = model.graph.find_nodes(op="placeholder")[len(kept) :]
    fixed = set(static)
    static = [place for place, old in enumerate(kept) if old in fixed]
    inputs = [*(inputs[old] for old in kept), *(node.meta["val"] for node in nodes)]
    model.recompile()
    if generates:
        others["static_input_idxs"] = [*static, *range(len(kept), len(inputs))]
        if "get_decomp_fn" in others:
            others["get_decomp_fn"] = select_decomp_table
        run: Any = compile_fx_inner(model, inputs, **others)
    else:
        run = partial(_interpret, model)
    return _boxed(run, kept, constants)


def _rewrite(
    model: GraphModule, static_places: Sequence[int], captured: bool, table: Decompositions
) -> Constants | None:
    """Does all that is done to a graph; its new inputs are the constants that it returns."""
    graph = model.graph
    report = replace_convolutions(graph)
    _log.info("%s", report)
    constants = keep_weights(graph, static_places, captured)
    prefer_channels_last(graph)
    decompose(graph, KEPT, table)
    encode(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return constants


def _drop_unused(graph: Graph, count: int) -> list[int]:
    """Erases those of a graph's first inputs that nothing reads, and returns the others' places.

    Parameters are the most of a graph's inputs, and each costs time in every call.
    """
    kept = []
    for place, node in enumerate(graph.find_nodes(op="placeholder")[:count]):
        # An integer may be what a size is called by.
        if node.users or not isinstance(value(node), Tensor):
            kept.append(place)
        else:
            graph.erase_node(node)
    return kept


def _interpret(model: GraphModule, inputs: list[Any]) -> Any:
    results = model(*inputs)
    inputs.clear()
    return results


def _boxed(
    run: Callable[[list[Any]], Any], kept: Sequence[int], constants: Constants | None
) -> Any:
    """Returns what takes a list of the graph's first inputs, and clears it."""

    def boxed(inputs: list[Any]) -> Any:
        given = [inputs[place] for place in kept]
        if constants is not None:
            given += constants(inputs)
        inputs.clear()
        return run(given)

    cast(Any, boxed)._boxed_call = True
    return boxed
