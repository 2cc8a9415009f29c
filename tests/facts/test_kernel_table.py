"""Tables of measured kernels: written, read, merged, chosen, and refused when they are wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import BadInput, OutputError, Unreadable
from meshwright.facts.kernel_table import (
    FORMAT,
    KernelTable,
    MeasuredKernel,
    MeasuredUpdate,
    add_table,
    find_table,
    read_tables,
    require_device,
    shipped_table,
    write_tables,
)


def kernel(signature: str = "aten.mm.default(a)", seconds: float = 1e-3) -> MeasuredKernel:
    return MeasuredKernel(
        name="mm",
        kind="matmul",
        dtype="fp32",
        flops=2e6,
        bytes=3e4,
        shape=(1, 100, 100, 100),
        seconds=seconds,
        signature=signature,
    )


def table(torch: str = "2.13.0", device: str = "H200", **parts: Any) -> KernelTable:
    parts = {"kernels": (kernel(),), "updates": (MeasuredUpdate(optimizer="SGD", elements=9, seconds=1e-5),), **parts}
    return KernelTable(device=device, machine="a machine", torch=torch, launch=5e-6, **parts)


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    tables = (table(), table("2.11.0"))
    write_tables(tmp_path / "kernels.json", tables)
    assert read_tables(tmp_path / "kernels.json") == tables
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


def test_the_newer_measurement_counts_and_others_stay() -> None:
    old = table(kernels=(kernel("a", 1.0), kernel("b", 2.0)))
    new = table(kernels=(kernel("b", 3.0), kernel("c", 4.0)), host=0.5)
    (merged,) = add_table((old,), new)
    assert {k.signature: k.seconds for k in merged.kernels} == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert merged.host == 0.5 and len(merged.updates) == 1


def test_another_release_or_machine_is_another_table() -> None:
    assert len(add_table((table(),), table("2.11.0"))) == 2
    assert len(add_table((table(),), table(threads=2))) == 2


def test_the_table_of_the_device_and_of_this_torch_is_found() -> None:
    tables = (table("2.11.0"), table("2.13.0"), table("2.12.0"), table("2.13.0", "cpu"))
    assert find_table(tables, "H200", "2.13.0") is tables[1]
    assert find_table(tables, "H200", "2.14.0") is tables[2]
    assert find_table(tables, "H200-141GB", "2.13.0") is tables[1]
    assert find_table(tables, "A100-40GB", "2.13.0") is None
    require_device(tables, "cpu", "kernels.json")
    require_device(tables, "h200-141gb", "kernels.json")
    with pytest.raises(BadInput, match=r"kernels.json has kernels of H200, cpu, but the cluster's device is B200"):
        require_device(tables, "B200", "kernels.json")


def test_without_a_shipped_table_there_is_none(tmp_path: Path) -> None:
    assert shipped_table("H200", tmp_path) is None
    write_tables(tmp_path / "H200-141GB.json", [table(host=1.0, step=1.0)])
    for name in ("H200", "H200-141GB"):  # as users call it, and as the catalogue does
        found = shipped_table(name, tmp_path)
        assert found is not None and found.kernels and (found.host, found.step) == (0.0, 0.0)


def spoil_row(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tables"][0]["kernels"][0].update({key: value})


def spoil_table(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tables"][0].update({key: value})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda document: document.update(format="other"), FORMAT),
        (lambda document: document.pop("tables"), FORMAT),
        (lambda document: document.update(tables=[3]), r"tables\[0\] is not an object"),
        (spoil_row("seconds", 0), r"tables\[0\].kernels\[0\].seconds is 0; it must be a number above 0"),
        (spoil_row("seconds", "fast"), "seconds is not a number"),
        (spoil_row("flops", None), "flops is not a number"),
        (spoil_row("shape", ["a"]), "shape is not a list of whole numbers"),
        (spoil_row("colour", "red"), "unknown key 'colour'"),
        (lambda document: document["tables"][0]["kernels"][0].pop("name"), "has no 'name'"),
        (spoil_table("launch", -1.0), "launch is -1.0"),
        (spoil_table("kernels", 3), "kernels is not a list"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: str) -> None:
    path = tmp_path / "kernels.json"
    write_tables(path, [table()])
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(Unreadable, match=words):
        read_tables(path)


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Cannot write the kernels"):
        write_tables(tmp_path / "none" / "kernels.json", [table()])
