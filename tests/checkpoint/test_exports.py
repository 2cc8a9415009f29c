"""Weights out of a checkpoint, as others read them: every bit, every name, never half of it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny_jobs
from checkpoint_samples import (
    everything_below,
    files_up_to,
    model_tensors,
    peak_memory_of,
    same_bits,
    save_in_boxes,
    train_a_little,
)
from meshwright.checkpoint.exports import export
from meshwright.checkpoint.hugging_face import hugging_face_of
from meshwright.errors import BadInput, CheckpointError, DamagedCheckpoint, OutputError
from meshwright.runtime.run import Run

MB = 10**6


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A transformer with a tied head."""
    with train_a_little("transformer") as run:
        yield run


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    run.save(path)
    return path


@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_safetensors_load_strictly(run: Run, saved: Path, tmp_path: Path, size: str) -> None:
    document = export(saved, tmp_path / "out", to="safetensors", shard_size=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same_bits(loaded, run.state())
    tiny_jobs.Transformer().load_state_dict(loaded)
    assert document["tensors"] == len(loaded) and "head.weight" in loaded and "token.weight" in loaded
    assert [file["name"] for file in document["files"]] == everything_below(tmp_path / "out")


@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_torch_loads_strictly(run: Run, saved: Path, tmp_path: Path, size: str) -> None:
    export(saved, tmp_path / "out", to="torch", shard_size=size)
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".pt", ".bin")]
    shards = [torch.load(file, weights_only=True) for file in files]
    loaded = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert same_bits(loaded, run.state())
    tiny_jobs.Transformer().load_state_dict(loaded)
    assert loaded["head.weight"].data_ptr() == loaded["token.weight"].data_ptr()  # still tied


def test_one_file_has_no_index(saved: Path, tmp_path: Path) -> None:
    for to, name in (("safetensors", "model.safetensors"), ("torch", "model.pt")):
        export(saved, tmp_path / to, to=to)
        assert everything_below(tmp_path / to) == [name]


