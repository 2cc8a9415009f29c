"""Jobs from configs of transformers, many architectures, nothing but the config read."""

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.jobs.load import load_job
from meshwright.recording.blueprint import record

transformers = pytest.importorskip("transformers")

TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**TOKENS, **TRANSFORMER, "max_position_embeddings": 24, "intermediate_size": 32}
GROUPED = {**TEXT, "num_key_value_heads": 1}
GPT2 = {"model_type": "gpt2", **TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
T5 = {"model_type": "t5", **TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 1, "num_labels": 10}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {"model_type": "llama", **GROUPED},
    "mistral": {"model_type": "mistral", **GROUPED},
    "qwen2": {"model_type": "qwen2", **GROUPED, "architectures": ["Qwen2ForCausalLM"]},
    "gemma": {"model_type": "gemma", **GROUPED, "head_dim": 8},
    "phi": {"model_type": "phi", **TEXT},
    "gpt_neox": {"model_type": "gpt_neox", **TEXT},
    "opt": {"model_type": "opt", **TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "falcon": {"model_type": "falcon", **TEXT},
    "bloom": {"model_type": "bloom", **TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "bert": {"model_type": "bert", **TEXT, "architectures": ["BertForMaskedLM"]},
    "bert-classes": {"model_type": "bert", **TEXT, "architectures": ["BertForSequenceClassification"]},
    "roberta": {
        "model_type": "roberta",
        **TEXT,
        "max_position_embeddings": 26,
        "architectures": ["RobertaForMaskedLM"],
    },
    "t5": {**T5, "is_encoder_decoder": True},
    "vit": {"model_type": "vit", **TRANSFORMER, **IMAGES, "intermediate_size": 32},
    "resnet": {"model_type": "resnet", **IMAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}
WEIGHTS = {"vit": 1, "resnet": 1, "bert-classes": 1, "t5": 512, "bloom": 512}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == "t5" else name for name in CONFIGS]
)
def test_an_architecture(tmp_path: Path, name: str) -> None:
    job = load_job(write(tmp_path, CONFIGS[name]))
    facts = describe(job)
    assert facts.unseen == ""
    assert facts.weight_per_sample == WEIGHTS.get(name, 24)
    assert len(facts.blocks) >= 2
    assert facts.tensor_plan is not None


@pytest.mark.parametrize("name", ["gpt2", "roberta", "vit", "t5"])
def test_a_real_step(tmp_path: Path, name: str) -> None:
    """On real tensors a token outside of the vocabulary or beyond the last position would be an error."""
    seq = "" if name == "vit" else ":seq=24"
    job = load_job(write(tmp_path, CONFIGS[name]) + seq)
    assert job.sample is not None
    model, batch = job.model(), job.sample(2)
    total, weight = job.loss(model(**job.inputs(batch)), batch)
    total.backward()
    assert torch.isfinite(total)
    assert 0 < total.item() / weight < 10


def test_the_class_is_the_one_that_the_config_names(tmp_path: Path) -> None:
    for name, kind in (("bert", "BertForMaskedLM"), ("bert-classes", "BertForSequenceClassification")):
        model = record(load_job(write(tmp_path, CONFIGS[name])).model, seed=0).model
        assert type(model).__name__ == kind


def test_without_a_name_the_first_that_takes_the_config(tmp_path: Path) -> None:
    for name, kind in (("llama", "LlamaForCausalLM"), ("t5", "T5ForConditionalGeneration")):
        model = record(load_job(write(tmp_path, CONFIGS[name])).model, seed=0).model
        assert type(model).__name__ == kind


def test_parameters_are_fp32_whatever_the_weights_were(tmp_path: Path) -> None:
    facts = describe(load_job(write(tmp_path, {**CONFIGS["llama"], "dtype": "bfloat16"})))
    assert {parameter.itemsize for parameter in facts.parameters} == {4}


def test_options_and_the_file_itself(tmp_path: Path) -> None:
    job = load_job(f"{write(tmp_path, GPT2)}/config.json:seq=8,batch=5")
    assert job.sample is not None
    assert job.global_batch == 5
    assert job.sample(2)["input_ids"].shape == (2, 8)


def test_a_long_model_gets_samples_of_a_usual_length(tmp_path: Path) -> None:
    text = write(tmp_path, {**CONFIGS["llama"], "max_position_embeddings": 131072})
    for options, length in (("", 2048), (":seq=4096", 4096)):
        sample = load_job(text + options).sample
        assert sample is not None
        assert sample(1)["input_ids"].shape == (1, length)


def test_blocks_that_know_their_number_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    ran, forward = [], kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *args, **kwargs: ran.append(self) or forward(self, *args, **kwargs)
    )
    job = load_job(write(tmp_path, {**CONFIGS["llama"], "num_hidden_layers": 12}))
    describe(replace(job, loss_over="samples"))  # else a small model also runs for real, to find that out
    assert 0 < len(ran) < 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no-such-model"}, "is not a config that transformers"),
        ({"vocab_size": 3}, "is not a config that transformers"),
        ({"model_type": "wav2vec2"}, "has no model for it that maps tokens or images to logits. Write a Python file"),
        ({**GPT2, "n_positions": 8}, "has 8 positions, but seq=16 was given; use fewer"),
    ],
)
def test_a_config_that_does_not_do(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(f"{write(tmp_path, config)}:seq=16")
    assert message in str(caught.value)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"There is no config .*config.json; give hf: a folder with a config.json"):
        load_job(f"hf:{tmp_path}")
    with pytest.raises(JobError, match="There is no config"):
        load_job("hf:gpt2")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(JobError, match="needs the package transformers, which is not installed; run `pip install"):
        load_job(write(tmp_path, GPT2))
