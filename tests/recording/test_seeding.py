import torch

from meshwright.recording.seeding import seed_torch


def test_the_numbers_are_those_of_manual_seed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    seed_torch(7)
    assert torch.equal(torch.rand(4), expected)
