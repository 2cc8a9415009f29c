"""What DeepSpeed is told of a strategy, and what of a user's own configuration is taken, compared or refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adam, AdamW

import tiny_jobs
from meshwright.assemble.check import check_engine_config
from meshwright.errors import BadInput, Refused
from meshwright.exchange import ExportRequest, export, read_foreign
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.deepspeed.config import config_of
from meshwright.strategies.deepspeed.user_config import read_config, strategy_of, understood

FACTS = ModelFacts(parameters=(ParameterFacts(names=("w",), shape=(1000, 1001), itemsize=4),), blocks=())
JOB = replace(
    tiny_jobs.transformer, optimizer=lambda params: AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
)


def config(text: str, **rest: Any) -> dict[str, Any]:
    return config_of(Strategy.parse(text).resolve(4), FACTS, **{"max_norm": None, **rest})


@pytest.mark.parametrize(("word", "stage"), [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_each_word_is_a_stage(word: str, stage: int) -> None:
    assert config(f"{word},engine=deepspeed")["zero_optimization"]["stage"] == stage


def test_clipping_is_never_left_to_the_default() -> None:
    assert config("zero1,engine=deepspeed")["gradient_clipping"] == 0.0
    assert config("zero1,engine=deepspeed", max_norm=0.5)["gradient_clipping"] == 0.5


def test_gradients_are_fp32_under_every_precision() -> None:
    assert config("zero2,bf16,engine=deepspeed")["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config("zero2,fp16,engine=deepspeed")["fp16"] == {"enabled": True, "loss_scale": 1.0}
    assert config("ddp,bf16,engine=deepspeed")["bf16"] == {"enabled": False}  # we cast where parameters are read


def test_offload() -> None:
    zero = config("zero2,offload=optimizer,engine=deepspeed")["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"} and "offload_param" not in zero
    zero = config("zero3,offload=nvme:/scratch,engine=deepspeed")["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/scratch"}


def test_the_user_tunes_and_the_strategy_rules() -> None:
    written = {"zero_optimization": {"reduce_bucket_size": 7, "stage": 1}, "steps_per_print": 5}
    merged = config("zero2,engine=deepspeed", written=written)
    assert merged["zero_optimization"]["reduce_bucket_size"] == 7 and merged["steps_per_print"] == 5
    assert merged["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("document", "strategy"),
    [
        ({}, "ddp,engine=deepspeed"),
        ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "fsdp,bf16,engine=deepspeed"),
        ({"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": "auto"}}, "ddp,engine=deepspeed"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": True}},
            "zero2,fp16,offload=optimizer,engine=deepspeed",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                    "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
                },
                "train_micro_batch_size_per_gpu": 2,
            },
            "fsdp,offload=nvme:/scratch,mb=2,engine=deepspeed",
        ),
    ],
)
def test_a_configuration_says_its_strategy(document: dict[str, Any], strategy: str) -> None:
    assert str(strategy_of(understood(document))) == strategy


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"curriculum_learning": {}}, "curriculum_learning"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
        ),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "zero_optimization.offload_optimizer.ratio"),
    ],
)
def test_what_nobody_reads_is_refused(document: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        understood(document)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "no strategy term"),
        ({"zero_optimization": 2}, "is no section"),
    ],
)
def test_what_makes_no_strategy(document: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        strategy_of(understood(document))


AGREES = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
}
STRATEGY = Strategy.parse("zero2,mb=2,engine=deepspeed").resolve(2)


def test_what_agrees_is_handed_on_without_what_the_job_owns() -> None:
    handed = check_engine_config(AGREES, JOB, STRATEGY)
    assert "optimizer" not in handed and handed["zero_optimization"] == AGREES["zero_optimization"]


@pytest.mark.parametrize(
    ("changed", "both"),
    [
        ({"train_batch_size": 16}, ["train_batch_size is 16", "global_batch=8"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu is 4", "micro-batches of 2"]),
        ({"gradient_accumulation_steps": 1}, ["gradient_accumulation_steps is 1", "are 2"]),
        ({"gradient_clipping": 1.0}, ["gradient_clipping is 1.0", "max_norm=0.5"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage is 3", "the strategy has zero2"]),
        ({"bf16": {"enabled": True}}, ["precision is 'bf16'", "the strategy has fp32"]),
        ({"optimizer": {"type": "Lamb"}}, ["optimizer.type is 'Lamb'", "the job makes an AdamW"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, ["optimizer.params.lr is 1", "AdamW has 0.001"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler is 'WarmupLR'", "the job has its own"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            ["offload is 'optimizer'", "offloads nothing"],
        ),
    ],
)
def test_a_contradiction_names_both_sides(changed: dict[str, Any], both: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        check_engine_config(understood(AGREES | changed), JOB, STRATEGY)
    assert all(side in str(caught.value) for side in both), caught.value


def checked(section: dict[str, Any], optimizer: Callable[..., Any]) -> str:
    """What contradicts, or nothing."""
    try:
        check_engine_config(AGREES | {"optimizer": section}, replace(JOB, optimizer=optimizer), STRATEGY)
    except Refused as refused:
        return str(refused)
    return ""


def test_plain_adam_is_not_adamw() -> None:
    """Unless nothing decays: then they are one."""
    plain = {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}}
    assert "optimizer.type is 'Adam', and DeepSpeed runs it as Adam" in checked(
        plain, lambda p: AdamW(p, lr=1e-3, weight_decay=0.1)
    )
    assert not checked(plain, lambda p: Adam(p, lr=1e-3, weight_decay=0.1))
    decaying = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    said = checked(decaying, lambda p: Adam(p, lr=1e-3, weight_decay=0.1))
    assert "runs it as AdamW unless adam_w_mode is false, but the job makes an Adam with weight decay" in said
    assert not checked(decaying, lambda p: AdamW(p, lr=1e-3, weight_decay=0.1))
    assert not checked({"type": "Adam", "params": {"lr": 1e-3}}, lambda p: Adam(p, lr=1e-3))
    assert not checked({"type": "AdamW", "params": {"lr": 1e-3}}, lambda p: Adam(p, lr=1e-3))


def test_what_the_section_leaves_out_is_deepspeed_s_default() -> None:
    """Torch's AdamW decays by 0.01 by default, DeepSpeed's by nothing."""
    section: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
    said = checked(section, lambda p: AdamW(p, lr=1e-3))
    assert "optimizer.params.weight_decay is 0.0, and the job's AdamW has 0.01" in said and "default" in said
    section["params"]["torch_adam"] = True
    assert not checked(section, lambda p: AdamW(p, lr=1e-3))
    assert "betas" in checked(section, lambda p: AdamW(p, lr=1e-3, betas=(0.9, 0.95)))


def test_a_setting_that_the_job_s_optimizer_lacks() -> None:
    section: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": True}}
    assert not checked(section, lambda p: Adam(p, lr=1e-3))
    section["params"]["bias_correction"] = False
    assert "bias_correction is False, and the job's Adam has no such" in checked(section, lambda p: Adam(p, lr=1e-3))


def test_groups_may_say_otherwise() -> None:
    section = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}

    def groups(params: Any, decay: float) -> AdamW:
        one, *others = params
        return AdamW([{"params": [one], "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

    assert not checked(section, lambda params: groups(params, 0.1))
    assert "weight_decay" in checked(section, lambda params: groups(params, 0.2))


def test_low_precision_sums_contradict_what_bf16_means() -> None:
    document = {**AGREES, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    strategy = Strategy.parse("zero2,bf16,mb=2,engine=deepspeed").resolve(2)
    with pytest.raises(Refused, match="grad_accum_dtype is 'bf16', and bf16 means"):
        check_engine_config(document, JOB, strategy)


def test_sums_over_ranks_have_the_strategy_s_dtype() -> None:
    full, low = (Strategy.parse(f"zero2,bf16,mb=2{how},engine=deepspeed").resolve(2) for how in ("", ",reduce=bf16"))
    assert [config_of(one, FACTS, max_norm=None)["communication_data_type"] for one in (full, low)] == ["fp32", "bf16"]
    document = {**AGREES, "bf16": {"enabled": True}, "communication_data_type": "bf16"}
    assert strategy_of(document).reduce == "bf16"
    check_engine_config(document, JOB, low)
    with pytest.raises(Refused, match="communication_data_type is 'bf16', and the strategy has reduce=fp32"):
        check_engine_config(document, JOB, full)


def test_another_engine_has_no_use_for_it() -> None:
    with pytest.raises(Refused, match="add engine=deepspeed"):
        check_engine_config({}, JOB, Strategy.parse("zero2").resolve(2))


def test_a_job_without_clipping_agrees_with_none() -> None:
    job = replace(JOB, max_norm=None, optimizer=lambda params: SGD(params, lr=0.1), model=lambda: nn.Linear(2, 2))
    check_engine_config({"gradient_clipping": 0.0}, job, Strategy.parse("ddp,engine=deepspeed").resolve(2))


@pytest.mark.parametrize(
    ("content", "said"), [("{", "is not JSON"), ("[]", "no JSON object"), (None, "cannot be read")]
)
def test_a_file_that_is_none(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=said):
        read_config(path)


def test_a_file_is_read_without_auto(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 1}}))
    assert read_config(path) == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize("text", ["ddp", "zero1,bf16", "zero2,fp16,offload=optimizer", "zero3,bf16,offload=params"])
def test_what_export_writes_can_be_run(text: str) -> None:
    strategy = replace(Strategy.parse(text).resolve(2), engine="deepspeed")
    subject = ExportRequest(strategy=strategy, ranks=2, global_batch=JOB.global_batch, max_norm=JOB.max_norm)
    said = strategy_of(understood(json.loads(export(subject, "deepspeed").text)))
    asked = [strategy.data, strategy.precision, strategy.offload, "deepspeed"]
    assert [said.data, said.precision, said.offload, said.engine] == asked


@pytest.mark.parametrize("text", ["ddp", "zero1,bf16", "zero2,fp16,offload=optimizer,mb=2", "zero3,offload=params"])
def test_a_file_says_the_same_to_train_and_to_plan(text: str, tmp_path: Path) -> None:
    strategy = replace(Strategy.parse(text).resolve(2), engine="deepspeed")
    subject = ExportRequest(strategy=strategy, ranks=2, global_batch=JOB.global_batch, max_norm=JOB.max_norm)
    path = tmp_path / "ds.json"
    path.write_text(export(subject, "deepspeed").text)
    assert strategy_of(read_config(path)) == replace(read_foreign(path).strategy, data_size=None)
