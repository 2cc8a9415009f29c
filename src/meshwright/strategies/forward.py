"""`wrap_forward`, as strategies use it; it stands in `describe`, where models are wrapped first."""

from meshwright.recording.wrap_forward import Around, wrap_forward

__all__ = ["Around", "wrap_forward"]
