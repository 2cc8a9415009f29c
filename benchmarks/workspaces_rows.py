"""The operators whose workspaces are measured: a grid of convolutions, and recurrent layers."""

from __future__ import annotations

from typing import Any

Layer = tuple[int, ...]
"""Dims, samples, channels in and out, size, kernel, stride, padding, dilation, groups, transposed, output padding."""
KINDS: tuple[Layer, ...] = (
    (2, 32, 256, 256, 56, 1, 1, 0, 1, 1, 0, 0),
    (2, 64, 1024, 256, 14, 1, 1, 0, 1, 1, 0, 0),
    (2, 32, 64, 64, 56, 3, 1, 1, 1, 1, 0, 0),
    (2, 8, 256, 256, 64, 3, 1, 1, 1, 1, 0, 0),
    (2, 32, 512, 512, 7, 3, 1, 1, 1, 1, 0, 0),
    (2, 64, 100, 100, 28, 3, 1, 1, 1, 1, 0, 0),
    (2, 16, 3, 64, 128, 3, 1, 1, 1, 1, 0, 0),
    (2, 16, 64, 3, 128, 3, 1, 1, 1, 1, 0, 0),
    (2, 32, 33, 65, 32, 3, 1, 1, 1, 1, 0, 0),
    (2, 32, 128, 256, 56, 3, 2, 1, 1, 1, 0, 0),
    (2, 32, 256, 512, 28, 1, 2, 0, 1, 1, 0, 0),
    (2, 16, 3, 64, 224, 7, 2, 3, 1, 1, 0, 0),
    (2, 8, 64, 64, 56, 7, 1, 3, 1, 1, 0, 0),
    (2, 16, 64, 128, 32, 5, 1, 2, 1, 1, 0, 0),
    (2, 32, 3, 768, 224, 16, 16, 0, 1, 1, 0, 0),
    (2, 32, 3, 1024, 224, 14, 14, 0, 1, 1, 0, 0),
    (2, 32, 3, 96, 224, 4, 4, 0, 1, 1, 0, 0),
    (2, 16, 256, 512, 28, 2, 2, 0, 1, 1, 0, 0),
    (2, 32, 128, 128, 56, 3, 1, 1, 1, 128, 0, 0),
    (2, 32, 128, 128, 56, 7, 1, 3, 1, 128, 0, 0),
    (2, 32, 96, 96, 56, 5, 2, 2, 1, 96, 0, 0),
    (2, 32, 128, 128, 56, 3, 1, 1, 1, 32, 0, 0),
    (2, 32, 128, 128, 28, 3, 1, 1, 1, 4, 0, 0),
    (2, 16, 128, 128, 56, 3, 1, 2, 2, 1, 0, 0),
    (2, 16, 128, 128, 56, 3, 1, 4, 4, 1, 0, 0),
    (2, 16, 256, 128, 28, 2, 2, 0, 1, 1, 1, 0),
    (2, 16, 256, 128, 28, 4, 2, 1, 1, 1, 1, 0),
    (2, 16, 256, 128, 28, 3, 2, 1, 1, 1, 1, 1),
    (1, 16, 256, 256, 4000, 1, 1, 0, 1, 1, 0, 0),
    (1, 16, 256, 256, 4000, 3, 1, 1, 1, 1, 0, 0),
    (1, 16, 256, 256, 4001, 2, 1, 0, 4, 1, 0, 0),
    (1, 16, 64, 64, 16000, 7, 1, 9, 3, 1, 0, 0),
    (1, 16, 1, 512, 80000, 10, 5, 0, 1, 1, 0, 0),
    (1, 16, 512, 512, 8000, 3, 2, 0, 1, 1, 0, 0),
    (1, 16, 768, 768, 499, 128, 1, 64, 1, 16, 0, 0),
    (1, 16, 1024, 1024, 1024, 4, 1, 3, 1, 1024, 0, 0),
    (1, 16, 256, 128, 1000, 16, 8, 4, 1, 1, 1, 0),
    (1, 16, 80, 512, 3000, 3, 1, 1, 1, 1, 0, 0),
    (3, 4, 32, 32, 48, 3, 1, 1, 1, 1, 0, 0),
    (3, 2, 64, 64, 24, 3, 1, 1, 1, 1, 0, 0),
    (3, 2, 1, 32, 64, 3, 1, 1, 1, 1, 0, 0),
    (3, 4, 128, 128, 12, 3, 1, 1, 1, 1, 0, 0),
    (3, 4, 32, 64, 32, 1, 1, 0, 1, 1, 0, 0),
    (3, 4, 32, 64, 48, 3, 2, 1, 1, 1, 0, 0),
    (3, 4, 64, 32, 24, 2, 2, 0, 1, 1, 1, 0),
    (3, 4, 32, 32, 32, 3, 1, 1, 1, 32, 0, 0),
    (3, 4, 3, 768, 64, 16, 16, 0, 1, 1, 0, 0),
    (3, 4, 16, 24, 33, 3, 1, 1, 1, 1, 0, 0),
)
"""All kinds: pointwise, strided, patches, depthwise, grouped, dilated, transposed, of one to three dims."""


