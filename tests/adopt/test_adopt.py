"""What a job cannot express is listed, nothing is lost without a line, and what is no training script is refused."""

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.adopt.adopt import adopt, adopt_script
from meshwright.adopt.script import Script
from meshwright.cli.main import app
from meshwright.errors import BadInput, MeshwrightError

SCRIPTS = Path(__file__).parent / "scripts"
RUNNER = CliRunner()


def changed(name: str, right: str, wrong: str) -> list[str]:
    """What is left to do for a script of the test data with a change."""
    text = (SCRIPTS / f"{name}.py").read_text()
    assert right in text
    job = adopt_script(Script.parse(text.replace(right, wrong), Path("train.py"))).job
    ast.parse(job.text)
    assert all(one in " ".join(job.text.split()) for one in (" ".join(row.split()) for row in job.todo))
    return job.todo


STEP = "        optimizer.step()\n"
LEFT = [
    (
        "weights are clamped",
        "plain_loop",
        STEP,
        f"{STEP}        model[0].weight.data.clamp_(-1, 1)\n",
        "changes the model",
    ),
    (
        "gradients are changed",
        "plain_loop",
        STEP,
        f"        for p in model.parameters():\n            p.grad.mul_(0.5)\n{STEP}",
        "changes the model",
    ),
    ("a part is in eval mode", "plain_loop", STEP, f"        model[0].eval()\n{STEP}", "keeps a part in eval mode"),
    (
        "the loss reads weights",
        "plain_loop",
        "criterion(model(x), y)",
        "criterion(model(x), y) + 0.01 * model[0].weight.norm()",
        "model is not defined",
    ),
    (
        "mixup",
        "plain_loop",
        "        loss = ",
        "        x = x * torch.rand(1)\n        loss = ",
        "draws random numbers",
    ),
    ("a hidden state", "plain_loop", "model(x), y)", "model(x + state), y); state = x", "state is carried"),
    ("two calls", "plain_loop", "model(x), y)", "model(x) + model(-x), y)", "calls the model 2 times"),
    (
        "two optimizers",
        "plain_loop",
        "for epoch",
        "other = torch.optim.Adam(model.parameters())\nfor epoch",
        "several optimizers (optimizer, other)",
    ),
    ("clipping by value", "accumulation", "clip_grad_norm_", "clip_grad_value_", "clipped by value"),
    ("a needed option", "functions", "type=float, default=0.5", "type=float, required=True", "args.lr has no default"),
    ("a weighted sampler", "plain_loop", "shuffle=True", "sampler=WeightedSampler(labels)", "sampler WeightedSampler"),
    ("no loader", "plain_loop", "in loader:", "in stream():", "does not iterate over a DataLoader"),
    ("an unknown batch size", "plain_loop", "batch_size=16", "batch_size=find_size()", "batch size was not found"),
    (
        "a method",
        "plain_loop",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "model.make_optimizer()",
        "a method of the model",
    ),
    (
        "a group that is added",
        "plain_loop",
        "for epoch",
        "optimizer.add_param_group({})\nfor epoch",
        "a group is added later",
    ),
]


@pytest.mark.parametrize(("name", "right", "wrong", "words"), [one[1:] for one in LEFT], ids=[one[0] for one in LEFT])
def test_what_a_job_cannot_express_is_listed(name: str, right: str, wrong: str, words: str) -> None:
    todo = changed(name, right, wrong)
    assert [one for one in todo if words in one], todo


def test_what_a_trainer_is_given_becomes_a_job() -> None:
    text = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
