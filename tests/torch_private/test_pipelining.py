from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from meshwright.assemble.world import fake_world
from meshwright.torch_private.pipelining import (
    NoVotes,
    Passed,
    Stage,
    construct_reverse_graph,
    get_param_groups,
    graph_node,
)

VOTES_SINCE = (2, 12)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def stage() -> Iterator[Stage]:
    world = fake_world(2, torch.device("cpu"))
    yield Stage(nn.Linear(2, 2), 0, 2, torch.device("cpu"), input_args=torch.ones(1, 2), output_args=torch.ones(1, 2))
    world.leave()


def test_neighbours_vote_since_their_release() -> None:
    votes = [name for name in vars(NoVotes) if name.startswith("_warmup")]
    assert len(votes) == 2
    assert all(hasattr(PipelineStage, name) for name in votes) == (RELEASE >= VOTES_SINCE)


def test_a_vote_has_passed() -> None:
    assert Passed().item() == 1


def test_a_stage_does_not_send_to_itself(stage: Stage) -> None:
    assert hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    peers = [op.group_peer for op in stage._get_init_p2p_neighbors_ops()]
    assert 1 in peers and stage.group_rank not in peers


def test_a_stage_keeps_outputs_and_inputs(stage: Stage) -> None:
    if RELEASE < VOTES_SINCE:  # there a stage wants to know its inputs before it runs
        stage._prepare_forward_infra(1, (torch.ones(1, 2),))
    output = stage.forward_one_chunk(0, (torch.ones(1, 2),), {})
    outputs, inputs = stage.kept_of(0)
    assert outputs[0] is output or torch.equal(outputs[0], output)
    assert torch.equal(inputs[0], torch.ones(1, 2))


def test_weights_are_grouped_by_where_they_meet_the_inputs() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2, requires_grad=True)
    output = second(first(x))
    edges = construct_reverse_graph([graph_node(output)])
    weights = [graph_node(module.weight) for module in (first, second)]
    assert all(node in edges for node in weights)
    groups = get_param_groups([graph_node(x)], weights, edges)
    assert sum(len(group["params"]) for group in groups) == 2
    assert all(len(group["intermediates"]) == 1 for group in groups)
