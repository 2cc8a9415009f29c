"""The plain decoder: its shape is checked, it computes what a decoder computes, and strategies find their way in it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.jobs.decoder import Decoder, Shape, decoder_job, rotary_tables, turn

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "feed_forward": 24, "vocabulary": 40}
LLAMA = Shape(**SIZES, length=8)
GPT = Shape(
    **{**SIZES, "kv_heads": 4}, length=8, gated=False, tied=True, norm="layer", positions="learned", biases=True
)


def count(shape: Shape) -> int:
    return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def logits(shape: Shape, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return Decoder(shape)(tokens)


def test_parameters_of_a_llama() -> None:
    block = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    assert count(LLAMA) == 2 * block + 2 * 40 * 16 + 16


def test_parameters_of_a_gpt() -> None:
    block = 4 * (16 * 16 + 16) + 16 * 24 + 24 + 24 * 16 + 16 + 4 * 16
    assert count(GPT) == 2 * block + 40 * 16 + 8 * 16 + 2 * 16


def test_biases_of_query_key_and_value_alone() -> None:
    names = {name for name, _ in Decoder(Shape(**SIZES, length=8, qkv_biases=True)).named_parameters()}
    assert {name.rpartition(".attention.")[2] for name in names if name.endswith("bias")} == {
        "query.bias",
        "key.bias",
        "value.bias",
    }


@pytest.mark.parametrize("shape", [LLAMA, GPT])
def test_no_token_sees_those_after_it(shape: Shape) -> None:
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 30
    before, after = logits(shape, tokens), logits(shape, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("shape", [LLAMA, GPT])
def test_the_place_of_a_token_counts(shape: Shape) -> None:
    """Without positions, the last token would not know the order of those before it."""
    there, back = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(logits(shape, there)[:, -1], logits(shape, back)[:, -1])


def test_rotary_products_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_tables(LLAMA)
    q, k = torch.randn(2, 1, 4)
    scores = turn(q.expand(8, 4), cos, sin) @ turn(k.expand(8, 4), cos, sin).T
    for distance in range(8):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(scores[0, :1], scores[0, 1:2])


def test_rotary_tables_are_no_part_of_a_checkpoint() -> None:
    model = Decoder(LLAMA)
    assert {name for name, _ in model.named_buffers()} == {"cos", "sin"}
    assert not any("cos" in name or "sin" in name for name in model.state_dict())


def test_it_computes_in_bf16() -> None:
    model = Decoder(LLAMA)
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16()
    assert model(torch.arange(8)[None]).dtype == torch.bfloat16


def test_facts() -> None:
    facts = describe(decoder_job(LLAMA, global_batch=4))
    assert facts.blocks == ("blocks.0", "blocks.1")
    assert facts.weight_per_sample == 8
    assert facts.unused == facts.read_elsewhere == ()
    assert not facts.drops
    assert facts.tensor_plan is not None
    roles = {row.module: f"{row.role} {row.parts} {row.what}" for row in facts.tensor_plan.rows}
    assert {name.removeprefix("blocks.1."): role for name, role in roles.items() if "blocks.0" not in name} == {
        "token": "vocabulary 40 vocabulary",
        "attention.query": "column 4 heads",
        "attention.key": "column 2 heads",
        "attention.value": "column 2 heads",
        "attention.out": "row 16 width",
        "feed_forward.gate": "column 24 width",
        "feed_forward.up": "column 24 width",
        "feed_forward.down": "row 24 width",
        "head": "vocabulary 40 vocabulary",
    }


def test_tied_weights_are_one_parameter() -> None:
    names = [parameter.names for parameter in describe(decoder_job(GPT, global_batch=4)).parameters]
    assert ("token.weight", "head.weight") in names


def test_samples_may_be_shorter() -> None:
    job = decoder_job(GPT, global_batch=4, length=5)
    assert job.sample is not None
    assert job.sample(3)["x"].shape == job.sample(3)["y"].shape == (3, 5)
    with pytest.raises(JobError, match="length=9 was given, but the decoder supports 1 to 8 tokens"):
        decoder_job(GPT, global_batch=4, length=9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 0}, r"Shape\(layers=...\) must be a whole number of at least 1, but it is 0"),
        ({"width": 16.0}, "it is 16.0"),
        ({"heads": True}, "it is True"),
        ({"heads": 3}, r"width=16, heads=3\): give a number of heads that divides width"),
        ({"kv_heads": 3}, r"heads=4, kv_heads=3\): give a number of kv_heads that divides heads"),
        ({"width": 20}, "a head is 5 wide, but rotary positions need pairs"),
        ({"norm": "batch"}, r"norm='batch'\) is unknown; use rms or layer"),
        ({"positions": "none"}, "use rotary or learned"),
    ],
)
def test_a_shape_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Shape(**{**SIZES, "length": 8, **changed})
