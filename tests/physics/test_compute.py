"""Seconds of operators: bounds no kernel can beat, what small work loses, and what depends on what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tables import beside

from planner.physics.compute import issue_seconds, operator_seconds, summed, with_host
from planner.physics.kernels import accumulate_s, attention_s, cast_s, clip_s, gemm_s, optimizer_s, product_s, stream_s
from planner.physics.layers import decoder_layer
from planner.physics.operators import Operator, operators_of
from planner.shape import Shape
from planner.specs.hardware import GemmEfficiency, HardwareSpec
from planner.specs.model import LayerKind
from planner.specs.registry import hardware_names, load_hardware, load_model
from planner.trainers.load import load_runtime

TABLES = beside(__file__)

H200 = load_hardware("h200-sxm-141gb")
A100 = load_hardware("a100-sxm-80gb")
MEGATRON = load_runtime("megatron")


def gemm(m: float, n: float, k: float, **fields: object) -> Operator:
    return Operator(name="gemm", kind="gemm", m=m, n=n, k=k, **fields)  # type: ignore[arg-type]


def attention(**fields: object) -> Operator:
    usual = {"batch": 1, "heads": 32, "kv_heads": 8, "q_len": 8192, "kv_len": 8192, "qk_dim": 128, "v_dim": 128}
    return Operator(name="attention", kind="attention", **(usual | fields))  # type: ignore[arg-type]


def forward_s(op: Operator, hardware: HardwareSpec = H200, dtype: str = "bf16") -> float:
    return float(operator_seconds(op, hardware, dtype, MEGATRON).forward_s)


def alone_s(m: float, n: float, k: float, hardware: HardwareSpec = H200) -> float:
    return float(product_s(hardware, "bf16", hardware.efficiency.gemm.forward_fraction, 1, m, n, k))


def with_gemm(hardware: HardwareSpec, **fields: float) -> HardwareSpec:
    block = GemmEfficiency.model_validate(hardware.efficiency.gemm.model_dump() | fields)
    return hardware.model_copy(update={"efficiency": hardware.efficiency.model_copy(update={"gemm": block})})


@pytest.mark.parametrize(("m", "n", "k", "measured_us"), TABLES["products_take_what_was_measured_on_h200"])
def test_products_take_what_was_measured_on_h200(m: int, n: int, k: int, measured_us: float) -> None:
    assert alone_s(m, n, k) * 1e6 == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize("name", sorted(hardware_names()))
def test_no_product_beats_peak_or_bandwidth(name: str) -> None:
    hardware, rng = load_hardware(name), np.random.default_rng(0)
    m, n, k = (rng.integers(1, 200, 500) * 64.0 for _ in range(3))
    peak = hardware.peak_flops("bf16")
    assert peak is not None
    # GeForce cards clock higher than their data sheet says: users timed up to 1.09 of its peak (docs/HARDWARE.md)
    boost = 1.1 if name.startswith("rtx-") else 1.0
    for seconds in gemm_s(gemm(m, n, k), hardware, "bf16"):  # type: ignore[arg-type]
        assert np.all(seconds > 2 * m * n * k / (boost * peak))
        assert np.all(seconds > 2 * (m * n + m * k + n * k) / hardware.hbm_bytes_per_s)


def test_products_never_get_faster_with_size() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 100, (3, 300)) * 64.0
    fraction = H200.efficiency.gemm.forward_fraction
    before = product_s(H200, "bf16", fraction, 1, *sizes)
    for axis in range(3):
        larger = sizes.copy()
        larger[axis] += 64
        assert np.all(product_s(H200, "bf16", fraction, 1, *larger) >= before)


def test_one_row_past_a_full_wave_costs_another_wave() -> None:
    # 11 x 12 tiles of 128 x 256 fill the 132 SMs; one row more, and smaller tiles or a second wave must do
    full, more = alone_s(11 * 128, 12 * 256, 8192), alone_s(11 * 128 + 1, 12 * 256, 8192)
    assert more > 1.08 * full


def test_idle_sms_leave_power_to_the_others() -> None:
    # where the power limit binds, quantization is hidden: a GPU that could clock higher is no faster
    cool = with_gemm(H200, wave_fraction=1.1)
    assert alone_s(8192, 8192, 8192, cool) == alone_s(8192, 8192, 8192)
    # 135 tiles of 128 x 256 on 132 SMs
    assert alone_s(9 * 128, 15 * 256, 8192, cool) < alone_s(9 * 128, 15 * 256, 8192)


def test_short_reductions_pay_for_prologue_and_epilogue() -> None:
    rate = [2 * 16384 * 4096 * k / alone_s(16384, 4096, k) for k in (512, 1024, 2048, 8192)]
    assert rate == sorted(rate)
    assert rate[0] < 0.8 * rate[-1]


def test_tensor_parallel_shards_lose_efficiency() -> None:
    whole, shards = forward_s(gemm(4096, 6144, 4096)), 8 * forward_s(gemm(4096, 768, 4096))
    assert 1.05 * whole < shards < 2 * whole


def test_fp8_speeds_up_products_by_weights_alone() -> None:
    weight, scores = gemm(8192, 8192, 8192), gemm(2048, 2048, 128, count=64, weight=False)
    assert 0.5 < forward_s(weight, dtype="fp8") / forward_s(weight) < 0.69
    assert forward_s(scores, dtype="fp8") == forward_s(scores)
    assert forward_s(weight, A100, "fp8") == forward_s(weight, A100), "A100 has no fp8"


@pytest.mark.parametrize(("gpu", "factor"), [("mi300x", 1.4), ("mi355x", 1.4), ("h200", 1.0)])
def test_products_that_nobody_tuned_are_slower_where_the_gpu_says_so(gpu: str, factor: float) -> None:
    op, hardware = gemm(8192, 8192, 8192), load_hardware(gpu)
    tuned, chosen = (operator_seconds(op, hardware, "bf16", load_runtime(name)) for name in ("megatron", "torchtitan"))
    assert chosen.forward_s / tuned.forward_s == pytest.approx(factor)


def test_fp8_pays_for_its_casts() -> None:
    """16 bits read twice, once for the scale; the narrow copy and its transpose written."""
    op = gemm(8192, 8192, 64)
    product = float(product_s(H200, "fp8", H200.efficiency.gemm.forward_fraction, 1, 8192, 8192, 64))
    cast = float(stream_s(H200, (2 + 2 + 1 + 1) * 8192 * 64, 1, "cast"))
    sustained = H200.efficiency.sustained_fraction * H200.efficiency.narrow_sustained_fraction
    assert forward_s(op, dtype="fp8") == pytest.approx(product / sustained + cast, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "dtype", "alone", "among_8"),
    [
        ("h200", "fp8", 6, 5 / 8 + 2),  # the transposed copy is made of what was gathered
        ("b200", "fp8", 5, 5 / 8),  # products take operands either way
        ("b200", "mxfp8", 4, 4 / 8),
        ("b200", "nvfp4", 7, 7 / 8),
    ],
)
def test_ranks_cast_their_shares_before_they_gather(gpu: str, dtype: str, alone: float, among_8: float) -> None:
    """Bytes moved per element; the gradient of a column-parallel output is whole on each rank."""
    hardware, whole = load_hardware(gpu), gemm(8192, 4096, 16384)
    runtime = MEGATRON.in_dtype(dtype, hardware.architecture)
    for shards, moved in ((1, alone), (8, among_8)):
        cast = cast_s(replace(whole, input_shards=shards), hardware, dtype, runtime)
        assert float(cast.forward_s) == pytest.approx(float(stream_s(hardware, moved * 8192 * 16384, 1, "cast")))
        assert float(cast.dgrad_s) == pytest.approx(float(stream_s(hardware, alone * 8192 * 4096, 1, "cast")))


def test_what_enters_and_leaves_tensor_parallel_products_is_cast_in_shares() -> None:
    model = load_model("llama-3.1-70b")
    for parallel, shards in ((1, 4), (0, 1)):
        shape = Shape(tp=4, seq_length=8192, sequence_parallel=parallel)
        layer = operators_of(decoder_layer(model, model.layers[0], shape, MEGATRON))
        found = {op.name: (int(op.input_shards), int(op.gradient_shards)) for op in layer if op.is_cast}
        assert found == {
            "qkv": (shards, 1), "attention output": (1, shards), "mlp up": (shards, 1), "mlp down": (1, shards),
        }  # fmt: skip


def test_a_backward_factor_is_of_both_gradients_alone() -> None:
    hardware, runtime = load_hardware("h200"), load_runtime("torch-eager")
    product = Operator(name="", kind="gemm", m=4096, n=32000, k=4096)
    plain, quick = (
        operator_seconds(op, hardware, "bf16", runtime) for op in (product, replace(product, backward_factor=0.5))
    )
    assert quick == pytest.approx((plain.forward_s, plain.dgrad_s / 2, plain.wgrad_s / 2))


def test_products_without_a_weight_have_two_input_gradients() -> None:
    scores, weight = gemm(2048, 2048, 128, weight=False), gemm(2048, 2048, 128)
    both = operator_seconds(weight, H200, "bf16", MEGATRON)
    one = operator_seconds(scores, H200, "bf16", MEGATRON)
    assert float(one.wgrad_s) == 0
    assert float(one.dgrad_s) == pytest.approx(float(both.dgrad_s + both.wgrad_s))


def test_heads_of_odd_dimension_lose_tensor_cores() -> None:
    even, odd = (gemm(2048, 2048, d, count=32, weight=False) for d in (112, 108))
    assert forward_s(odd, A100) > 5 * forward_s(even, A100)
    assert forward_s(replace(odd, weight=True), A100) <= forward_s(replace(even, weight=True), A100)


def test_grouped_products_share_waves_but_stream_every_weight() -> None:
    one, many = gemm(128, 2048, 768), gemm(128, 2048, 768, count=64)
    assert forward_s(many) < 0.7 * 64 * forward_s(one)
    assert forward_s(many) > forward_s(gemm(64 * 128, 2048, 768))
    assert forward_s(many) > 64 * 2 * 2048 * 768 / H200.hbm_bytes_per_s


def test_attention_reaches_what_was_measured_on_h200() -> None:
    seconds = operator_seconds(attention(), H200, "bf16", MEGATRON)
    assert float(seconds.forward_s) * 1e6 == pytest.approx(883, rel=0.05)
    assert float(seconds.dgrad_s) * 1e6 == pytest.approx(2701, rel=0.08)
    assert float(seconds.wgrad_s) == 0


def test_attention_is_less_efficient_for_short_sequences_and_few_heads() -> None:
    rate = {
        (seq, heads): heads * seq**2 / forward_s(attention(q_len=seq, kv_len=seq, heads=heads))
        for seq, heads in ((2048, 32), (8192, 32), (32768, 32), (8192, 4))
    }
    assert rate[2048, 32] < rate[8192, 32] < rate[32768, 32]
    assert rate[8192, 4] < 0.85 * rate[8192, 32]


@pytest.mark.parametrize("kernel", ["fastest", "flash"])
def test_only_the_block_on_the_diagonal_ends_in_a_long_tile_row(kernel: str) -> None:
    """A rank's 4,096 of 8 times as many tokens: beyond one block of keys, the seconds of scores alone."""
    one, ring = (
        Operator(name="", kind="attention", batch=1, heads=4, q_len=4096, kv_len=4096 * n, qk_dim=128, v_dim=128)
        for n in (1, 8)
    )
    flops = np.array([[op.forward_flops, op.backward_flops] for op in (one, ring)])
    long = replace(one, batch=4096)  # so many that its last tile rows count for nothing
    rates = np.array([long.forward_flops, long.backward_flops]) / np.array(attention_s(long, H200, kernel))
    seconds = np.array([attention_s(op, H200, kernel) for op in (one, ring)])
    assert seconds[1] - seconds[0] == pytest.approx((flops[1] - flops[0]) / rates, rel=0.01)


