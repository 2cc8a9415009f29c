"""Hold architectures of Hugging Face transformers against plain PyTorch under strategies that divide the model.

python benchmarks/architectures.py --json docs/data/architectures.json --page docs/architectures.md
python benchmarks/architectures.py --models Llama T5 --strategies tp=2

The reference is a plain loop over the model, in float64 where it runs so, with dropout off. A verdict is "equal",
"refused" (by an error that says why), "DIFFERS" or "CRASH". The table has the largest share of the parameters that one
of the two ranks holds: a half would be ideal. With --json a run goes on where an earlier one ended. Exit 1 if
anything differs or crashes.
"""

from plain_matrix import Matrix, share, widest_case

from architecture_jobs import ARCHITECTURES

MATRIX = Matrix(
    models=tuple(ARCHITECTURES),
    strategies=("single", "pp=2:1f1b", "tp=2"),
    case=lambda name: widest_case("architecture_jobs", name),
    packages=("torch", "transformers"),
    cell=share,
)

if __name__ == "__main__":
    MATRIX.main(__doc__)
