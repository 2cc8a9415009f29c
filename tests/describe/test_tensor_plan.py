"""Which layers tensor parallelism divides is found in the author's own model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensor_models
from meshwright.describe.linear_layers import output_dim
from meshwright.errors import JobError
from meshwright.facts.tensor_plan import TensorPlan, TensorRow
from minimal import WIDTH, Blocks, make_job
from tensor_models import MODELS, job_of, plan_of


def rows_of(name: str, **parts: Any) -> dict[str, TensorRow]:
    """Rows of the first block and of all that lies outside of blocks, by the last part of their names."""
    plan, blocks = plan_of(job_of(name, **parts))
    others = tuple(f"{block}." for block in blocks[1:])
    return {row.module: row for row in plan.rows if not row.module.startswith(others)}


def told(rows: dict[str, TensorRow]) -> dict[str, str]:
    return {name.rpartition(".")[2]: f"{row.role} {row.parts} {row.what}" for name, row in rows.items()}


LLAMA = {
    "embed_tokens": "vocabulary 64 vocabulary",
    "q_proj": "column 4 heads",
    "k_proj": "column 2 heads",
    "v_proj": "column 2 heads",
    "o_proj": "row 32 width",
    "gate_proj": "column 48 width",
    "up_proj": "column 48 width",
    "down_proj": "row 48 width",
    "lm_head": "vocabulary 64 vocabulary",
}


def test_plain_gpt() -> None:
    rows = rows_of("example")
    assert told(rows) == {
        "token": "vocabulary 64 vocabulary",
        "position": "whole 1 width",
        "query": "column 4 heads",
        "key": "column 4 heads",
        "value": "column 4 heads",
        "out": "row 32 width",
        "up": "column 128 width",
        "down": "row 128 width",
        "head": "vocabulary 64 vocabulary",
    }
    assert rows["blocks.0.attention.key"].feeds == "blocks.0.attention.out"
    assert {row.source for row in rows.values()} == {"found"}
    assert rows["position"].reason == "not the vocabulary"


@pytest.mark.parametrize("name", ["llama", "llama-cache", "mistral", "qwen2", "qwen3", "gemma", "gemma2"])
def test_models_with_a_plan_of_their_own(name: str) -> None:
    rows = rows_of(name)
    assert told(rows) == LLAMA
    assert {row.source for row in rows.values()} == {"model"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi", "gpt-neox"])
def test_structure_says_what_a_models_own_plan_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = plan_of(job_of(name))[0].as_mapping()
    monkeypatch.setattr("meshwright.describe.tensor_hints._plans", lambda model: [])
    found, _ = plan_of(job_of(name))
    assert found.as_mapping() == given
    assert {row.source for row in found.rows} == {"found"}


def test_one_key_value_head() -> None:
    rows = rows_of("llama-1kv")
    assert told(rows)["k_proj"] == "column 1 heads"
    plan = TensorPlan(rows=tuple(rows.values()))
    assert plan.refuse(2) is None
    assert plan.for_ranks(2).as_mapping()["model.layers.0.self_attn.v_proj"] == "whole"


def test_fused_query_key_and_value() -> None:
    phi3 = "model.layers.0.self_attn.qkv_proj"
    layers = [("gpt2", "transformer.h.0.attn.c_attn"), ("fused", "qkv"), ("narrowed", "qkv"), ("phi3-even", phi3)]
    for name, layer in layers:
        row = rows_of(name)[layer]
        assert (row.role, row.parts, row.what, row.pieces) == ("column", 4, "heads", 3)
    assert rows_of("fused")["gate_up"].pieces == rows_of("narrowed")["gate_up"].pieces == 2
    assert rows_of("phi3")["model.layers.0.self_attn.qkv_proj"].pieces == 1  # keys are narrower than queries
    # Each head has its own query, key and value: those are not pieces of the whole.
    assert rows_of("gpt-neox")["gpt_neox.layers.0.attention.query_key_value"].pieces == 1
    assert rows_of("bloom")["transformer.h.0.self_attention.query_key_value"].pieces == 1


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("gpt2", ["c_attn", "c_fc"], ["c_proj"]),
        ("bert", ["query", "key", "value", "intermediate.dense"], ["attention.output.dense", "layer.0.output.dense"]),
        ("vit", ["q_proj", "k_proj", "v_proj", "fc1"], ["o_proj", "fc2"]),
        ("opt", ["q_proj", "k_proj", "v_proj", "fc1"], ["out_proj", "fc2"]),
        ("olmo2", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]),
        ("falcon", ["query_key_value", "dense_h_to_4h"], ["self_attention.dense", "dense_4h_to_h"]),
        ("bloom", ["query_key_value", "dense_h_to_4h"], ["self_attention.dense", "dense_4h_to_h"]),
        ("t5", [".q", ".k", ".v", ".wi"], [".o", ".wo"]),
    ],
)
def test_pairs(name: str, columns: list[str], rows: list[str]) -> None:
    found = rows_of(name)
    for role, endings in (("column", columns), ("row", rows)):
        named = {module for module, row in found.items() if row.role == role}
        assert named and named == {module for module in found if module.endswith(tuple(endings))}


def test_small_heads_stay_whole() -> None:
    assert rows_of("vit")["classifier"].role == "whole"


def test_a_layer_without_a_partner_says_so() -> None:
    row = rows_of("bert")["cls.predictions.transform.dense"]
    assert (row.role, row.reason[:11]) == ("whole", "no partner:")


@pytest.mark.slow
def test_every_model_gets_a_plan() -> None:
    for name in MODELS:
        plan, _ = plan_of(job_of(name))
        assert plan.refuse(2) is None, name
        assert TensorPlan.from_json(plan.to_json()) == plan


def test_a_plan_can_be_given_back() -> None:
    plan, _ = plan_of(job_of("gpt2"))
    again, _ = plan_of(job_of("gpt2", tensor_plan=plan.as_mapping()))
    assert again.as_mapping() == plan.as_mapping()
    assert {row.source for row in again.rows} == {"job"}
    assert [(row.parts, row.what, row.pieces) for row in again.divided] == [
        (row.parts, row.what, row.pieces) for row in plan.divided
    ]


def test_the_job_decides_before_the_model() -> None:
    plan, _ = plan_of(job_of("llama", tensor_plan={"*.self_attn.*": "whole", "*.gate_proj": "colwise"}))
    rows = {row.module: row for row in plan.rows}
    assert rows["model.layers.1.self_attn.o_proj"].role == "whole"
    assert rows["model.layers.1.mlp.gate_proj"].source == "job"
    assert rows["model.layers.1.mlp.down_proj"].source == "model"


@pytest.mark.parametrize(
    ("hint", "complaint"),
    [({"up": "sideways"}, "the role 'sideways'; use column, row,"), ({"upp": "column"}, "names 'upp', but no linear")],
)
def test_a_wrong_hint(hint: dict[str, str], complaint: str) -> None:
    with pytest.raises(JobError, match=complaint):
        plan_of(job_of("fused", tensor_plan=hint))


class ReadsPast(nn.Module):
    """Computes with the weight of a layer that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + self.up.weight.sum()


