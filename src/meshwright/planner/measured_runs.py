"""Read tables of measured runs, in the columns of public benchmark tables, as step layouts."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, get_args

from meshwright.errors import BadInput, MeshwrightError
from meshwright.facts.catalogue import GBPS, catalogue_name, hardware_of_device
from meshwright.facts.cluster import Cluster
from meshwright.facts.grammar import Recompute
from meshwright.facts.hardware import lay_over
from meshwright.facts.model_axis import MODEL_AXES, normalised
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.jobs.decoder import Shape
from meshwright.planner.step_layout import StepLayout
from meshwright.reading import read_text, shown
from meshwright.schedules import FAMILIES
from meshwright.units import GIB

MOST_LAYERS = 1_000
"""Most layers of a row's decoder: each is built and described."""
MOST = 10_000_000
"""Largest count of tokens, devices and so on; a larger number is a typing error."""

ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "afab": "gpipe"}
"""Other names of dtypes, and nanotron's of a schedule: all forward, all backward."""
NOT_MEASURED = ("", "-", "na", "n/a", "nan", "none", "null")
"""What tables write where nothing was measured."""
BESIDE = 1.25
"""A micro-batch's gradients and DDP's buckets of them, relative to all of them in the parameters' dtype, that are kept
beside a sum in a wider dtype (published sweep, without a tensor axis: 1.0 to 1.6)."""