def test_attention_pads_head_dimensions_and_amortises_softmax_over_them() -> None:
    narrow, odd, usual, wide = (
        forward_s(attention(qk_dim=d, v_dim=v)) for d, v in ((64, 64), (96, 96), (128, 128), (192, 128))
    )
    assert odd == usual, "cuDNN pads 96 to 128"
    assert 0.5 * usual < narrow < usual
    assert wide > usual * 320 / 256


def test_sliding_windows_save_work() -> None:
    full, window, all_keys = (forward_s(attention(window=w)) for w in (0, 1024, 8192))
    assert all_keys == full
    assert 0.1 * full < window < 0.4 * full


def test_the_faster_attention_kernel_is_taken_where_the_gpu_has_it() -> None:
    flash = H200.efficiency.model_copy(update={"cudnn": None})
    assert forward_s(attention(), H200.model_copy(update={"efficiency": flash})) > 1.5 * forward_s(attention())
    assert A100.efficiency.cudnn is None


@pytest.mark.parametrize("name", ["b200", "b300", "gb200", "gb300"])
def test_flash_attention_2_has_no_kernel_of_blackwell_s(name: str) -> None:
    blackwell, titan = load_hardware(name), load_runtime("torchtitan").in_dtype("bf16", "blackwell")
    seconds = [sum(attention_s(attention(), blackwell, kernel)) for kernel in ("flash", titan.attention_kernel)]
    assert seconds[0] > 2 * seconds[1]
    assert seconds[0] == pytest.approx(sum(attention_s(attention(), H200, "flash")), rel=0.25)


