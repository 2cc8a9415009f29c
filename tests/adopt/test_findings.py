"""Mistakes are found in broken scripts, and nothing is in sound ones."""

from pathlib import Path

import pytest

from meshwright.adopt.finding import Finding
from meshwright.adopt.findings import find
from meshwright.adopt.kind import kind_of
from meshwright.adopt.script import Script

SCRIPTS = Path(__file__).parent / "scripts"
SOUND = sorted(SCRIPTS.glob("*.py"))

FABRIC = """
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1 + fabric.global_rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(range(8), batch_size=4, shuffle=True))
for batch in loader:
    optimizer.zero_grad()
    loss = model(batch).mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.save("checkpoint", {"model": model})
"""
DEEPSPEED = """
import deepspeed
import torch
model = torch.nn.Linear(4, 2)
config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
engine, optimizer, loader, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    if step % 100 == 0:
        engine.save_checkpoint("out")
"""
FSDP = """
import functools
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

def main(rank, dataset, model, Block):
    torch.cuda.set_device(rank)
    torch.manual_seed(17 + rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(model, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print("loss", total.item() / dist.get_world_size())
    state = model.state_dict()
    if rank == 0:
        torch.save(state, "model.pt")
    dist.barrier()
    state = torch.load("model.pt")
"""
SCALED = """
import torch
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler()
losses = 0.0
for step, (x, y) in enumerate(loader):
    with torch.autocast("cuda", torch.float16):
        loss = torch.nn.functional.mse_loss(model(x), y) / 4
    scaler.scale(loss).backward()
    losses += loss.item()
    if (step + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    if step % 100 == 0:
        model.eval()
        with torch.no_grad():
            print(model(x).mean().item())
        model.train()
"""
MORE = {"fabric": FABRIC, "deepspeed": DEEPSPEED, "fsdp": FSDP, "scaled": SCALED}


def findings(text: str) -> list[Finding]:
    script = Script.parse(text, Path("train.py"))
    return find(script, kind_of(script))


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.stem)
def test_a_sound_script_of_the_test_data(path: Path) -> None:
    assert findings(path.read_text()) == []


@pytest.mark.parametrize("name", MORE)
def test_a_sound_script(name: str) -> None:
    assert findings(MORE[name]) == []


def source(name: str) -> str:
    return MORE[name] if name in MORE else (SCRIPTS / f"{name}.py").read_text()


