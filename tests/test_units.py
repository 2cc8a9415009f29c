import pytest

from meshwright import units


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 * units.MIB, "512 MiB"),
        (42_300_000_000, "39.4 GiB"),
        (units.GIB - 1, "1 GiB"),
        (1010 * units.MIB, "1010 MiB"),
        (-3 * units.GIB, "-3 GiB"),
        (3 * units.TIB // 2, "1.5 TiB"),
    ],
)
def test_show_bytes(size: int, text: str) -> None:
    assert units.show_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.25, "1.25 s"), (0.3124, "312 ms"), (4.2e-6, "4.2 us"), (-0.05, "-50 ms"), (3600, "3600 s")],
)
def test_show_seconds(seconds: float, text: str) -> None:
    assert units.show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7, "7"), (1_300_000, "1.3M"), (70_000_000_000, "70B"), (999_999, "1M"), (8_030_000_000, "8.03B")],
)
def test_show_count(count: int, text: str) -> None:
    assert units.show_count(count) == text


def test_parse_reads_what_show_writes() -> None:
    assert units.parse_bytes(units.show_bytes(40 * units.GIB)) == 40 * units.GIB


def test_decimal_units_are_decimal() -> None:
    assert units.parse_bytes("40GB") == 40_000_000_000
    assert units.parse_bytes("40 gib") == 40 * units.GIB


@pytest.mark.parametrize("text", ["", "GiB", "40 parsecs", "-1GiB", "1e9"])
def test_parse_refuses_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="40GiB") as caught:
        units.parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_gib_and_mib() -> None:
    assert units.gib(units.GIB * 3) == 3
    assert units.mib(units.GIB) == 1024
