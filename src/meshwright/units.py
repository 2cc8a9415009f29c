"""Format bytes, seconds and counts: `39.4 GiB`, `312 ms`, `70B`; parse bytes."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

# Largest first: the first unit that the amount reaches is shown.
_BYTES = {"TiB": float(TIB), "GiB": float(GIB), "MiB": float(MIB), "KiB": float(KIB), "B": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_COUNTS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}

# Decimal units are parsed, because vendors use them, but never printed.
_READ_BYTES = _BYTES | {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}


def gib(size: float) -> float:
    """Bytes as GiB."""
    return size / GIB


def mib(size: float) -> float:
    """Bytes as MiB."""
    return size / MIB


def show_bytes(size: float) -> str:
    """`show_bytes(42_300_000_000)` is `39.4 GiB`."""
    return _show(size, _BYTES, zero="B", gap=" ")


def show_seconds(seconds: float) -> str:
    """`show_seconds(0.3124)` is `312 ms`."""
    return _show(seconds, _SECONDS, zero="s", gap=" ")


def show_count(count: float) -> str:
    """`show_count(1_300_000)` is `1.3M`."""
    return _show(count, _COUNTS, zero="", gap="")


def parse_bytes(text: str) -> int:
    """`parse_bytes("40GiB")`; GB, MB and KB are decimal."""
    by_name = {unit.lower(): size for unit, size in _READ_BYTES.items()}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in by_name:
        known = ", ".join(_READ_BYTES)
        raise ValueError(f"Cannot read {text!r}: write a number and a unit, such as 40GiB (units: {known}).")
    return round(float(found[1]) * by_name[found[2].lower()])


def _show(amount: float, units: dict[str, float], *, zero: str, gap: str) -> str:
    if amount == 0:
        return f"0{gap}{zero}"
    # 0.9995 rounds to 1 at three digits, so 999,999 is shown as 1M and not as 1000K.
    unit = next((unit for unit, size in units.items() if abs(amount) / size >= 0.9995), list(units)[-1])
    return f"{_three_digits(amount / units[unit])}{gap}{unit}"


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
