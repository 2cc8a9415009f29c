"""Hold models of packages from the registry against plain PyTorch under many strategies; draw the table of the docs.

python benchmarks/registry_models.py --json docs/data/registry_models.json --page docs/registry-models.md
python benchmarks/registry_models.py --models "timm Swin" "peft LoRA on a Llama" --strategies single ddp tp=2

registry_jobs.py says what to install. The reference is a plain loop over the package's own model, in float64 where it
runs so. A verdict is "equal", "refused" (by an error that says why), "DIFFERS" or "CRASH". With --json a run goes on
where an earlier one ended. Exit 1 if anything differs or crashes.
"""

from __future__ import annotations

import sys

from plain_matrix import Matrix
from registry_jobs import JOBS

from zoo.programs import Case, plain_of

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "pp=2:1f1b", "layers=2")
PACKAGES = (
    *("torch", "transformers", "timm", "diffusers", "peft"),
    *("segmentation-models-pytorch", "torch-geometric", "x-transformers"),
)


def case_of(name: str) -> Case:
    """In float64 if the model runs so; packages compute some things in float32 whatever the model's dtype."""
    for double in (True, False):
        case = Case("registry_jobs", name, double=double, exact=False)
        try:
            plain_of(case)
        except Exception as error:
            print(f"{name}: not in {'float64' if double else 'float32'}: {error}", file=sys.stderr)
        else:
            return case
    raise RuntimeError(f"{name} does not train in plain PyTorch.")


MATRIX = Matrix(models=tuple(JOBS), strategies=STRATEGIES, case=case_of, packages=PACKAGES)

if __name__ == "__main__":
    MATRIX.main(__doc__)
