"""How many rows of logits a pieced loss computes at a time."""

from __future__ import annotations

LARGEST = 1 << 28
"""Elements of a piece's logits: 1 GiB in fp32. Smaller pieces would take longer, because each one reads and writes the
gradient of the whole weight."""
FEWEST = 4
"""Pieces that rows are cut into at least."""
ALIGNED = 128
"""Rows of a piece are a multiple of this, where there are as many: matrix products are slower on odd sizes."""


def piece_rows(rows: int, classes: int) -> int:
    """Rows of each piece; the last one may have fewer."""
    most = max(1, LARGEST // max(classes, 1))
    size = max(1, min(most, -(-rows // FEWEST)))
    size = -(-rows // -(-rows // size)) if rows else 1
    return min(-(-size // ALIGNED) * ALIGNED, max(ALIGNED, most // ALIGNED * ALIGNED)) if size > ALIGNED else size
