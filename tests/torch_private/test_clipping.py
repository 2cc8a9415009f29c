from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from meshwright.torch_private.clipping import Scaling, TotalNorm, wrap_clipping


def test_both_halves_of_clipping_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a name that was imported before."""
    monkeypatch.setattr(clip_grad, "_get_total_norm", clip_grad._get_total_norm)
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", clip_grad._clip_grads_with_norm_)
    monkeypatch.setattr(nn.utils, "get_total_norm", nn.utils.get_total_norm)
    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", nn.utils.clip_grads_with_norm_)
    scaled: list[float] = []

    def doubled(norm: TotalNorm) -> TotalNorm:
        return lambda *args, **kwargs: norm(*args, **kwargs) * 2

    def noted(scaling: Scaling) -> Scaling:
        def scale(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            scaled.append(float(total_norm))
            scaling(parameters, max_norm, total_norm, foreach)

        return scale

    wrap_clipping(doubled, noted)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], 1.0) == 10 and scaled == [10]
    torch.testing.assert_close(parameter.grad, torch.tensor([0.3, 0.4]))
    assert float(nn.utils.get_total_norm([parameter.grad])) == pytest.approx(1.0)