data, pad = load(), make_collator()
model = AutoModelForCausalLM.from_pretrained("tiny")
args = TrainingArguments("out", learning_rate=1e-4, per_device_train_batch_size=4, gradient_accumulation_steps=2)
Trainer(model=model, args=args, train_dataset=data["train"], data_collator=pad).train()
"""
    job = adopt_script(Script.parse(text, Path("train.py"))).job
    assert job.global_batch == 8
    for line in (
        "torch.optim.AdamW(params, lr=0.0001, weight_decay=0.0)",
        'weight = (batch["labels"][:, 1:] != -100).sum()',
        "return data['train']",
        "collate=pad",
        "max_norm=1.0",
    ):
        assert line in job.text
    assert any("give its schedule" in one for one in job.todo)


def test_a_loop_of_another_library_or_file_is_listed() -> None:
    trainer = "from transformers import Trainer\nTrainer(model=None, args=None).train()\n"
    job = adopt_script(Script.parse(trainer, Path("train.py"))).job
    assert any("the loop is in transformers.Trainer" in one for one in job.todo)
    elsewhere = (
        "import torch\nfrom torch.utils.data import DataLoader\nfrom loops import fit\nmodel = torch.nn.Linear(1, 1)\n"
    )
    elsewhere += (
        "optimizer = torch.optim.SGD(model.parameters(), lr=1)\nfit(model, optimizer, DataLoader([1], batch_size=4))\n"
    )
    todo = adopt_script(Script.parse(elsewhere, Path("train.py"))).job.todo
    assert any("the loop is in another file" in one for one in todo)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"print('hello')\n", "is no training script"),
        (b"import torch\nclass Net(torch.nn.Module):\n    pass\n", "is no training script"),
        (b"def broken(:\n", "line 1"),
        (b"\x00\x01\x02", "not Python that can be read"),
        (b"\xff\xfe", "not Python that can be read"),
        (b"", "is no training script"),
        (b"(" * 3000 + b")" * 3000, "not Python that can be read"),
    ],
)
def test_what_is_no_training_script_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text)
    with pytest.raises(BadInput, match=words):
        adopt(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.py"):
        with pytest.raises(BadInput, match="cannot be read"):
            adopt(path)


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\n" + (SCRIPTS / "plain_loop.py").read_text()
    (tmp_path / "train.py").write_text(text)
    adopt(tmp_path / "train.py")
    assert not (tmp_path / "ran").exists()


def test_the_command(tmp_path: Path) -> None:
    script, job = tmp_path / "train.py", tmp_path / "job.py"
    script.write_text((SCRIPTS / "ddp_spawn.py").read_text().replace("        sampler.set_epoch(epoch)\n", ""))
    found = RUNNER.invoke(app, ["adopt", str(script), "-o", str(job)])
    assert found.exit_code == 0, found.output
    assert "sampler-set-epoch" in found.stdout
    assert "meshwright verify" in job.read_text()
    document = json.loads(RUNNER.invoke(app, ["adopt", str(script), "--json"]).stdout)
    assert set(document) == {"script", "kind", "strategy", "global_batch", "findings", "todo", "notes", "job", "file"}
    assert (document["kind"], document["strategy"], document["global_batch"]) == ("DDP", "ddp", 12)
    assert [one["name"] for one in document["findings"]] == ["sampler-set-epoch"]


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    script, job = tmp_path / "train.py", tmp_path / "job.py"
    script.write_text((SCRIPTS / "plain_loop.py").read_text())
    job.write_text("mine")
    refused = [["-o", str(job)], ["-o", str(script), "--force"]]
    for words in refused:
        assert isinstance(RUNNER.invoke(app, ["adopt", str(script), *words]).exception, MeshwrightError)
    assert (job.read_text(), script.read_text()) == ("mine", (SCRIPTS / "plain_loop.py").read_text())
    assert RUNNER.invoke(app, ["adopt", str(script), "-o", str(job), "--force"]).exit_code == 0
    assert "job = Job(" in job.read_text()


STRATEGIES = {
    "ddp_trainer": "ddp",
    "fsdp2": "fsdp",
    "zero_redundancy": "zero1",
    "with_accelerate": "ddp",
}


@pytest.mark.parametrize(("name", "strategy"), STRATEGIES.items())
def test_the_strategy_corresponds(name: str, strategy: str) -> None:
    assert adopt(SCRIPTS / f"{name}.py").job.strategy == strategy
