"""A stand-in for a tokenizer that is imported and not used in training."""


class SentencePieceProcessor:
    pass
