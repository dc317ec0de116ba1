"""Default figures agree with what fleets published, and follow the sizes of a job."""

import math

import pytest

from planner.months.losses import Fact, Losses, all_in_repair, load_facts, losses_of, stated
from planner.specs.cluster import ClusterSpec
from planner.specs.training import OperationsSpec

TERABYTE = 1e12


def losses(hardware: str = "h100", num_gpus: int = 2048, asynchronous: bool = True, **given: float) -> Losses:
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    return losses_of(cluster, OperationsSpec.model_validate(given), num_gpus, 5.7 * TERABYTE, asynchronous)


def hours_between_failures(found: Losses) -> tuple[float, float]:
    """The ends of the interval of the mean time between failures."""
    rate = found.failures_per_day
    return 24 / rate.high, 24 / rate.low


@pytest.mark.parametrize(("num_gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_hours_between_failures_that_meta_expects_of_its_a100(num_gpus: int, hours: float) -> None:
    # arXiv:2410.21680, RSC-1
    low, high = hours_between_failures(losses("a100", num_gpus))
    assert low <= hours <= high


def test_interruptions_of_llama_3() -> None:
    # 419 unexpected ones in 54 days, arXiv:2407.21783, Table 5
    rate = losses("h100", 16_384).failures_per_day
    assert rate.low <= 419 / 54 <= rate.high
    assert rate.value == pytest.approx(419 / 54, rel=0.1)


def test_restarts_of_byterobust_lie_in_the_interval() -> None:
    # a new job on 2,048 to 16,384 GPUs, arXiv:2509.16293, Table 7
    for num_gpus, seconds in ((2048, 454), (4096, 545), (8192, 635), (16_384, 768)):
        restart = losses(num_gpus=num_gpus).restart_s
        assert restart.low <= seconds <= restart.high


def test_spare_nodes_advised_are_those_of_byterobust() -> None:
    # its 99th percentiles are 2, 2, 3 and 4 machines of 16 GPUs for 128 to 1,024 of them (Table 5)
    advised = [losses(num_gpus=16 * machines).num_spare_nodes_advised for machines in (128, 256, 512, 1024)]
    assert all(abs(ours - theirs) <= 1 for ours, theirs in zip(advised, (2, 2, 3, 4), strict=True))


def test_blooms_checkpoint_takes_the_time_that_it_took() -> None:
    # 2.3 TB in 40 s from 384 GPUs
    rate = losses("a100", 384).storage_gb_per_s
    assert rate.low <= 2300 / 40 <= rate.high


def test_given_figures_replace_the_defaults_and_are_certain() -> None:
    found = losses(storage_gb_per_s=400.0, failures_per_1000_gpu_days=2.0)
    assert found.storage_gb_per_s == stated(400.0)
    assert (found.failures_per_day.low, found.failures_per_day.high) == (4.096, 4.096)
    assert found.sources["failures_per_day"] == found.sources["storage_gb_per_s"] == "given"


def test_racks_and_unknown_gpus_have_rates_of_their_own() -> None:
    rates = load_facts().failures_per_1000_gpu_days
    assert losses("gb200").failures_per_1000_gpu_days == rates["rack"]
    assert losses("b200").failures_per_1000_gpu_days == rates["blackwell"]
    assert losses("mi300x").failures_per_1000_gpu_days == rates["other"]
    assert "no public figure" in rates["other"].source


def test_every_figure_of_the_answer_has_a_source() -> None:
    assert all(losses(num_spare_nodes=2).sources.values())
    assert {"repair_s", "node_loss_fraction"} <= losses(num_spare_nodes=2).sources.keys()


def test_spare_nodes_in_repair_follow_poissons_distribution() -> None:
    mean = 0.9
    for count in range(6):
        tail = 1 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count))
        assert all_in_repair(mean, count) == pytest.approx(tail)


def test_sources_are_one_line_of_a_report() -> None:
    facts = load_facts()
    figures = [*facts.failures_per_1000_gpu_days.values(), *(getattr(facts, name) for name in type(facts).model_fields)]
    assert all(0 < len(figure.source) <= 62 for figure in figures if isinstance(figure, Fact))


def test_figures_are_the_middle_of_their_intervals_as_factors_go() -> None:
    facts = [
        one for value in dict(load_facts()).values() for one in (value.values() if isinstance(value, dict) else [value])
    ]
    assert all(fact.low <= fact.value <= fact.high for fact in facts)
    assert all(0.95 <= fact.value / (fact.low * fact.high) ** 0.5 <= 1.05 for fact in facts if fact.low)
