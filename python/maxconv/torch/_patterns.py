"""What a node of a traced model is, as far as a convolution's kernel can take it over."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..activations import NAMES, ActivationSpec, clamp, leaky_relu
from ._tracing import in_place, is_plain, unpacked

__all__ = [
    "Addition",
    "Normalization",
    "Upsampling",
    "activation_of",
    "addition_of",
    "is_identity",
    "is_metadata",
    "is_metadata_of_input",
    "module_of",
    "mutates",
    "normalization_of",
    "own_tensor",
    "upsampling_of",
]

#: Modules of a traced model by their paths.
Modules = Mapping[str, nn.Module]

_BATCH_NORMS: Final = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


def module_of(node: Node, modules: Modules) -> nn.Module | None:
    """Returns the module that a node calls."""
    return modules[str(node.target)] if node.op == "call_module" else None


#: Makes an activation of its parameters; ``None`` if kernels do not have it with these.
_Maker: TypeAlias = Callable[..., "ActivationSpec | None"]


# Activations ------------------------------------------------------------------------------------


def _gelu(approximate: str = "none") -> ActivationSpec | None:
    return {"none": NAMES["gelu"], "tanh": NAMES["gelu_tanh"]}.get(approximate)


def _clamp(min: float | None = None, max: float | None = None) -> ActivationSpec | None:
    low = -math.inf if min is None else min
    high = math.inf if max is None else max
    # Of an empty range PyTorch makes its maximum.
    return None if (min is None and max is None) or low > high else clamp(low, high)


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> ActivationSpec | None:
    return _clamp(min_val, max_val)


def _leaky_relu(negative_slope: float = 0.01) -> ActivationSpec | None:
    return leaky_relu(negative_slope)


def _named(name: str) -> _Maker:
    return lambda: NAMES[name]


#: What makes the activation of a module, and which of its attributes that takes.
_MODULES: Final[dict[type[nn.Module], tuple[_Maker, Sequence[str]]]] = {
    nn.ReLU: (_named("relu"), ()),
    nn.ReLU6: (_named("relu6"), ()),
    nn.Hardtanh: (_hardtanh, ("min_val", "max_val")),
    nn.LeakyReLU: (_leaky_relu, ("negative_slope",)),
    nn.Sigmoid: (_named("sigmoid"), ()),
    nn.SiLU: (_named("silu"), ()),
    nn.Hardswish: (_named("hardswish"), ()),
    nn.Hardsigmoid: (_named("hardsigmoid"), ()),
    nn.GELU: (_gelu, ("approximate",)),
    nn.Tanh: (_named("tanh"), ()),
}

#: By function or, as a string, by the name of a method of tensors.
_FUNCTIONS: Final[dict[Any, _Maker]] = {
    **dict.fromkeys(
        (functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"),
        _named("relu"),
    ),
    functional.relu6: _named("relu6"),
    **dict.fromkeys((functional.hardtanh, functional.hardtanh_), _hardtanh),
    **dict.fromkeys((functional.leaky_relu, functional.leaky_relu_), _leaky_relu),
    **dict.fromkeys(
        (functional.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"),
        _named("sigmoid"),
    ),
    functional.silu: _named("silu"),
    functional.hardswish: _named("hardswish"),
    functional.hardsigmoid: _named("hardsigmoid"),
    functional.gelu: _gelu,
    **dict.fromkeys((functional.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), _named("tanh")),
    **dict.fromkeys(
        (torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_"),
        _clamp,
    ),
}


def activation_of(node: Node, modules: Modules) -> ActivationSpec | None:
    """Returns the activation that a node computes, if kernels have it and it is known now."""
    module = module_of(node, modules)
    if module is not None:
        make, names = _MODULES.get(type(module), (None, ()))
        if make is None or not is_plain(module):
            return None
        return make(*(getattr(module, name) for name in names))
    if node.op not in ("call_function", "call_method"):
        return None
    make = _FUNCTIONS.get(node.target)
    if make is None:
        return None
    keywords = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    positional = list(node.args[1:])
    # In the functions that have it, ``inplace`` comes last.
    names = [*inspect.signature(make).parameters]
    if len(positional) > len(names) and isinstance(positional[-1], bool):
        positional.pop()
    if len(positional) > len(names) or not set(keywords) <= set(names):
        return None
    values = [*positional, *keywords.values()]
    if not all(value is None or isinstance(value, int | float | str) for value in values):
        return None
    arguments: dict[str, Any] = {**dict(zip(names, positional, strict=False)), **keywords}
    return make(**arguments)


# Additions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Addition:
    """``tail + beta * residual``."""

    residual: Node
    beta: float
    in_place: bool


def addition_of(node: Node, tail: Node) -> Addition | str | None:
    """Returns what a node adds to ``tail``, or why a kernel cannot; ``None`` if it adds nothing.

    Whether the shapes are equal shows at run time.
    """
    arguments = node.args
    if node.target is in_place and arguments[0] == "iadd":
        arguments = arguments[1:]
    elif node.target not in (operator.add, torch.add, "add", "add_"):
        return None
    writes = node.target in (in_place, "add_")
    if len(arguments) != 2 or not set(node.kwargs) <= {"alpha"}:
        return "an addition with other arguments than two tensors and alpha"
    left, right = arguments
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return "no other tensor is added"
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return "alpha is computed at run time"
    if left is tail:
        return Addition(right, float(alpha), writes)
    if writes:
        return "it is added in place to another tensor"
    if alpha != 1:
        return "it is scaled in the addition"
    return Addition(left, 1.0, writes)


# Enlargements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Upsampling:
    """Each pixel of an image, repeated."""

    image: Node
    factors: tuple[int, ...]
    """One a spatial dimension."""


#: Modes that repeat pixels where the factor is an integer.
_REPEATING: Final = ("nearest", "nearest-exact")


def upsampling_of(node: Node, modules: Modules, rank: int) -> Upsampling | None:
    """Returns the enlargement that a node computes by integers that are known now.

    Args:
        node: The node.
        modules: The model's.
        rank: Spatial dimensions.
    """
    module = module_of(node, modules)
    given: dict[str, Any]
    if module is not None:
        if type(module) not in (nn.Upsample, nn.UpsamplingNearest2d) or not is_plain(module):
            return None
        given = {name: getattr(module, name) for name in ("size", "scale_factor", "mode")}
        given |= dict(zip(("input",), node.args, strict=False)) | node.kwargs
    elif node.op == "call_function" and node.target is functional.interpolate:
        names = tuple(inspect.signature(functional.interpolate).parameters)
        given = {"size": None, "scale_factor": None, "mode": "nearest"}
        given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    else:
        return None
    image, factors = given.get("input"), given["scale_factor"]
    if not isinstance(image, Node) or given["size"] is not None or given["mode"] not in _REPEATING:
        return None
    each = tuple(factors) if isinstance(factors, tuple | list) else (factors,) * rank
    whole = all(isinstance(f, int | float) and f >= 1 and int(f) == f for f in each)
    return Upsampling(image, tuple(map(int, each))) if whole and len(each) == rank else None


# Normalizations and the rest --------------------------------------------------------------------


@dataclass(frozen=True)
class Normalization:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, by channels."""

    name: str
    """``BatchNorm2d`` for a module, ``batch_norm`` for a function."""
    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def normalization_of(
    node: Node, model: GraphModule, modules: Modules, rank: int | None = None
) -> Normalization | str | None:
    """Returns the normalization that a node computes, or why it cannot become part of a filter.

    Args:
        node: The node.
        model: The model whose node it is.
        modules: The model's.
        rank: Of the filter; ``None`` for any.
    """
    module = module_of(node, modules)
    if isinstance(module, _BatchNorm):
        return batch_norm(module, rank)
    if node.op == "call_function" and node.target is functional.batch_norm:
        return _function(node, model)
    return None


