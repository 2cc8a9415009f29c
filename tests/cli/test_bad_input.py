"""Bad input: one clear sentence, exit 2, nothing written. Refused before any process starts, so these are quick."""

import subprocess
import sys
from pathlib import Path

import pytest

from job_text import JOB
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command line in a folder with `job.py`; gives exit code and the last line on stderr."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)

    def call(*words: str, job: str = "") -> tuple[int, str]:
        if job:
            Path("job.py").write_text(JOB + job)
        monkeypatch.setattr("sys.argv", ["meshwright", *words])
        code = main_with_exit_codes(app)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["job.py"]
        return code, captured.err

    return call


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        ("fsdpp", 2, "did you mean 'fsdp'"),
        ("ddp,fsdp", 2, "'ddp' and 'fsdp' exclude each other"),
        ("op=2,fp8", 2, "fp8 is not built for layers that op divides; use bf16"),
        ("tp=2,op=2", 4, "'tp=2' and 'op=2' exclude each other"),
        ("pp=2:zb,layers=2", 4, "'pp=2' and 'layers=2' exclude each other"),
        ("pp=2:zbb", 2, "did you mean 'zb'"),
        ("pp=3:1f1b", 3, "cannot be cut into 3 stages, because it has 2 blocks (0, 2)"),
        ("pp=2:interleaved", 2, "use at most 2 stages"),
        ("layers=3", 3, "use at most 2 stages"),
        ("pp=2:1f1b,mb=8", 2, "mb=8 cuts a data rank's 8 samples into 1 micro-batches"),
        ("pp=2:1f1b,ddp", 16, "use a global batch of 16 or more, or pp:gpipe"),
        ("pp=2:1f1b,ddp", 3, "needs a multiple of 2 ranks, but 3 were given"),
        ("op=3", 3, "op=3 divides linear"),
        ("tp=2,engine=deepspeed", 2, "engine=deepspeed"),
        ("bf16,fp8", 2, "exclude each other"),
        ("hsdp=2x2", 6, "hsdp=2x2 needs 4 ranks, but 6 were given"),
        ("single", 2, "ddp is the simplest"),
        ("ddp", 9, "global batch of 8 is smaller than the 9 data ranks"),
        ("ddp,mb=5", 2, "use mb=4 or less"),
        ("dp", 2, "use ddp"),
        ("ddp,offload=params", 2, "needs fsdp or hsdp"),
        ("zero3,offload=nvme:/autofs", 2, "engine=deepspeed"),
    ],
)
def test_strategies(run, strategy: str, ranks: int, says: str) -> None:
    code, message = run("train", "job.py", "--strategy", strategy, "--ranks", str(ranks))
    assert code == 2
    assert says in message
    assert message.startswith("error: ") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("del job", "has no variable 'job'"),
        ("other = job; del job", "it has other: write job.py:other"),
        ("job = 3", "is int; it must be a meshwright.Job"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("parts['model'] = lambda: nn.Linear('four', 2)", "The job's model cannot be built: TypeError"),
        ("parts['model'] = lambda: 3", "must return an nn.Module"),
        ("parts['sample'] = lambda n: {'x': torch.randn(n, 5), 'y': torch.randn(n, 2)}", "do not fit each other"),
        ("parts['inputs'] = lambda batch: batch['x']", "must return a tuple"),
        ("parts['loss'] = lambda output, batch: output.mean()", "must return (sum, weight)"),
        ("parts['optimizer'] = lambda params: torch.optim.SGD(params, lr=-1)", "Invalid learning rate"),
        ("parts['data'] = None", "has no data to train on"),
    ],
)
def test_jobs(run, job: str, says: str) -> None:
    rebuilt = job if "parts" not in job else f"{job}\njob = Job(**parts, global_batch=8)"
    code, message = run("train", "job.py", job=rebuilt)
    assert code == 2
    assert says in message
    assert message.startswith("error: ") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (["nowhere"], "names 'nowhere', where no stage can begin; these can: 0, 2"),
        (["0", "2", "2"], "must name the first modules of 2 stages"),
    ],
)
@pytest.mark.parametrize("strategy", ["pp=2:1f1b", "layers=2"])
def test_stages(run, strategy: str, stages: list[str], says: str) -> None:
    job = f"job = Job(**parts, global_batch=8, stages={stages!r})"
    code, message = run("train", "job.py", "--strategy", strategy, "--ranks", "2", job=job)
    assert code == 2
    assert says in message
    assert message.startswith("error: ") and message.count("\n") == 1


def test_batch_norm_under_a_pipeline(run) -> None:
    resnet = str(Path(__file__).parents[2] / "examples" / "resnet.py")
    code, message = run("train", resnet, "--strategy", "pp=2:1f1b", "--ranks", "2", "--device", "cpu")
    assert code == 2
    assert "BatchNorm (stem.1) normalises over a micro-batch" in message and "layers=2" in message
    assert message.startswith("error: ") and message.count("\n") == 1


SHAPED = """
class Shaped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        rows, _ = torch.where(x > 0)
        return self.second(x).index_add(0, rows, self.second(x)[rows])

parts["model"] = Shaped
job = Job(**parts, global_batch=8)
"""


def test_a_model_that_cannot_be_cut(run) -> None:
    code, message = run("train", "job.py", "--strategy", "pp=2:1f1b", "--ranks", "2", job=SHAPED)
    assert code == 2
    assert "after calling first" in message
    assert message.startswith("error: ") and message.count("\n") == 1


MIXED = """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x):
        return self.second(self.first(x).double()).float()

parts["model"] = lambda: nn.Sequential(Mixed(), Mixed(), nn.Linear(4, 2))
job = Job(**parts, global_batch=8)
"""


def test_a_precision_that_does_not_run(run) -> None:
    code, message = run("train", "job.py", "--strategy", "ddp,bf16", "--ranks", "2", job=MIXED)
    assert code == 2
    assert "0.second.weight" in message and "bf16" in message and "float64" in message
    assert message.startswith("error: ") and message.count("\n") == 1


def test_missing_file(run) -> None:
    assert run("train", "nowhere.py") == (
        2,
        "error: There is no job file nowhere.py; give the path of a Python file with a variable `job`.\n",
    )


def test_output_that_cannot_be_written(run) -> None:
    code, message = run("train", "job.py", "--out", "job.py/below")
    assert code == 2
    assert "cannot be written" in message


def test_more_ranks_than_gpus(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, message = run("train", "job.py", "--ranks", "2", "--device", "cuda")
    assert code == 2
    assert "2 ranks need as many GPUs, but this machine has 1" in message


def test_wrong_option(run) -> None:
    code, message = run("train", "job.py", "--steps", "0")
    assert code == 2
    assert "--steps" in message


def test_wrong_device(run) -> None:
    code, message = run("train", "job.py", "--device", "tpu")
    assert code == 2
    assert "must be cpu or cuda" in message


@pytest.mark.slow
def test_sigterm_before_there_are_ranks_ends_in_a_sentence(tmp_path: Path) -> None:
    """The job signals itself while it is loaded, as a scheduler might at that moment."""
    job = tmp_path / "job.py"
    job.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    command = [sys.executable, "-m", "meshwright", "train", str(job), "--ranks", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (143, "ended by SIGTERM")


def test_help_shows_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["meshwright", "serve", "--help"])
    main_with_exit_codes(app)
    assert "meshwright[serve]" in capsys.readouterr().out