BROKEN = [
    ("sampler-set-epoch", "ddp_spawn", "        sampler.set_epoch(epoch)\n", ""),
    (
        "no-distributed-sampler",
        "ddp_spawn",
        "sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)",
        "",
    ),
    ("shuffle-with-sampler", "ddp_trainer", "shuffle=False", "shuffle=True"),
    (
        "padded-evaluation",
        "ddp_spawn",
        "    criterion =",
        "    val_sampler = DistributedSampler(val_set, shuffle=False)\n    criterion =",
    ),
    ("padded-evaluation", "with_accelerate", "gather_for_metrics", "gather"),
    ("equal-seeds", "fsdp", "torch.manual_seed(17 + rank)", "torch.manual_seed(17)\n    drop = torch.nn.Dropout(0.1)"),
    ("no-zero-grad", "plain_loop", "        optimizer.zero_grad()\n", ""),
    ("plain-backward", "with_accelerate", "accelerator.backward(loss)", "loss.backward()"),
    ("plain-backward", "fabric", "fabric.backward(loss)", "loss.backward()"),
    ("plain-backward", "deepspeed", "engine.backward(loss)", "loss.backward()"),
    ("accumulation-not-divided", "accumulation", " / ACCUMULATE\n", "\n"),
    ("accumulation-not-divided", "scaled", ", y) / 4", ", y)"),
    ("mean-of-means", "ddp_spawn", "nn.BCEWithLogitsLoss()", "nn.CrossEntropyLoss(ignore_index=0)"),
    ("local-norm", "fsdp", "model.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    ("local-norm", "with_accelerate", "accelerator.clip_grad_norm_", "nn.utils.clip_grad_norm_"),
    ("clip-before-unscale", "scaled", "        scaler.unscale_(optimizer)\n", ""),
    ("step-without-scaler", "scaled", "scaler.step(optimizer)", "optimizer.step()"),
    ("no-scaler-update", "scaled", "        scaler.update()\n", ""),
    (
        "schedule-before-step",
        "frozen",
        "optimizer.step()\n            scheduler.step()",
        "scheduler.step()\n            optimizer.step()",
    ),
    (
        "clip-after-step",
        "fsdp2",
        "            optimizer.step()\n            optimizer.zero",
        "            optimizer.zero",
    ),
    (
        "zero-before-step",
        "plain_loop",
        "        loss.backward()\n",
        "        loss.backward()\n        optimizer.zero_grad()\n",
    ),
    ("kept-graph", "scaled", "losses += loss.item()", "losses += loss"),
    ("stays-in-eval-mode", "scaled", "        model.train()\n", ""),
    ("find-unused-parameters", "ddp_trainer", "DDP(self.model)", "DDP(self.model, find_unused_parameters=True)"),
    (
        "optimizer-before-wrap",
        "fsdp",
        "    sampler = ",
        "    optimizer = torch.optim.AdamW(model.parameters())\n    sampler = ",
    ),
    ("one-unit", "fsdp", "FSDP(model, auto_wrap_policy=policy)", "FSDP(model)"),
    ("one-gpu", "fsdp", "    torch.cuda.set_device(rank)\n", ""),
    ("past-the-wrapper", "ddp_trainer", "self.model(source)", "self.model.module(source)"),
    (
        "late-sync-batch-norm",
        "ddp_spawn",
        "    dataset = make",
        "    m = nn.SyncBatchNorm.convert_sync_batchnorm(ddp_model)\n    dataset = make",
    ),
    ("not-prepared", "with_accelerate", "prepare(\n        model, optimizer,", "prepare(\n        model,"),
    ("local-loss", "ddp_spawn", "            dist.all_reduce(mean)\n", ""),
    ("data-parallel", "plain_loop", "criterion =", "model = nn.DataParallel(model)\ncriterion ="),
    ("saved-by-every-rank", "ddp_spawn", "    if rank == 0:\n        torch.save(", "    if True:\n        torch.save("),
    (
        "saved-by-one-rank",
        "fsdp",
        "    state = model.state_dict()\n    if rank == 0:\n",
        "    if rank == 0:\n        state = model.state_dict()\n",
    ),
    ("saved-by-one-rank", "deepspeed", "if step % 100 == 0:", "if step % 100 == 0 and engine.global_rank == 0:"),
    ("no-barrier", "fsdp", "    dist.barrier()\n", ""),
    ("prefixed-names", "ddp_spawn", "ddp_model.module.state_dict()", "ddp_model.state_dict()"),
]


@pytest.mark.parametrize(("name", "base", "right", "wrong"), BROKEN, ids=[f"{one[0]}-{one[1]}" for one in BROKEN])
def test_a_mistake_is_found(name: str, base: str, right: str, wrong: str) -> None:
    text = source(base)
    assert right in text
    broken = text.replace(right, wrong)
    if name == "clip-after-step":
        clip = "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        broken = text.replace(clip, "").replace(
            "            optimizer.step()\n", f"            optimizer.step()\n{clip}"
        )
    if name == "no-distributed-sampler":
        broken = broken.replace("sampler=sampler", "shuffle=True").replace("        sampler.set_epoch(epoch)\n", "")
    found = [one for one in findings(broken) if one.name == name]
    assert found
    assert all(1 <= one.line <= broken.count("\n") + 1 and one.message.endswith(".") for one in found)


def test_summed_gradients() -> None:
    text = source("plain_loop").replace("        optimizer.step()", "        average(model)\n        optimizer.step()")
    by_hand = "import torch.distributed as dist\ndef average(model):\n    for p in model.parameters():\n"
    by_hand += "        dist.all_reduce(p.grad)\n"
    assert [one.name for one in findings(by_hand + text)] == ["summed-gradients"]
    assert findings(by_hand + "        p.grad /= dist.get_world_size()\n" + text) == []
