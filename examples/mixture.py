"""The GPT of gpt.py with a mixture of experts in every block: each token is computed by two of four experts.

meshwright train examples/mixture.py --strategy ep=2 --ranks 2 --steps 60
meshwright verify examples/mixture.py --ranks 2 --strategies ep=2 fsdp
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, HEADS, LAYERS, WIDTH, Attention
from gpt import job as plain

EXPERTS = 4
CHOSEN = 2


class Experts(nn.Module):
    """The weights of all experts in two tensors. Called with tokens, it computes each by the experts it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, 4 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(chosen == number)
            output = F.gelu(tokens[token] @ up) @ down
            result = result.index_add(0, token, output * weights[token, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        return self.experts(tokens, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, dropout=0.0)
        self.mixture_norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mixture_norm(x))


def build() -> GPT:
    model = GPT()
    model.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    return model


job = replace(plain, model=build)
