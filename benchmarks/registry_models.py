"""Hold models of packages from the registry against plain PyTorch under many strategies; draw the table of the docs.

python benchmarks/registry_models.py --json docs/data/registry_models.json --page docs/registry-models.md
python benchmarks/registry_models.py --models "timm Swin" "peft LoRA on a Llama" --strategies single ddp tp=2

registry_jobs.py says what to install. The reference is a plain loop over the package's own model, in float64 where it
runs so. A verdict is "equal", "refused" (by an error that says why), "DIFFERS" or "CRASH". With --json a run goes on
where an earlier one ended. Exit 1 if anything differs or crashes.
"""

from __future__ import annotations

from plain_matrix import Matrix, widest_case
from registry_jobs import JOBS

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "pp=2:1f1b", "layers=2")
PACKAGES = (
    *("torch", "transformers", "timm", "diffusers", "peft"),
    *("segmentation-models-pytorch", "torch-geometric", "x-transformers"),
)


MATRIX = Matrix(
    models=tuple(JOBS), strategies=STRATEGIES, case=lambda name: widest_case("registry_jobs", name), packages=PACKAGES
)

if __name__ == "__main__":
    MATRIX.main(__doc__)