def test_the_first_flash_attention_is_slower_than_the_second_by_what_the_gpu_says() -> None:
    op = attention()
    for hardware in (H200, A100):
        first, second = (sum(attention_s(op, hardware, kernel)) for kernel in ("flash1", "flash"))
        assert first == pytest.approx(hardware.efficiency.flash1_factor * second, rel=1e-2)
    assert H200.efficiency.flash1_factor > A100.efficiency.flash1_factor > 1


def test_streams_take_their_bytes_and_their_launches() -> None:
    launch = H200.efficiency.launch_us * 1e-6
    assert float(stream_s(H200, 48e9, 1)) == pytest.approx(0.01 / H200.efficiency.stream_fraction + launch)
    assert float(stream_s(H200, 1, 7)) == pytest.approx(7 * launch, rel=1e-3)
    assert float(stream_s(H200, 0, 7)) == 0, "a kernel that another runtime fuses away"
    assert stream_s(H200, 1e9, 1, "norm") > stream_s(H200, 1e9, 1, "residual")


def test_optimizer_and_accumulation_move_their_bytes() -> None:
    shard = 10**9
    bandwidth = H200.efficiency.of_family("optimizer") * H200.hbm_bytes_per_s
    assert float(optimizer_s(H200, shard, MEGATRON)) == pytest.approx(34 * shard / bandwidth)
    assert float(optimizer_s(H200, shard, MEGATRON, shard)) == pytest.approx(42 * shard / bandwidth)
    lean = MEGATRON.model_copy(update={"optimizer_bytes": 8})
    assert optimizer_s(H200, shard, lean) < optimizer_s(H200, shard, MEGATRON)
    assert float(accumulate_s(H200, shard)) > 10 * shard / H200.hbm_bytes_per_s