class Tied(nn.Module):
    """An embedding and a head of one weight, the head as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.token(x), self.token.weight)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def roles(build: Any, **parts: Any) -> dict[str, str]:
    return {row.module: row.role for row in plan_of(make_job(model=build, **parts))[0].rows}


def test_a_weight_that_is_read_past_its_layer_stays_whole() -> None:
    assert set(roles(ReadsPast).values()) == {"whole"}
    plan, _ = plan_of(make_job(model=ReadsPast))
    assert plan.rows[0].reason == "up.weight is also read outside of it"
    parts = {"inputs": lambda batch: (batch["x"],), "loss": tensor_models.loss, "sample": tensor_models.sample}
    assert roles(Tied, **parts) == {"token": "whole"}


def test_in_a_chain_every_second_layer_is_a_row() -> None:
    assert roles(Chain) == {"layers.0": "column", "layers.2": "row", "layers.4": "whole"}


def test_pairs_do_not_cross_blocks() -> None:
    found = roles(Blocks)
    assert found["enter"] == found["leave"] == "whole"
    assert found["blocks.1.up"] == "column"


def test_convolutions_have_nothing_to_divide() -> None:
    plan, _ = plan_of(make_job(model=lambda: nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 1, 1), nn.Flatten())))
    assert plan.rows == () and "no layer can be divided" in str(plan.refuse(2))


def test_a_model_that_looks_at_values_and_is_small() -> None:
    class Looks(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    assert roles(Looks)["layers.0"] == "column"


def test_sequences_are_seen() -> None:
    assert plan_of(job_of("llama"))[0].sequence
    assert not plan_of(make_job(model=Chain))[0].sequence


def test_where_outputs_lie() -> None:
    assert output_dim(nn.Linear(2, 3)) == 0
    model = MODELS["gpt2"]()
    assert output_dim(model.get_submodule("transformer.h.0.attn.c_attn")) == 1
