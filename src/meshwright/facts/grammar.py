"""The grammar of a strategy's text, as a table: each row reads and prints one kind of term.

A term is `head`, `head=value`, `head:suffix` or `head=value:suffix`. Reading gives fields of `Strategy`; a row prints
"" if its fields have their defaults. Data strategies and model axes register their terms; see `facts/data_axis.py` and
`facts/model_axis.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshwright.errors import ContradictoryTerms, UnknownTerm
from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm, AxisTraits
from meshwright.facts.precision import FORMATS, FULL

if TYPE_CHECKING:
    from meshwright.facts.strategy import Strategy

Recompute = Literal["none", "selective", "full"]
Offload = Literal["", "optimizer", "params", "nvme"]
Sync = Literal["each", "last"]
Reduce = Literal["fp32", "bf16"]
Loss = Literal["whole", "pieced"]
Engine = Literal["torch", "deepspeed"]

SUFFIXES = ("pure", "autocast")
"""Suffixes of a precision, each a field of `Strategy`."""

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term, split into its parts."""

    text: str
    """The term as written."""
    head: str
    """The part before `=` and `:`."""
    value: str | None
    """The part after `=`; None without a `=`."""
    suffix: str | None
    """The part after `:`; None without a `:`."""

    @classmethod
    def split(cls, text: str) -> Term:
        # The colon first: the folder in `offload=nvme:DIR` may contain an equals sign.
        left, colon, suffix = text.partition(":")
        head, equals, value = left.partition("=")
        return cls(text=text, head=head, value=value if equals else None, suffix=suffix if colon else None)


@dataclass(frozen=True, kw_only=True)
class TermRow:
    """Terms that set the same fields, so that a strategy may have at most one of them."""

    forms: tuple[str, ...]
    """The forms of the terms; their heads identify the row."""
    read: Callable[[Term], Fields]
    """The fields that a term sets."""
    show: Callable[[Strategy], str]
    """The canonical term; "" if the fields have their defaults."""
    meaning: str = ""
    """One line for help texts; "" if what registered the term has its own."""

    @property
    def heads(self) -> dict[str, str]:
        """Each head with its first form."""
        return {Term.split(form).head: form for form in reversed(self.forms)}


def read_terms(text: str) -> Fields:
    """The fields that a strategy's text sets."""
    fields: Fields = {"axes": ()}
    written: dict[int, Term] = {}
    rows = table()
    for part in text.split(","):
        term = Term.split(part.strip())
        place = next((index for index, row in enumerate(rows) if term.head in row.heads), None)
        if place is None:
            raise UnknownTerm(_unknown(term, rows))
        if place in written:
            raise ContradictoryTerms(_twice(written[place], term))
        written[place] = term
        found = rows[place].read(term)
        fields |= {**found, "axes": (*fields["axes"], *found.get("axes", ()))}
    return fields


def show_terms(strategy: Strategy) -> str:
    """The canonical text; `fp32` if every field has its default."""
    before, after = ([row.show(strategy) for row in rows] for rows in (_BEFORE, _AFTER))
    shown = (*before, show_data(strategy), *map(str, strategy.axes), *after)  # axes are in the table's order
    return ",".join(filter(None, shown)) or FULL.word


