"""Hold mixtures of experts against plain PyTorch under every strategy, and under hybrids with ep.

python benchmarks/mixture_table.py --json docs/data/mixtures.json --page docs/architectures.md
python benchmarks/mixture_table.py --models Mixtral --strategies ep=2 ep=2,fsdp

The reference is a plain loop over the model, in float64 where it runs so. "=" is equal, "r" refused by an error that
says why; anything else is a mistake of ours. With --json a run goes on where an earlier one ended.
"""

from __future__ import annotations

from plain_matrix import Matrix, widest_case

from mixture_jobs import MIXTURES

ON_FOUR = ("hsdp=2x2", "ep=4", "ep=2,ddp=2", "ep=2,fsdp=2", "ep=2,tp=2", "ep=2,pp=2:1f1b")

MATRIX = Matrix(
    models=tuple(MIXTURES),
    strategies=(
        *("single", "ddp", "zero1", "zero2", "fsdp", "hsdp=2x2", "tp=2", "op=2", "pp=2:1f1b", "layers=2"),
        *("ep=2", "ep=4", "ep=2,ddp=2", "ep=2,fsdp=2", "ep=2,tp=2", "ep=2,pp=2:1f1b"),
    ),
    case=lambda name: widest_case("mixture_jobs", name),
    ranks=lambda strategy: 4 if strategy in ON_FOUR else 2,
    packages=("torch", "transformers"),
    marker="mixtures",
)

if __name__ == "__main__":
    MATRIX.main(__doc__)
