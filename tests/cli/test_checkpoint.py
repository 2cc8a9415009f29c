"""`meshwright checkpoint`: one document on stdout, one sentence on stderr, exit 2 where something is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_samples import TINY_JOBS, everything_below, train_a_little
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes

JOB = f"{TINY_JOBS}:transformer"
DATA = "rank-00000.safetensors"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    with train_a_little("transformer") as run:
        run.save(path)
    return path


@pytest.fixture
def run(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the verb in a folder with a run's folder `run` in it; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pristine, "run/checkpoints/step-00000001")
    Path("run/checkpoints/latest").write_text("step-00000001\n")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["meshwright", "checkpoint", *words])
        code = main_with_exit_codes(app)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def damage(name: str, change: Callable[[bytes], bytes]) -> None:
    path = Path("run/checkpoints/step-00000001") / name
    path.write_bytes(change(path.read_bytes()))


def test_show(run: Call) -> None:
    code, out, err = run("show", "run", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["path"] == "run/checkpoints/step-00000001"
    assert (document["step"], document["seed"], document["strategy"], document["ranks"]) == (1, 0, "single", 1)
    assert document["made"].keys() == {"meshwright", "torch", "python", "at"}
    assert document["parameters"] == document["trained"] == document["bytes"]["model"] / 4
    assert document["bytes"]["optimizer"] > 2 * document["bytes"]["model"]
    assert document["bytes"]["total"] == sum(file["bytes"] for file in document["files"])
    assert [file["name"] for file in document["files"]] == [DATA]
    assert document["optimizer"]["class"] == "AdamW"
    assert [group["lr"] for group in document["optimizer"]["groups"]] == [5e-4, 5e-4]
    assert document["schedule"] == "StepLR" and document["tied"] == {"head.weight": "token.weight"}
    assert document["hugging_face"] is None and "tensors" not in document


def test_show_lists_tensors(run: Call) -> None:
    tensors = json.loads(run("show", "run", "--tensors", "--json")[1])["tensors"]
    assert {"name": "model/token.weight", "dtype": "float32", "shape": [31, 16], "chunks": 1} in tensors
    assert {tensor["name"].partition("/")[0] for tensor in tensors} == {"model", "optimizer", "rng"}


def test_show_for_people(run: Call) -> None:
    code, out, _ = run("show", "run", "--tensors")
    assert code == 0
    for word in ("single on 1 rank", "AdamW", "StepLR", "head.weight = token.weight", DATA, "31 x 16"):
        assert word in out


def test_show_reads_no_data(run: Call) -> None:
    Path("run/checkpoints/step-00000001", DATA).unlink()
    assert run("show", "run")[0] == 0


def test_check(run: Call) -> None:
    code, out, err = run("check", "run", "--job", JOB)
    assert (code, err) == (0, "")
    assert "is intact" in out and "fits the job" in " ".join(out.split())
    document = json.loads(run("check", "run", "--json")[1])
    assert document == {
        "path": "run/checkpoints/step-00000001",
        **{"sound": True, "damage": [], "fits": None, "misfit": None},
    }


def test_check_lists_all_damage(run: Call) -> None:
    damage(DATA, lambda content: content[:-1])
    Path("run/checkpoints/step-00000001/stranger").touch()
    code, out, err = run("check", "run", "--json")
    document = json.loads(out)
    assert code == 2 and document["sound"] is False
    assert [(one["file"], one["tensors"]) for one in document["damage"]] == [
        ("stranger", []),
        (DATA, ["rng/0/torch"]),
    ]
    assert err.count("damaged: ") == 3 and err.splitlines()[-1].startswith("error: The checkpoint run/checkpoints/step")
    assert f"{DATA} has " in err and "stranger does not belong to it" in err


def test_check_names_file_and_parameter(run: Call) -> None:
    text = json.loads(Path("run/checkpoints/step-00000001/checkpoint.json").read_text())
    at = text["tensors"]["model/token.weight"]["chunks"][0]["at"]
    damage(DATA, lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    code, out, err = run("check", "run")
    assert (code, out) == (2, "")
    assert err == (
        "error: The checkpoint run/checkpoints/step-00000001 is damaged: "
        f"{DATA} is not what was written: model/token.weight.\n"
    )


@pytest.mark.parametrize(
    ("name", "change", "file"),
    [
        ("checkpoint.json", lambda content: content.replace(b'"step": 1', b'"step": 2'), "checkpoint.json"),
        ("checkpoint.json", lambda content: content[:100], "checkpoint.json"),
        ("checkpoint.sha256", lambda content: b"\xff", "checkpoint.sha256"),
    ],
)
def test_check_of_a_changed_manifest(run: Call, name: str, change: Callable[[bytes], bytes], file: str) -> None:
    damage(name, change)
    code, out, err = run("check", "run", "--json")
    document = json.loads(out)
    assert code == 2 and document["sound"] is False
    assert [one["file"] for one in document["damage"]] == [file]
    assert file in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["checkpoint.json", "checkpoint.sha256"])
def test_check_of_a_missing_manifest(run: Call, name: str) -> None:
    Path("run/checkpoints/step-00000001", name).unlink()
    code, out, err = run("check", "run/checkpoints/step-00000001", "--json")
    assert code == 2 and f"{name} is missing" in err
    assert [one["file"] for one in json.loads(out)["damage"]] == [name]


def test_check_against_another_job(run: Call) -> None:
    code, out, err = run("check", "run", "--job", f"{TINY_JOBS}:plain", "--json")
    document = json.loads(out)
    assert code == 2 and document["sound"] is True and document["fits"] is False
    assert err == f"error: {document['misfit']}\n" and "which the job's model has" in err


def test_export_and_import(run: Call) -> None:
    code, out, err = run("export", "run", "--to", "torch", "--out", "weights", "--json")
    assert (code, err) == (0, "")
    assert [file["name"] for file in json.loads(out)["files"]] == ["model.pt"]
    code, out, err = run("import", "weights/model.pt", "--out", "new", "--job", JOB, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["path"] == "new/checkpoints/step-00000000"
    document = json.loads(run("show", "new", "--json")[1])
    assert document["optimizer"] is None and document["trained"] is None and document["step"] == 0


def test_export_and_import_for_people(run: Call) -> None:
    code, out, _ = run("export", "run", "--to", "safetensors", "--out", "weights", "--shard-size", "20KB")
    assert code == 0 and "model.safetensors.index.json" in out
    code, out, _ = run("import", "weights", "--out", "new", "--job", JOB)
    assert code == 0 and "step-00000000" in out
    assert run("show", "new")[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("show nowhere", "nowhere does not exist; give a checkpoint's folder or a run's."),
        ("show file", "file is not a checkpoint"),
        ("check nowhere --json", "nowhere does not exist"),
        ("check run --job nowhere.py", "There is no job file nowhere.py"),
        ("export nowhere --to torch --out new", "nowhere does not exist"),
        ("export run --to tourch --out new", "did you mean 'torch'"),
        ("export run --to hf --out new", "not of a transformers model"),
        ("export run --to torch --out new --shard-size 5", "--shard-size: Cannot read '5'"),
        ("export run --to torch --out new --dtype fp8", "--dtype must be one of bf16, fp16, fp32"),
        ("export run --to torch --out run", "not empty"),
        ("export run --to torch --out file", "is a file"),
        ("export run --to torch --out file/new", "cannot be written: Not a directory."),
        ("import nowhere --out new", "nowhere does not exist; give a weights file"),
        ("import file --out new", "file is not a weights file"),
        ("import run --out new", "is a Meshwright checkpoint"),
        ("import good.pt --out run", "already has checkpoints"),
        ("import good.pt --out file", "is a file"),
        (f"import good.pt --out new --job {JOB}", "good.pt has a, which the job's model does not have"),
    ],
)
def test_wrong_input(run: Call, tmp_path: Path, words: str, says: str) -> None:
    Path("file").write_text("no weights")
    torch.save({"a": torch.ones(1)}, "good.pt")
    before = everything_below(tmp_path)
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert says in err and err.startswith("error: ") and err.count("\n") == 1
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("verb", ["show", "check", "export", "import"])
def test_help_begins_with_examples(run: Call, verb: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert out[: out.index("Options")].count(f"meshwright checkpoint {verb} ") == 3  # the usage, and two examples
