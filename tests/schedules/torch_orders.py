"""What PyTorch's own schedule classes run, found with no process. All use of torch's private names for it is here."""

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.schedules import FAMILIES

CLASSES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def torch_order(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> list[list[str]]:
    """For each rank, the compute actions that PyTorch runs, in order and as it prints them."""
    if issubclass(CLASSES[name], torch_schedules.PipelineScheduleSingle):
        return [_recorded(name, rank, ranks, micro_batches) for rank in range(ranks)]
    program = _build(name, ranks, micro_batches, virtual).pipeline_order_with_comms
    return [[str(action) for action in program[rank] if action.is_compute_op] for rank in range(ranks)]


def torch_accepts(name: str, ranks: int, micro_batches: int) -> bool:
    """Whether PyTorch's class takes so many micro-batches; it also refuses what would never end."""
    try:
        _build(name, ranks, micro_batches)
    except (ValueError, AssertionError):
        return False
    return True


def torch_placement(name: str, ranks: int, micro_batches: int) -> dict[int, int]:
    """The rank of each stage."""
    return dict(_build(name, ranks, micro_batches).stage_index_to_group_rank)


def _build(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Any:
    if issubclass(CLASSES[name], torch_schedules.PipelineScheduleSingle):
        return CLASSES[name](_Recorder(0, ranks), micro_batches)
    number = virtual or FAMILIES[name].virtual
    stages = [_Recorder(index, ranks, stages=ranks * number) for index in range(number)]
    return CLASSES[name](stages, micro_batches)


def _recorded(name: str, rank: int, ranks: int, micro_batches: int) -> list[str]:
    """The step itself is run: 1F1B's `_get_pipeline_order` is out by one micro-batch on the last rank."""
    stage = _Recorder(rank, ranks)
    schedule = CLASSES[name](stage, micro_batches)
    schedule._initialize_stage = lambda *arguments: None
    schedule._step_microbatches()
    return stage.actions


class _Recorder(SimpleNamespace):
    """A stage that computes and sends nothing, and writes down what it is asked for."""

    def __init__(self, index: int, ranks: int, stages: int | None = None) -> None:
        number = stages or ranks
        super().__init__(stage_index=index, num_stages=number, group_size=ranks, group_rank=index % ranks)
        self.is_last = index == number - 1
        self.submod = nn.Identity()
        self.actions: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *arguments: object, **options: object) -> None:
        self.actions.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **options: object) -> None:
        self.actions.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, divisor: int) -> None:
        pass

    def _no_transfers(self, micro_batch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers
