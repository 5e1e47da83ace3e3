"""``torch.compile(backend="maxconv")`` with CUDA tensors: CUDA graphs, and weights that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import maxconv.torch as mt  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

DTYPE = torch.bfloat16


def network() -> Any:
    """Convolutions with a normalization, a residual and a computed weight; a transposed one."""
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[name-defined, misc] # torch is imported by pytest
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU()
            )
            self.second = nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 3, padding=1))
            self.up = nn.ConvTranspose2d(32, 16, 2, 2)

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            return self.up(torch.relu(self.second(y) + y)).mean((2, 3), keepdim=True) * 3

    torch.manual_seed(0)
    made = Net()
    made.first[1].running_mean.uniform_(-1, 1)
    made.first[1].running_var.uniform_(0.5, 2)
    return made.eval().to("cuda", DTYPE)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("generates", [True, False])
def test_weights_may_change(mode: str, generates: bool) -> None:
    model = network()
    torch.compiler.reset()
    options = {**torch._inductor.list_mode_options(mode), "inductor": generates}
    compiled = torch.compile(model, backend="maxconv", fullgraph=True, options=options)
    x = torch.randn(4, 16, 24, 24, device="cuda", dtype=DTYPE)
    changes = (
        lambda: None,
        lambda: model.first[0].weight.mul_(-1),
        lambda: model.first[1].running_var.add_(1),
        lambda: model.second.parametrizations.weight.original0.mul_(2),
        lambda: model.second.bias.add_(1),
        lambda: model.up.weight.neg_(),
    )
    with torch.no_grad():
        for change in changes:
            change()
            exact = copy.deepcopy(model).double()(x.double())
            own = model(x)
            # The third call replays a CUDA graph.
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                error = (compiled(x) - exact).abs().max() / exact.abs().max()
                # A unit roundoff of bfloat16 is 4e-3; PyTorch's own error says what depth costs.
                assert error <= 4 * (own - exact).abs().max() / exact.abs().max() + 1e-2


def test_a_capture_that_needs_new_weights_is_refused() -> None:
    model = network()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="maxconv", options={"inductor": False})
    x = torch.randn(4, 16, 24, 24, device="cuda", dtype=DTYPE)
    with torch.no_grad():
        compiled(x)
        mt.repack(model)
        graph = torch.cuda.CUDAGraph()
        message = "cannot be computed while a CUDA graph is captured"
        with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
            compiled(x)