def test_small_operators_wait_for_the_host_unless_graphs_replay_them() -> None:
    small = [gemm(128, 256, 256), attention(q_len=128, kv_len=128, heads=1)] * 4
    graphs = MEGATRON.model_copy(update={"cuda_graphs": True})
    eager, replayed = (
        with_host(
            summed(operator_seconds(op, H200, "bf16", runtime) for op in small),
            issue_seconds(small, H200, runtime),
            runtime,
        )
        for runtime in (MEGATRON, graphs)
    )
    host = MEGATRON.host_factor * H200.efficiency.host_us * 1e-6
    assert float(eager.forward_s) == pytest.approx(8 * host)
    assert float(eager.dgrad_s + eager.wgrad_s) == pytest.approx(4 * (2 + 3) * host)
    assert replayed.forward_s < eager.forward_s


def test_learned_sinks_add_to_the_backward_of_each_row() -> None:
    block = H200.efficiency.attention.model_copy(update={"sink_row_ns": 5.0})
    slower = H200.model_copy(update={"efficiency": H200.efficiency.model_copy(update={"cudnn": block})})
    plain = attention(q_len=2**15, kv_len=2**15, heads=8)
    with_sinks, without = attention_s(replace(plain, has_sinks=True), slower), attention_s(plain, slower)
    forward, backward = (one - other for one, other in zip(with_sinks, without, strict=True))
    assert (float(forward), float(backward)) == (0, pytest.approx(2**15 * 8 * 5e-9))
    layer = decoder_layer(load_model("gpt-oss-20b"), LayerKind("full", "moe"), Shape(seq_length=4096), MEGATRON)
    assert [op.has_sinks for op in operators_of(layer) if op.kind == "attention"] == [True]


def test_large_operators_hide_the_host() -> None:
    large = [gemm(8192, 8192, 8192)] * 3
    seconds = with_host(
        summed(operator_seconds(op, H200, "bf16", MEGATRON) for op in large),
        issue_seconds(large, H200, MEGATRON),
        MEGATRON,
    )
    assert float(seconds.forward_s) == pytest.approx(3 * forward_s(large[0]))