def batch_norm(module: _BatchNorm, rank: int | None = None) -> Normalization | str:
    """Returns what a module computes, or why it cannot become part of a filter of a rank."""
    name = type(module).__name__
    if type(module) not in _BATCH_NORMS:
        return f"a {name} may compute something else"
    if rank not in (None, _BATCH_NORMS[type(module)]):
        return f"a {name} after a {rank}-D convolution"
    if module.training:
        return "it is in training mode; call eval() first"
    if module.running_mean is None or module.running_var is None:
        return "it has no running statistics"
    if not is_plain(module):
        return "it has forward hooks"
    tensors = module.running_mean, module.running_var, module.weight, module.bias
    return Normalization(name, *tensors, module.eps)


def _function(node: Node, model: GraphModule) -> Normalization | str:
    names = list(inspect.signature(functional.batch_norm).parameters)
    given: dict[str, Any] = {"training": False, "eps": 1e-5, "weight": None, "bias": None}
    given |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given["training"] is not False:
        return "it is in training mode; call eval() first"
    if not isinstance(given["eps"], float):
        return "eps is computed at run time"
    tensors = []
    for name in ("running_mean", "running_var", "weight", "bias"):
        tensor = own_tensor(model, given[name])
        if tensor is None and (given[name] is not None or name.startswith("running")):
            return f"its {name} is not the model's own"
        tensors.append(tensor)
    mean, variance, weight, bias = tensors
    assert mean is not None and variance is not None
    return Normalization("batch_norm", mean, variance, weight, bias, given["eps"])


