"""Mistakes in how the model is wrapped and placed: order, units, devices, what goes through the wrapper."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.adopt.finding import ADVICE, Finding
from meshwright.adopt.kind import OPTIMIZERS, Kind
from meshwright.adopt.script import Script, is_true, keyword, last_name, mentions_rank, names_in


def check(script: Script, kind: Kind) -> Iterator[Finding]:
    yield from _unused_parameters(script)
    yield from _optimizer_first(script)
    yield from _one_unit(script)
    yield from _one_gpu(script, kind)
    yield from _past_the_wrapper(script, kind)
    yield from _late_sync_batch_norm(script)
    yield from _not_prepared(script, kind)
    yield from _local_loss(script, kind)
    yield from _data_parallel(script)


def _unused_parameters(script: Script) -> Iterator[Finding]:
    for call in script.calls_of("DistributedDataParallel", "DistributedDataParallelKwargs", "DDPStrategy"):
        if is_true(keyword(call, "find_unused_parameters")):
            yield Finding(
                name="find-unused-parameters",
                line=call.lineno,
                grade=ADVICE,
                message="find_unused_parameters=True walks the graph in every step. It is needed only if some "
                "parameters get no gradient in some steps; otherwise leave it out.",
            )


def _wraps(script: Script) -> list[ast.Call]:
    return script.calls_of("FullyShardedDataParallel", "fully_shard")


def _optimizer_first(script: Script) -> Iterator[Finding]:
    """An optimizer of parameters that FSDP replaces afterwards."""
    for wrap in _wraps(script):
        wrapped = names_in(wrap.args[0]) if wrap.args else set()
        for call in script.calls_of(*OPTIMIZERS):
            same = script.function_of(call) is script.function_of(wrap)
            if same and call.lineno < wrap.lineno and call.args and names_in(call.args[0]) & wrapped:
                yield Finding(
                    name="optimizer-before-wrap",
                    line=call.lineno,
                    message=f"The optimizer holds the parameters that FSDP replaces in line {wrap.lineno}, so it "
                    "updates none of those that are trained. Build it after wrapping.",
                )
                return


def _one_unit(script: Script) -> Iterator[Finding]:
    wraps = _wraps(script)
    if len(wraps) != 1 or script.loops_of(wraps[0]) or script.calls_of("wrap", "enable_wrap", "apply"):
        return
    call = wraps[0]
    has_policy = any(one.arg in {"auto_wrap_policy", None} for one in call.keywords) or len(call.args) > 3
    if last_name(call.func) == "fully_shard":
        called = script.callers(script.function_of(call))
        has_policy = any(script.loops_of(one) for one in called)
    if not has_policy:
        yield Finding(
            name="one-unit",
            line=call.lineno,
            grade=ADVICE,
            message="The whole model is one FSDP unit: each rank gathers all parameters at once and overlaps nothing. "
            "Wrap each block too (auto_wrap_policy, or fully_shard on every block first).",
        )


def _one_gpu(script: Script, kind: Kind) -> Iterator[Finding]:
    if not kind.by_hand or script.calls_of("set_device", "set_device_index", "set_default_device"):
        return
    if "CUDA_VISIBLE_DEVICES" in script.text or "device_ids" in script.text:
        return
    for call in script.calls:
        name, first = last_name(call.func), call.args[0] if call.args else None
        bare = name == "cuda" and not call.args and not call.keywords and isinstance(call.func, ast.Attribute)
        literal = name in {"to", "device"} and isinstance(first, ast.Constant) and first.value in {"cuda", "cuda:0"}
        if (bare or literal) and not mentions_rank(call):
            yield Finding(
                name="one-gpu",
                line=call.lineno,
                message="Every rank of a node uses GPU 0. Call torch.cuda.set_device(local_rank) first, or name the "
                "device.",
            )
            return


def _past_the_wrapper(script: Script, kind: Kind) -> Iterator[Finding]:
    if "ddp" not in kind.libraries:
        return
    functions = {script.function_of(call) for call in kind.backward}
    evaluates = ("eval", "no_grad", "inference_mode")
    for call in script.calls:
        through = isinstance(call.func, ast.Attribute) and call.func.attr == "module"
        if (
            through
            and script.function_of(call) in functions
            and not any(
                word in ast.unparse(one.items[0])
                for one in script.above(call)
                if isinstance(one, ast.With)
                for word in evaluates
            )
        ):
            yield Finding(
                name="past-the-wrapper",
                line=call.lineno,
                message=f"{ast.unparse(call.func)}(...) goes around DDP, so gradients are not averaged over ranks. "
                "Call the wrapped model.",
            )


def _late_sync_batch_norm(script: Script) -> Iterator[Finding]:
    for call in script.methods("convert_sync_batchnorm"):
        for wrap in script.calls_of("DistributedDataParallel"):
            if script.function_of(wrap) is script.function_of(call) and wrap.lineno < call.lineno:
                yield Finding(
                    name="late-sync-batch-norm",
                    line=call.lineno,
                    message="SyncBatchNorm replaces modules after DDP has registered their parameters. Convert first.",
                )


def _not_prepared(script: Script, kind: Kind) -> Iterator[Finding]:
    if "accelerate" not in kind.libraries:
        return
    prepared = script.methods("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader")
    names = {ast.unparse(arg) for call in prepared for arg in call.args}
    if not prepared or any(isinstance(arg, ast.Starred) for call in prepared for arg in call.args):
        return
    for call in script.calls_of(*OPTIMIZERS):
        for target in script.targets_of(call):
            if target not in names and not _is_returned(script, call, target):
                yield Finding(
                    name="not-prepared",
                    line=call.lineno,
                    message=f"{target} is not given to accelerator.prepare(), so its steps ignore the loss scale, "
                    "accumulation and sharding. Prepare it with the model.",
                )


def _is_returned(script: Script, call: ast.Call, target: str) -> bool:
    returns = [
        one for one in ast.walk(script.function_of(call)) if isinstance(one, ast.Return) and one.value is not None
    ]
    return any(target in names_in(one) for one in returns)


def _local_loss(script: Script, kind: Kind) -> Iterator[Finding]:
    if not kind.by_hand or script.calls_of(
        "all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "all_gather_into_tensor"
    ):
        return
    for call in script.calls_of("print", "log", "info", "add_scalar", "set_postfix", "set_description"):
        if "loss" in ast.unparse(call).lower() and script.is_guarded(call):
            yield Finding(
                name="local-loss",
                line=call.lineno,
                grade=ADVICE,
                message="The logged loss is that of one rank's samples, not of the global batch. All-reduce it first.",
            )
            return


def _data_parallel(script: Script) -> Iterator[Finding]:
    for call in script.calls_of("DataParallel"):
        yield Finding(
            name="data-parallel",
            line=call.lineno,
            grade=ADVICE,
            message="nn.DataParallel copies the model in every step and runs in one process. DDP is faster.",
        )
        return
