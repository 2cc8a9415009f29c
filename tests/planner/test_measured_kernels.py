"""Prices of kernels: by the same kernel, by the nearest ones, by the catalogue; and what plans make of them."""

from dataclasses import replace

import pytest

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import Kernel, ModelCosts, Size
from meshwright.facts.host_passes import HostPasses
from meshwright.facts.kernel_table import KernelTable, MeasuredKernel, MeasuredUpdate
from meshwright.facts.plan import MEASURED_KERNELS, Plan, show_plan
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner import kernels
from meshwright.planner.host_costs import OURS
from meshwright.planner.measured_kernels import KernelPrices, KernelSeconds
from meshwright.planner.search import MEASURED_BAR, consider
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import lay_out_step
from meshwright.tracing.costs import measure_costs
from meshwright.tracing.operator_calls import step_calls

CLUSTER = Cluster.parse("1xA100-80GB")
HARDWARE = hardware_of(CLUSTER)
SHAPE = Shape(layers=2, width=256, heads=4, kv_heads=4, feed_forward=1024, vocabulary=1000, length=128)
SINGLE = Strategy.parse("single,bf16")


def table(*rows: MeasuredKernel, updates: tuple[MeasuredUpdate, ...] = ()) -> KernelTable:
    return KernelTable(
        device=HARDWARE.device, machine="made up", torch="2.13.0", launch=5e-6, kernels=rows, updates=updates
    )


def measured(name: str, size: float, seconds: float, *, kind: str = "other", flops: float = 0.0) -> MeasuredKernel:
    return MeasuredKernel(
        name=name, kind=kind, dtype="bf16", flops=flops, bytes=size, seconds=seconds, signature=f"{name} {size} {flops}"
    )


def moving(name: str, size: float) -> Kernel:
    return Kernel(name=name, kind="other", dtype="bf16", flops=Size(), bytes=Size(0.0, size))


def usual(size: float) -> float:
    return kernels.seconds(moving("any", size), 1, 1, HARDWARE)


def test_time_steps_of_a_recurrent_layer_wait_for_each_other() -> None:
    def layer(steps: int) -> Kernel:
        shape = (Size(steps), Size(0.0, 1.0), Size(2048.0), Size(512.0))
        return Kernel(
            name="any",
            kind="recurrent",
            dtype="bf16",
            flops=Size(0.0, 2e6 * steps),
            bytes=Size(2e6 * steps),
            shape=shape,
        )

    short, long = (kernels.seconds(layer(steps), 8, 1, HARDWARE) for steps in (10, 1000))
    assert long == pytest.approx(100 * short)
    assert long > 1000 * kernels.LEAST


def test_the_same_kernel_has_its_measured_time() -> None:
    prices = KernelPrices(table(measured("gelu", 4e6, 7e-5)), HARDWARE)
    assert prices.seconds(moving("gelu", 2e6), 2, 1) == KernelSeconds(exact=7e-5)


def test_kernels_that_costs_cannot_tell_apart_are_averaged_by_their_counts() -> None:
    one = measured("add", 1e6, 1e-5)
    rows = (replace(one, count=3), replace(one, seconds=5e-5, signature="strided", count=1))
    assert KernelPrices(table(*rows), HARDWARE).seconds(moving("add", 1e6), 1, 1).exact == pytest.approx(2e-5)


def test_between_sizes_the_ratio_to_the_catalogue_is_interpolated() -> None:
    rows = [measured("gelu", size, 2 * usual(size)) for size in (1e6, 1e8)]
    found = KernelPrices(table(*rows), HARDWARE).seconds(moving("gelu", 1e7), 1, 1)
    assert found == KernelSeconds(interpolated=pytest.approx(2 * usual(1e7)))
    rows[1] = measured("gelu", 1e8, 8 * usual(1e8))
    found = KernelPrices(table(*rows), HARDWARE).seconds(moving("gelu", 1e7), 1, 1)
    assert found.interpolated == pytest.approx(4 * usual(1e7), rel=1e-6)


