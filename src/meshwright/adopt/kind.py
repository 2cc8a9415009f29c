"""Which libraries a script trains with, and whether it trains at all."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from meshwright.adopt.script import Script, is_true, keyword, last_name, names_in

WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "fully_shard": "fsdp2",
    "DataParallel": "dp",
    "Accelerator": "accelerate",
    "Fabric": "fabric",
    "ZeroRedundancyOptimizer": "zero1",
    "parallelize_module": "tp",
}
OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "LBFGS",
    "Adafactor", "SparseAdam", "Muon", "Lion", "Lamb", "LARS", "FusedAdam", "DeepSpeedCPUAdam", "AdamW8bit",
    "Adam8bit", "PagedAdamW8bit", "SOAP", "Prodigy",
)  # fmt: skip
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "LightningTrainer")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a script trains."""

    libraries: frozenset[str]
    """Of ddp, fsdp, fsdp2, dp, accelerate, fabric, deepspeed, zero1, tp."""
    backward: tuple[ast.Call, ...]
    """Its backward passes."""
    elsewhere: bool = False
    """Whether the loop is in another file: this one builds an optimizer and a loader, and hands them on."""
    trainer: str = ""
    """The class that holds the loop, if another library does."""

    @property
    def trains(self) -> bool:
        return bool(self.backward) or bool(self.trainer) or self.elsewhere

    @property
    def by_hand(self) -> bool:
        """Whether the script itself spreads data, wraps the model and saves, with nothing that does it for it."""
        return bool(self.libraries & {"ddp", "fsdp", "fsdp2", "zero1"}) and not self.library

    @property
    def library(self) -> str:
        """The library that owns backward and data, if one does."""
        return next((one for one in ("accelerate", "fabric", "deepspeed") if one in self.libraries), "")

    @property
    def shards(self) -> bool:
        return bool(self.libraries & {"fsdp", "fsdp2", "deepspeed"})

    def __str__(self) -> str:
        names = {
            "ddp": "DDP",
            "fsdp": "FSDP",
            "fsdp2": "FSDP2",
            "dp": "DataParallel",
            "accelerate": "Accelerate",
            "fabric": "Lightning Fabric",
            "deepspeed": "DeepSpeed",
            "zero1": "ZeroRedundancyOptimizer",
            "tp": "tensor parallelism",
        }
        found = [name for key, name in names.items() if key in self.libraries]
        return " and ".join(found) or (f"{self.trainer}" if self.trainer else "plain PyTorch")


def kind_of(script: Script) -> Kind:
    libraries = {
        WRAPPERS[name] for call in script.calls if (name := script.dotted(call.func).rpartition(".")[2]) in WRAPPERS
    }
    if any(script.dotted(call.func) == "deepspeed.initialize" for call in script.calls):
        libraries.add("deepspeed")
    elsewhere = bool(script.calls_of(*OPTIMIZERS)) and bool(script.calls_of("DataLoader")) and not _backward(script)
    return Kind(
        libraries=frozenset(libraries), backward=tuple(_backward(script)), trainer=_trainer(script), elsewhere=elsewhere
    )


def _backward(script: Script) -> list[ast.Call]:
    found = script.methods("backward", "manual_backward")
    # A method `backward` of an autograd function is called with `ctx`, and by torch.
    return [call for call in found if not any(last_name(arg) == "ctx" for arg in call.args)]


def _trainer(script: Script) -> str:
    for call in script.calls_of(*TRAINERS):
        source = script.dotted(call.func)
        if source.split(".")[0] in {"transformers", "trl", "lightning", "pytorch_lightning"}:
            return source
    return ""


def loss_of(call: ast.Call) -> ast.expr | None:
    """What a backward pass starts from: `loss` of `loss.backward()`, `scaler.scale(loss).backward()` and the like."""
    assert isinstance(call.func, ast.Attribute)
    if (
        call.args
        and not is_true(keyword(call, "retain_graph"))
        and names_in(call.args[0]) & names_like(call.args[0], "loss")
    ):
        return call.args[0]
    value = call.func.value
    if isinstance(value, ast.Call) and last_name(value.func) == "scale" and value.args:
        return value.args[0]
    if call.args and last_name(value) in {"accelerator", "fabric", "engine", "model_engine", "model", "self"}:
        return call.args[0]
    return value


def names_like(node: ast.AST, part: str) -> set[str]:
    return {name for name in names_in(node) if part in name.lower()}
