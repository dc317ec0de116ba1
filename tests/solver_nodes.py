"""Nodes for the solver: small ones that brute force can judge, and those of random jobs with memory near the edge."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.layout.evaluate import pricing_of
from planner.physics.cost import PartCost
from planner.physics.pricing import Pricing
from planner.schedule.orders import chunks_in_flight, in_flight_microbatches
from planner.search.case import Case
from planner.search.enumerate import enumerate_shapes, scalar
from planner.search.frontier import nodes_of, recompute_choices
from planner.search.ilp.node import Node, node_of
from planner.search.ilp.program import solve
from planner.search.priced_shapes import PricedShapes, priced_shapes
from planner.specs.cluster import ClusterSpec
from planner.specs.model import LayerKind
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

DENSE, MOE, SLIDING = LayerKind("full", "dense"), LayerKind("full", "moe"), LayerKind("sliding", "dense")


def random_part(rng: random.Random, scale: float = 1.0, **changes: float) -> PartCost:
    seconds = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "tp_forward_s": 0.3, "tp_backward_s": 0.3}
    sizes = {"live_bytes": GIB, "transient_bytes": GIB / 2, "weights_bytes": GIB, "optimizer_bytes": 2 * GIB}
    ends = {"reduce_s": 2, "gather_s": 1, "optimizer_s": 0.5}
    numbers = {name: scale * most * rng.uniform(0.3, 1) for name, most in (seconds | sizes | ends).items()}
    return PartCost(**(numbers | changes))


def recomputed_whole(plain: PartCost, rng: random.Random) -> PartCost:
    """Twice the forward, next to nothing kept."""
    return replace(
        plain, input_grad_s=plain.input_grad_s + plain.forward_s, live_bytes=rng.uniform(0.05, 0.3) * plain.live_bytes,
        transient_bytes=plain.transient_bytes + plain.live_bytes,
    )  # fmt: skip


def random_node(seed: int, **changes: Any) -> Node:
    """At most 8 layers of one or two kinds on at most 3 stages; memory is tight in half of all cases."""
    rng = random.Random(seed)
    pp, steps = rng.randint(1, 3), rng.randint(1, 12)
    lengths = [rng.randint(max(2, pp), 8)]
    if rng.random() < 0.5:
        lengths.insert(0, rng.randint(1, 8 - min(lengths[0], 7)))
    runs = tuple(zip((DENSE, MOE), lengths, strict=False))
    plain = {kind: random_part(rng) for kind, _ in runs}
    layers = {(kind, "none"): part for kind, part in plain.items()}
    layers |= {(kind, "full"): recomputed_whole(part, rng) for kind, part in plain.items()}
    node = {
        "runs": runs, "layers": layers, "embedding": random_part(rng, 0.3), "head": random_part(rng, 0.8), "pp": pp,
        "vpp": 1, "num_microbatches": steps, "base": "none",
        "whole": rng.choice(["none", "all", "per_stage"] + ["one_count"] * (len(runs) == 1)),
        "in_flight": in_flight_microbatches("1f1b" if pp > 1 else "none", pp, 1, steps),
        "usable_bytes": rng.choice([1e6, rng.uniform(3, 12) * sum(lengths) / pp]) * GIB,
        "p2p_s": rng.choice([0.0, 0.05]), "bound": "one_f_one_b", "placement": tuple(range(pp)),
        "blocking_p2p": rng.random() < 0.5, "gap_fraction": 0.0, "empty_ends": rng.random() < 0.5,
        "gradient_overlap_fraction": rng.choice([0.0, 0.9]), "parameter_overlap_fraction": rng.choice([0.0, 0.9]),
        "contention_fraction": rng.choice([0.0, 0.2]),
    }  # fmt: skip
    return Node(**(node | changes))


def recurring_node(seed: int) -> Node:
    """Up to 9 layers, two or three kinds in a pattern that repeats, on up to three stages."""
    rng = random.Random(2000 + seed)
    repeated = rng.choice([[DENSE, MOE], [DENSE, DENSE, MOE], [DENSE, MOE, DENSE, SLIDING], [DENSE, MOE, MOE, DENSE]])
    first, num_layers = rng.randint(0, 2), rng.randint(5, 9)
    pattern = [repeated[(number + first) % len(repeated)] for number in range(num_layers)]
    plain = {kind: random_part(rng) for kind in dict.fromkeys(pattern)}
    layers = {(kind, "none"): part for kind, part in plain.items()}
    layers |= {(kind, "full"): recomputed_whole(part, rng) for kind, part in plain.items()}
    return random_node(
        seed, runs=tuple((kind, len(list(same))) for kind, same in groupby(pattern)), layers=layers,
        whole=rng.choice(["none", "all"] + ["per_stage"] * (num_layers < 8)),
        usable_bytes=rng.choice([1e6, rng.uniform(3, 12) * num_layers / 2]) * GIB,
    )  # fmt: skip


def interleaved_node(seed: int) -> Node:
    """One kind of layers in two or three equal chunks on each of two or three ranks."""
    rng = random.Random(1000 + seed)
    pp, vpp = rng.choice([(2, 2), (2, 3), (3, 2)])
    steps = pp * rng.randint(1, 4)
    plain = random_part(rng)
    return random_node(
        seed, runs=((DENSE, rng.randint(pp * vpp - 2, 13)),),
        layers={(DENSE, "none"): plain, (DENSE, "full"): recomputed_whole(plain, rng)}, pp=pp, vpp=vpp,
        num_microbatches=steps, whole=rng.choice(["none", "all"]),
        in_flight=in_flight_microbatches("interleaved-1f1b", pp, vpp, steps),
        chunk_in_flight=chunks_in_flight("interleaved-1f1b", pp, vpp, steps), bound="interleaved",
        placement=tuple(range(pp)) * vpp, usable_bytes=rng.choice([1e6, rng.uniform(8, 25)]) * GIB,
        passes_behind=rng.choice([0.5, 1.0, 1.5]), lead_passes=rng.choice([1 / vpp, 1.0]),
    )  # fmt: skip


JOBS = (
    ("8b", 16, "a100", 128, "megatron"), ("8b", 32, "h100", 256, "torchtitan"), ("70b", 64, "h100", 512, "megatron"),
    ("70b", 128, "h100", 512, "torch-eager"), ("405b", 512, "h100", 1024, "megatron"),
    ("gpt3-175b", 256, "a100", 768, "megatron-2021"), ("gpt3-175b", 192, "a100", 768, "megatron-deepspeed"),
    ("mixtral-8x7b", 64, "h100", 512, "megatron"), ("qwen3-30b-a3b", 32, "h100", 512, "megatron"),
    ("gpt-oss-120b", 64, "h100", 512, "bridge"), ("deepseek-v3", 1024, "h800", 4096, "megatron"),
    ("kimi-k2", 512, "h800", 4096, "bridge"), ("nemotron-4-340b", 384, "h100", 768, "megatron"),
)  # fmt: skip
"""Models of equal layers, of two kinds and of kinds that recur, on several GPUs, under several trainers."""


@cache
def _shapes_of(job: int) -> tuple[Pricing, SearchLimits, PricedShapes]:
    """The shapes of a job that have a pipeline, priced."""
    name, num_gpus, hardware, batch, trainer = JOBS[job]
    model, runtime, limits = load_model(name), load_runtime(trainer), SearchLimits()
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=2048, global_batch_size=batch)
    shapes, _ = enumerate_shapes(Case(model, cluster, training, runtime, limits))
    rows = np.flatnonzero(np.asarray(shapes.pp) > 1)
    rows = np.sort(np.random.default_rng(job).choice(rows, min(len(rows), 200), replace=False))
    pricing = pricing_of(model, cluster, training, runtime, limits)
    return pricing, limits, priced_shapes(pricing, shapes.take(rows), limits)


def node_of_a_job(seed: int) -> Node:
    """Any shape, schedule, vpp and way to recompute of one of the jobs.

    In most cases a rank can use about what it needs for the fastest split, in some a cutoff is near that split's step.
    """
    rng = random.Random(seed)
    pricing, limits, priced = _shapes_of(rng.randrange(len(JOBS)))
    rows = np.array(sorted(rng.sample(range(len(priced.kernel)), min(12, len(priced.kernel)))))
    blocks = [nodes for _, nodes in nodes_of(priced.take(rows)) if len(nodes.schedules)]
    nodes = rng.choice(blocks)
    row = rng.randrange(len(nodes.schedules))
    choice = rng.choice(recompute_choices(pricing.model, pricing.runtime, limits))
    table = pricing.table(scalar(nodes.shapes.shape, row))
    node = replace(node_of(pricing, table, choice, nodes.schedules[row]), gap_fraction=0.0)
    roomy = replace(node, usable_bytes=1e9 * GIB)
    fastest = solve(roomy, 60.0, proves=False)
    if fastest is not None and rng.random() < 0.8:
        most_bytes = max(roomy.usable_bytes - free for free in fastest.free_bytes)
        node = replace(node, usable_bytes=rng.uniform(0.8, 1.02) * most_bytes)
    if fastest is not None and rng.random() < 0.3:
        node = replace(node, cutoff_s=rng.uniform(0.97, 1.1) * fastest.objective_s)
    return node


SMALL = (random_node, recurring_node, interleaved_node)


def drawn(first: int, last: int) -> Iterator[tuple[int, Node, bool]]:
    """Each seed with its node, and whether brute force can judge it: two of five are small."""
    for seed in range(first, last):
        if seed % 5 < 2:
            yield seed, SMALL[seed % 3](seed), True
        else:
            try:
                yield seed, node_of_a_job(seed), False
            except PlannerError as error:
                raise AssertionError(f"seed {seed} draws no node: {error.message}") from error
