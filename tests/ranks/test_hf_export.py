"""A model of Hugging Face that several ranks trained in parts: transformers opens it whole."""

from pathlib import Path

import pytest
import torch

import recovery_programs
import tiny_jobs
from checkpoint_samples import same_bits
from meshwright.checkpoint.exports import export
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["tp=2,fsdp", pytest.param("pp=2:1f1b,fsdp", marks=pytest.mark.thorough)])
def test_transformers_opens_what_four_ranks_trained(four_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    from transformers import AutoModelForCausalLM

    state = four_ranks(recovery_programs.train_hugging_face, strategy, 2, str(tmp_path / "saved"))[0]
    expected = tiny_jobs.gpt2()
    expected.load_state_dict(state)
    export(tmp_path / "saved", tmp_path / "out", to="hf", shard_size="16KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    opened, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert type(opened) is type(expected)
    assert opened.lm_head.weight is opened.transformer.wte.weight
    assert same_bits(opened.state_dict(), expected.state_dict())
    x = tiny_jobs.tokens(3)["x"]
    with torch.no_grad():
        assert torch.equal(opened.eval()(x).logits, expected.eval()(x).logits)
