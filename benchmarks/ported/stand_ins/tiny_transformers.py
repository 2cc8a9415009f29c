"""Tiny models and a tokenizer in place of those that transformers would download."""

import torch
import transformers
from transformers import BatchEncoding

LENGTH, SYMBOLS = 24, 40


class Characters:
    """A tokenizer whose tokens are letters."""

    pad_token_id, eos_token_id = 0, 1

    def ids(self, text):
        return [*(2 + ord(letter) % (SYMBOLS - 2) for letter in text[: LENGTH - 1]), self.eos_token_id]

    def __call__(self, texts, pairs=None, truncation=True, max_length=None, padding=False, return_tensors=None):
        both = texts if pairs is None else [f"{one} {other}" for one, other in zip(texts, pairs, strict=True)]
        found = [self.ids(text)[:max_length] for text in both]
        encoded = {"input_ids": found, "attention_mask": [[1] * len(one) for one in found]}
        if padding == "max_length":
            encoded = self._padded(encoded, min(max_length, LENGTH))
        return BatchEncoding(encoded, tensor_type=return_tensors)

    batch_encode_plus = __call__

    def pad(self, examples, padding="longest", return_tensors="pt", **options):
        columns = {name: [example[name] for example in examples] for name in examples[0]}
        longest = max(len(one) for one in columns["input_ids"])
        return BatchEncoding(columns | self._padded(columns, longest), tensor_type=return_tensors)

    def _padded(self, columns, length):
        names = ("input_ids", "attention_mask")
        return {name: [one + [0] * (length - len(one)) for one in columns[name]] for name in names}

    def batch_decode(self, ids, skip_special_tokens=True):
        return ["" for _ in ids]

    def save_pretrained(self, *args, **kwargs):
        """Save nothing."""


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=SYMBOLS, max_position_embeddings=32, **sizes, **drops)
    return transformers.BertForSequenceClassification(config)


def t5():
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    config = transformers.T5Config(vocab_size=SYMBOLS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def seeded(build):
    """What `from_pretrained` gives: always the same weights."""

    def from_pretrained(*args, **kwargs):
        torch.manual_seed(0)
        return build()

    return from_pretrained


def install():
    """Let `from_pretrained` make tiny models."""
    for name in ("AutoTokenizer", "T5Tokenizer"):
        setattr(transformers, name, type(name, (), {"from_pretrained": staticmethod(lambda *a, **k: Characters())}))
    transformers.AutoModelForSequenceClassification.from_pretrained = seeded(bert)
    transformers.AutoModelForSeq2SeqLM.from_pretrained = seeded(t5)
    transformers.T5ForConditionalGeneration.from_pretrained = seeded(t5)
    # PEFT asks for a method that newer releases of transformers do not have.
    transformers.T5ForConditionalGeneration._prepare_encoder_decoder_kwargs_for_generation = None
    transformers.AdamW = torch.optim.AdamW  # which old scripts import
