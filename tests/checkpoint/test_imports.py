"""Others' weights as a checkpoint of step 0: every bit, names as the job has them, and nothing that could run."""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_jobs
from checkpoint_samples import (
    TINY_JOBS,
    everything_below,
    files_up_to,
    model_tensors,
    peak_memory_of,
    same_bits,
    train_a_little,
)
from meshwright.checkpoint.exports import export
from meshwright.checkpoint.imports import import_weights
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.name_matching import Prefix, find_prefix
from meshwright.checkpoint.overview import check
from meshwright.errors import CheckpointError, JobError, OutputError, WrongCheckpoint
from meshwright.runtime.run import Run, setup

JOB = f"{TINY_JOBS}:transformer"
HF_JOB = f"{TINY_JOBS}:hf_gpt2"
FIRST = Path("checkpoints") / "step-00000000"


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


@pytest.fixture(scope="module")
def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.state()


def write(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_there_and_back(saved: Path, weights: dict[str, torch.Tensor], tmp_path: Path, to: str, size: str) -> None:
    export(saved, tmp_path / "out", to=to, shard_size=size)
    import_weights(tmp_path / "out", tmp_path / "fits", job=JOB)
    assert same_bits(model_tensors(tmp_path / "fits" / FIRST), model_tensors(saved))
    import_weights(tmp_path / "out", tmp_path / "plain")
    assert same_bits(model_tensors(tmp_path / "plain" / FIRST), weights)  # a tied name is a tensor of its own


def test_it_is_a_checkpoint_of_step_0(saved: Path, tmp_path: Path) -> None:
    export(saved, tmp_path / "out", to="torch")
    document = import_weights(tmp_path / "out" / "model.pt", tmp_path / "run", job=JOB)
    assert document["path"] == str(tmp_path / "run" / FIRST)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000000\n"
    run_state = read_manifest(tmp_path / "run" / FIRST).run_state
    assert (run_state.step, run_state.samples, run_state.seed, run_state.strategy, run_state.ranks) == (
        0,
        0,
        0,
        "single",
        1,
    )
    assert run_state.optimizer is None and run_state.schedule is None and run_state.hugging_face is None
    assert run_state.tied == {"head.weight": "token.weight"}
    verdict = check(tmp_path / "run", JOB)
    assert not verdict.damage and verdict.fits


def test_a_run_begins_with_it(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    import_weights(write(tmp_path / "w.pt", weights), tmp_path / "run", job=JOB)
    with setup(tiny_jobs.transformer, "single", seed=5, device="cpu") as other:
        assert not same_bits(other.state(), weights)
        loaded = other.load(tmp_path / "run")
        assert loaded.step == 0 and other.position == 0
        assert same_bits(other.state(), weights)
        other.step(tiny_jobs.tokens(8))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_files(weights: dict[str, torch.Tensor], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in weights.items()}, path)
    else:
        write(path, weights)
    import_weights(path, tmp_path / "run")
    assert same_bits(model_tensors(tmp_path / "run" / FIRST), weights)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_nested_state_dict(weights: dict[str, torch.Tensor], tmp_path: Path, key: str) -> None:
    import_weights(write(tmp_path / "w.pt", {"epoch": 3, key: OrderedDict(weights)}), tmp_path / "run", job=JOB)
    assert model_tensors(tmp_path / "run" / FIRST).keys() == weights.keys() - {"head.weight"}


def test_an_old_file_and_odd_tensors(tmp_path: Path) -> None:
    """Before torch 1.6; not contiguous, without dims, without elements, of whole numbers and truth values."""
    base = torch.randn(4, 6)
    tensors = {
        **{"turned": base.T, "part": base[1:3, ::2], "one": torch.tensor(2.5), "none": torch.empty(0, 3)},
        **{"half": base.bfloat16(), "count": torch.tensor(7), "flags": torch.tensor([True, False])},
    }
    for number, zipped in enumerate((True, False)):
        path = write(tmp_path / f"{number}.pt", tensors, _use_new_zipfile_serialization=zipped)
        import_weights(path, tmp_path / f"run{number}")
        assert same_bits(model_tensors(tmp_path / f"run{number}" / FIRST), tensors)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.model."])
def test_a_prefix_is_taken_off(weights: dict[str, torch.Tensor], tmp_path: Path, prefix: str) -> None:
    wrapped = {prefix + name: tensor for name, tensor in weights.items()}
    document = import_weights(write(tmp_path / "w.pt", wrapped), tmp_path / "run", job=JOB)
    assert document["prefix"] == {"off": prefix, "on": ""}
    assert model_tensors(tmp_path / "run" / FIRST).keys() == weights.keys() - {"head.weight"}


def test_the_prefix_that_makes_most_names_fit() -> None:
    wanted = {"net.0.weight", "net.1.weight", "0.weight"}
    assert find_prefix({"net.0.weight", "net.1.weight"}, wanted) == Prefix()
    assert find_prefix({"0.weight", "1.weight"}, wanted) == Prefix(on="net.")
    assert find_prefix({"a.net.0.weight", "a.net.1.weight"}, wanted) == Prefix(off="a.")
    assert find_prefix({"other"}, wanted) == Prefix()
    assert find_prefix((), ()) == Prefix()


def test_any_name_of_a_tied_parameter_will_do(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for number, left in enumerate(("head.weight", "token.weight")):
        some = {name: tensor for name, tensor in weights.items() if name != left}
        import_weights(write(tmp_path / "w.pt", some), tmp_path / str(number), job=JOB)
        assert "token.weight" in model_tensors(tmp_path / str(number) / FIRST)
    unlike = {**weights, "head.weight": weights["head.weight"] + 1}
    with pytest.raises(WrongCheckpoint, match=r"token\.weight and head\.weight with different values"):
        import_weights(write(tmp_path / "w.pt", unlike), tmp_path / "run", job=JOB)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks.0.up.bias": None}, "lacks blocks.0.up.bias, which the job's model has"),
        ({f"blocks.{at}.up.bias": None for at in range(3)} | {"blocks.0.down.bias": None}, "and 1 more, which the job"),
        ({"new": torch.ones(1)}, "has new, which the job's model does not have"),
        ({"blocks.0.up.bias": torch.ones(3)}, "blocks.0.up.bias of shape (3,), but in the job's model it is (48,)"),
        ({"module.blocks.0.up.bias": torch.ones(3)}, "has module.blocks.0.up.bias, which the job's model does not"),
    ],
)
def test_what_does_not_fit(
    weights: dict[str, torch.Tensor], tmp_path: Path, change: dict[str, torch.Tensor | None], says: str
) -> None:
    spoiled = {name: tensor for name, tensor in ({**weights, **change}).items() if tensor is not None}
    path = write(tmp_path / "w.pt", spoiled)
    with pytest.raises(WrongCheckpoint) as error:
        import_weights(path, tmp_path / "run", job=JOB)
    assert says in str(error.value)
    assert everything_below(tmp_path) == ["w.pt"]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_nothing_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for zipped in (True, False):
        write(Path("w.pt"), {"a": torch.ones(1), "b": Evil()}, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=r"holds a posix\.system, but only tensors can be read"):
            import_weights(Path("w.pt"), Path("run"))
    assert everything_below(tmp_path) == ["w.pt"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([torch.ones(1)], "it holds a list"),
        ({}, "it holds a dict"),
        ({"a": torch.ones(1), "lr": 0.1}, "holds 'lr', which is not a plain tensor"),
        ({0: torch.ones(1)}, "holds 0, which is not a plain tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "holds 'a', which is not a plain tensor"),
        ({"a": torch.ones(2, device="meta")}, "holds 'a', which is not a plain tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "has a in torch.complex128, which a checkpoint cannot store"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(CheckpointError) as error:
        import_weights(write(tmp_path / "w.pt", content), tmp_path / "run")
    assert says in str(error.value)
    assert everything_below(tmp_path) == ["w.pt"]


@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.safetensors"])
@pytest.mark.parametrize("kept", [0, 10, 300])
def test_half_a_file(tmp_path: Path, name: str, kept: int) -> None:
    tensors = {"a": torch.randn(50, 50)}
    save_file(tensors, tmp_path / name) if name.endswith("safetensors") else write(tmp_path / name, tensors)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="is not a valid"):
        import_weights(tmp_path / name, tmp_path / "run")
    assert everything_below(tmp_path) == [name]


def index(folder: Path, where: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(where))
    save_file({"a": torch.ones(1)}, folder / "shard.safetensors")
    save_file({"a": torch.ones(1)}, folder.parent / "outside.safetensors")
    return folder


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names the file 'gone.safetensors', which is not next to it"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "'../outside.safetensors', which is not next to it"),
        ({"weight_map": {"b": "shard.safetensors"}}, "says that b is in shard.safetensors, where it is not"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ([], "is not a JSON object"),
    ],
)
def test_a_wrong_index(tmp_path: Path, where: Any, says: str) -> None:
    with pytest.raises(CheckpointError) as error:
        import_weights(index(tmp_path / "hf", where), tmp_path / "run")
    assert says in str(error.value)


def test_places_that_cannot_be(saved: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt", weights)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no weights")
    before = everything_below(tmp_path)
    for source, says in [
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", "holds no weights"),
        (tmp_path / "notes.txt", "is not a weights file"),
        (saved, "is a Meshwright checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            import_weights(source, tmp_path / "run")
    with pytest.raises(OutputError, match="is a file; give the folder of a new run"):
        import_weights(path, path)
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        import_weights(path, path / "below")
    with pytest.raises(JobError):
        import_weights(path, tmp_path / "run", job="nowhere.py")
    assert everything_below(tmp_path) == before


def test_a_run_that_has_checkpoints_is_refused(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt", weights)
    import_weights(path, tmp_path / "run")
    before = everything_below(tmp_path)
    with pytest.raises(OutputError, match="already has checkpoints"):
        import_weights(path, tmp_path / "run")
    assert everything_below(tmp_path) == before


def test_a_full_disk_leaves_nothing(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt", weights)
    with files_up_to(10_000), pytest.raises(OutputError, match="cannot be written: File too large"):
        import_weights(path, tmp_path / "deep" / "run")
    assert everything_below(tmp_path) == ["w.pt"]


@pytest.mark.slow
@pytest.mark.thorough
def test_memory_is_not_that_of_the_weights(tmp_path: Path) -> None:
    tensors = {str(at): torch.full((2_500_000,), float(at)) for at in range(16)}
    write(tmp_path / "w.pt", tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    works = [f"import_weights(Path('w.{kind}'), Path('{kind}'), progress=watch)" for kind in ("pt", "safetensors")]
    assert max(peak_memory_of(works, tmp_path)) < 60 * 10**6


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(1)
    return tiny_jobs.gpt2()


def test_a_folder_without_the_tied_head(gpt2: Any, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path / "hf")
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    import_weights(tmp_path / "hf", tmp_path / "run", job=HF_JOB)
    run_state = read_manifest(tmp_path / "run" / FIRST).run_state
    assert run_state.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert run_state.hugging_face is not None
    assert run_state.hugging_face["config"]["architectures"] == ["GPT2LMHeadModel"]
    export(tmp_path / "run", tmp_path / "again", to="hf")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert same_bits(again, load_file(tmp_path / "hf" / "model.safetensors"))


def test_without_a_job_the_configuration_is_the_folder_s(gpt2: Any, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path / "hf", max_shard_size="16KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    import_weights(tmp_path / "hf", tmp_path / "run")
    found = read_manifest(tmp_path / "run" / FIRST).run_state.hugging_face
    assert found == {"prefix": "", "config": json.loads((tmp_path / "hf" / "config.json").read_text())}
    export(tmp_path / "run", tmp_path / "again", to="hf")
    assert type(gpt2).from_pretrained(tmp_path / "again").state_dict().keys() == gpt2.state_dict().keys()


def test_a_base_model_with_masks_of_old(gpt2: Any, tmp_path: Path) -> None:
    """As the published GPT-2 is: names without `transformer.`, causal masks among the weights."""
    gpt2.transformer.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(file), "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file)
    document = import_weights(tmp_path / "hf", tmp_path / "run", job=HF_JOB)
    assert document["prefix"] == {"off": "", "on": "transformer."}
    assert document["left_out"] == ["transformer.h.0.attn.bias"]
    found = read_manifest(tmp_path / "run" / FIRST).run_state.hugging_face
    assert found is not None and found["config"]["architectures"] == ["GPT2LMHeadModel"]
    tensors = model_tensors(tmp_path / "run" / FIRST)
    assert torch.equal(tensors["transformer.wte.weight"], gpt2.transformer.wte.weight)


def test_a_folder_of_pickles(gpt2: Any, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    state = gpt2.state_dict()
    parts = {"a.bin": dict(list(state.items())[:5]), "b.bin": dict(list(state.items())[5:])}
    where = {name: file for file, tensors in parts.items() for name in tensors}
    for file, tensors in parts.items():
        write(tmp_path / "hf" / file, tensors)
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    import_weights(tmp_path / "hf", tmp_path / "run", job=HF_JOB)
    assert len(model_tensors(tmp_path / "run" / FIRST)) == len(state) - 1


def test_layers_of_transformers_are_no_model_of_it() -> None:
    """A layer has a configuration, too, but nothing of transformers can open it."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    from meshwright.checkpoint.hugging_face import hugging_face_of

    layer = GPT2MLP(8, GPT2Config(n_embd=4))
    layer.config = GPT2Config()
    assert hugging_face_of(torch.nn.Sequential(layer), ()) is None
    found = hugging_face_of(torch.nn.ModuleDict({"inner": tiny_jobs.gpt2()}), ())
    assert found is not None and found["prefix"] == "inner"


def test_a_wrapper_adds_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from tiny_jobs import *\njob = replace(plain, model=lambda: nn.Sequential(Plain()))"
    )
    path = write(tmp_path / "w.pt", tiny_jobs.Plain().state_dict())
    import_weights(path, tmp_path / "run", job=str(tmp_path / "job.py"))
    assert model_tensors(tmp_path / "run" / FIRST).keys() == {f"0.{name}" for name in tiny_jobs.Plain().state_dict()}
