"""Mistakes in how data reach the ranks: samplers, shuffling, seeds, evaluation over padding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from meshwright.adopt.finding import ADVICE, Finding
from meshwright.adopt.kind import Kind
from meshwright.adopt.script import (
    Script,
    argument,
    called_on,
    is_false,
    is_true,
    keyword,
    last_name,
    mentions_rank,
    names_in,
)

HELD_OUT = re.compile(r"(^|_|\.)(val|valid|validation|test|eval|dev)", re.IGNORECASE)
RANDOM = re.compile(r"^(Dropout\w*|dropout|Random\w+|ColorJitter|AutoAugment|RandAugment|TrivialAugmentWide|AugMix)$")
SPREAD = (
    "shard",
    "split_dataset_by_node",
    "StatefulDistributedSampler",
    "DistributedBatchSampler",
    "SplitByNode",
    "split_by_node",
)


def check(script: Script, kind: Kind) -> Iterator[Finding]:
    yield from _shuffle_beside_sampler(script)
    yield from _uneven_gather(script, kind)
    if kind.by_hand:
        yield from _set_epoch(script)
        yield from _no_sampler(script, kind)
        yield from _padded_evaluation(script)
        yield from _equal_seeds(script)


def _samplers(script: Script) -> list[ast.Call]:
    return script.calls_of("DistributedSampler")


def _is_held_out(script: Script, call: ast.Call) -> bool:
    """Whether a sampler or loader is of held-out data, by the names of its data and of what it is assigned to."""
    data = argument(call, 0, "dataset")
    words = [*script.targets_of(call), ast.unparse(data) if data is not None else ""]
    return any(HELD_OUT.search(word) for word in words)


def _set_epoch(script: Script) -> Iterator[Finding]:
    for call in _samplers(script):
        if is_false(keyword(call, "shuffle")) or _is_held_out(script, call) or script.methods("set_epoch"):
            continue
        if _is_handed_on(script, call):
            continue
        yield Finding(
            name="sampler-set-epoch",
            line=call.lineno,
            message="DistributedSampler shuffles by (seed, epoch), and set_epoch() is never called: every epoch has "
            "the same order. Call sampler.set_epoch(epoch) before each epoch.",
        )


def _is_handed_on(script: Script, sampler: ast.Call) -> bool:
    """Whether a function of another file gets the sampler, and may call set_epoch()."""
    names = set(script.targets_of(sampler))
    for call in script.calls:
        name = last_name(call.func)
        if name in script.functions or name.endswith("DataLoader"):
            continue
        if names & {ast.unparse(one) for one in [*call.args, *(word.value for word in call.keywords)]}:
            return True
    return False


def _no_sampler(script: Script, kind: Kind) -> Iterator[Finding]:
    words = {ast.unparse(call.func).rpartition(".")[2] for call in script.calls}
    if _samplers(script) or words & set(SPREAD) or script.calls_of("IterableDataset"):
        return
    if any(
        "IterableDataset" in ast.unparse(base)
        for one in ast.walk(script.tree)
        if isinstance(one, ast.ClassDef)
        for base in one.bases
    ):
        return
    for call in script.calls_of("DataLoader", "StatefulDataLoader"):
        data = argument(call, 0, "dataset")
        has_own = any(keyword(call, name) is not None for name in ("sampler", "batch_sampler"))
        has_own |= any(one.arg is None for one in call.keywords)  # **options may hold a sampler
        if has_own or _is_held_out(script, call) or data is None or _depends_on_rank(script, data):
            continue
        yield Finding(
            name="no-distributed-sampler",
            line=call.lineno,
            message="Every rank iterates over all of this data: the ranks train on the same samples, or an epoch "
            "counts each sample once per rank. Give the DataLoader sampler=DistributedSampler(dataset).",
        )


def _depends_on_rank(script: Script, data: ast.expr) -> bool:
    if mentions_rank(data):
        return True
    sources = [one.value for name in names_in(data) for one in script.assigned.get(name, []) if one.value is not None]
    return any(mentions_rank(one) for one in sources)


def _shuffle_beside_sampler(script: Script) -> Iterator[Finding]:
    for call in script.calls_of("DataLoader"):
        if is_true(keyword(call, "shuffle")) and isinstance(keyword(call, "sampler"), ast.Call):
            yield Finding(
                name="shuffle-with-sampler",
                line=call.lineno,
                message="DataLoader refuses shuffle=True beside a sampler. Leave shuffle out; the sampler shuffles.",
            )


def _padded_evaluation(script: Script) -> Iterator[Finding]:
    for call in _samplers(script):
        if (
            _is_held_out(script, call)
            and not is_true(keyword(call, "drop_last"))
            and script.calls_of("all_reduce", "reduce", "all_gather")
        ):
            yield Finding(
                name="padded-evaluation",
                line=call.lineno,
                message="DistributedSampler repeats samples until every rank has as many, and the metric counts them "
                "twice. Evaluate the last samples apart (drop_last=True), or count only the first len(dataset).",
            )


def _uneven_gather(script: Script, kind: Kind) -> Iterator[Finding]:
    if "accelerate" not in kind.libraries or re.search(r"samples_seen|\[\s*:\s*len\(", script.text):
        return
    for call in script.methods("gather"):
        owner = ast.unparse(called_on(call))
        if "accelerator" in owner and _near_held_out(script, call):
            yield Finding(
                name="padded-evaluation",
                line=call.lineno,
                message="accelerator.gather() keeps the samples that were repeated to fill the last batch, and the "
                "metric counts them twice. Use accelerator.gather_for_metrics().",
            )


def _near_held_out(script: Script, call: ast.Call) -> bool:
    return any(HELD_OUT.search(ast.unparse(loop.iter)) for loop in script.loops_of(call) if isinstance(loop, ast.For))


def _equal_seeds(script: Script) -> Iterator[Finding]:
    seeds = [
        call for call in script.calls_of("manual_seed", "manual_seed_all", "set_seed", "seed_everything") if call.args
    ]
    draws = [
        node
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and RANDOM.match(ast.unparse(node.func).rpartition(".")[2])
    ]
    if (
        not seeds
        or not draws
        or any(_depends_on_rank(script, call.args[0]) or _in_ranked_call(script, call) for call in seeds)
    ):
        return
    yield Finding(
        name="equal-seeds",
        line=seeds[0].lineno,
        grade=ADVICE,
        message="All ranks get the same seed, so they draw the same dropout masks and augmentations for different "
        "samples. Add the rank to the seed once the model is built.",
    )


def _in_ranked_call(script: Script, call: ast.Call) -> bool:
    """Whether the function that seeds gets a seed that depends on the rank."""
    callers = script.callers(script.function_of(call))
    return any(
        _depends_on_rank(script, one)
        for caller in callers
        for one in [*caller.args, *(k.value for k in caller.keywords)]
    )
