import torch

from meshwright.torch_private.dynamo import on_compile_end, on_compile_start


def test_compiling_is_told() -> None:
    told = []
    on_compile_start(lambda *arguments: told.append("start"))
    on_compile_end(lambda *arguments: told.append("end"))
    torch.compile(lambda x: x - 3, backend="eager")(torch.ones(2))
    assert told == ["start", "end"]
