"""A plan that no search made: what the report and the commands are tested with."""

import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import yaml
from remembered import Prices, Searches

from planner.answer import (
    Layout,
    ModelSummary,
    Plan,
    PricedLayout,
    RunCost,
    SearchReport,
    StageMemory,
    StagePlan,
    StepBreakdown,
    StepTime,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tables of tests are read by libyaml
gc.set_threshold(50_000)  # what is collected and imported stays: looking through it is two seconds of each worker
# a shell ignores Ctrl-C in what it starts in the background, and nohup the terminal's end; so would every process that
# a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _stage(stage: int, pp: int, num_layers: int, first: int, total_gib: float, recompute: dict[str, int]) -> StagePlan:
    total_bytes = round(total_gib * GIB)
    memory = StageMemory(
        weights_bytes=10 * GIB, gradients_bytes=20 * GIB, optimizer_bytes=4 * GIB,
        activations_bytes=total_bytes - 38 * GIB, logits_bytes=0, workspace_bytes=GIB, reserved_bytes=3 * GIB,
        peak_allocated_bytes=total_bytes - 3 * GIB, total_bytes=total_bytes,
    )  # fmt: skip
    ends = (("embedding",) if stage == 0 else ()) + (("head",) if stage == pp - 1 else ())
    return StagePlan(
        stage=stage, chunks=((first, first + num_layers),), num_layers=num_layers, holds=ends, recompute=recompute,
        in_flight_microbatches=pp - stage, forward_s=0.045, backward_s=0.092, weight_grad_s=0.045,
        forward_comm_s=0.006, backward_comm_s=0.011, optimizer_s=0.02, num_parameters=3_200_000_000, memory=memory,
    )  # fmt: skip


def _priced(
    pp: int, total_gib: float, fits: bool, step_s: float, stage_recompute: dict[str, int], **layout: Any
) -> PricedLayout:
    parallelism = Layout(
        **{
            "tp": 8, "cp": 1, "ep": 1, "etp": 8, "pp": pp, "vpp": 1, "dp": 2048 // 8 // pp, "micro_batch_size": 1,
            "num_microbatches": 8 * pp, "schedule": "1f1b", "zero_stage": 1, "shard_size": 2048 // 8 // pp,
            "sequence_parallel": True, "recompute": "none", "num_gpus_used": 2048, **layout,
        }
    )  # fmt: skip
    starts = [126 * stage // pp for stage in range(pp + 1)]
    breakdown = {
        "compute_s": 0.8, "tp_comm_s": 0.07, "cp_comm_s": 0, "ep_comm_s": 0, "pp_comm_s": 0.01, "exposed_dp_s": 0.005,
        "bubble_s": 0.1, "optimizer_s": 0.005, "overhead_s": 0.01,
    }  # fmt: skip
    return PricedLayout(
        evidence="calibrated",
        fits=fits,
        parallelism=parallelism,
        stages=tuple(
            _stage(i, pp, starts[i + 1] - starts[i], starts[i], total_gib - i / 2, stage_recompute) for i in range(pp)
        ),
        step=StepTime(
            step_s=step_s, step_s_interval=(0.95 * step_s, 1.06 * step_s), tokens_per_s=2048 * 8192 / step_s,
            tokens_per_s_per_gpu=8192 / step_s, model_tflops_per_gpu=412.3, mfu=0.4167, bubble_fraction=0.099,
            breakdown=StepBreakdown(**{name: share * step_s for name, share in breakdown.items()}),
        ),
    )  # fmt: skip


def _plan(
    pp: int = 16,
    total_gib: float = 71.3,
    fits: bool = True,
    step_s: float = 22.08,
    stage_recompute: dict[str, int] | None = None,
    searched: bool = True,
    **layout: Any,
) -> Plan:
    recompute = stage_recompute or {"none": 8}
    best = _priced(pp, total_gib, fits, step_s, recompute, **layout)
    other = _priced(8, 76.2, True, 1.023 * step_s, recompute).model_copy(
        update={"trade": "half the pipeline bubble for 4.9 GiB more on the fullest stage"}
    )
    model = load_model("405b")
    answer: dict[str, Any] = {}
    if searched:
        answer = {
            "alternatives": (other,) * 5,
            "rejections": {"heads_not_divisible": 312, "out_of_memory": 1204},
            "rejection_examples": {
                "heads_not_divisible": "TP 16: 8 key-value heads cannot be split over 16 ranks",
                "out_of_memory": "TP 1 × PP 1 × DP 2048: stage 0 needs 7,301.2 GiB of 79.1 even when it recomputes all",
            },
            "search": SearchReport(
                num_shapes=1516, num_fitting=312, num_ilps=17, seconds=0.42, outcome="proven", lower_bound_s=22.07,
                gap=0.0004,
            ),
            "assumptions": ("90% of the gradient reduction hides behind the last backward: gradient_overlap_fraction",),
        }  # fmt: skip
    return Plan(
        planner_version="0",
        model=ModelSummary(
            name=model.name, num_parameters=405_853_388_800, num_active_parameters=405_853_388_800,
            model_flops_per_token=2.5e12, spec=model,
        ),
        cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=2048),
        training=TrainingSpec(seq_length=8192, global_batch_size=2048, tokens=15e12),
        runtime="megatron",
        runtime_spec=load_runtime("megatron"),
        best=best,
        run_cost=RunCost(tokens=15e12, days=228.7, gpu_hours=11_240_000, usd=35_970_000, mwh=19_108),
        **answer,
    )  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def no_runs_of_the_users_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep runs in a folder of theirs, and take none of those that the user keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_HISTORY", str(tmp_path_factory.mktemp("history") / "none"))
        yield


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_torch_imports_late() -> Iterator[None]:
    """The server that forks a probe's ranks imports torch's compiler once.

    Torch imports it where it makes an optimizer, which is two seconds of CPU for each rank that has to do it itself.
    """

    def preload(context: BaseContext, names: Sequence[str]) -> None:
        set_forkserver_preload([*names, "torch._dynamo"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseContext, "set_forkserver_preload", preload)
        yield


_PRICES = Prices()

FIRST = ("tests/validate/test_published.py", "tests/test_public_api.py", "tests/export/test_torch_write.py")
"""Files of the longest tests. Two workers that end together take least time, and one of these last is half a minute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every case of the tests marked `thorough`, not a sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a sample of the cases of tests marked `thorough(n)`: every n-th, or of n = 0 none."""
    cases: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("thorough")
        test = item.nodeid.partition("[")[0]
        in_sample = mark is None or (mark.args[0] and cases[test] % mark.args[0] == 0)
        cases[test] += 1
        (kept if in_sample or config.getoption("--thorough") else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.fixture(scope="session", autouse=True)
def kept_searches(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Searches]:
    """What tests search for or price again, in any worker, is not searched or priced again."""
    mine = tmp_path_factory.getbasetemp()
    folder = (mine if worker_id == "master" else mine.parent) / "searches"
    folder.mkdir(exist_ok=True)
    searches, _PRICES.folder = Searches(folder), folder
    with pytest.MonkeyPatch.context() as patch:
        for module in ("planner.search.search",):
            patch.setattr(f"{module}.search_within_risk", searches)
        yield searches


@pytest.fixture(scope="module", autouse=True)
def tests_of_the_search_search(request: pytest.FixtureRequest, kept_searches: Searches) -> None:
    """Those in tests/search are of the search itself; those in its folders are of what is said of it."""
    kept_searches.anew = request.path.parent == Path(__file__).parent / "search"


@pytest.fixture(autouse=True)
def searched_anew(request: pytest.FixtureRequest, kept_searches: Searches) -> Iterator[None]:
    """A test that is marked `anew` holds two searches beside each other."""
    was, kept_searches.anew = kept_searches.anew, kept_searches.anew or "anew" in request.keywords
    yield
    kept_searches.anew = was


@pytest.fixture(scope="session")
def prices() -> Prices:
    """The prices of published runs that tests have asked for."""
    return _PRICES


@pytest.fixture
def priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published runs, which half of tests/validate asks for, are priced once."""
    monkeypatch.setattr("planner.layout.runs.price_given", _PRICES)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Builds a plan of 405B on 2,048 GPUs, by default one that fits; keywords change sizes of its layout."""
    return _plan
