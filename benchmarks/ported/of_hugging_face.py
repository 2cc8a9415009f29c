"""Accelerate's NLP and CV examples, and a PEFT fine-tune with LoRA.

They are written for Accelerate. Their plain form, from which both ports are counted, is made by taking it out.
"""

from __future__ import annotations

import made_up_data
from edits import after, replace, swap, without
from script import Edits, Script

NLP_SAMPLE = "sample=dict(eval_dataloader.collate_fn([eval_dataloader.dataset[i] for i in range(2)]))"


def _nlp(strategy: str) -> Edits:
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, scheduler=lr_scheduler, {NLP_SAMPLE})'
    return {
        "nlp_example.py": [
            after("from torch.utils.data import DataLoader", "import meshwright as mw"),
            replace("# Now we train the model", f"model, optimizer, lr_scheduler = {call}",
                    "train_dataloader = model.divide(train_dataloader)"),
        ]
    }  # fmt: skip


NLP = Script(
    name="Accelerate NLP",
    repository="huggingface+accelerate",
    folder="examples",
    main="nlp_example.py",
    files=[],
    arguments=["--cpu"],
    setting={
        "nlp_example.py": [
            swap('"num_epochs": 3, "seed": 42, "batch_size": 16', '"num_epochs": 1, "seed": 42, "batch_size": 8'),
            swap('"lr": 2e-5', '"lr": 1e-2'),
            swap("num_warmup_steps=100", "num_warmup_steps=1"),
        ]
    },
    plain={
        "nlp_example.py": [
            replace("from accelerate import Accelerator, Dist"),
            swap("get_dataloaders(accelerator: Accelerator, batch", "get_dataloaders(batch"),
            replace("accelerator (`Accelerator`):", until="An `Accelerator` object"),
            replace("# starting with the main process first:"),
            replace("with accelerator.main_process_first():", "if True:"),
            replace("# For Torchxla,", "max_length = pad_to_multiple_of = None", until="pad_to_multiple_of = None"),
            replace('drop_last=(accelerator.mixed_precision == "fp8")'),
            replace("# Initialize accelerator", until="accelerator = Accelerator("),
            swap(" and accelerator.distributed_type != DistributedType.XLA", ""),
            swap("get_dataloaders(accelerator, batch_size)", "get_dataloaders(batch_size)"),
            replace("# We could avoid this line since the accelerator is set", 'device = torch.device("cpu")',
                    until="# creation otherwise"),
            swap("accelerator.device", "device", every=True),
            replace("# Prepare everything", until="    )"),
            swap("accelerator.backward(loss)", "loss.backward()"),
            replace("predictions, references = accelerator.gather_for", 'references = batch["labels"]'),
            replace("# Use accelerator.print"),
            swap("accelerator.print", "print"),
            replace("accelerator.end_training()"),
        ]
    },
    own_loop=_nlp,
)  # fmt: skip


def _cv(strategy: str) -> Edits:
    sample = "sample=torch.zeros(2, 3, 8, 8)"
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, scheduler=lr_scheduler, {sample})'
    return {
        "cv_example.py": [
            after("from torch.utils.data import DataLoader", "import meshwright as mw"),
            replace("# Now we train the model", f"model, optimizer, lr_scheduler = {call}",
                    "train_dataloader = model.divide(train_dataloader)"),
        ]
    }  # fmt: skip


CV = Script(
    name="Accelerate CV",
    repository="huggingface+accelerate",
    folder="examples",
    main="cv_example.py",
    files=[],
    arguments=["--cpu", "--data_dir", "pets"],
    setting={
        "cv_example.py": [
            swap('"num_epochs": 3, "seed": 42, "batch_size": 64', '"num_epochs": 1, "seed": 42, "batch_size": 8'),
            swap("num_workers=4", "num_workers=0", every=True),
            swap("os.listdir(args.data_dir) if", "sorted(os.listdir(args.data_dir)) if"),
        ]
    },
    plain={
        "cv_example.py": [
            replace("from accelerate import Accelerator"),
            swap("from accelerate.utils import set_seed", "from transformers import set_seed"),
            replace("# Initialize accelerator", until="accelerator = Accelerator("),
            replace("# We could avoid this line since the accelerator is set", 'device = torch.device("cpu")',
                    until="# creation otherwise"),
            swap("accelerator.device", "device", every=True),
            replace("# Prepare everything", until="    )"),
            swap("accelerator.backward(loss)", "loss.backward()"),
            replace("predictions, references = accelerator.gather_for", 'references = batch["label"]'),
            replace("# Use accelerator.print"),
            swap("accelerator.print", "print"),
            replace("accelerator.end_training()"),
        ]
    },
    own_loop=_cv,
    prepare=made_up_data.pets,
)  # fmt: skip


def _peft(strategy: str) -> Edits:
    sample = "sample={key: torch.tensor(train_dataset[key][:2]) for key in train_dataset.column_names}"
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, scheduler=lr_scheduler, {sample})'
    return {
        "peft_lora_seq2seq_accelerate_fsdp.py": [
            after("from torch.utils.data import DataLoader", "import meshwright as mw"),
            replace("    print(model)", f"model, optimizer, lr_scheduler = {call}",
                    "train_dataloader = model.divide(train_dataloader)", "print(model)"),
            swap("model.save_pretrained(peft_model_id)", "model.save_pretrained(peft_model_id, state_dict=model.state_dict())"),
        ]
    }  # fmt: skip


PEFT = Script(
    name="PEFT LoRA",
    repository="huggingface+peft",
    folder="examples/conditional_generation",
    main="peft_lora_seq2seq_accelerate_fsdp.py",
    files=[],
    library="src/peft",
    setting={
        "peft_lora_seq2seq_accelerate_fsdp.py": [
            swap("lora_dropout=0.1", "lora_dropout=0.0"),
            swap("lr = 1e-3", "lr = 1e-1"),
            swap("pin_memory=True", "pin_memory=False", every=True),
        ]
    },
    plain={
        "peft_lora_seq2seq_accelerate_fsdp.py": [
            replace("from accelerate import Accelerator"),
            replace("from peft.utils.other import fsdp_auto"),
            replace("accelerator = Accelerator()"),
            swap("accelerator.print(", "print(", every=True),
            replace("with accelerator.main_process_first():", "if True:"),
            replace('if getattr(accelerator.state, "fsdp_plugin"', until="    )"),
            swap("accelerator.gather_for_metrics(torch.argmax(outputs.logits, -1))", "torch.argmax(outputs.logits, -1)"),
            without("accelerator.wait_for_everyone()"),
        ]
    },
    own_loop=_peft,
)  # fmt: skip