@pytest.mark.parametrize(
    ("to", "first", "index"),
    [
        ("safetensors", "model-00001-of-0000{}.safetensors", "model.safetensors.index.json"),
        ("torch", "pytorch_model-00001-of-0000{}.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_shards_keep_to_their_size(saved: Path, tmp_path: Path, to: str, first: str, index: str) -> None:
    export(saved, tmp_path / "out", to=to, shard_size="10KB")
    where = json.loads((tmp_path / "out" / index).read_text())
    files = sorted(set(where["weight_map"].values()))
    assert files[0] == first.format(len(files)) and len(files) > 2
    assert set(everything_below(tmp_path / "out")) == {*files, index}
    tensors = model_tensors(saved)
    tensors["head.weight"] = tensors["token.weight"]
    for file in files:
        names = [name for name, place in where["weight_map"].items() if place == file]
        distinct = {name for name in names if to == "safetensors" or name != "head.weight"}
        assert sum(tensors[name].nbytes for name in distinct) <= 10_000


def test_a_tensor_larger_than_a_shard_is_one(tmp_path: Path) -> None:
    tensors = {"model/small": torch.ones(2), "model/large": torch.ones(100), "model/last": torch.ones(3)}
    export(save_in_boxes(tmp_path / "c", tensors), tmp_path / "out", to="safetensors", shard_size="20B")
    where = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert [where[name][6:11] for name in ("small", "large", "last")] == ["00001", "00002", "00003"]


def test_boxes_are_put_together(tmp_path: Path) -> None:
    tensors = {
        "rows": torch.randn(5, 3),
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }
    keyed = {f"model/{name}": tensor for name, tensor in tensors.items()} | {"optimizer/rows/step": torch.tensor(1.0)}
    saved = save_in_boxes(tmp_path / "c", keyed)
    export(saved, tmp_path / "s", to="safetensors")
    export(saved, tmp_path / "t", to="torch")
    assert same_bits(load_file(tmp_path / "s" / "model.safetensors"), tensors)
    assert same_bits(torch.load(tmp_path / "t" / "model.pt", weights_only=True), tensors)


def test_dtype_changes_floats_only(tmp_path: Path) -> None:
    tensors = {"model/a": torch.randn(4, 4), "model/n": torch.arange(3)}
    saved = save_in_boxes(tmp_path / "c", tensors)
    export(saved, tmp_path / "out", to="safetensors", dtype="bf16")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(loaded, {"a": tensors["model/a"].bfloat16(), "n": tensors["model/n"]})


def test_a_value_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    saved = save_in_boxes(
        tmp_path / "c", {"model/a": torch.tensor([1.0, float("inf")]), "model/b": torch.full((2,), 1e6)}
    )
    with pytest.raises(CheckpointError, match=r"b has values too large for torch\.float16"):
        export(saved, tmp_path / "out", to="torch", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.slow
@pytest.mark.thorough
def test_memory_is_that_of_a_shard(tmp_path: Path) -> None:
    """16 tensors of 10 MB in boxes: 160 MB, of which one tensor or one shard may be held."""
    save_in_boxes(tmp_path / "c", {f"model/{at}": torch.full((2_500_000,), float(at)) for at in range(16)})
    works = [
        f"export(Path('c'), Path('{number}'), to='{to}', shard_size='{size}', progress=watch)"
        for number, (to, size) in enumerate([("safetensors", "20MB"), ("torch", "20MB"), ("torch", "5GB")])
    ]
    by_tensor, by_shard, at_once = peak_memory_of(works, tmp_path)
    assert by_tensor < 60 * MB and by_shard < 60 * MB
    assert at_once > 100 * MB  # the measure does see what is held


@pytest.mark.slow
def test_hugging_face_opens_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with train_a_little("hf_gpt2") as run:
        run.save(tmp_path / "c")
        document = export(tmp_path / "c", tmp_path / "out", to="hf", shard_size="16KB")
        assert document["left_out"] == []
        opened, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(told.values())
        trained = run.trainer.engine.model.eval()
        x = tiny_jobs.tokens(3)["x"]
        with torch.no_grad():
            assert torch.equal(opened.eval()(x).logits, trained(x).logits)


def test_hugging_face_within_another_model(tmp_path: Path) -> None:
    """Names without the prefix, a tied parameter once, what lies outside of it left out and said so."""
    tensors = {"model/inner.wte": torch.ones(2, 2), "model/inner.ln": torch.ones(2), "model/head.bias": torch.ones(2)}
    config = {"model_type": "gpt2", "architectures": ["MadeUpModel"], "torch_dtype": "float32"}
    saved = save_in_boxes(
        tmp_path / "c",
        tensors,
        tied={"inner.lm_head": "inner.wte", "twice": "inner.wte"},
        hugging_face={"prefix": "inner", "config": config},
    )
    document = export(saved, tmp_path / "out", to="hf", dtype="bf16")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"wte", "ln"}
    assert document["left_out"] == ["head.bias"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "gpt2", "architectures": ["MadeUpModel"], "dtype": "bfloat16"}


@pytest.mark.slow
def test_names_that_hugging_face_does_not_know_are_refused(tmp_path: Path) -> None:
    """It would open such a folder without an error, with fresh weights."""
    from transformers import GPT2Config

    config = {**GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=8).to_diff_dict(), "architectures": ["GPT2Model"]}
    tensors = {"model/wte.base_layer.weight": torch.ones(8, 4)}
    saved = save_in_boxes(tmp_path / "c", tensors, hugging_face={"prefix": "", "config": config})
    with pytest.raises(CheckpointError, match=r"GPT2Model\.from_pretrained cannot load .* wte\.base_layer\.weight"):
        export(saved, tmp_path / "out", to="hf")


class PreTrainedModel(nn.Module):
    """Plays a model of transformers."""

    class Config:
        @staticmethod
        def to_diff_dict() -> dict[str, str]:
            return {"model_type": "made-up"}

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(2, 2, bias=False)})


class PeftModel(nn.Module):
    """Plays a model of peft around it."""

    class Config:
        @staticmethod
        def to_dict() -> dict[str, object]:
            return {"peft_type": "LORA", "target_modules": {"layer"}, "inference_mode": False}

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.base_model = PreTrainedModel()
        self.peft_config = {name: self.Config() for name in adapters}


PreTrainedModel.__module__, PeftModel.__module__ = "transformers.made_up", "peft.made_up"


def adapted(folder: Path, monkeypatch: pytest.MonkeyPatch, *adapters: str) -> Path:
    def saved(
        module: nn.Module, state_dict: dict[str, Tensor], adapter_name: str, **options: bool
    ) -> dict[str, Tensor]:
        return {n.replace(f".{adapter_name}", ""): t for n, t in state_dict.items() if f"lora_A.{adapter_name}" in n}

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(get_peft_model_state_dict=saved))
    model = nn.ModuleDict({"net": PeftModel(*adapters)})
    told = hugging_face_of(model, [name for name, _ in model.named_parameters()])
    return save_in_boxes(folder, {f"model/{n}": t.detach() for n, t in model.named_parameters()}, hugging_face=told)


