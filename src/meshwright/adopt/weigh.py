"""A script's mean loss as a job's (sum, weight), so that ranks and micro-batches of any size count right."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, argument

PER_TARGET = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
PER_ELEMENT = (
    "mse_loss", "MSELoss", "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss",
    "binary_cross_entropy", "BCELoss", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss",
)  # fmt: skip
SHIFTED = ("CausalLM", "LMHeadModel")
PER_LABEL = ("Seq2SeqLM", "ConditionalGeneration", "MaskedLM", "TokenClassification")
PER_SAMPLE = ("SequenceClassification", "ImageClassification", "AudioClassification", "create_model", "get_classifier")
COUNT = "samples_in(batch)"


@dataclass(frozen=True, kw_only=True)
class Weight:
    """How a loss is weighted."""

    text: str
    """The weight, as Python in the job's loss function."""
    is_sum: bool = False
    """Whether the script's loss is a sum over the batch already."""
    note: str = ""


def weigh(script: Script, parts: Parts, value: ast.expr, *, in_output: bool) -> Weight:
    """The weight of a loss whose last step is `value`. `in_output`: the model computes it."""
    if in_output:
        return _in_model(script, parts)
    call = value if isinstance(value, ast.Call) else None
    name, options = _loss_class(script, parts, call)
    reduction = options.get("reduction")
    if isinstance(reduction, ast.Constant) and reduction.value == "sum":
        return _summed()
    if call is not None and name in PER_TARGET:
        return _per_target(call, options)
    if call is not None and name in PER_ELEMENT and "weight" not in options:
        target = argument(call, 1, "target")
        return Weight(text=f"{_operand(target)}.numel()") if target is not None else _by_samples("")
    if name in script.functions and _sums(script, name):
        return _summed()
    if call is not None and isinstance(call.func, ast.Attribute) and call.func.attr == "sum":
        return _summed()
    return _by_samples("The loss is weighted by samples: right if it is a mean over samples that count alike.")


def _loss_class(script: Script, parts: Parts, call: ast.Call | None) -> tuple[str, dict[str, ast.expr]]:
    """The name of a loss function or class, with its options."""
    if call is None:
        return "", {}
    options = {one.arg: one.value for one in call.keywords if one.arg}
    made = call.func
    if isinstance(made, ast.Name):
        for statement in parts.prelude:
            if (
                isinstance(statement, ast.Assign)
                and ast.unparse(statement.targets[0]) == made.id
                and isinstance(statement.value, ast.Call)
            ):
                options |= {one.arg: one.value for one in statement.value.keywords if one.arg}
                if statement.value.args:
                    options["weight"] = statement.value.args[0]
                return script.dotted(statement.value.func).rpartition(".")[2], options
    if isinstance(made, ast.Call):  # nn.CrossEntropyLoss()(output, target)
        options |= {one.arg: one.value for one in made.keywords if one.arg}
        return script.dotted(made.func).rpartition(".")[2], options
    return script.dotted(made).rpartition(".")[2], options


def _per_target(call: ast.Call, options: dict[str, ast.expr]) -> Weight:
    target = argument(call, 1, "target")
    if target is None or "weight" in options:
        return _by_samples(
            "The loss has weights per class: divide by the sum of the targets' weights instead of samples."
        )
    text = _operand(target)
    ignored = options.get("ignore_index")
    if ignored is not None:
        return Weight(text=f"({text} != {ast.unparse(ignored)}).sum()")
    if any(word in text for word in ("view", "reshape", "flatten")):
        return Weight(text=f"({text} != -100).sum()")
    return Weight(text=f"{text}.numel()")


def _operand(node: ast.expr) -> str:
    """An expression as an operand of `.` and `!=`."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call) else f"({text})"


def _sums(script: Script, name: str) -> bool:
    text = " ".join(ast.unparse(one) for one in script.functions[name])
    return (
        ("reduction='sum'" in text or ".sum()" in text or "torch.sum(" in text)
        and "mean" not in text
        and "/" not in text
    )


def _summed() -> Weight:
    return Weight(
        text=f"{COUNT} / GLOBAL_BATCH",
        is_sum=True,
        note="The script's loss is a sum over the batch, so its gradient grows with the batch; the job keeps that for "
        "full batches.",
    )


def _by_samples(note: str) -> Weight:
    return Weight(text=COUNT, note=note)


def _in_model(script: Script, parts: Parts) -> Weight:
    """A loss that the model returns, by the model's class."""
    built = " ".join(ast.unparse(one) for one in parts.prelude if parts.model in ast.unparse(one).split("=")[0])
    if any(word in built for word in SHIFTED):
        return Weight(text='(batch["labels"][:, 1:] != -100).sum()')
    if any(word in built for word in PER_LABEL):
        return Weight(text='(batch["labels"] != -100).sum()')
    if any(word in built for word in PER_SAMPLE):
        return Weight(text=COUNT)
    return _by_samples("The model computes the loss: it is weighted by samples, which is right if they count alike.")


def divides(script: Script, statement: ast.stmt, loss: str, accumulation: ast.expr | None) -> bool:
    """Whether a statement only divides the loss for accumulation."""
    if (
        isinstance(statement, ast.AugAssign)
        and isinstance(statement.op, ast.Div)
        and ast.unparse(statement.target) == loss
    ):
        return _is_count(statement.value, accumulation)
    value = getattr(statement, "value", None)
    return (
        isinstance(statement, ast.Assign)
        and isinstance(value, ast.BinOp)
        and divided(value, accumulation) is not None
        and (ast.unparse(value.left) == loss)
    )


def divided(node: ast.expr, accumulation: ast.expr | None) -> ast.expr | None:
    """x of `x / N` where N is the number of accumulated batches; None if it is anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_count(node.right, accumulation):
        return node.left
    return None


def _is_count(node: ast.expr, accumulation: ast.expr | None) -> bool:
    text = ast.unparse(node)
    return (accumulation is not None and text == ast.unparse(accumulation)) or "accum" in text.lower()