def pick(word: str | None, choices: Iterable[str], *, term: str, what: str, note: str = "") -> str:
    """Return `word` if it is one of the choices; if not, raise an error with the note, or with a guess."""
    valid = [choice for choice in choices if choice]
    if word in valid:
        return str(word)
    near = None if note else nearest(word or "", valid)
    hint = f"; did you mean {near!r}?" if near else f"; {note}." if note else "."
    found = f"an unknown {what} {word!r}" if word else f"no {what}"
    raise UnknownTerm(f"Strategy term {term!r} has {found}{hint} Valid: {', '.join(valid)}.")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice with the fewest typing errors; among equals a data strategy, best one that is as long as the word."""
    word, known = word.lower(), list(choices)

    def rank(choice: str) -> tuple[int, int, bool]:
        length = abs(len(word) - len(choice)) if choice in DATA_AXES else len(word)
        return typing_errors(word, choice), length, word[:1] != choice[:1]

    return min(difflib.get_close_matches(word, known, n=max(1, len(known))), key=rank, default=None)


def typing_errors(word: str, meant: str) -> int:
    """Letters to insert, delete, replace or swap with the next one."""
    rows: list[list[int]] = [[*range(len(meant) + 1)]]
    for i, letter in enumerate(word, 1):
        row = [i]
        for j, other in enumerate(meant, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (meant[j - 2], other):
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def count(text: str | None, *, term: str, example: str) -> int:
    """Parse a whole number of at least 1."""
    if text and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise UnknownTerm(f"Strategy term {term!r} needs a whole number of at least 1, as in {example}.")


def bare(term: Term, *, value: bool = True, suffix: bool = True) -> None:
    """Raise an error for a value or a suffix on a term that takes none."""
    if value and term.value is not None:
        raise UnknownTerm(f"Strategy term {term.text!r} takes no value; write {term.head!r}.")
    if suffix and term.suffix is not None:
        right = term.text.partition(":")[0]
        raise UnknownTerm(f"Strategy term {term.text!r} takes no suffix {term.suffix!r}; write {right!r}.")


def _twice(first: Term, second: Term) -> str:
    if first.text == second.text:
        return f"Strategy terms {first.text!r} and {second.text!r} repeat each other; write it once."
    return f"Strategy terms {first.text!r} and {second.text!r} exclude each other; keep one of them."


def _unknown(term: Term, rows: Sequence[TermRow]) -> str:
    forms = ", ".join(form for row in rows for form in row.forms)
    if not term.text:
        return f"Empty strategy term; write terms with one comma between them. Valid: {forms}."
    heads = {head: form for row in rows for head, form in row.heads.items()}
    near = nearest(term.head, heads)
    hint = f"; did you mean {_mended(term, near, heads[near])!r}?" if near else "."
    return f"Unknown strategy term {term.text!r}{hint} Valid: {forms}."


def _mended(term: Term, head: str, form: str) -> str:
    """The user's term with the right head if it is valid, so that `tpp=4` suggests `tp=4`; otherwise the form."""
    text = head + term.text[len(term.head) :]
    try:
        read_terms(text)
    except UnknownTerm:
        return form
    return text


def flag(name: str, meaning: str) -> TermRow:
    """A term without a value, such as `compile`."""

    def read(term: Term) -> Fields:
        bare(term)
        return {name: True}

    def show(strategy: Strategy) -> str:
        return name if getattr(strategy, name) else ""

    return TermRow(forms=(name,), read=read, show=show, meaning=meaning)


def read_micro_batch(term: Term) -> Fields:
    bare(term, value=False)
    return {"micro_batch": count(term.value, term=term.text, example=f"{term.head}=2")}


def show_micro_batch(strategy: Strategy) -> str:
    return "" if strategy.micro_batch is None else f"mb={strategy.micro_batch}"


def choice(head: str, words: tuple[str, ...], meaning: str, *, field: str = "") -> TermRow:
    """A term with one of a few words, such as `ac=full`; the first word is the default."""
    field = field or head

    def read(term: Term) -> Fields:
        bare(term, value=False)
        return {field: pick(term.value, words, term=term.text, what="value")}

    def show(strategy: Strategy) -> str:
        word = getattr(strategy, field)
        return "" if word == words[0] else f"{head}={word}"

    return TermRow(forms=(f"{head}={'|'.join(words)}",), read=read, show=show, meaning=meaning)


def read_data(term: Term) -> Fields:
    traits = next(traits for word, traits in DATA_AXES.items() if term.head in (word, *traits.aliases))
    if traits.hybrid:
        return _read_hybrid(term)
    bare(term, value=not traits.sized, suffix=term.head not in DATA_AXES or not traits.variants)
    fields: Fields = {"data": traits.word}
    if term.value is not None:
        fields["data_size"] = count(term.value, term=term.text, example=f"{term.head}=4")
    if term.suffix is not None:
        # The nearest word to `full-shard` is `no-shard`, its opposite.
        note = f"{traits.word} alone shards everything" if traits.shards else ""
        fields["variant"] = pick(term.suffix, traits.variants, term=term.text, what="suffix", note=note)
    return fields


def _read_hybrid(term: Term) -> Fields:
    bare(term, value=False)
    sizes = (term.value or "").split("x")
    if len(sizes) != 2:
        raise UnknownTerm(f"Strategy term {term.text!r} needs replicas x shards, as in {term.head}=2x4.")
    replicas, shards = (count(number, term=term.text, example=f"{term.head}=2x4") for number in sizes)
    return {"data": term.head, "data_size": replicas * shards, "hsdp_replicas": replicas}