def convolutions() -> list[dict[str, Any]]:
    """Every kind in two dtypes and layouts, sizes one at a time, and half of the kinds in fp16 and without TF32."""
    rows = []
    for layer in KINDS:
        for dtype in ("bfloat16", "float32"):
            rows += [convolution(layer, dtype), convolution(layer, dtype, channels_last=True)]
    for layer in _sizes():
        rows += [convolution(layer, "bfloat16"), convolution(layer, "float32")]
    for layer in KINDS[::2]:
        rows += [convolution(layer, "float16"), convolution(layer, "float32") | {"tf32": False}]
    return rows


def _sizes() -> list[Layer]:
    def plain(dims: int, samples: int, inner: int, outer: int, size: int, kernel: int = 3) -> Layer:
        return dims, samples, inner, outer, size, kernel, 1, kernel // 2, 1, 1, 0, 0

    found = [plain(2, n, 128, 128, 28) for n in (1, 4, 64, 256)]
    found += [plain(2, 16, 128, 128, size) for size in (7, 14, 56, 112)]
    found += [plain(2, 16, c, c, 28) for c in (8, 16, 32, 64, 256, 512, 1024)]
    for c in (16, 64, 512, 4, 12, 36, 66, 130, 255):
        found += [plain(2, 16, 128, c, 28), plain(2, 16, c, 128, 28)]
    found += [plain(2, 16, 128, 128, 28, k) for k in (1, 5, 7, 9)]
    found += [plain(3, n, 32, 32, size) for n, size in ((1, 12), (2, 48), (8, 24), (1, 96))]
    return found + [plain(1, n, 128, 128, size) for n, size in ((1, 16000), (8, 2000), (32, 500), (64, 8000))]


def convolution(layer: Layer, dtype: str, *, channels_last: bool = False) -> dict[str, Any]:
    dims, samples, inner, outer, size, kernel, stride, pad, dilation, groups, transposed, output_pad = layer
    x = [samples, inner, *[size] * dims]
    channels = [inner, outer // groups] if transposed else [outer, inner // groups]
    row = {"x": x, "w": [*channels, *[kernel] * dims], "dt": dtype, "tr": bool(transposed), "groups": groups}
    row |= {"stride": [stride] * dims, "pad": [pad] * dims, "dil": [dilation] * dims, "opad": [output_pad] * dims}
    return row | ({"xs": _channels_last(x)} if channels_last else {})


def _channels_last(shape: list[int]) -> list[int]:
    """Strides with the channels innermost."""
    strides, step = [0] * len(shape), 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[dim] = step
        step *= shape[dim]
    return strides


def recurrent_layers() -> list[dict[str, Any]]:
    """Steps `t`, samples `n`, input and state `i` and `h`; changed one at a time, and a few large ones."""
    rows: list[dict[str, Any]] = []

    def add(**changed: Any) -> None:
        usual = {"mode": "lstm", "t": 100, "n": 16, "i": 128, "h": 128, "layers": 2, "bi": 0, "dt": "bfloat16"}
        usual |= {"bf": 0, "drop": 0.0, "train": 1, "proj": 0, "bias": 1, "flat": 0, "packed": 0}
        if (row := usual | changed) not in rows:
            rows.append(row)

    add(t=512, n=64, i=1536, h=1536, layers=3, bf=1)
    add(mode="gru", t=500, n=32, i=1280, h=1024, layers=5, bi=1, bf=1)
    for mode in ("lstm", "gru", "tanh"):
        for bi in (0, 1):
            for layers in (1, 2, 3):
                add(mode=mode, bi=bi, layers=layers)
            for more in ({"dt": "float32"}, {"dt": "float16"}, {"drop": 0.1}, {"packed": 1}):
                add(mode=mode, bi=bi, **more)
        for more in ({"train": 0}, {"bf": 1}, {"flat": 1}, {"bias": 0}):
            add(mode=mode, **more)
        for name, sizes in {"t": (1, 10, 50, 400), "n": (1, 8, 64, 256), "i": (64, 100, 512, 1024)}.items():
            for size in sizes:
                add(mode=mode, **{name: size})
        for h in (64, 100, 256, 512, 1024, 1536):
            add(mode=mode, h=h)
            add(mode=mode, h=h, dt="float32")
        add(mode=mode, n=64, h=1024, i=1024, t=256, layers=3)
        for dtype in ("bfloat16", "float32"):
            add(mode=mode, n=64, h=1024, i=512, t=256, layers=3, bi=1, dt=dtype)
        add(mode=mode, n=32, h=1024, i=1280, t=500, layers=5, bi=1, drop=0.1)
        add(mode=mode, n=32, h=768, i=80, t=500, layers=4, packed=1, drop=0.1)
    for layers in (1, 2, 3):
        for bi in (0, 1):
            add(proj=64, layers=layers, bi=bi)
    for more in ({"dt": "float32"}, {"drop": 0.1}):
        add(proj=64, **more)
    add(mode="relu")
    return rows