def test_an_adapter_is_written_as_peft_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = export(adapted(tmp_path / "c", monkeypatch, "mine"), tmp_path / "out", to="hf")
    assert everything_below(tmp_path / "out") == ["adapter_config.json", "adapter_model.safetensors"]
    assert list(load_file(tmp_path / "out" / "adapter_model.safetensors")) == ["base_model.lora_A.weight"]
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == {"peft_type": "LORA", "target_modules": ["layer"], "inference_mode": True}
    assert sorted(document["left_out"]) == ["net.base_model.layer.bias", "net.base_model.layer.weight"]


def test_several_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="adapters one, two"):
        export(adapted(tmp_path / "c", monkeypatch, "one", "two"), tmp_path / "out", to="hf")


@pytest.mark.slow
@pytest.mark.thorough
def test_peft_opens_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = tiny_jobs.gpt2()
    options = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], init_lora_weights=False)
    model = peft.get_peft_model(base, options)
    told = hugging_face_of(model, [name for name, _ in model.named_parameters()])
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    export(save_in_boxes(tmp_path / "c", tensors, hugging_face=told), tmp_path / "out", to="hf")
    torch.manual_seed(0)
    opened = peft.PeftModel.from_pretrained(tiny_jobs.gpt2(), tmp_path / "out")
    x = tiny_jobs.tokens(3)["x"]
    with torch.no_grad():
        assert torch.equal(opened.eval()(x).logits, model.eval()(x).logits)


def test_another_model_is_not_of_hugging_face(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not of a transformers model"):
        export(saved, tmp_path / "out", to="hf")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "safetensor"}, "did you mean 'safetensors'"),
        (
            {"to": "onnx"},
            "--to must be one of safetensors, torch, hf, dcp, accelerate, accelerate-fsdp, trainer, lightning, not",
        ),
        ({"to": "torch", "dtype": "int8"}, "--dtype must be one of bf16, fp16, fp32"),
        ({"to": "torch", "shard_size": "many"}, "--shard-size: Cannot read 'many'"),
        ({"to": "torch", "shard_size": "0GB"}, "at least one byte"),
    ],
)
def test_wrong_options(saved: Path, tmp_path: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput) as error:
        export(saved, tmp_path / "out", **options)
    assert says in str(error.value)
    assert everything_below(tmp_path) == []


def test_a_folder_with_something_in_it_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="already exists and is not empty"):
        export(saved, tmp_path, to="torch")
    with pytest.raises(OutputError, match="is a file"):
        export(saved, tmp_path / "file", to="torch")
    with pytest.raises(OutputError, match=r"file/below/out cannot be written: Not a directory\."):
        export(saved, tmp_path / "file" / "below" / "out", to="torch")
    assert everything_below(tmp_path) == ["file"]


def test_an_empty_folder_is_taken(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(saved, tmp_path / "out", to="torch")
    assert everything_below(tmp_path) == ["out", "out/model.pt"]


def test_nothing_is_put_into_a_checkpoint(saved: Path) -> None:
    before = everything_below(saved)
    with pytest.raises(OutputError, match="give a path outside it"):
        export(saved, saved / "out", to="torch")
    assert everything_below(saved) == before


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    saved = save_in_boxes(tmp_path / "c", {"model/a": torch.ones(4)})
    file = saved / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000.safetensors is not what was written: model/a"):
        export(saved, tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_full_disk_leaves_nothing(saved: Path, tmp_path: Path, to: str) -> None:
    with files_up_to(10_000), pytest.raises(OutputError, match="cannot be written: File too large"):
        export(saved, tmp_path / "deep" / "out", to=to)
    assert everything_below(tmp_path) == []


def test_what_a_killed_export_left_is_replaced(saved: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model-00001-of-00009.safetensors").write_text("half")
    export(saved, tmp_path / "out", to="safetensors")
    assert everything_below(tmp_path) == ["out", "out/model.safetensors"]


def test_averages_of_a_run_that_has_none(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        export(saved, tmp_path / "out", to="torch", ema=True)
    assert not (tmp_path / "out").exists()