def test_a_part_of_a_divided_kernel_is_interpolated() -> None:
    prices = KernelPrices(table(measured("gelu", 1e6, 3 * usual(1e6))), HARDWARE)
    whole = moving("gelu", 4e6)
    assert prices.seconds(whole, 1, 4).interpolated == pytest.approx(3 * kernels.seconds(whole, 1, 4, HARDWARE))


def test_another_product_of_the_kind_helps_and_another_dtype_does_not() -> None:
    product = Kernel(name="addmm", kind="matmul", dtype="bf16", flops=Size(1e9), bytes=Size(1e6))
    own = kernels.seconds(product, 1, 1, HARDWARE)
    rows = measured("mm", 1e6, 3 * own, kind="matmul", flops=1e9), measured("gelu", 1e6, 3 * usual(1e6))
    prices = KernelPrices(table(*rows), HARDWARE)
    assert prices.seconds(product, 1, 1).interpolated == pytest.approx(3 * own)
    other = replace(moving("gelu", 1e6), dtype="fp32")
    assert prices.seconds(other, 1, 1) == KernelSeconds(catalogue=kernels.seconds(other, 1, 1, HARDWARE))


def test_far_from_every_measured_size_the_catalogue_counts() -> None:
    prices = KernelPrices(table(measured("gelu", 1e6, 3 * usual(1e6))), HARDWARE)
    assert prices.seconds(moving("gelu", 1e8), 1, 1) == KernelSeconds(catalogue=usual(1e8))


def test_a_compiler_fuses_measured_kernels_too_but_no_products() -> None:
    flops = Kernel(name="mm", kind="matmul", dtype="bf16", flops=Size(1e9), bytes=Size(1e6))
    rows = measured("gelu", 1e6, 1e-4), measured("mm", 1e6, 1e-4, kind="matmul", flops=1e9)
    prices = KernelPrices(table(*rows), HARDWARE)
    assert prices.seconds(moving("gelu", 1e6), 1, 1, compiled=True).exact == pytest.approx(kernels.FUSED * 1e-4)
    assert prices.seconds(flops, 1, 1, compiled=True).exact == 1e-4


def test_updates_scale_with_the_elements_of_the_same_optimizer() -> None:
    updates = (
        MeasuredUpdate(optimizer="AdamW", elements=1e6, seconds=1e-3),
        MeasuredUpdate(optimizer="AdamW", elements=1e8, seconds=5e-2),
    )
    prices = KernelPrices(table(updates=updates), HARDWARE, "AdamW")
    assert prices.update(2e6) == pytest.approx(2e-3)
    assert prices.update(2e8) == pytest.approx(0.1)
    assert KernelPrices(table(updates=updates), HARDWARE, "SGD").update(2e6) is None


def test_shares_add_up() -> None:
    found = (KernelSeconds(exact=3.0) + KernelSeconds(catalogue=1.0)) * 2
    assert found.shares() == {"exact": 0.75, "interpolated": 0.0, "catalogue": 0.25}
    assert sum(KernelSeconds().shares().values()) == 0


@pytest.fixture(scope="module")
def planner() -> Planner:
    job = decoder_job(SHAPE, global_batch=8)
    found = Planner(job, describe(job), 8)
    found.measure("bf16", "none")
    return found


def plan_with(planner: Planner, rows: KernelTable | None, text: str = "single,bf16") -> Plan:
    tables = () if rows is None else (rows,)
    own = Planner(planner.job, planner.facts, 8, costs=planner._costs, kernels=tables)
    own.measure("bf16", "none")
    return consider(own.context(CLUSTER), Strategy.parse(text))


def rows_of(costs: ModelCosts, samples: int, times: float) -> KernelTable:
    """A table in which every kernel of a model takes `times` its catalogue seconds."""
    own = {kernel for unit in costs.units for kernel in (*unit.forward, *unit.backward)}
    rows = [
        MeasuredKernel(
            name=kernel.name,
            kind=kernel.kind,
            dtype=kernel.dtype,
            flops=kernel.flops.at(samples),
            bytes=kernel.bytes.at(samples),
            shape=tuple(round(size.at(samples)) for size in kernel.shape),
            steps=kernel.steps.at(samples),
            seconds=times * kernels.seconds(kernel, samples, 1, HARDWARE),
            signature=f"{place}",
        )
        for place, kernel in enumerate(own)
    ]
    return table(*rows)


