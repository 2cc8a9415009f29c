"""Hold every model of tests/zoo against plain PyTorch under every strategy; draw the table of the docs.

python benchmarks/zoo_check.py --json docs/data/zoo.json --page docs/zoo.md
python benchmarks/zoo_check.py --models lstm resnet_in_place --strategies single fsdp tp=2

The reference is a plain loop over the user's builder, in float64 where the model allows it. Compared are the initial
weights and buffers bit for bit, the loss of each step, every gradient of the first step, and all parameters and
buffers after three steps. A verdict is "equal", "refused" (by an error that says why), "DIFFERS" or "CRASH". With
--json a run goes on where an earlier one ended. Exit 1 if anything differs or crashes.
"""

from plain_matrix import Matrix

from zoo.catalogue import STRATEGIES, ZOO, case_of, ranks_of

MATRIX = Matrix(models=tuple(ZOO), strategies=("single", *STRATEGIES), case=case_of, ranks=ranks_of)

if __name__ == "__main__":
    MATRIX.main(__doc__)
