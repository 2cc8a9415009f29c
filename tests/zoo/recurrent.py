"""Recurrent networks: they keep their weights in lists of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from meshwright import Job
from zoo.jobs import CLASSES, LENGTH, VOCABULARY, WIDTH, entry, make_job, sequences, tokens


class Recurrent(nn.Module):
    def __init__(self, body: nn.RNNBase) -> None:
        super().__init__()
        self.body = body
        width = (body.proj_size or body.hidden_size) * (2 if body.bidirectional else 1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


@entry()
def lstm() -> Job:
    """A stacked nn.LSTM."""
    return make_job(lambda: Recurrent(nn.LSTM(WIDTH, 8, 2, batch_first=True)), sequences)


@entry()
def lstm_projected() -> Job:
    """A bidirectional nn.LSTM with projections and without biases."""
    return make_job(
        lambda: Recurrent(nn.LSTM(WIDTH, 8, bias=False, proj_size=4, bidirectional=True, batch_first=True)), sequences
    )


@entry()
def gru() -> Job:
    """A bidirectional nn.GRU, initialised over its named parameters."""

    def build() -> nn.Module:
        model = Recurrent(nn.GRU(WIDTH, 8, 2, bidirectional=True, batch_first=True))
        for name, parameter in model.body.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
        return model

    return make_job(build, sequences)


@entry()
def rnn_relu() -> Job:
    """An nn.RNN with ReLU."""
    return make_job(lambda: Recurrent(nn.RNN(WIDTH, 8, nonlinearity="relu", batch_first=True)), sequences)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.body = nn.LSTM(WIDTH, 8, batch_first=True)
        self.body.flatten_parameters()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.token(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=x.shape[1])[0])


def texts_of_lengths(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "lengths": torch.randint(1, LENGTH + 1, (n,))}


def counted_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    counts = torch.arange(LENGTH) < batch["lengths"][:, None]
    each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return (each * counts.flatten()).sum(), counts.sum()


@entry()
def lstm_packed() -> Job:
    """Packed sequences of several lengths; the weight of the loss is a number of tokens."""
    return make_job(Packed, texts_of_lengths, inputs=lambda batch: (batch["x"], batch["lengths"]), loss=counted_loss)


class Translate(nn.Module):
    """An encoder and a decoder of cells with attention; embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.token(x)
        memory, state = self.encoder(embedded)
        hidden, outputs = state[0], []
        for step in embedded.unbind(1):
            scores = torch.einsum("bld,bd->bl", memory, hidden).softmax(-1)
            hidden = self.cell(torch.cat([step, torch.einsum("bl,bld->bd", scores, memory)], 1), hidden)
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


@entry()
def translation() -> Job:
    """A GRU encoder, a decoding loop with attention, tied weights."""
    return make_job(Translate, tokens)


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(WIDTH, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][-1])


@entry()
def time_major_inside() -> Job:
    """A model that takes time first, of a batch that has samples first."""
    return make_job(TimeMajor, sequences, inputs=lambda batch: (batch["x"].transpose(0, 1),))
