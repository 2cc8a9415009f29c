"""A small Hugging Face GPT-2, built from its config: nothing is downloaded.

meshwright train examples/hf_gpt2.py --strategy fsdp --ranks 2 --steps 60
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from meshwright import Job
from stdlib_text import StdlibText

VOCABULARY = 256
LENGTH = 128


def build() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=4,
        n_head=4,
        n_embd=128,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


def next_byte_loss(output: CausalLMOutputWithCrossAttentions, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    # The data set already shifts y. The model's own loss would shift the labels again, so it is not used.
    y = batch["y"]
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def sample(n: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


job = Job(
    model=build,
    inputs=lambda batch: {"input_ids": batch["x"]},
    loss=next_byte_loss,
    optimizer=lambda params: AdamW(params, lr=1e-3),
    max_norm=1.0,
    data=lambda: StdlibText(LENGTH),
    sample=sample,
    global_batch=16,
)