def show_data(strategy: Strategy) -> str:
    if strategy.data is None:
        return ""
    if strategy.traits.hybrid:
        return f"{strategy.data}={strategy.replicas}x{strategy.shards}"
    number = "" if strategy.data_size is None else f"={strategy.data_size}"
    suffix = f":{strategy.variant}" if strategy.variant else ""
    return f"{strategy.data}{number}{suffix}"


def axis_row(traits: AxisTraits) -> TermRow:
    """The term of a registered model axis."""
    word = traits.word
    form = f"{word}=N" + (f":{'|'.join(traits.suffixes)}" if traits.suffixes else "")
    example = f"{word}=4:{traits.default_suffix}" if traits.suffixes else f"{word}=2"

    def read(term: Term) -> Fields:
        bare(term, value=False, suffix=not traits.suffixes)
        size, suffix = count(term.value, term=term.text, example=example), ""
        if term.suffix is not None:
            suffix = pick(term.suffix, traits.suffixes, term=term.text, what=traits.suffix_name)
        return {"axes": (AxisTerm(word, size, suffix),)}

    def show(strategy: Strategy) -> str:
        return "".join(str(term) for term in strategy.axes if term.word == word)

    return TermRow(forms=(form,), read=read, show=show)


def read_precision(term: Term) -> Fields:
    bare(term, suffix=False)
    if term.suffix is None:
        return {"precision": term.head}
    return {"precision": term.head, pick(term.suffix, SUFFIXES, term=term.text, what="suffix"): True}


def show_precision(strategy: Strategy) -> str:
    if strategy.precision == FULL.word:
        return ""
    return strategy.precision + "".join(f":{suffix}" for suffix in SUFFIXES if getattr(strategy, suffix))


def read_offload(term: Term) -> Fields:
    what = pick(term.value, get_args(Offload), term=term.text, what="value")
    if what != "nvme":
        bare(term, value=False)
        return {"offload": what}
    if not term.suffix:
        raise UnknownTerm(f"Strategy term {term.text!r} needs a folder, as in offload=nvme:/scratch.")
    return {"offload": what, "nvme": term.suffix}


def show_offload(strategy: Strategy) -> str:
    if not strategy.offload:
        return ""
    return f"offload={strategy.offload}" + (f":{strategy.nvme}" if strategy.nvme else "")


def _data_forms() -> tuple[str, ...]:
    forms: list[str] = []
    for word, traits in DATA_AXES.items():
        suffixes = (f"{word}=N", f"{word}:{'|'.join(traits.variants)}") if traits.variants else ()
        forms += [*traits.aliases, f"{word}=RxS" if traits.hybrid else word, *suffixes]
    return tuple(forms)


_BEFORE = (flag("auto", "the planner chooses the axes, and the policies that are not named"),)
_AFTER = (
    TermRow(
        forms=tuple(FORMATS),
        read=read_precision,
        show=show_precision,
        meaning="compute dtype with fp32 master weights; bf16:pure without them, bf16:autocast as torch.autocast",
    ),
    choice("ac", get_args(Recompute), "activation checkpointing: what backward computes again", field="recompute"),
    TermRow(
        forms=("offload=optimizer|params|nvme:DIR",),
        read=read_offload,
        show=show_offload,
        meaning="state that is kept in host memory or in files instead of on the device",
    ),
    TermRow(
        forms=("mb=N",), read=read_micro_batch, show=show_micro_batch, meaning="samples in one micro-batch of a rank"
    ),
    choice("sync", get_args(Sync), "sharded gradients are reduced after each micro-batch, or once after the last"),
    choice("reduce", get_args(Reduce), "dtype in which gradients are summed over ranks"),
    choice("loss", get_args(Loss), "output layer and loss at once, or in pieces that never hold all logits"),
    flag("compile", "blocks are compiled by torch.compile"),
    flag("graphs", "forward, loss and backward are replayed as a CUDA graph; only with single and ddp"),
    choice("engine", get_args(Engine), "what runs the strategy: PyTorch's own parts, or DeepSpeed"),
)


def table() -> tuple[TermRow, ...]:
    """All rows, in the order of the canonical text."""
    data = TermRow(forms=_data_forms(), read=read_data, show=show_data)
    return (*_BEFORE, data, *map(axis_row, MODEL_AXES.values()), *_AFTER)
