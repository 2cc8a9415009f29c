"""Every kind of model that transformers has and `hf:` takes, made small: it trains, so it must be forecast.

    PYTHONPATH=src:benchmarks python benchmarks/every_model.py --json docs/data/every_model.json    # no GPU; an hour

Each config class gets small sizes, or keeps its own where these contradict each other. What then runs forward and
backward on a CPU is described, and its step under `single,bf16` is accounted for and traced. The others say why they do
not train. Each model has a process of its own with a time limit; finished ones are kept, so the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers
from plan_gpu import account_for
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.jobs.hugging_face import TASKS, hugging_face_job
from meshwright.tracing import trace_step
from meshwright.units import GIB

STRATEGY, BATCH, TOKENS = "single,bf16", 8, 128
MOST_PARAMETERS, MOST_BYTES, LIMIT_S = 2e8, 7 << 30, 300
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff"), 512),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "q_lora_rank", "kv_lora_rank", "sliding_window"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 32),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"vocab_size": 1024, "max_position_embeddings": 256},
}
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def small_config(kind: Any, *, only_smaller: bool) -> Any:
    """A config with small sizes; with `only_smaller`, those that the class has smaller stay."""
    usual = kind()
    sizes = {name: size for name, size in SMALL.items() if type(getattr(usual, name, None)) is int}
    if only_smaller:
        sizes = {name: size for name, size in sizes.items() if getattr(usual, name) >= size}
    chosen: dict[str, Any] = dict(sizes)
    for name in SPECIAL_TOKENS:
        if type(getattr(usual, name, None)) is int and getattr(usual, name) >= SMALL["vocab_size"]:
            chosen[name] = 1
    if isinstance(getattr(usual, "layer_types", None), list) and "num_hidden_layers" in sizes:
        chosen["layer_types"] = None
    return kind(**chosen)


def trained_job(kind: Any, folder: Path) -> Job:
    """The job of the first config that trains; an error of the last one that does not."""
    reason = ""
    for only_smaller in (False, True, None):
        try:
            config = kind() if only_smaller is None else small_config(kind, only_smaller=only_smaller)
            config.save_pretrained(folder)
            takes_text = any(type(config) in getattr(transformers, one.mapping) for one in TASKS[:3])
            job = hugging_face_job(f"{folder}:batch={BATCH}" + (f",seq={TOKENS}" if takes_text else ""))
            train(job)
            return job
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {str(error)[:160]}"
    raise RuntimeError(reason)


def train(job: Job) -> None:
    with torch.device("meta"):
        if sum(p.numel() for p in job.model().parameters()) > MOST_PARAMETERS:
            raise RuntimeError("too large to be tried on a CPU")
    model, batch = job.model().train(), job.sample(2)
    total, weight = job.loss(model(**job.inputs(batch)), batch)
    (total / weight).backward()


def forecast(name: str, answer: Connection) -> None:
    """Answer with a row: why the model does not train, or what is forecast of it, or why not."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    row: dict[str, Any] = {"model": name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            job = trained_job(CONFIG_MAPPING[name], Path(folder))
        except Exception as error:
            answer.send(row | {"does_not_train": str(error)})
            return
        try:
            facts = describe(job)
            row["parameters"] = sum(parameter.count for parameter in facts.parameters)
            case = {"job": name, "strategy": STRATEGY, "ranks": 1, "rank": 0}
            row["account_gib"] = account_for(case, Planner(job, facts, BATCH))["account_gib"]
            row["traced_gib"] = trace_step(job, facts, Strategy.parse(STRATEGY), ranks=1, rank=0).peak / GIB
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    answer.send(row)


def apart(name: str) -> dict[str, Any]:
    """The row of a model from a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    started, process = time.perf_counter(), fork.Process(target=forecast, args=(name, theirs))
    process.start()
    theirs.close()
    row = {"model": name, "error": f"no answer in {LIMIT_S} s"}
    if ours.poll(LIMIT_S):
        try:
            row = ours.recv()
        except EOFError:
            row["error"] = "the process ended"
    process.kill()
    process.join()
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def summary(rows: list[dict[str, Any]]) -> str:
    trains = [row for row in rows if "does_not_train" not in row]
    told = [row for row in trains if "traced_gib" in row]
    off = [abs(row["account_gib"] / row["traced_gib"] - 1) for row in told]
    lines = [f"{len(rows)} kinds, {len(trains)} train, {len(told)} are forecast"]
    lines += (
        [f"account beside trace: mean {mean(off):.1%}, median {median(off):.1%}, most {max(off):.1%}"] if off else []
    )
    return "\n".join(lines + [f"{row['model']}: {row['error']}" for row in trains if "error" in row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of models (default: all)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    done = {row["model"] for row in rows}
    tables = [getattr(transformers, task.mapping) for task in TASKS]
    for name in options.only or list(CONFIG_MAPPING):
        if name in done or not any(CONFIG_MAPPING[name] in table for table in tables):
            continue
        rows.append(apart(name))
        print(rows[-1], flush=True)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        versions = f'"torch": "{torch.__version__}", "transformers": "{transformers.__version__}"'
        options.json.write_text(f'{{\n {versions},\n "rows": [\n{lines}\n ]\n}}\n')
    print(summary(rows))


if __name__ == "__main__":
    main()
