"""Draw the pictures of docs/learn: `PYTHONPATH=src python docs/learn_pictures.py` writes docs/learn/images/*.svg.

Numbers, schedules and bytes come from the code that they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from strategy_numbers import RANKS, state_bytes
from svg import BLUE, GREEN, ORANGE, PURPLE, Drawing

from meshwright.schedules import Kind, make, simulate

FOLDER = Path(__file__).parent / "learn" / "images"
Tensors = list[list[int]]
"""One for each rank."""
BEFORE: Tensors = [[1, 2], [10, 20]]


def summed(tensors: Tensors) -> list[int]:
    return [sum(column) for column in zip(*tensors, strict=True)]


COLLECTIVES: dict[str, Callable[[Tensors], Tensors]] = {
    "broadcast": lambda tensors: [tensors[0] for _ in tensors],
    "all-reduce": lambda tensors: [summed(tensors) for _ in tensors],
    "all-gather": lambda tensors: [[n for tensor in tensors for n in tensor] for _ in tensors],
    "reduce-scatter": lambda tensors: [[n] for n in summed(tensors)],
    "all-to-all": lambda tensors: [list(parts) for parts in zip(*tensors, strict=True)],
    "send, receive": lambda tensors: [tensors[0], tensors[0]],
}
"""What each rank has afterwards, where two ranks have two numbers each."""


def collective(name: str) -> Drawing:
    after = COLLECTIVES[name](BEFORE)
    drawing = Drawing(560, 118, f"{name}: {BEFORE} becomes {after}")
    for rank, (begun, done) in enumerate(zip(BEFORE, after, strict=True)):
        y = 22 + 52 * rank
        drawing.text(8, y + 23, f"rank {rank}", anchor="start")
        cells(drawing, 64, y, begun)
        cells(drawing, 330, y, done)
    drawing.line(196, 66, 306, 66, arrow=True)
    drawing.text(251, 56, name, bold=True)
    return drawing


def cells(drawing: Drawing, x: float, y: float, numbers: list[int]) -> None:
    """Numbers in the colour of the rank that they come from; sums in a third one."""
    for place, number in enumerate(numbers):
        colour = BLUE if number in BEFORE[0] else ORANGE if number in BEFORE[1] else GREEN
        drawing.box(x + 52 * place, y, 48, 36, colour)
        drawing.text(x + 52 * place + 24, y + 23, str(number), size=15)


LAYERS = 4
PANEL, TOP = 210, 88
"""The width of a panel, and where the layers begin."""


def side_by_side() -> Drawing:
    drawing = Drawing(4 * PANEL, 276, "Data, sharded, tensor and pipeline parallelism on two ranks, side by side")
    panels = {"data": data_panel, "sharded": sharded_panel, "tensor": tensor_panel, "pipeline": pipeline_panel}
    for place, (name, draw) in enumerate(panels.items()):
        x = place * PANEL
        drawing.text(x + 103, 20, name, size=15, bold=True)
        for rank in (0, 1):
            drawing.text(x + 60 + 90 * rank, 42, f"rank {rank}", size=12)
        draw(drawing, x)
    return drawing


def layer(drawing: Drawing, x: float, number: int, colour: str, *, width: float = 76, dashed: bool = False) -> None:
    drawing.box(x, TOP + 34 * number, width, 28, colour, dashed=dashed)


def layer_names(drawing: Drawing, x: float, numbers: range) -> None:
    for number in numbers:
        drawing.text(x + 38, TOP + 19 + 34 * number, f"layer {number + 1}", size=12)


def around(drawing: Drawing, x: float, samples: tuple[str, ...], sent: str, when: str) -> None:
    """What comes into each rank, and what crosses between them."""
    for rank, words in enumerate(samples):
        drawing.text(x + 60 + 90 * rank, 62, words, size=12)
        drawing.line(x + 60 + 90 * rank, 67, x + 60 + 90 * rank, TOP - 2, arrow=True)
    drawing.text(x + 105, 246, f"sent: {sent}", size=12)
    drawing.text(x + 105, 264, when, size=12)


def data_panel(drawing: Drawing, x: float) -> None:
    for rank, colour in enumerate((BLUE, ORANGE)):
        for number in range(LAYERS):
            layer(drawing, x + 22 + 90 * rank, number, colour)
        layer_names(drawing, x + 22 + 90 * rank, range(LAYERS))
    around(drawing, x, ("samples 1-16", "17-32"), "gradients", "once per step")


def sharded_panel(drawing: Drawing, x: float) -> None:
    for rank, colour in enumerate((BLUE, ORANGE)):
        left = x + 22 + 90 * rank
        for number in range(LAYERS):
            layer(drawing, left + 38 * rank, number, colour, width=38)
            layer(drawing, left + 38 * (1 - rank), number, (ORANGE, BLUE)[rank], width=38, dashed=True)
        layer_names(drawing, left, range(LAYERS))
    around(drawing, x, ("samples 1-16", "17-32"), "parameters, gradients", "for each layer (dashed: fetched)")


def tensor_panel(drawing: Drawing, x: float) -> None:
    for rank, colour in enumerate((BLUE, ORANGE)):
        left = x + 22 + 90 * rank
        for number in range(LAYERS):
            layer(drawing, left + 19, number, colour, width=38)
            drawing.text(left + 38, TOP + 19 + 34 * number, f"½ {number + 1}", size=12)
    around(drawing, x, ("all samples", "all samples"), "activations", "in every layer")


def pipeline_panel(drawing: Drawing, x: float) -> None:
    for rank, colour in enumerate((BLUE, ORANGE)):
        numbers = range(2 * rank, 2 * rank + 2)
        for number in numbers:
            layer(drawing, x + 22 + 90 * rank, number, colour)
        layer_names(drawing, x + 22 + 90 * rank, numbers)
    drawing.line(x + 98, TOP + 48, x + 110, TOP + 82, arrow=True)
    around(drawing, x, ("all samples",), "activations", "between the stages")


def overlap() -> Drawing:
    drawing = Drawing(760, 118, "All-reduces of gradients run while backward goes on")
    for y, words in ((36, "computing"), (84, "network")):
        drawing.text(8, y + 4, words, anchor="start")
    for place in range(8):
        forward = place < LAYERS
        number = place + 1 if forward else 2 * LAYERS - place
        width = 50 if forward else 90
        x = 96 + 50 * place if forward else 96 + 200 + 90 * (place - LAYERS)
        drawing.box(x, 18, width - 4, 32, BLUE if forward else ORANGE)
        drawing.text(x + width / 2 - 2, 39, f"{'F' if forward else 'B'}{number}", size=12)
        if not forward:
            drawing.box(x + 90, 66, 64, 32, GREEN)
            drawing.text(x + 122, 87, f"sum {number}", size=12)
    return drawing


DP_STEP = ("copy", "forward", "outputs", "loss", "backward", "sum", "update")
"""What `nn.DataParallel` does in a step; messages between the GPUs stand between the passes."""
DP_MESSAGES = {"copy": "model", "outputs": "outputs", "sum": "gradients"}
DP_EVERYWHERE = {"forward": BLUE, "backward": ORANGE}


def data_parallel() -> Drawing:
    """Two lanes of one process: the second GPU works in the passes only."""
    drawing = Drawing(760, 150, "nn.DataParallel: GPU 0 copies the model, gathers outputs, and alone does the rest")
    for gpu in (0, 1):
        drawing.text(8, 49 + 64 * gpu, f"GPU {gpu}", anchor="start")
    for place, part in enumerate(DP_STEP):
        x = 66 + 98 * place
        if part in DP_MESSAGES:
            drawing.text(x + 46, 20, DP_MESSAGES[part], size=12)
            start, end = (46, 106) if part == "copy" else (106, 46)
            drawing.line(x + 14, start, x + 78, end, arrow=True)
            continue
        for gpu in (0, 1) if part in DP_EVERYWHERE else (0,):
            drawing.box(x, 28 + 64 * gpu, 92, 34, DP_EVERYWHERE.get(part, GREEN))
            drawing.text(x + 46, 50 + 64 * gpu, part, size=12)
    return drawing


def zero() -> Drawing:
    """Bytes of states on each rank, for each parameter."""
    drawing = Drawing(700, 196, f"Bytes per parameter on each of {RANKS} ranks, bf16 with fp32 masters")
    colours = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN}
    for place, (cause, colour) in enumerate(colours.items()):
        drawing.box(90 + 130 * place, 8, 14, 14, colour)
        drawing.text(110 + 130 * place, 20, cause, anchor="start")
    for row, word in enumerate(("ddp", "zero1", "zero2", "fsdp")):
        x, y = 80.0, 38 + 36 * row
        drawing.text(70, y + 19, word, anchor="end")
        for cause, size in state_bytes(f"{word},bf16").items():
            drawing.box(x, y, 34 * size, 28, colours[cause])
            x += 34 * size
        drawing.text(x + 8, y + 19, f"{sum(state_bytes(f'{word},bf16').values()):g} bytes", anchor="start")
    drawing.text(80, 190, f"per parameter on each of {RANKS} ranks; bf16 with fp32 masters", size=12, anchor="start")
    return drawing


def pipeline() -> Drawing:
    """Two schedules as they are simulated; a backward pass takes as long as two forward passes."""
    drawing = Drawing(760, 330, "GPipe and 1F1B on four ranks with eight micro-batches; gaps are bubbles")
    for place, (name, title) in enumerate({"gpipe": "GPipe", "1f1b": "1F1B"}.items()):
        top, result = 24 + 164 * place, simulate(make(name, 4, 8))
        drawing.text(8, top - 6, f"{title}: idle {result.bubble:.0%}", anchor="start", bold=True)
        for timed in (timed for spans in result.spans for timed in spans):
            scale = 680 / result.total
            x, y = 64 + scale * timed.start, top + 33 * timed.rank
            width = scale * (timed.end - timed.start) - 1.5
            drawing.box(x, y, width, 27, BLUE if timed.action.kind is Kind.FORWARD else ORANGE)
            drawing.text(x + width / 2, y + 18, str(timed.action.micro_batch), size=11)
        for rank in range(4):
            drawing.text(8, top + 33 * rank + 18, f"rank {rank}", size=12, anchor="start")
    return drawing


def tensor() -> Drawing:
    drawing = Drawing(760, 208, "A pair of layers: the first divided by its outputs, the second by its inputs")
    drawing.box(16, 84, 64, 40, PURPLE)
    drawing.text(48, 109, "x")
    for rank, (colour, y) in enumerate(((BLUE, 38), (ORANGE, 134))):
        drawing.text(48, y + 12 if rank == 0 else y + 42, f"rank {rank}")
        for x, words in ((140, "up: half of the columns"), (430, "down: half of the rows")):
            drawing.box(x, y, 170, 40, colour)
            drawing.text(x + 85, y + 25, words, size=12)
        drawing.line(82, 104, 138, y + 20, arrow=True)
        drawing.line(312, y + 20, 428, y + 20, arrow=True)
        drawing.text(370, y + 12, "half of the width", size=11)
        drawing.line(602, y + 20, 654, 104 - (12 if rank == 0 else -12), arrow=True)
    drawing.box(656, 84, 92, 40, GREEN)
    drawing.text(702, 109, "sum = y")
    drawing.text(702, 146, "one all-reduce", size=12)
    drawing.text(370, 200, "nothing is sent between the two layers", size=12)
    return drawing


def mesh() -> Drawing:
    drawing = Drawing(700, 236, "Eight ranks as a mesh of two stages, two data ranks and two tensor ranks")
    for stage in (0, 1):
        left = 30 + 350 * stage
        drawing.box(left, 34, 290, 150)
        drawing.text(left + 145, 24, f"stage {stage} (pp)", bold=True)
        for data in (0, 1):
            for part in (0, 1):
                x, y = left + 24 + 134 * part, 50 + 66 * data
                drawing.box(x, y, 108, 52, (BLUE, ORANGE)[part])
                drawing.text(x + 54, y + 23, f"rank {4 * stage + 2 * data + part}", bold=True)
                drawing.text(x + 54, y + 41, f"samples {'1-16' if data == 0 else '17-32'}", size=11)
            drawing.both_ways(left + 134, 76 + 66 * data, left + 156, 76 + 66 * data)
        for part in (0, 1):
            drawing.both_ways(left + 78 + 134 * part, 103, left + 78 + 134 * part, 115)
    drawing.line(322, 109, 378, 109, arrow=True)
    drawing.text(350, 99, "pp", size=12)
    drawing.text(
        350, 212, "left and right: tp, the halves of each layer;  up and down: fsdp, samples and shards", size=12
    )
    return drawing


def pictures() -> dict[str, str]:
    """Every picture's text, by the name of its file."""
    names = {name: name.replace(", ", "-") for name in COLLECTIVES}
    drawn = {f"{file}.svg": str(collective(name)) for name, file in names.items()}
    others = {"side-by-side": side_by_side, "overlap": overlap, "dp": data_parallel, "zero": zero, "pipeline": pipeline}
    others |= {"tensor": tensor, "mesh": mesh}
    return drawn | {f"{name}.svg": str(draw()) for name, draw in others.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
