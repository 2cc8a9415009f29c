"""Models of all kinds are planned for without being known by name."""

from pathlib import Path

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
    ViTConfig,
)

from meshwright.api.job_planner import PlanOptions
from meshwright.api.plan import plan
from meshwright.facts.cluster import Cluster
from meshwright.jobs.load import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
EIGHT = Cluster.parse("8xA100-40GB")
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: list[PretrainedConfig] = [
    GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=256, n_positions=64),
    LlamaConfig(**SMALL, intermediate_size=128, vocab_size=256, max_position_embeddings=64),
    Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=128, vocab_size=256, max_position_embeddings=64),
    GPTNeoXConfig(**SMALL, intermediate_size=128, vocab_size=256, max_position_embeddings=64),
    OPTConfig(**SMALL, ffn_dim=128, vocab_size=256, max_position_embeddings=64, word_embed_proj_dim=64),
    BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=256),
    FalconConfig(**SMALL, vocab_size=256),
    BertConfig(**SMALL, intermediate_size=128, vocab_size=256, max_position_embeddings=64),
    T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256),
    ViTConfig(**SMALL, intermediate_size=128, image_size=32, patch_size=8),
]
OFTEN = ("llama", "falcon", "t5", "vit")
"""Examples hold more of GPT-2 and ViT; the other decoders differ little from these."""


@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "cnn", "resnet", "hf_llama"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("resnet_groupnorm", "hf_gpt2", "hf_vit")),
    ],
)
def test_every_example(name: str) -> None:
    found = plan(load_job(str(EXAMPLES / f"{name}.py")), EIGHT, PlanOptions(fast=True))
    assert found.plans
    assert all(each.peak > 0 and each.forecast.step > 0 for each in found.plans)


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=[] if c.model_type in OFTEN else [pytest.mark.thorough]) for c in CONFIGS],
    ids=lambda config: config.model_type,
)
def test_configs(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    found = plan(load_job(f"hf:{tmp_path}:seq=32,batch=16"), EIGHT, PlanOptions(fast=True))
    assert found.plans
    assert found.plans[0].forecast.time["compute"] > 0
