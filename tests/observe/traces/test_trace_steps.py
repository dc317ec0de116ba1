"""A step is cut into parts that add up, with numbers that the made trace lets one add up by hand (microseconds).

Intervals of time, families of kernels as libraries spell them, and groups as trainers describe them.
Ranks beside each other: waits apart from transfers, clocks, stages and stragglers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import ALL_REDUCE, ATTENTION, GEMM, SEND_RECV, MadeTrace, training_trace
from tables import beside

from planner.errors import SpecError
from planner.observe.traces.breakdown import Sorted
from planner.observe.traces.events import (
    COMMUNICATION,
    NAMES,
    OTHER,
    ProcessGroup,
    RankReport,
    Spans,
    TraceReport,
    TraceStep,
    axis_of,
    axis_of_description,
    family_of,
    intersect,
    length_ns,
    merge,
    ranks_by_stride,
    ranks_of,
    subtract,
    union,
    window,
)
from planner.observe.traces.recorded import read_traces
from planner.observe.traces.source import read_kineto

TABLES = beside(__file__)

US = 1e-6


def reported(trace: MadeTrace, folder: Path) -> RankReport:
    return read_traces([trace.write(folder / "made.json")]).ranks[0]


def parts_us(step: TraceStep) -> dict[str, float]:
    names = ("compute_s", "exposed_communication_s", "copies_s", "host_gaps_s", "dependencies_s", "idle_s")
    return {name: round(getattr(step, name) / US, 6) for name in names}


def test_parts_of_a_step_are_what_the_trace_shows(tmp_path: Path) -> None:
    first, last = reported(training_trace(0), tmp_path).steps
    # computing 10–310, 510–810, 900–950; all-reduce 410–610; the next step begins at 1,010
    assert parts_us(first) == {
        "compute_s": 650, "exposed_communication_s": 100, "copies_s": 0,
        "host_gaps_s": 90 + 60, "dependencies_s": 100, "idle_s": 0,
    }  # fmt: skip
    assert (first.number, first.wall_s) == (3, pytest.approx(1000 * US))
    # the GPU begins a step 10 µs after the host, which ends this one at 1,990
    assert last.wall_s == pytest.approx(990 * US)
    assert parts_us(last)["idle_s"] == 50


def test_families_and_groups_add_up_to_their_part(tmp_path: Path) -> None:
    for step in reported(training_trace(0), tmp_path).steps:
        assert sum(parts_us(step).values()) * US == pytest.approx(step.wall_s, abs=1e-12)
        assert sum(family.seconds for family in step.families) == pytest.approx(step.compute_s, abs=1e-12)
        assert sum(group.exposed_s for group in step.groups) == pytest.approx(step.exposed_communication_s, abs=1e-12)
    families = {family.family: round(family.seconds / US) for family in step.families}
    assert families == {"gemm": 500, "attention": 100, "optimizer": 50}
    (group,) = step.groups
    assert (group.group, round(group.busy_s / US), round(group.hidden_s / US)) == ("tp", 200, 100)


def test_time_that_two_families_share_counts_once(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0, stream=7)
    trace.kernel(ATTENTION, 50, 100, 0, stream=8)  # attention stands above gemm in the table
    trace.kernel(GEMM, 20, 50, 0, stream=9)
    step = reported(trace, tmp_path).steps[0]
    assert {family.family: round(family.seconds / US) for family in step.families} == {"attention": 100, "gemm": 50}


def test_kernels_that_no_row_knows_are_named_with_their_share(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel("somebody_s_kernel", 0, 30, 0)
    trace.kernel(GEMM, 30, 70, 0)
    other = reported(trace, tmp_path).steps[0].families[-1]
    assert (other.family, other.share_fraction, other.longest) == ("other", pytest.approx(0.3), ("somebody_s_kernel",))


def test_steps_that_capture_graphs_are_warm_ups(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("cuda_runtime", "cudaStreamBeginCapture", 20, 5)
    assert [step.warm_up for step in reported(trace, tmp_path).steps] == [True, False]


def test_a_first_step_that_is_slow_is_a_warm_up(tmp_path: Path) -> None:
    trace = MadeTrace()
    for number, (at, length) in enumerate([(0, 500), (500, 100), (600, 100), (700, 100)]):
        trace.step(number, at, length)
        trace.kernel(GEMM, at + 5, 50, at + 1)
    assert [step.warm_up for step in reported(trace, tmp_path).steps] == [True, False, False, False]


def test_a_trace_without_marks_is_one_step_and_says_so(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 10, 100, 5)
    report = read_traces([trace.write(tmp_path / "made.json")])
    assert [step.number for step in report.ranks[0].steps] == [None]
    assert any("nothing marks them" in told for told in report.not_shown)


def test_synchronising_calls_in_gaps_are_named(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 815, 60)
    waits = dict(reported(trace, tmp_path).steps[0].waits)
    assert waits == {"cudaStreamSynchronize": pytest.approx(60 * US)}


def test_kernels_without_words_get_their_collective_from_the_host(tmp_path: Path) -> None:
    """As on ROCm, where kernels carry nothing and `record_param_comms` on the host says it all."""
    trace = MadeTrace()
    trace.add(
        "cpu_op", "record_param_comms", 0, 20, lane=1,
        **{"Collective name": "reduce_scatter", "In msg nelems": 8000, "Out msg nelems": 2000, "dtype": "Float",
           "Group size": 4, "Process Group Name": "5", "Process Group Description": "mesh_dp_shard",
           "Global rank start": 1, "Global rank stride": 2, "Process Group Ranks": "[1, 3, ...]"},
    )  # fmt: skip
    trace.kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 30, 100, 10)
    trace.kernel(SEND_RECV, 150, 10, 60)
    (trace_read,) = read_kineto(trace.write(tmp_path / "made.json"))
    assert trace_read.groups["5"].ranks == (1, 3, 5, 7)
    gathered, transfer = reported(trace, tmp_path).collectives
    assert (
        gathered.group, gathered.collective, gathered.num_bytes, gathered.count,
    ) == ("dp", "reduce_scatter", 32000, 1)  # fmt: skip
    # 32,000 bytes × 3/4 in 100 µs, waiting included: the links are at least as fast
    assert (gathered.bus_gb_per_s, gathered.at_least) == (pytest.approx(0.24), True)
    assert (transfer.group, transfer.num_bytes, transfer.bus_gb_per_s) == ("point to point", None, None)


def test_copies_are_apart_from_computing(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0)
    trace.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50, 100, 8, correlation=99, bytes=4096)
    parts = parts_us(reported(trace, tmp_path).steps[0])
    assert (parts["compute_s"], parts["copies_s"]) == (100, 50)


def test_each_gpu_of_a_file_is_a_trace_of_its_own(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0)
    trace.events.append({**trace.events[-1], "pid": 1, "ts": 40.0})
    traces = read_kineto(trace.write(tmp_path / "made.json"))
    assert [(len(t.gpu), t.rank) for t in traces] == [(1, None), (1, None)]


def test_events_that_end_before_they_start_are_left_out_and_told(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("kernel", GEMM, 100, -5, 7)
    assert any(text.startswith("1 events") for text in reported(trace, tmp_path).warnings)


def test_old_spellings_are_read(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.add("Kernel", ALL_REDUCE, 10, 20)
    trace.add("Runtime", "cudaLaunchKernel", 5, 1)
    (read,) = read_kineto(trace.write(tmp_path / "rank-7.json"))
    assert (len(read.gpu), len(read.launches)) == (1, 1)


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def spans_of(pairs: list[tuple[int, int]]) -> Spans:
    starts = np.array([start for start, _ in pairs], np.int64)
    return union(starts, starts + np.array([length for _, length in pairs], np.int64))


def points(spans: Spans) -> set[int]:
    return {point for start, end in spans.tolist() for point in range(start, end)}


@given(PAIRS, PAIRS)
def test_spans_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = spans_of(one), spans_of(other)
    assert points(a) == {point for start, length in one for point in range(start, start + length)}
    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert points(merge(a, b)) == points(a) | points(b)


@given(PAIRS)
def test_spans_are_sorted_and_apart_so_that_lengths_count_once(pairs: list[tuple[int, int]]) -> None:
    spans = spans_of(pairs)
    assert length_ns(spans) == len(points(spans))
    assert (spans[1:, 0] > spans[:-1, 1]).all()


def test_a_window_without_length_is_empty() -> None:
    assert length_ns(window(5, 5)) == 0
    assert window(2, 5).tolist() == [[2, 5]]


KERNELS = [
    ("communication", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("communication", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"),
    ("communication", "gloo:all_reduce"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128"),
    ("attention", "attn_fwd"),
    ("attention", "aiter::fmha_bwd_hd128_bf16_causal_a32_psskddv"),
    ("gemm", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT"),
    ("gemm", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"),
    ("gemm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
    ("gemm", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)"),
    ("norm", "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>(Params)"),
    ("norm", "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)"),
    ("MoE routing", "_permute_kernel"),
    ("MoE routing", "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(TensorInfo)"),
    ("optimizer", "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(long)"),
    ("elementwise", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"),
    (
        "elementwise",
        "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<BinaryFunctor, lambda(int)#1>>",
    ),
    ("casts and quantisation", "void transformer_engine::cast_transpose_fused_kernel_notaligned<true>(CTDBiasParam)"),
    ("fused by Inductor", "triton_red_fused_add_native_layer_norm_3"),
    ("loss", "void vocab_parallel_cross_entropy_kernel<float>()"),
    ("scan", "_chunk_scan_fwd_kernel"),
    (OTHER, "somebody_s_own_kernel"),
]


@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_a_kernel_is_of_its_family(family: str, name: str) -> None:
    assert NAMES[family_of(name)] == family


def test_families_have_names_of_their_own() -> None:
    assert (NAMES[COMMUNICATION], NAMES[-1]) == ("communication", OTHER)
    assert len(set(NAMES)) == len(NAMES)


DESCRIPTIONS = TABLES["descriptions"]


@pytest.mark.parametrize("axis", DESCRIPTIONS)
def test_a_description_names_its_axis(axis: str | None) -> None:
    assert {axis_of_description(description) for description in DESCRIPTIONS[axis].split()} == {axis}
    assert axis_of_description("") is None


@pytest.mark.parametrize(("ranks", "axis"), TABLES["size_and_stride_name_an_axis_of_the_grid"])
def test_size_and_stride_name_an_axis_of_the_grid(ranks: tuple[int, ...], axis: str) -> None:
    grid = {"tp": 2, "cp": 2, "dp": 4, "pp": 2}
    assert axis_of(ProcessGroup("7", "undefined", ranks, len(ranks)), grid) == axis


@pytest.mark.parametrize("text", ["[0, 1, ...]", "0, 1", "[a]", "[" + "1," * 10**6 + "]", [0, "1"], [True], [-1], None])
def test_lists_that_are_cut_or_odd_say_no_ranks(text: object) -> None:
    assert ranks_of(text) == ()


def test_ranks_are_read_from_lists_and_from_strides() -> None:
    assert ranks_of("[0, 8, 16]") == ranks_of([0, 8, 16]) == ranks_by_stride(0, 8, 3) == (0, 8, 16)
    assert ranks_by_stride(0, -1, 3) == ranks_by_stride(0, 0, 3) == ranks_by_stride("0", 1, 2) == ()


def both(folder: Path, *traces: MadeTrace, **options: object) -> TraceReport:
    paths = [trace.write(folder / f"rank{number}.json") for number, trace in enumerate(traces)]
    return read_traces(paths, **options)  # type: ignore[arg-type]


def test_a_collective_is_cut_at_the_latest_rank(tmp_path: Path) -> None:
    report = both(tmp_path, training_trace(0), training_trace(1, late_us=80))
    early, late = (rank.collectives[0] for rank in report.ranks)
    assert (early.median_s, late.median_s) == (pytest.approx(200 * US), pytest.approx(120 * US))
    assert (early.wait_s, early.transfer_s) == (pytest.approx(80 * US), pytest.approx(120 * US))
    assert (late.wait_s, late.transfer_s) == (pytest.approx(0), pytest.approx(120 * US))
    # 2 MB × 2 (n − 1)/n, n = 2, in 120 µs
    assert (early.bus_gb_per_s, early.at_least) == (pytest.approx(2e6 / 120e-6 / 1e9), False)


def test_clocks_that_are_apart_are_aligned_by_what_ends_together(tmp_path: Path) -> None:
    apart = training_trace(1, late_us=80)
    apart.header["baseTimeNanoseconds"] += 3_000_000  # 3 ms, many times the collective
    report = both(tmp_path, training_trace(0), apart)
    assert report.ranks[0].collectives[0].wait_s == pytest.approx(80 * US)
    assert report.clock_error_s == pytest.approx(0)


def test_clocks_of_ranks_that_share_nothing_with_the_first_are_aligned_too(tmp_path: Path) -> None:
    pairs = [training_trace(0), training_trace(1), training_trace(0), training_trace(1, late_us=80)]
    for rank, trace in enumerate(pairs):
        trace.header["baseTimeNanoseconds"] += 3_000_000 * rank
        trace.header["distributedInfo"] |= {"rank": rank, "world_size": 4}
        for event in trace.events:
            if rank > 1 and event["args"].get("Process Group Ranks"):
                event["args"]["Process Group Ranks"] = "[2, 3]"
        for group in trace.header["distributedInfo"]["pg_config"]:
            group["ranks"] = [0, 1] if rank < 2 else [2, 3]
    report = both(tmp_path, *pairs)
    waits = {rank.rank: rank.collectives[0].wait_s for rank in report.ranks}
    assert {rank: round((wait or 0) / US) for rank, wait in waits.items()} == {0: 0, 1: 0, 2: 80, 3: 0}


def test_one_rank_cannot_tell_wait_from_transfer_and_says_so(tmp_path: Path) -> None:
    report = both(tmp_path, training_trace(0))
    only = report.ranks[0].collectives[0]
    assert (only.transfer_s, only.wait_s, only.at_least) == (None, None, True)
    assert any("one rank's trace" in text for text in report.not_shown)


def test_a_grid_names_groups_that_nobody_described_and_tells_stages(tmp_path: Path) -> None:
    trace = MadeTrace(5, world_size=8, groups={"3": ("undefined", [1, 5]), "4": ("undefined", [4, 5])})
    trace.collective(10, 50, 0, "3")
    trace.collective(70, 50, 0, "4")
    (rank,) = both(tmp_path, trace, grid={"tp": 2, "dp": 2, "pp": 2}).ranks
    assert rank.stage == 1
    assert {row.group for row in rank.collectives} == {"pp", "tp"}
    (rank,) = both(tmp_path, trace).ranks
    assert {row.group for row in rank.collectives} == {"group 3 (2 ranks, stride 4)", "group 4 (2 ranks, stride 1)"}


def test_transfers_are_matched_by_source_and_destination(tmp_path: Path) -> None:
    traces = []
    for rank, (start, length) in enumerate([(100, 30), (40, 90), (0, 10)]):
        trace = MadeTrace(rank, 3, groups={"9": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1, 2])})
        if rank < 2:
            kind = "send" if rank == 0 else "recv"
            trace.collective(start, length, 0, "9", SEND_RECV, kind, **{"Src Rank": 0, "Dst Rank": 1})
        trace.kernel(GEMM, 0, 5, 0)
        traces.append(trace)
    sender, receiver, _ = both(tmp_path, *traces).ranks
    assert sender.collectives[0].wait_s == pytest.approx(0)
    assert receiver.collectives[0].wait_s == pytest.approx(60 * US)
    assert receiver.collectives[0].transfer_s == pytest.approx(30 * US)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is of rank 0, as"):
        both(tmp_path, training_trace(0), training_trace(0))


def test_only_exchanges_are_kept_while_the_next_file_is_read(tmp_path: Path) -> None:
    (trace,) = read_kineto(training_trace(0).write(tmp_path / "rank0.json"))
    kept = Sorted.of(trace).exchanges()
    assert len(kept.trace.gpu) == len(kept.group) == 2
    assert {kept.trace.names[name] for name in kept.trace.gpu["name"]} == {ALL_REDUCE}
    assert len(kept.trace.launches) == len(kept.trace.operators) == len(kept.trace.marks) == 0
