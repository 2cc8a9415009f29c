"""`meshwright checkpoint show|check|export|import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result

NOTES = """A path is a checkpoint's folder, or a run's folder for its latest checkpoint. Checkpoints are never
unpickled; from imported files, only tensors are."""

app = typer.Typer(
    name="checkpoint",
    help="Show and check checkpoints, export them for other tools, and import those of other tools.",
    epilog=NOTES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint's folder, or a run's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


@app.command("show")
def show(
    path: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds. Its data files are not read.

    [bold]meshwright checkpoint show runs/gpt[/]

    [bold]meshwright checkpoint show runs/gpt/checkpoints/step-00000120 --tensors --json[/]
    """
    from meshwright.checkpoint import overview
    from meshwright.report.checkpoint import show_page

    document = overview.show(path, tensors=tensors)
    print_result(document, show_page(document), as_json=as_json)


@app.command("check")
def check(
    path: Checkpoint,
    job: Annotated[str | None, typer.Option(help="A job that it must fit: file.py or file.py:name.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read every byte of a checkpoint and report damage; with a job, also whether it fits.

    [bold]meshwright checkpoint check runs/gpt[/]

    [bold]meshwright checkpoint check runs/gpt/checkpoints/step-00000120 --job examples/gpt.py --json[/]
    """
    from meshwright.checkpoint import overview
    from meshwright.report.checkpoint import bytes_bar, check_page

    verdict = overview.check(path, job, bytes_bar)
    document = verdict.to_json()
    if as_json or (document["sound"] and not verdict.misfit):
        print_result(document, check_page(document), as_json=as_json)
    if len(verdict.damage) > 1:
        for damage in verdict.damage:
            print(f"damaged: {damage}", file=sys.stderr)
    verdict.raise_problem()


@app.command("export")
def export(
    path: Checkpoint,
    to: Annotated[
        str,
        typer.Option(
            help="Weights: safetensors, torch, hf (a folder for from_pretrained, or a peft adapter). "
            "The whole training: dcp, accelerate, accelerate-fsdp, trainer, lightning, torch --training."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    training: Annotated[
        bool, typer.Option("--training", help="With --to torch: also the optimizer, the schedule and the step.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="In front of every name, such as model. for a LightningModule with self.model.")
    ] = "",
    shard_size: Annotated[str, typer.Option(help="Maximum file size; a larger tensor gets its own file.")] = "5GB",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: as in the checkpoint.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Export the averaged weights of a job with ema.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a checkpoint to files for other tools: its weights, or all that continues the training.

    [bold]meshwright checkpoint export runs/llama --to hf --dtype bf16 --shard-size 2GB --out llama-hf[/]

    [bold]meshwright checkpoint export runs/gpt --to accelerate --out gpt-accelerate[/]
    """
    from meshwright.checkpoint import exports
    from meshwright.report.checkpoint import bytes_bar, export_page

    document = exports.export(
        path,
        out,
        to=to,
        training=training,
        prefix=prefix,
        shard_size=shard_size,
        dtype=dtype,
        ema=ema,
        progress=bytes_bar,
    )
    print_result(document, export_page(document), as_json=as_json)


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A .safetensors, .pt, .pth, .bin or .ckpt; a folder of Hugging Face, peft, Accelerate, the Trainer, "
            "DeepSpeed or torch.distributed.checkpoint.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The folder of a new run.")],
    job: Annotated[
        str | None, typer.Option(help="A job that it must fit: file.py or file.py:name. Without it, only weights.")
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave out the optimizer and the step.")] = False,
    step: Annotated[int | None, typer.Option(help="Steps that were taken, where the source does not say.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Whose schedule to take where they differ: source, or job (at this step).")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a run's first checkpoint from another tool's; train --resume starts from it.

    With a job, its optimizer, schedule and step are imported too. What is left out is listed.

    [bold]meshwright checkpoint import gpt2/ --job examples/hf_gpt2.py --out runs/gpt2[/]

    [bold]meshwright checkpoint import weights.pt --job job.py --out runs/tuned[/]
    """
    from meshwright.checkpoint import imports
    from meshwright.report.checkpoint import bytes_bar, import_page

    document = imports.import_weights(
        source, out, job=job, weights_only=weights_only, step=step, schedule=schedule, progress=bytes_bar
    )
    print_result(document, import_page(document), as_json=as_json)
