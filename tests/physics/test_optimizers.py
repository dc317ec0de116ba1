"""States and updates of optimizers: against counts by hand, laws over rows, and what a search may choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.physics.kernels import product_s, stream_s
from planner.physics.operators import Operator
from planner.physics.optimizers import state_bytes, state_update_s, states_of, tensors_of, update_bytes
from planner.physics.pricing import Pricing
from planner.search.case import Case
from planner.search.recipes import pinned
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.optimizers import BLOCK, OPTIMIZERS
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

H100 = load_hardware("h100")
SHAPE = Shape.of(tp=1, seq_length=2048)


def _runtime(name: str, optimizer: str) -> RuntimeSpec:
    return switched(load_runtime(name), {"optimizer": optimizer})


def _pricing(optimizer: str, runtime: str = "hf", model: str = "8b") -> Pricing:
    training = TrainingSpec(seq_length=2048, global_batch_size=8)
    cluster = ClusterSpec(hardware=H100, num_gpus=8)
    return Pricing(model=load_model(model), training=training, cluster=cluster, runtime=_runtime(runtime, optimizer))


def _product(rows: int, columns: int, **more: object) -> Operator:
    sizes = {"name": "up", "m": 1, "n": rows, "k": columns, "parameters": rows * columns}
    return Operator(kind="gemm", **{**sizes, **more})  # type: ignore[arg-type]


def _bytes(op: Operator, optimizer: str, runtime: str = "hf") -> float:
    return float(state_bytes([op], 4096, _runtime(runtime, optimizer), expert=op.expert))


@pytest.mark.parametrize(
    ("optimizer", "resident"),
    [
        ("adamw-8bit", 2 * 4096 * 1024 * (1 + 4 / 256)),
        ("paged-adamw-8bit", 2 * 4096 * 1024 * 4 / 256),
        ("paged-adamw", 0),
        ("adafactor", 4 * (4096 + 1024)),
        ("sgd", 0),
        ("sgd-momentum", 2 * 4096 * 1024),
        ("adamw", 4 * 4096 * 1024),
    ],
)
def test_states_of_a_matrix_in_16_bits(optimizer: str, resident: float) -> None:
    runtime = load_runtime("hf").model_copy(update={"optimizer": optimizer})
    (matrix, bias) = tensors_of(_product(4096, 1024), 4096)
    assert float(states_of(matrix, runtime).resident_bytes) == pytest.approx(resident)
    assert float(states_of(bias, runtime).resident_bytes) == 0


def test_small_tensors_and_embeddings_keep_their_states_in_32_bits() -> None:
    norm = Operator(name="norm", kind="elementwise", family="norm", parameters=4095)
    table = Operator(name="embedding", kind="elementwise", family="embedding", parameters=4096 * 50)
    assert _bytes(norm, "adamw-8bit") == 8 * 4095
    assert _bytes(table, "adamw-8bit") == 8 * 4096 * 50


def test_a_small_tensor_does_not_leave_the_gpu() -> None:
    assert _bytes(_product(99, 1000), "paged-adamw") == 8 * 99_000
    assert _bytes(_product(100, 1000), "paged-adamw") == 0


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest() -> None:
    head = _product(1000, 4096, name="head")
    bias = _product(64, 32, parameters=64 * 32 + 64)
    assert _bytes(_product(64, 32), "muon", "megatron") == 4 * 64 * 32
    assert _bytes(bias, "muon", "megatron") == 4 * 64 * 32 + 8 * 64
    assert _bytes(head, "muon", "megatron") == 8 * 4096 * 1000


def test_an_iteration_of_newton_and_schulz_has_the_flops_of_its_three_products() -> None:
    runtime, (long, short) = _runtime("megatron", "muon"), (14336, 4096)
    plain = runtime.model_copy(update={"optimizer": "sgd-momentum"})

    def seconds(which: RuntimeSpec, tp: int = 1) -> float:
        return float(state_update_s([_product(long // tp, short)], 4096, tp, H100, which, expert=False))

    fraction = H100.efficiency.gemm.forward_fraction
    products = [(short, short, long), (short, short, short), (short, long, short)]
    each = sum(float(product_s(H100, "bf16", fraction, 1, *dims)) for dims in products)
    more_moved = update_bytes(OPTIMIZERS["muon"], runtime) - update_bytes(OPTIMIZERS["sgd-momentum"], plain)
    moved_s = float(stream_s(H100, more_moved * long * short, 0, "optimizer"))
    assert seconds(runtime) - seconds(plain) == pytest.approx(5 * each + moved_s)
    # tensor-parallel ranks repeat the products on the whole matrix, and update their share of it
    assert seconds(runtime, tp=2) > 5 * each > 0.9 * seconds(runtime, tp=2)
    # or share two of them, and sum a square of the hidden state's width
    shared = runtime.model_copy(update={"optimizer": "muon-distributed"})
    assert seconds(shared) == seconds(runtime)
    square = float(product_s(H100, "bf16", fraction, 1, short, short, short))
    summed = 2 * 7 / 8 * 4 * short**2 / H100.tiers[0].bytes_per_s
    assert seconds(runtime, tp=8) - seconds(shared, tp=8) == pytest.approx(
        5 * ((each - square) * 7 / 8 - summed), rel=0.1
    )


@pytest.mark.parametrize("runtime", ["hf", "megatron"])
def test_no_optimizer_keeps_more_than_adamw_and_all_rows_are_priced(runtime: str) -> None:
    tables = {
        name: _pricing(str(name), runtime).table(SHAPE) for name in switches_of(load_runtime(runtime))["optimizer"]
    }
    kept = {name: float(next(iter(table.layers.values())).optimizer_bytes) for name, table in tables.items()}
    assert all(kept[name] < kept["adamw"] for name in kept if name not in ("adamw", "paged-adamw"))
    assert all(float(table.embedding.optimizer_s) > 0 for table in tables.values())


def test_states_are_sharded_as_adamws_are() -> None:
    pricing = _pricing("adamw-8bit")
    whole, eighth = (
        next(iter(pricing.table(Shape.of(tp=1, dp=dp, seq_length=2048, zero_stage=2)).layers.values())) for dp in (1, 8)
    )
    assert float(whole.optimizer_bytes) == pytest.approx(8 * float(eighth.optimizer_bytes))
    assert float(whole.state_bytes) == float(eighth.state_bytes)


def test_arrays_of_shapes_are_priced_as_each_shape_by_itself() -> None:
    pricing = _pricing("muon", "megatron")
    several = pricing.table(Shape.of(tp=np.array([1, 2]), dp=np.array([8, 4]), seq_length=2048, zero_stage=1))
    for place, (tp, dp) in enumerate(((1, 8), (2, 4))):
        one = pricing.table(Shape.of(tp=tp, dp=dp, seq_length=2048, zero_stage=1))
        for key, part in several.layers.items():
            assert float(part.take(place).optimizer_bytes) == pytest.approx(float(one.layers[key].optimizer_bytes))
            assert float(part.take(place).optimizer_s) == pytest.approx(float(one.layers[key].optimizer_s))


def _evaluated(optimizer: str) -> Plan:
    return evaluate(
        load_model("8b"),
        ClusterSpec(hardware=load_hardware("h200"), num_gpus=1),
        TrainingSpec(seq_length=1024, global_batch_size=1),
        Parallelism(recompute="full"),
        runtime=_runtime("hf", optimizer),
    )


def test_adafactor_makes_copies_of_the_largest_weight() -> None:
    plan = _evaluated("adafactor")
    memory = plan.best.stages[0].memory
    sizes = memory.activations_bytes + memory.logits_bytes + memory.workspace_bytes
    # 16 bytes for each element of the embedding table, of which activations are gone
    assert sizes == pytest.approx(16 * 128_256 * 4096, rel=0.01)


def test_a_checkpoint_holds_the_states_that_there_are() -> None:
    held = {name: _runtime("hf", name).checkpoint_bytes_per_parameter for name in ("adamw", "adamw-8bit", "sgd")}
    assert held == {"adamw": 6, "adamw-8bit": 2 + 2 * (1 + 4 / BLOCK), "sgd": 2}


def test_every_optimizer_says_where_its_numbers_come_from() -> None:
    assert all(row.source and row.says for row in OPTIMIZERS.values())


def test_offloaded_states_of_hf_leave_the_gpu_whole() -> None:
    pricing, hf = _pricing("adamw"), load_runtime("hf")
    each = (replace(pricing, runtime=switched(hf, {"optimizer_offload": share})) for share in (0.0, 1.0))
    on, off = (next(iter(one.table(SHAPE).layers.values())) for one in each)
    assert float(on.optimizer_bytes) > 0
    assert float(off.optimizer_bytes) == 0
    assert float(off.optimizer_s) > float(on.optimizer_s)


def test_other_optimizers_do_not_go_to_the_host() -> None:
    limits = SearchLimits(switches={"optimizer": "adafactor", "optimizer_offload": 1.0})
    cluster = ClusterSpec(hardware=H100, num_gpus=8)
    training = TrainingSpec(seq_length=1024, global_batch_size=8)
    with pytest.raises(SpecError, match="must be adamw beside optimizer_offload"):
        pinned(Case(load_model("8b"), cluster, training, load_runtime("hf"), limits))