def test_a_plan_takes_its_compute_from_measured_kernels(planner: Planner) -> None:
    rows = rows_of(planner._costs["bf16", "none"], 8, 3.0)
    before, after = plan_with(planner, None), plan_with(planner, rows)
    layout = lay_out_step(SINGLE.resolve(1), planner.facts, 8)
    (stage,) = StageCosts(planner.facts, planner._costs, HARDWARE).of(layout)
    kernels_before = sum(unit.forward + unit.backward for unit in stage.units)
    assert after.forecast.time["compute"] - before.forecast.time["compute"] == pytest.approx(2 * kernels_before)
    assert after.forecast.memory == before.forecast.memory
    assert after.kernels == {"exact": pytest.approx(1.0), "interpolated": 0.0, "catalogue": 0.0}
    shown = show_plan(after)
    assert (shown["time_grade"], shown["kernels"]["exact"]) == (MEASURED_KERNELS, pytest.approx(1.0))
    assert (show_plan(before)["time_grade"], show_plan(before)["kernels"]) == ("catalogue", {})
    assert Plan.from_json(after.to_json()) == after


def test_a_plan_mostly_interpolated_has_the_usual_bar(planner: Planner) -> None:
    costs = planner._costs["bf16", "none"]
    usual_bar, exact, other = (
        plan_with(planner, rows).error_bar["time"] for rows in (None, rows_of(costs, 8, 3.0), rows_of(costs, 4, 3.0))
    )
    assert (exact, other) == (MEASURED_BAR, usual_bar)


def test_another_micro_batch_is_interpolated(planner: Planner) -> None:
    found = plan_with(planner, rows_of(planner._costs["bf16", "none"], 8, 3.0), "single,bf16,mb=2")
    assert found.kernels["interpolated"] > 0.5 and found.kernels["catalogue"] < 0.01


def test_a_timed_host_replaces_the_constant_a_launch(planner: Planner) -> None:
    layout = lay_out_step(SINGLE.resolve(1), planner.facts, 8)
    names = {unit.name for unit in planner._costs["bf16", "none"].units}
    host = HostPasses(units=dict.fromkeys(names, (0.25, 0.5)), reference=1.0).at(2.0)
    (stage,) = StageCosts(planner.facts, planner._costs, HARDWARE, host=lambda precision: host).of(layout)
    assert all(unit.host == (0.5, 1.0) for unit in stage.units)
    context = planner.context(CLUSTER)
    slow = replace(
        context, stage_costs=StageCosts(planner.facts, planner._costs, HARDWARE, host=lambda precision: host)
    )
    time = consider(slow, SINGLE).forecast.time
    launches = sum(unit.forward_launches + unit.backward_launches + 2 * unit.tensors for unit in stage.units)
    at_least = 1.5 * len(stage.units) - time["compute"]
    assert at_least < time["host"] < 1.5 * len(stage.units) + launches * 1e-4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernels_of_costs_are_those_of_a_traced_step(planner: Planner, device: str) -> None:
    """What `probe --kernels` would measure is what a plan looks up."""
    precision = "bf16" if device == "cuda" else "fp32"
    strategy = Strategy.parse(f"single,{precision}").resolve(1)
    calls = step_calls(planner.job, planner.facts, strategy, ranks=1, device=device).calls
    rows = [
        MeasuredKernel(
            name=call.run.name,
            kind=call.run.kind,
            dtype=call.run.dtype,
            flops=call.run.flops,
            bytes=call.run.bytes,
            shape=call.run.shape,
            steps=call.run.steps,
            seconds=1e-4,
            signature=call.signature,
        )
        for call in calls
    ]
    costs = measure_costs(planner.job, planner.facts, precision, device=device)
    prices = KernelPrices(table(*rows), HARDWARE)
    own = {kernel for unit in costs.units for kernel in (*unit.forward, *unit.backward) if kernel.bytes.at(8)}
    missing = {kernel.name for kernel in own if not prices.seconds(kernel, 8, 1).exact}
    # The gradient of the loss, which the engine makes by its weight, and the sample's tokens, which it has copied.
    assert missing <= {"ones_like", "clone"}