NEEDED = (
    *("arch", "n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len", "gpu", "gpus_per_node", "n_gpus"),
    *("dp_replicate", "dp_shard", "zero_stage", "tp", "pp", "micro_batch", "grad_accum", "status"),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured run of a decoder."""

    name: str
    arch: str
    shape: Shape
    cluster: Cluster
    step_layout: StepLayout
    fits: bool
    tokens_per_s: float | None
    """Per device."""
    peak_gib: float | None
    loss: str = "plain"
    """How cross entropy is computed: "plain", "shifted" as Megatron and nanotron do, or "fused" as for MPT."""
    columns: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The row as it was written."""

    @property
    def cell(self) -> tuple[str, int]:
        """Key of the runs that are alternatives to each other."""
        return self.arch, self.cluster.devices

    @property
    def axes(self) -> tuple[str, ...]:
        """Words of the axes that divide the model."""
        layout = self.step_layout
        words = [term.word for term in layout.inner if term.size > 1]
        return tuple(sorted([*words, "pp"] if layout.stage_ranks > 1 else words))

    @property
    def step(self) -> float | None:
        """Measured seconds per step."""
        if self.tokens_per_s is None:
            return None
        return self.step_layout.samples * self.shape.length / (self.tokens_per_s * self.cluster.devices)


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be read or forecast."""

    name: str
    reason: str


def read_rows(path: Path) -> list[MeasuredRun]:
    """Read all rows of a CSV file; an error names the line and the column."""
    runs, skipped = read_table(path)
    if skipped:
        raise BadInput(f"{path}, {skipped[0].name}: {skipped[0].reason}.")
    return runs


def read_table(path: Path) -> tuple[list[MeasuredRun], list[SkippedRow]]:
    """The rows of a CSV file that can be read, and the others by line; an error if a needed column is missing."""
    runs: list[MeasuredRun] = []
    skipped: list[SkippedRow] = []
    try:
        reader = csv.DictReader(StringIO(read_text(path), newline=""))
        missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise BadInput(f"{path} has no column {missing[0]!r}; it needs {', '.join(NEEDED)}.")
        for line, values in enumerate(reader, start=2):
            found = _read(values, line)
            (runs if isinstance(found, MeasuredRun) else skipped).append(found)  # type: ignore[arg-type]
    except csv.Error as error:
        raise BadInput(f"{path} cannot be read as CSV: {error}.") from None
    return runs, skipped


def _read(values: Mapping[str, Any], line: int) -> MeasuredRun | SkippedRow:
    short = next((name for name in NEEDED if values[name] is None), None)
    if short is not None:
        return SkippedRow(f"line {line}", f"the line ends before the column {short}")
    try:
        return _row(values, line)
    except (ValueError, KeyError, MeshwrightError) as error:
        return SkippedRow(f"line {line}", str(error).rstrip("."))


def _row(values: Mapping[str, Any], line: int) -> MeasuredRun:
    number = partial(_count, values)
    learned = values["arch"].lower().startswith(("mpt", "gpt"))
    # Summing gradients in another dtype than the parameters' is Megatron's way, and so is its loss.
    accumulators = _dtype(values, "grad_dtype", "fp32") != _dtype(values, "param_dtype", "fp32")
    return MeasuredRun(
        name=values.get("row") or f"line {line}",
        arch=values["arch"],
        shape=Shape(
            layers=number("n_layers"),
            width=number("d_model"),
            heads=number("n_heads"),
            kv_heads=number("n_kv_heads", number("n_heads")),
            feed_forward=number("d_ff"),
            vocabulary=number("vocab"),
            length=number("seq_len"),
            gated=_is_true(values.get("gated_mlp")),
            tied=_is_true(values.get("tied_embeddings")),
            norm="layer" if learned else "rms",
            positions="learned" if learned else "rotary",
            biases=learned,
        ),
        cluster=_cluster(values),
        step_layout=_step_layout(values),
        fits=values["status"] == "ok",
        tokens_per_s=_measured(values, "tok_s_gpu"),
        peak_gib=_measured(values, "peak_mem_gib"),
        columns={name: str(text or "") for name, text in values.items() if name is not None},
        loss="fused" if values["arch"].lower().startswith("mpt") else "shifted" if accumulators else "plain",
    )


def _cluster(values: Mapping[str, Any]) -> Cluster:
    devices, per_node = _count(values, "n_gpus"), _count(values, "gpus_per_node")
    return Cluster(
        nodes=-(-devices // per_node),
        devices_per_node=min(devices, per_node),
        device=values["gpu"],
        hardware=_hardware(values),
        memory_gib=_measured(values, "gpu_mem_gib"),
        between_gbps=_between_gbps(values) if devices > per_node else None,
        between_kind=_link(values) if devices > per_node else None,
    )


def _hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the row says about its device: dense TFLOP/s in 16 bits and in fp32, and GB/s of its memory."""
    found: dict[str, Any] = {}
    half, full, memory = (_measured(values, name) for name in ("gpu_bf16_tflops", "gpu_fp32_tflops", "gpu_mem_gbs"))
    flops = {"bf16": half, "fp16": half, "fp32": full}
    if known := {name: number * 1e12 for name, number in flops.items() if number is not None}:
        found["flops"] = known
    if memory is not None:
        found["bandwidth"] = memory * 1e9
    size = _measured(values, "gpu_mem_gib")
    if found and size is not None:
        found["memory"] = round(size * GIB)
    complete = None not in (half, full, memory, size)
    if complete and catalogue_name(values["gpu"]) is None:  # links and host as an unknown GPU's
        return lay_over(hardware_of_device(None).to_json(), found)
    return found


def _between_gbps(values: Mapping[str, Any]) -> float | None:
    """Gbit/s of a node: the row's or, if only its link's kind is known, what the catalogue has for such nodes."""
    given = _measured(values, "inter_node_gbps")
    if given is not None or _link(values) is None:
        return given
    return hardware_of_device(catalogue_name(values["gpu"])).between.bandwidth / GBPS


def _link(values: Mapping[str, Any]) -> str | None:
    """Kind of the link between nodes: from the row's column, or from the source that it cites."""
    if values.get("inter_node_link"):
        return str(values["inter_node_link"])
    source = values.get("source") or ""
    return next((network["link"] for word, network in _networks().items() if word in source), None)


@cache
def _networks() -> dict[str, dict[str, str]]:
    """Networks of published benchmarks whose rows lack that column, by a word of the source."""
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("networks.json").read_text())
    return found


