"""The grids under tests/schedules/golden, which change only when somebody says so.

python tests/schedules/golden_files.py    # writes them again; then look at the difference
"""

from pathlib import Path

from meshwright.schedules import FAMILIES, make, refuse

FOLDER = Path(__file__).parent / "golden"
SIZES = ((2, 2), (2, 4), (3, 6), (4, 4), (4, 8))
CASES = [(name, ranks, size) for name in FAMILIES for ranks, size in SIZES if refuse(name, ranks, size) is None]


def path_of(name: str, ranks: int, micro_batches: int) -> Path:
    return FOLDER / f"{name}_p{ranks}_m{micro_batches}.txt"


def main() -> None:
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        path_of(*case).write_text(f"{make(*case)}\n")


if __name__ == "__main__":
    main()
