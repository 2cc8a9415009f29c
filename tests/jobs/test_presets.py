"""Presets have the number of parameters that was published, and their options do what they say."""

from math import prod

import pytest

from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.jobs import decoder
from meshwright.jobs.load import load_job
from meshwright.jobs.presets import PRESETS, preset_job
from meshwright.recording.blueprint import record

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mistral-large-123b": 122_610_069_504,
    "yi-34b": 34_388_917_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671_026_419_200,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_600_000_000,  # its paper rounds to that
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
}


def test_every_preset_is_checked() -> None:
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    model = record(preset_job(name).model, seed=0).model
    assert sum(prod(parameter.shape) for parameter in model.parameters()) == pytest.approx(PUBLISHED[name], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "blocks", "weight"),
    [("llama3-70b", 80, 8192), ("gpt2", 12, 1024), ("bert-base", 12, 512), ("vit-base", 12, 1), ("resnet-50", 16, 1)],
)
def test_facts(name: str, blocks: int, weight: float) -> None:
    facts = describe(load_job(f"preset:{name}"))
    assert len(facts.blocks) == blocks
    assert len(facts.calls) > blocks
    assert facts.weight_per_sample == weight
    assert facts.unused == ()
    assert facts.unseen == ""


def test_only_some_blocks_of_a_large_model_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing 405B takes seconds because of that, not minutes."""
    ran, forward = [], decoder.Block.forward
    monkeypatch.setattr(decoder.Block, "forward", lambda self, *args: ran.append(self) or forward(self, *args))
    describe(load_job("preset:llama3-8b"))
    assert 0 < len(ran) < 5


def test_options() -> None:
    job = load_job("preset:llama3-8b:seq=512,batch=3")
    assert job.sample is not None
    assert job.global_batch == 3
    assert job.sample(2)["x"].shape == (2, 512)
    assert load_job("preset:llama3-8b:batch=7").global_batch == 7
    assert load_job("preset:vit-base:batch=7").global_batch == 7


def test_rotary_positions_go_on() -> None:
    job = preset_job("llama2-7b:seq=16384")
    assert job.sample is not None
    assert job.sample(1)["x"].shape == (1, 16384)


def test_fewer_tokens_than_positions_leave_the_model_as_it_is() -> None:
    model = record(preset_job("gpt2:seq=64").model, seed=0).model
    assert sum(prod(parameter.shape) for parameter in model.parameters()) == PUBLISHED["gpt2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama3-8", r"There is no preset 'llama3-8'. Did you mean preset:llama3-8b\? Use one of llama3.2-1b"),
        ("zzz", "There is no preset 'zzz'. Use one of"),
        ("gpt2:seq=2048", "preset:gpt2 has 1024 positions, but seq=2048 was given; use fewer"),
        ("vit-base:seq=64", "preset:vit-base takes images, which have no seq=64"),
        ("gpt2:seqq=64", r"there is no option 'seqq=64'; did you mean 'seq'\? write seq=TOKENS"),
        ("gpt2:seq=many", "'seq=many' needs a whole number of at least 1"),
        ("gpt2:batch=0", "'batch=0' needs a whole number"),
        ("gpt2:seq=4,", "there is no option ''"),
    ],
)
def test_what_is_not_there_is_named(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        preset_job(text)