def _step_layout(values: Mapping[str, Any]) -> StepLayout:
    number = partial(_count, values)
    shards, replicas, stage = number("dp_shard"), number("dp_replicate"), number("zero_stage")
    compute = _dtype(values, "compute_dtype", "bf16")
    rest, gradient, master = (
        FORMATS[_dtype(values, name, "fp32")].bytes for name in ("param_dtype", "grad_dtype", "master_dtype")
    )
    # The ranks that share a sequence shard states, too: FSDP2's and Megatron's group is that of both axes.
    over = shards * number("cp", 1) if stage else 1
    has_masters = master > rest
    terms = tuple(AxisTerm(word, number(word, None if word in NEEDED else 1)) for word in MODEL_AXES)
    axes = Strategy(axes=normalised(terms))
    micro_batches = number("grad_accum")
    named = _word(values, "pp_schedule", tuple(FAMILIES)) or axes.schedule
    schedule = named if axes.stage_ranks > 1 else ""
    return StepLayout(
        data=shards * replicas,
        shards=over,
        inner=axes.inner_axes,
        stage_ranks=axes.stage_ranks,
        schedule=schedule,
        virtual=FAMILIES[schedule].virtual if schedule else 1,
        micro_batch=number("micro_batch"),
        micro_batches=micro_batches,
        precision=compute,
        recompute=_word(values, "activation_ckpt", get_args(Recompute)) or "none",
        compile=_is_true(values.get("compile")),
        compiles_whole=stage != 3,
        compiles_loss=False,
        parameters_over=over if stage == 3 else 1,
        # PyTorch's pipelines reduce a stage's gradients after its last micro-batch.
        gradients_over=over if stage >= 2 and (axes.stage_ranks == 1 or micro_batches == 1) else 1,
        optimizer_over=over,
        parameter_bytes=rest,
        gradient_bytes=gradient,
        beside_bytes=BESIDE * rest if gradient > rest and stage < 2 else 0.0,
        moment_bytes=2 * master,
        master_bytes=master if has_masters else 0,
        cast_bytes=0 if FORMATS[compute].bytes == rest or stage == 3 else FORMATS[compute].bytes,
        # FSDP2 keeps a pipeline's stages gathered for the whole step.
        reshards=stage == 3 and axes.stage_ranks == 1,
        reduce_bytes=gradient,
        # An accumulator of its own is reduced to shards when the sum is complete; DDP reduces it bucket by bucket.
        overlaps=gradient == rest or stage != 1,
        # Such an accumulator keeps its size after it was reduced, and the whole of it is summed between stages.
        sums_ties_whole=gradient > rest and stage < 2,
        sequence=_is_true(values.get("sequence_parallel")),
        elastic=_is_true(values.get("sequence_parallel")),
    )


def _count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a row; an error names the column."""
    text = values.get(name) or ""
    if not text and default is not None:
        return default
    number = _real(text, name)
    least, most = (0 if name == "zero_stage" else 1), (MOST_LAYERS if name == "n_layers" else MOST)
    if number != int(number) or not least <= number <= most:
        raise ValueError(f"{name} is {shown(text)}; it must be a whole number from {least} to {most}")
    return int(number)


def _dtype(values: Mapping[str, Any], name: str, default: str) -> str:
    word = str(values.get(name) or "").strip().lower() or default
    dtype = ALIASES.get(word, word)
    if dtype not in FORMATS:
        raise ValueError(f"{name} is {shown(word)}; it must be one of {', '.join(FORMATS)}")
    return dtype


def _word(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    """One of the known words; empty if the column is empty or missing."""
    word = str(values.get(name) or "").strip().lower()
    found = ALIASES.get(word, word)
    if found and found not in known:
        raise ValueError(f"{name} is {shown(word)}; it must be one of {', '.join(known)}, or empty")
    return found


def _is_true(text: Any) -> bool:
    return str(text or "").strip().lower() in ("true", "1", "yes")


def _float(values: Mapping[str, Any], name: str) -> float | None:
    text = values.get(name)
    return _real(text, name) if text not in (None, "") else None


def _measured(values: Mapping[str, Any], name: str) -> float | None:
    """A measured number above 0; None if the column is empty or missing."""
    text = str(values.get(name) or "").strip()
    number = None if text.lower() in NOT_MEASURED else _float({name: text}, name)
    if number is not None and number <= 0:
        raise ValueError(f"{name} is {shown(values[name])}; it must be above 0, or empty if it was not measured")
    return number


def _real(text: Any, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {shown(text)}; it must be a number")
    return number