def own_tensor(model: GraphModule, value: object) -> Tensor | None:
    """Returns the tensor of the model's own that an argument is, if it is one."""
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    found: Any = model
    for part in str(value.target).split("."):
        found = getattr(found, part)
    return found if isinstance(found, Tensor) else None


def is_metadata(node: Node) -> bool:
    """Whether a node reads what all elementwise functions of a tensor have in common with it."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op == "call_method" and node.target in ("size", "dim", "ndimension")


def is_metadata_of_input(node: Node) -> bool:
    """Whether a node reads what a convolution's output also has in common with its input."""
    if node.op == "call_function":
        return node.target is getattr and node.args[1] in ("ndim", "dtype", "device")
    return node.op == "call_method" and node.target in ("dim", "ndimension")


def is_identity(node: Node, modules: Modules) -> bool:
    """Whether a node hands on what it gets: ``nn.Identity``, or a dropout that is not training."""
    if node.op == "call_function":
        # torchvision has its function traced as a whole.
        target: Any = node.target
        if target not in _DROPOUTS and getattr(target, "__name__", "") != "stochastic_depth":
            return False
        names = inspect.signature(target).parameters
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("training") is False
    module = module_of(node, modules)
    if module is None or not is_plain(module):
        return False
    if type(module) is nn.Identity:
        return True
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return type(module) in dropouts and not module.training


_DROPOUTS: Final = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    functional.alpha_dropout,
)

#: Packages whose functions write only where their names or arguments say so.
_KNOWN: Final = ("torch", "maxconv", "_operator", "operator", "math", "builtins")


def mutates(node: Node, modules: Modules) -> bool:
    """Whether a node may write to a tensor that others read."""
    if node.op == "call_module":
        module = module_of(node, modules)
        known = type(module).__module__.split(".")[0] in ("torch", "maxconv")
        return not known or bool(getattr(module, "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    target: Any = node.target
    name = str(getattr(target, "__name__", ""))
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    # Given by position, ``inplace`` is some True; no other argument is looked at more closely.
    if getattr(functional, name, None) is target and any(value is True for value in node.args):
        return True
    if hasattr(target, "_schema"):
        return bool(target._schema.is_mutable)
    owner = str(getattr(target, "__module__", None) or "torch").split(".")[0]
    if target is unpacked:
        return False
    if owner not in _KNOWN or target is in_place:
        return True
    if owner in ("_operator", "operator"):
        return name in _WRITERS
    return name.endswith("_") and not name.endswith("__")


#: Of ``operator``'s functions, those that write to their first argument.
_WRITERS: Final = frozenset(
    (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"),
        *("ipow", "irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
    )
)
