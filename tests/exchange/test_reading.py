"""Files as others write them, also wrong ones."""

from pathlib import Path

import pytest

from meshwright.exchange import ExchangeError, read_foreign

FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: {sharding}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_backward_prefetch: BACKWARD_PRE
"""
FSDP2 = """
distributed_type: FSDP
mixed_precision: {precision}
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: true
"""


def read(tmp_path: Path, text: str, **ranks: int) -> str:
    path = tmp_path / "theirs"
    path.write_text(text)
    return str(read_foreign(path, **ranks).strategy)


@pytest.mark.parametrize(
    ("sharding", "strategy"),
    [
        ("FULL_SHARD", "fsdp=16,bf16,reduce=bf16"),
        ("1", "fsdp=16,bf16,reduce=bf16"),
        ("SHARD_GRAD_OP", "fsdp=16:grad-op,bf16,reduce=bf16"),
        ("NO_SHARD", "fsdp=16:no-shard,bf16"),
        ("HYBRID_SHARD", "hsdp=2x8,bf16,reduce=bf16"),
    ],
)
def test_accelerate_with_the_first_fsdp(sharding: str, strategy: str, tmp_path: Path) -> None:
    assert read(tmp_path, FSDP1.format(sharding=sharding)) == strategy


def test_accelerate_with_the_second_fsdp(tmp_path: Path) -> None:
    assert read(tmp_path, FSDP2.format(precision="'no'", reshard="false")) == "fsdp=8:grad-op,ac=full"
    assert read(tmp_path, FSDP2.format(precision="no", reshard="true")) == "fsdp=8,ac=full"


def test_accelerate_with_a_file_of_deepspeed_s(tmp_path: Path) -> None:
    """The way Hugging Face's examples are written: sizes are left to the script."""
    (tmp_path / "zero3.json").write_text(
        '{"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",'
        ' "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4,'
        ' "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": true}}'
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config:\n  deepspeed_config_file: zero3.json\n  zero3_init_flag: true\n"
    )
    found = read_foreign(path)
    assert str(found.strategy) == "fsdp=8,bf16,offload=params,reduce=bf16,engine=deepspeed"
    assert found.origin == "accelerate"
    assert "zero_optimization.overlap_comm" in found.ignored


@pytest.mark.parametrize("left_open", ["", "num_processes: -1\n"])
def test_accelerate_without_a_number_of_ranks(left_open: str, tmp_path: Path) -> None:
    text = f"distributed_type: FSDP\n{left_open}fsdp_config: {{fsdp_version: 2}}\n"
    assert read(tmp_path, text) == "fsdp"
    assert read(tmp_path, text, ranks=16) == "fsdp=16"
    assert read(tmp_path, f"distributed_type: MULTI_GPU\n{left_open}") == "ddp"


def test_deepspeed_without_a_number_of_ranks(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}'
    assert read(tmp_path, text) == "zero2,fp16,mb=4,engine=deepspeed"


@pytest.mark.parametrize(
    ("setting", "reduced"),
    [
        ("", ",reduce=bf16"),
        ('"communication_data_type": "bf16",', ",reduce=bf16"),
        ('"communication_data_type": "fp32",', ""),
    ],
)
def test_deepspeed_s_reduction(setting: str, reduced: str, tmp_path: Path) -> None:
    """Without a setting, DeepSpeed sums gradients in the dtype that it computes in."""
    text = '"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}'
    assert read(tmp_path, f"{{{setting} {text}}}") == f"zero2,bf16,mb=4{reduced},engine=deepspeed"


def test_torchtitan_s_own_defaults(tmp_path: Path) -> None:
    """An empty table there is FSDP over what is left, bf16, every second layer recomputed, eight samples a rank."""
    path = tmp_path / "theirs.toml"
    path.write_text("[parallelism]\n[job]\ndescription = 'x'\n")
    found = read_foreign(path)
    assert str(found.strategy) == "fsdp,bf16,ac=selective,mb=8"
    assert found.ignored == ("activation_checkpoint.selective_ac_option = 2 (ours chooses operators, not layers)",)
    assert found.max_norm == 1.0


def test_torchtitan_s_hybrid_of_what_is_left(tmp_path: Path) -> None:
    text = "[parallelism]\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2\n"
    assert read(tmp_path, text, ranks=16).startswith("hsdp=2x4,tp=2,bf16")
    with pytest.raises(ExchangeError, match="data_parallel_shard_degree"):
        read(tmp_path, text)


def test_a_schedule_without_a_word_gives_its_nearest(tmp_path: Path) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text('[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "LoopedBFS"\n')
    found = read_foreign(path)
    assert "pp=2:interleaved" in str(found.strategy)
    assert "LoopedBFS" in found.ignored[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello: world\n", "hello.*DeepSpeed JSON"),
        ("just words", "not a table of settings"),
        ('{"zero_optimization": {"stage": 4}}', "stage is 4.*0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "only stage 3 divides"),
        ('{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}', "stage 0"),
        ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "nvme_path"),
        ('{"zero_optimization": {}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}', "both enabled"),
        (
            '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}',
            "10.*not a multiple",
        ),
        ("distributed_type: MEGATRON_LM\n", "MEGATRON_LM.*FSDP or DEEPSPEED"),
        ("distributed_type: MULTI_GPU\nnum_processes: many\n", "num_processes is 'many'"),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
            "parallelism_config:\n  parallelism_config_tp_size: 2\n",
            "tp_size and distributed_type DEEPSPEED exclude each other",
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}\n",
            "multiply to 4, but num_processes is 8",
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n",
            "fsdp_version: 2",
        ),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_replicate_size: 4, parallelism_config_tp_size: 2}\n",
            "refuses replicas beside tp_size 2",
        ),
        ("[parallelism]\ntensor_parallel_degree = 'two'\n", "tensor_parallel_degree is 'two'"),
        ("[activation_checkpoint]\nmode = 'memory_budget'\n", "memory_budget"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\n", "gone.json"),
    ],
)
def test_mistakes_are_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=words):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_cp_size: 2}\n",
        "[parallelism]\ndata_parallel_shard_degree = 4\ncontext_parallel_degree = 2\n",
    ],
)
def test_a_context_axis(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text).startswith("fsdp=4,cp=2")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"no\.yaml"):
        read_foreign(tmp_path / "no.yaml")
