"""A small Hugging Face Llama, built from its config: rotary positions, grouped-query attention.

meshwright train examples/hf_llama.py --strategy pp=2:1f1b --ranks 2 --steps 30
meshwright train examples/hf_llama.py --strategy tp=2 --ranks 2 --steps 30
"""

from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from hf_gpt2 import LENGTH, VOCABULARY, next_byte_loss, sample
from meshwright import Job
from stdlib_text import StdlibText


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=128,
        intermediate_size=352,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


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