def test_a_better_gpu_is_never_slower() -> None:
    ops = [gemm(4096, 6144, 4096), gemm(512, 512, 512), attention(), gemm(256, 2048, 768, count=64)]
    better = [
        H200.model_copy(update={"hbm_gb_per_s": 2 * H200.hbm_gb_per_s}),
        H200.model_copy(update={"peak_tflops": {k: 2 * v for k, v in H200.peak_tflops.items()}}),
    ]
    for hardware in better:
        for op in ops:
            for now, then in zip(
                operator_seconds(op, hardware, "bf16", MEGATRON),
                operator_seconds(op, H200, "bf16", MEGATRON),
                strict=True,
            ):
                assert now <= then


def test_experts_on_streams_pay_for_each_batch_of_launches() -> None:
    """Four experts share waves; one kernel for all of them shares more, and is launched once."""
    op, four = gemm(1000, 1408, 2048, count=16), gemm(1000, 1408, 2048, count=4)
    grouped, apart, batch = (gemm_s(o, H200, "bf16", flag) for o, flag in ((op, True), (op, False), (four, True)))
    for together, each, some in zip(grouped, apart, batch, strict=True):
        assert float(each) == pytest.approx(4 * float(some))
        assert float(together) < float(each)
    assert gemm_s(four, H200, "bf16", False) == batch


def test_heads_are_batched_whoever_trains() -> None:
    scores = gemm(2048, 2048, 128, count=16, weight=False)
    assert gemm_s(scores, H200, "bf16", False) == gemm_s(scores, H200, "bf16", True)


def test_small_products_of_many_weights_are_bound_by_the_gradients_they_are_added_to() -> None:
    """256 experts of 128 rows on B200, 7168 x 2048: SimuMax measured 5.3 ms with fp32 gradients, 3.0 ms with bf16."""
    op = Operator(name="experts", kind="gemm", count=256, m=128, n=7168, k=2048)
    b200 = load_hardware("b200")
    in_bf16, in_fp32 = (float(gemm_s(op, b200, "bf16", False, 2 * size).wgrad_s) for size in (2, 4))
    assert in_fp32 == pytest.approx(5.3e-3, rel=0.2)
    assert in_bf16 == pytest.approx(3.0e-3, rel=0.35)
    runtime = load_runtime("megatron")
    fused = operator_seconds(op, b200, "bf16", runtime)
    apart = operator_seconds(op, b200, "bf16", runtime.model_copy(update={"fused_grad_accumulation": False}))
    assert fused.wgrad_s > apart.wgrad_s
    assert fused[:2] == apart[:2]


@pytest.mark.parametrize(
    ("n", "k", "count", "rows", "fp32_s", "bf16_s"), TABLES["a_product_does_not_hide_the_gradient_that_it_is_added_to"]
)
def test_a_product_does_not_hide_the_gradient_that_it_is_added_to(
    n: int, k: int, count: int, rows: int, fp32_s: float, bf16_s: float
) -> None:
    """Weight gradients on B200 with fp32 and with bf16 sums, as SimuMax timed them (b200_bf16_ceperm.json, v1.2)."""
    op = Operator(name="", kind="gemm", count=count, m=rows, n=n, k=k)
    in_bf16, in_fp32 = (float(gemm_s(op, load_hardware("b200"), "bf16", False, 2 * size).wgrad_s) for size in (2, 4))
    assert in_fp32 - in_bf16 == pytest.approx(fp32_s - bf16_s, rel=0.35)
    assert in_fp32 == pytest.approx(fp32_s, rel=0.12)


def test_clipping_passes_over_the_shard_and_zeroing_over_all() -> None:
    bandwidth = H200.efficiency.stream_fraction * H200.hbm_bytes_per_s
    shard, whole = 1e9, 8e9
    assert float(clip_s(H200, shard, whole, MEGATRON)) == pytest.approx(4 * (3 * shard + whole) / bandwidth, rel=1e-2)
    assert clip_s(H200, shard, whole, load_runtime("torch-eager")) == 0.0


def test_sums_in_a_fixed_order_slow_down_the_backward_of_attention_and_permutations_alone() -> None:
    same_bits = MEGATRON.model_copy(update={"deterministic": True})
    permute = Operator(name="permute", kind="elementwise", family="permute", forward_bytes=1e9, backward_bytes=1e9)
    for op, slow in ((attention(), (1.0, 1.6)), (permute, (3.0, 3.0)), (gemm(4096, 4096, 4096), (1.0, 1.0))):
        free, fixed = (operator_seconds(op, H200, "bf16", runtime) for runtime in (MEGATRON, same_bits))
        assert (fixed[0] / free[0], fixed[1] / free[1]) == pytest.approx(slow)