def test_unknown_operators_without_products_are_not_interpolated_from_others() -> None:
    prices = KernelPrices(table(measured("fill", 1e9, 1e-9)), HARDWARE)
    kernel = Kernel(name="norm", kind="other", dtype="bf16", flops=Size(), bytes=Size(1e9))
    assert prices.seconds(kernel, 1, 1).catalogue > 1e-4


def test_kernels_with_strided_operands_are_interpolated_apart() -> None:
    strided = replace(measured("mul", 1e9, 5e-3), steps=1e9, signature="strided")
    prices = KernelPrices(table(measured("mul", 1e9, 1e-3), strided), HARDWARE)

    def seconds(steps: float) -> float:
        kernel = Kernel(
            name="mul", kind="other", dtype="bf16", flops=Size(), bytes=Size(1.01e9), steps=Size(steps * 1.01)
        )
        return prices.seconds(kernel, 1, 1).interpolated

    assert seconds(0.0) == pytest.approx(1e-3, rel=0.05)
    assert seconds(1e9) == pytest.approx(5e-3, rel=0.05)


def test_a_measured_host_scales_what_the_engine_costs_it() -> None:
    scaled = OURS.scaled(2.0)
    assert scaled.collective == 2 * OURS.collective
    assert scaled.piece == (2 * OURS.piece[0], 2 * OURS.piece[1])
    assert scaled.gathers_by_copy is OURS.gathers_by_copy


def attention(heads: int, keys: int, width: int, name: str = "flash_attention") -> Kernel:
    sizes = (heads, keys, keys, width)
    flops, moved = 4.0 * heads * keys * keys * width, 8.0 * heads * keys * width
    shape = tuple(Size(size) for size in sizes)
    return Kernel(name=name, kind="attention", dtype="bf16", flops=Size(flops), bytes=Size(moved), shape=shape)


def test_attention_is_interpolated_by_keys_and_width_and_not_by_its_size() -> None:
    def row(heads: int, keys: int, width: int, times: float) -> MeasuredKernel:
        kernel = attention(heads, keys, width)
        return MeasuredKernel(
            name=kernel.name,
            kind="attention",
            dtype="bf16",
            flops=kernel.flops.fixed,
            bytes=kernel.bytes.fixed,
            shape=(heads, keys, keys, width),
            seconds=times * kernels.seconds(kernel, 1, 1, HARDWARE),
            signature=f"{heads} {keys} {width}",
        )

    rows = [row(16, 512, 64, 3.0), row(1024, 512, 128, 1.0), row(32, 8192, 64, 0.5)]
    wanted = attention(1024, 512, 64)
    found = KernelPrices(table(*rows), HARDWARE).seconds(wanted, 1, 1).interpolated
    assert found == pytest.approx(3 * kernels.seconds(wanted, 1, 1, HARDWARE), rel=0.05)


def test_attention_with_a_mask_is_slower() -> None:
    plain, masked = (
        attention(128, 2048, 128, name)
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
    )
    ratio = kernels.seconds(plain, 1, 1, HARDWARE) / kernels.seconds(masked, 1, 1, HARDWARE)
    assert ratio == pytest.approx(kernels.MASKED, rel=0.02)


def test_a_padded_product_has_the_speed_of_even_sides() -> None:
    def product(classes: int) -> Kernel:
        shape = tuple(Size(size) for size in (1, 4096, classes, 1024))
        return Kernel(name="mm", kind="matmul", dtype="bf16", flops=Size(2.0**43), bytes=Size(1.0), shape=shape)

    odd, even = (kernels.seconds(product(classes), 1, 1, HARDWARE) for classes in (50257, 50264))
    assert odd > 4 * even
    assert kernels.seconds(kernels.padded(product(50257)), 1, 1, HARDWARE) == pytest.approx(even)
