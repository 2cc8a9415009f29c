"""nanoGPT, and llama2.c's training on a stream."""

from __future__ import annotations

import made_up_data
from edits import Edit, replace, swap
from script import Edits, Script

SMALL = ["--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=2", "--eval_iters=1", "--max_iters=3"]
RATES = ["--learning_rate=0.01", "--gradient_accumulation_steps=2", "--batch_size=4"]


def _parallelize(strategy: str, length: str) -> str:
    sample = f"(torch.zeros(2, {length}, dtype=torch.long),) * 2"
    return f'model, optimizer = mw.parallelize(model, "{strategy}", optimizer=optimizer, sample={sample})'


def _both(strategy: str, quote: str, length: str) -> list[Edit]:
    """What is the same in both scripts: one's loop is the other's."""
    return [
        replace("from torch.nn.parallel import Dist", "import meshwright as mw"),
        replace("ddp = int(os.environ.get(", f"ddp, master_process = False, os.environ.get({quote}RANK{quote}) == {quote}0{quote}",
                until="# if not ddp, we are running"),
        replace("    master_process = True"),
        swap("    seed_offset = 0", "seed_offset = 0"),
        swap("    ddp_world_size = 1", "ddp_world_size = 1"),
        replace("# wrap model into DDP container", _parallelize(strategy, length), until="model = DDP(model"),
        swap("eval_interval == 0 and master_process", "eval_interval == 0"),
        replace("raw_model = model.module if ddp", "raw_model = model"),
    ]  # fmt: skip


def _nanogpt(strategy: str) -> Edits:
    return {
        "train.py": [
            replace("from torch.distributed import init_process"),
            *_both(strategy, "'", "block_size"),
            swap("(batch_size,))", "(batch_size,))[model.data_rank::model.data_ranks]"),
            replace("checkpoint = {", "model.save(out_dir)", until="torch.save(checkpoint"),
        ]
    }


def _llama2c(strategy: str) -> Edits:
    loss = "loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), Y.flatten())"
    return {
        "train.py": [
            replace("from torch.distributed import destroy"),
            *_both(strategy, '"', "max_seq_len"),
            _each("loss = raw_model.last_loss", loss),
            swap('train_batch_iter = iter_batches(split="train")', 'train_batch_iter = iter_batches(split="train", divide=model.divide)'),
            replace("checkpoint = {", "model.save(out_dir)", until="model_export(raw_model"),
        ],
        "tinystories.py": [
            replace("rank = dist.get_rank()", "rank = 0"),
            swap("num_workers=0, **dataset_kwargs", "num_workers=0, divide=lambda dl: dl, **dataset_kwargs"),
            swap("for x, y in dl:", "for x, y in divide(dl):"),
        ],
    }  # fmt: skip


def _each(old: str, new: str) -> Edit:
    return swap(old, new, every=True)


def _accelerate(quote: str) -> list[Edit]:
    return [
        replace("from torch.nn.parallel import Dist", "from accelerate import Accelerator"),
        replace("ddp = int(os.environ.get(", "accelerator = Accelerator(cpu=True)",
                "ddp, master_process = False, accelerator.is_main_process", "seed_offset = accelerator.process_index",
                "ddp_world_size, device = accelerator.num_processes, accelerator.device.type",
                "gradient_accumulation_steps //= ddp_world_size", until="    ddp_world_size = 1"),
        replace("# wrap model into DDP container", "model, optimizer = accelerator.prepare(model, optimizer)",
                until="model = DDP(model"),
        replace("raw_model = model.module if ddp", "raw_model = accelerator.unwrap_model(model)"),
        replace("scaler = torch.cuda.amp"),
        swap("scaler.scale(loss).backward()", "accelerator.backward(loss)"),
        replace("scaler.unscale_(optimizer)"),
        swap("torch.nn.utils.clip_grad_norm_", "accelerator.clip_grad_norm_"),
        swap("scaler.step(optimizer)", "optimizer.step()"),
        replace("scaler.update()"),
    ]  # fmt: skip


NANOGPT = Script(
    name="nanoGPT",
    repository="karpathy+nanoGPT",
    folder="",
    main="train.py",
    files=["model.py", "configurator.py"],
    arguments=[*SMALL, *RATES, "--dataset=tiny", "--block_size=16", "--n_layer=2", "--n_head=2", "--n_embd=16",
               "--warmup_iters=2", "--lr_decay_iters=6"],
    accelerate={"train.py": [replace("from torch.distributed import init_process"), *_accelerate("'")]},
    own_loop=_nanogpt,
    prepare=made_up_data.nanogpt,
)  # fmt: skip

LLAMA2C = Script(
    name="llama2.c (stream)",
    repository="karpathy+llama2.c",
    folder="",
    main="train.py",
    files=["model.py", "configurator.py", "tinystories.py", "tokenizer.py", "export.py"],
    arguments=[*SMALL, *RATES, "--vocab_source=custom", "--vocab_size=48", "--max_seq_len=16", "--dim=16",
               "--n_layers=2", "--n_heads=2", "--n_kv_heads=2", "--multiple_of=8", "--warmup_iters=2"],
    accelerate={"train.py": [replace("from torch.distributed import destroy"), *_accelerate('"')]},
    own_loop=_llama2c,
    prepare=made_up_data.llama2c,
)  # fmt: skip
