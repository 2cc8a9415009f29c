"""`wrap_forward` for strategies; it is defined in `recording`, a lower layer."""

from meshwright.recording.wrap_forward import Around, wrap_forward

__all__ = ["Around", "wrap_forward"]
