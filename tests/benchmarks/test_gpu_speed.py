"""The benchmark beside other libraries: kinds of kernels, the same model in another order, and what counts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>": "attention",
    "triton_poi_fused__to_copy_add_mul_0": "streaming",
    "triton_red_fused__scaled_dot_product_cudnn_attention_backward__to_copy_3": "streaming",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>": "streaming",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
    "something_new": "other",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.mark.parametrize(("kernel", "kind"), KERNELS.items())
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert import_module("kernel_kinds").kind_of(kernel) == kind


def test_rows_of_neighbours_make_the_same_rotary_attention() -> None:
    start = import_module("same_start")
    sizes = start.Sizes(1, 32, 4, 4, 64, 64, 6, 1)
    halves, neighbours = torch.empty(32, 32), torch.empty(32, 32)
    start.fill([("blocks.0.q.weight", halves)])
    start.fill([("layers.0.attention.wq.weight", neighbours)], neighbours=sizes.head_width)
    x = torch.randn(6, 32)
    cos, sin = start.rotary(sizes, torch.device("cpu"))
    q = (x @ halves.T).unflatten(-1, (-1, 8)).transpose(0, 1)
    first, second = q.chunk(2, dim=-1)
    turned = q * cos + torch.cat((-second, first), dim=-1) * sin
    pairs = torch.view_as_complex((x @ neighbours.T).unflatten(-1, (-1, 4, 2)).transpose(0, 1).contiguous())
    other = torch.view_as_real(pairs * torch.complex(cos, sin)[:, :4]).flatten(2)
    torch.testing.assert_close(turned @ turned.mT, other @ other.mT)
    assert not torch.equal(halves, neighbours)


def judged(tmp_path: Path, **losses: list[float]) -> list[str]:
    results = import_module("speed_results").Results(tmp_path / "results.json", "cpu")
    for way, found in losses.items():
        results.add("row", way.replace("_", "-"), {"ranks": 64, "losses": found})
    apart: list[str] = results.judge(["row"])
    return apart


def test_losses_that_are_apart_do_not_count(tmp_path: Path) -> None:
    assert judged(tmp_path, hand_written=[12.0, 11.9], fsdp=[12.01, 11.9]) == []
    assert "fsdp" in judged(tmp_path, hand_written=[12.0, 11.9], fsdp=[12.0, 11.8])[0]
    assert "fsdp" in judged(tmp_path, hand_written=[12.0, 11.9], fsdp=[12.0, float("nan")])[0]


def test_losses_without_a_reference_do_not_count(tmp_path: Path) -> None:
    assert "no hand-written model" in judged(tmp_path, fsdp=[12.0, 11.8])[0]


def test_new_results_replace_those_of_the_same_way_alone(tmp_path: Path) -> None:
    judged(tmp_path, hand_written=[12.0], fsdp=[12.0])
    judged(tmp_path, fsdp=[11.99])
    results = import_module("speed_results").Results(tmp_path / "results.json", "cpu").document["results"]
    assert {each["way"]: each["losses"] for each in results} == {"hand-written": [12.0], "fsdp": [11.99]}


def test_the_table_names_the_fastest_peer() -> None:
    table = import_module("speed_table")
    common: dict[str, Any] = {"row": table.PEER_ROW, "run": "1", "quartiles_ms": [1.0, 2.0]}
    results = [
        {**common, "way": table.OURS, "ms": 100.0, "peak_gib": 30.0},
        {**common, "way": "Accelerate", "ms": 120.0, "peak_gib": 20.0},
        {**common, "way": "torchtitan", "ms": 110.0, "peak_gib": 40.0},
        {"row": table.PEER_ROW, "run": "1", "way": "Lightning Fabric", "not_measured": "no | package"},
    ]
    document = {"device": "one", "versions": {"torch": "2.11"}, "rates": {}, "results": results}
    text = table.tables(document, [table.PEER_ROW])
    assert "1.100 of the tokens a second of the fastest peer (torchtitan) at 0.750 of its peak memory" in text
    assert "not measured: no / package" in text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("row", "ours"), [("3B", "tp=8,bf16"), ("1x8192", "fsdp,bf16")])
def test_ours_and_the_model_written_by_hand_train_alike_as_rank_0(row: str, ours: str) -> None:
    command = [sys.executable, str(FOLDER / "gpu_speed.py"), "--tiny", "--only", row, "--ways", ours, "hand-written"]
    paths = [str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count('"losses"') == 2
