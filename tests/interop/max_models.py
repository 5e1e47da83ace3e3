"""Small configurations of the models in MAX's wheel that convolve, and what MAX makes of them.

``python -m tests.interop.max_models`` records the outputs of MAX's own convolutions, which take
MAX some minutes a model to compile, in ``max_models.npz``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MODELS", "RECORDED", "build", "inputs", "weights"]

Array = npt.NDArray[Any]

#: The outputs of MAX's own, by the model's name.
RECORDED = Path(__file__).with_suffix(".npz")


def _attention(q: Any, k: Any, v: Any, mask_variant: Any = None, scale: float = 1.0) -> Any:
    """What ``flash_attention_gpu`` computes of ``[B, S, H, D]``; MAX has it for GPUs only."""
    from max.graph import ops

    q, k, v = (ops.permute(value, [0, 2, 1, 3]) for value in (q, k, v))
    shares = ops.softmax((q @ ops.permute(k, [0, 1, 3, 2])) * scale)
    return ops.permute(shares @ v, [0, 2, 1, 3])


@contextlib.contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Has a module other global values for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _place() -> dict[str, Any]:
    from max.dtype import DType
    from max.graph import DeviceRef

    return {"dtype": DType.float32, "device": DeviceRef.CPU()}


def _qwen_image() -> Any:
    from max.pipelines.architectures.autoencoders.autoencoder_kl_qwen_image import (
        AutoencoderKLQwenImage,
    )
    from max.pipelines.architectures.autoencoders.model_config import AutoencoderKLQwenImageConfig

    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1}
    config = AutoencoderKLQwenImageConfig(**sizes, temporal_downsample=[False], **_place())
    return AutoencoderKLQwenImage(config).decoder


def _flux2() -> Any:
    from max.pipelines.architectures.autoencoders.vae_flux2 import Decoder

    return Decoder(
        in_channels=4,
        out_channels=3,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_post_quant_conv=True,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=True,
        **_place(),
    )


def _whisper() -> Any:
    from max.pipelines.architectures.whisper.encoder import WhisperEncoder

    config: Any = SimpleNamespace(
        d_model=16,
        n_heads=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=10,
        encoder_layers=1,
    )
    place = _place()
    return WhisperEncoder(config, place["dtype"], place["device"])


def _wan() -> Any:
    from max.pipelines.architectures.autoencoders.model_config import AutoencoderKLWanConfig
    from max.pipelines.architectures.autoencoders.vae import VAEDecoderRestFrameCached

    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": (1, 1), "num_res_blocks": 1}
    config = AutoencoderKLWanConfig(**sizes, temporal_downsample=(True,), **_place())
    return VAEDecoderRestFrameCached(config)


#: What makes a model, by its name; the model is a ``max.nn`` module.
MODELS: Mapping[str, Callable[[], Any]] = {
    "qwen_image": _qwen_image,
    "flux2": _flux2,
    "whisper": _whisper,
    "wan": _wan,
}

#: Shapes of what a model is given first.
_SHAPES = {
    "qwen_image": (1, 4, 6, 8),
    "flux2": (1, 4, 6, 8),
    "whisper": (2, 20, 8),
    "wan": (1, 4, 1, 4, 6),
}

#: Tensors that the Wan decoder keeps of earlier frames: MAX knows the number of one configuration.
_WAN_CACHES = 15


@contextlib.contextmanager
def _made(name: str) -> Iterator[tuple[Any, Any]]:
    """A model within another, which gives its weights names of their own; what a CPU lacks."""
    from max.nn.layer import Module
    from max.pipelines.architectures.autoencoders import vae, vae_flux2

    class Named(Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, MODELS[name]())

        def __call__(self, *given: Any) -> Any:
            return getattr(self, name)(*given)

    caches = {"WAN_DECODER_CACHE_SLOTS": _WAN_CACHES}
    with (
        _replaced(vae, flash_attention_gpu=_attention, **caches),
        _replaced(vae_flux2, flash_attention_gpu=_attention),
    ):
        whole: Any = Named()
        yield whole, getattr(whole, name)


def _caches(model: Any) -> list[tuple[int, ...]]:
    _, _, _, height, width = _SHAPES["wan"]
    return [tuple(map(int, shape)) for shape in model.decoder.cache_shapes(1, height, width)]


def inputs(name: str) -> list[Array]:
    """Returns what a model is given."""
    shapes: list[tuple[int, ...]] = [_SHAPES[name]]
    if name == "wan":
        with _made(name) as (_, model):
            shapes += _caches(model)
    generator = np.random.default_rng(7)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def weights(name: str) -> dict[str, Array]:
    """Returns a model's weights: random, of a size that keeps values of order one."""
    generator = np.random.default_rng(8)
    values: dict[str, Array] = {}
    with _made(name) as (whole, _):
        for path, weight in whole.raw_state_dict().items():
            shape = tuple(map(int, weight.shape))
            drawn = generator.standard_normal(shape)
            if len(shape) < 2 or path.endswith("gamma"):
                value = 0.1 * drawn + (path.endswith("weight") or path.endswith("gamma"))
            else:
                value = drawn / np.sqrt(np.prod(shape) / max(shape[0], shape[-1]))
            values[path] = value.astype(np.float32)
    return values


def build(name: str, title: str, module: Any) -> Any:
    """Returns the graph of a model.

    Args:
        name: In ``MODELS``.
        title: Of the graph.
        module: The ``max.graph.Module`` that it belongs to.
    """
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    with _made(name) as (whole, model):
        whole.load_state_dict(weights(name), weight_alignment=1, strict=True)
        types = [TensorType(DType.float32, given.shape, DeviceRef.CPU()) for given in inputs(name)]
        with Graph(title, input_types=types, module=module) as graph:
            result = model(*(value.tensor for value in graph.inputs))
            graph.output(*(result if isinstance(result, tuple | list) else (result,)))
        return graph


def _record() -> None:
    """Writes what MAX's own convolutions make."""
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import Module

    session = InferenceSession(devices=[CPU()])
    found: dict[str, Array] = {}
    for name in MODELS:
        module = Module()
        build(name, name, module)
        model = session.load_all(module, weights_registry=weights(name))[name]
        found[name] = np.from_dlpack(model.execute(*inputs(name))[0])
        print(name, found[name].shape, np.abs(found[name]).mean(), flush=True)
    # numpy's types take the names for its own flags, which are boolean.
    np.savez_compressed(RECORDED, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    _record()
