"""Options become specs; whatever is wrong names the option."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.cli import inputs, main
from planner.cli.inputs import Job, read_described, read_job, read_limits
from planner.cli.options import JobOptions, LayoutOptions, PlanOptions, SearchOptions, command_line
from planner.cli.sweep_command import by_nodes, doubling, numbers
from planner.errors import SpecError
from planner.layout.evaluate import evaluate, job_of
from planner.report.rows import cost_figures
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.documents import example_lengths, mean_length
from planner.trainers.switches import written

TABLES = beside(__file__)

JOB = {"model": "405b", "gpus": 2048}


def own_read_job(options: dict[str, Any]) -> Job:
    return inputs.read_job(JobOptions(**options))


def own_read_limits(options: dict[str, Any]) -> SearchLimits:
    return inputs.read_limits(SearchOptions(**options), own_read_job(JOB))


def read_parallelism(options: dict[str, Any]) -> Parallelism:
    return inputs.read_parallelism(LayoutOptions(**options))


def problem(read: Any, **options: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read({**JOB, **options})
    return caught.value


def test_what_is_not_given_comes_from_the_models_published_training() -> None:
    job = own_read_job(JOB)
    assert (job.training.seq_length, job.training.global_batch_size, job.training.dtype) == (8192, 2048, "bf16")
    assert (job.cluster.hardware.name, job.cluster.num_gpus, job.runtime) == ("h100-sxm-80gb", 2048, "megatron")


def test_batches_in_tokens() -> None:
    assert own_read_job({**JOB, "batch_tokens": "16777216"}).training.global_batch_size == 2048
    # 3,906 sequences is what 16M exactly are; 4,096 is what 2,048 GPUs divide, and what 16·2²⁰ are
    assert own_read_job({**JOB, "seq_length": 4096, "batch_tokens": "16M"}).training.global_batch_size == 4096
    # 15,625 sequences leave GPUs idle
    assert own_read_job({**JOB, "seq_length": 4096, "batch_tokens": "64000000"}).training.global_batch_size == 15360
    # exactly as asked where the GPUs divide it as well as anything near it
    assert (
        own_read_job({**JOB, "gpus": 48, "seq_length": 1000, "batch_tokens": "4800000"}).training.global_batch_size
        == 4800
    )


def test_16m_of_8192_is_2048_sequences_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert own_read_job({**JOB, "batch_tokens": "16M"}).training.global_batch_size == 2048
    assert "16M is taken as 16,777,216, 2,048 sequences" in caplog.text


def test_a_batch_near_that_suits_the_gpus_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert own_read_job({**JOB, "batch_tokens": "1000000"}).training.global_batch_size == 120
    assert "--batch-tokens: 1000000 is taken as 983,040, 120 sequences" in caplog.text
    with caplog.at_level(logging.INFO):
        assert own_read_job({**JOB, "seq_length": 5000}).training.global_batch_size == 3328
    assert "llama-3.1-405b's published batch: 16,777,216 is taken as 16,640,000" in caplog.text


def test_a_batch_in_sequences_that_was_meant_in_tokens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    own_read_job({**JOB, "global_batch_size": 2048})
    assert not caplog.text
    own_read_job({**JOB, "global_batch_size": 1 << 20})
    assert "8,589,934,592 tokens a step; --batch-tokens 1048576" in caplog.text


def test_a_batch_far_from_any_whole_number_of_sequences_is_refused() -> None:
    error = problem(own_read_job, batch_tokens="12000", gpus=1)
    assert error.message == "--batch-tokens: 12,000 tokens are no whole number of sequences of 8,192"
    assert error.hint == "--batch-tokens 8192 or --batch-tokens 16384"
    assert problem(own_read_job, batch_tokens="12000", gpus=8).hint == "--batch-tokens 65536"


def test_a_model_without_published_training_must_be_told(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 4, vocab_size: 512}"
    )
    assert "--seq-length and --global-batch-size: are missing" in problem(own_read_job, model=str(path)).message
    assert "--global-batch-size: is missing" in problem(own_read_job, model=str(path), seq_length=128).message
    job = own_read_job({"model": str(path), "gpus": 1, "seq_length": 128, "global_batch_size": 4})
    assert job.training.tokens_per_step == 512


def test_comma_lists_pin_axes() -> None:
    limits = own_read_limits({"tp": "8", "pp": "8, 16", "recompute": "none,full", "schedule": "1f1b", "top": 3})
    assert (limits.tp, limits.pp, limits.recompute, limits.schedule) == ((8,), (8, 16), ("none", "full"), ("1f1b",))
    assert (limits.top, limits.cp, limits.time_limit_s, limits.tp_across_nodes) == (3, None, 30.0, False)


def test_one_layout() -> None:
    layout = read_parallelism({"tp": 8, "pp": 2, "layers_per_stage": "64,62", "recompute_modules": "mlp, core_attn"})
    assert (layout.tp, layout.layers_per_stage, layout.recompute_modules) == (8, (64, 62), ("mlp", "core_attn"))
    assert "dp" not in layout.model_fields_set
    assert problem(read_parallelism, pp=2, layers_per_stage="1,2,3").message.startswith(
        "layers_per_stage has 3 entries"
    )


def test_the_hosts_speed_can_be_assumed() -> None:
    """Every launch of an eager layer follows it."""
    jobs = [own_read_job({**JOB, **more}) for more in ({}, {"assume": "host_us=20,host_memory_gib=64"}, {"host": "p5"})]
    assert [job.cluster.hardware.efficiency.host_us for job in jobs] == [46, 20, 60]
    assert [job.cluster.hardware.host.memory_gib for job in jobs[:2]] == [256, 64]


@pytest.mark.parametrize(("options", "switch", "mean", "spread"), TABLES["options_say_how_experts_load"])
def test_options_say_how_experts_load(options: dict[str, Any], switch: str | None, mean: float, spread: float) -> None:
    asked = LayoutOptions(**{**JOB, "model": "qwen3-30b", "runtime": "megatron", "switch": switch, **options})
    training = inputs.read_described(asked, inputs.read_job(asked)).training
    assert (training.moe_imbalance, training.moe_spread) == (mean, spread)


@pytest.mark.parametrize("options", TABLES["python_takes_a_job_as_the_command_line_does"])
def test_python_takes_a_job_as_the_command_line_does(options: dict[str, Any]) -> None:
    job = own_read_job({"gpus": 64, **options})
    said = {name: getattr(job.training, name) for name in ("seq_length", "global_batch_size", "adapters", "objective")}
    taken = job_of(options["model"], job.cluster, TrainingSpec(**said), options.get("runtime"))
    assert taken == (job.model, job.training, job.runtime_spec)


def test_a_dtype_alone_sums_gradients_no_narrower() -> None:
    for switch, num_bytes in ((None, 4), ("bf16_gradients=true", 2)):
        options: dict[str, Any] = {**JOB, "runtime": "megatron", "dtype": "fp8", "switch": switch}
        asked = LayoutOptions(**options)
        run = inputs.read_described(asked, inputs.read_job(asked))
        assert run.runtime_spec.in_dtype("fp8", "hopper").gradient_bytes == num_bytes


@pytest.mark.parametrize(("text", "values"), TABLES["numbers_of_gpus"])
def test_numbers_of_gpus(text: str, values: list[int]) -> None:
    assert numbers("--gpus", text, by_nodes(8)) == values


def test_other_ranges_double() -> None:
    assert numbers("--seq-length", "4096..40000", doubling) == [4096, 8192, 16384, 32768]


def job(**options: Any) -> Any:
    return read_job(PlanOptions(**{"model": "1b", "no_history": True, **options}))


def test_nodes_are_gpus_of_the_hardware() -> None:
    assert job(nodes=4).cluster.num_gpus == 32
    assert job(nodes=4, hardware="gb200").cluster.num_gpus == 16
    assert job(nodes=4, gpus_per_node=4).cluster.num_gpus == 16
    with pytest.raises(SpecError, match="32 GPUs"):
        job(nodes=4, gpus=16)


def test_finetune_trains_all_weights_under_the_trainer_of_adapters() -> None:
    tuned = job(gpus=8, finetune=True)
    assert tuned.training.starts_trained
    assert (tuned.runtime, tuned.training.adapters, tuned.training.seq_length) == ("hf", None, 2048)
    assert tuned.training.global_batch_size == 16
    # transformers' classes leave it out
    assert job(model="glm-4.5-air", gpus=8, finetune=True).model.num_nextn_predict_layers == 0


@pytest.mark.parametrize(("asked", "figure", "value"), TABLES["a_time_or_a_sum_says_how_many_tokens"])
def test_a_time_or_a_sum_says_how_many_tokens(asked: str, figure: str, value: float, capsys: Any) -> None:
    pins = "--tp 1 --pp 1 --micro-batch-size 1 --top 1 --json"
    assert main([*shlex.split(f"-m 1b -g 16 -s 8k -b 256 {pins}"), *asked.split()]) == 0
    cost = json.loads(capsys.readouterr().out)["run_cost"]
    assert cost[figure] == pytest.approx(value, rel=1e-3)
    assert cost["tokens"] > 1e9


def test_options_of_lists_are_joined_and_of_any_other_the_last_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "-m", "8b", "-g", "16", "--tp", "2", "-s", "2048", "-b", "64", "--json"]
    switches = ("cross_entropy_fusion=false", "p2p_overlap=true")
    told = []
    for given in (["--switch", ",".join(switches)], [f"--switch={switches[0]}", "--switch", switches[1]]):
        assert main([*words, *given]) == 0
        told.append(json.loads(capsys.readouterr().out)["best"]["step"]["step_s"])
    assert told[0] == told[1]
    assert main([*words, "--tp", "4"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["best"]["parallelism"]["tp"] == 4
    assert "--tp: given 2 times, the last counts: 2, 4" in shown.err


MIXTURE = ["--model", "qwen3-30b", "--gpus", "64", "--hardware", "gb200", "-s", "4096", "-b", "512"]
LAYOUT = ["--ep", "32"]
_SIZES = ("tp", "cp", "pp", "vpp", "dp", "ep", "micro_batch_size", "zero_stage", "schedule")


def evaluated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def line(**features: Any) -> dict[str, Any]:
    layout = {"ep": 32, "dp": 64}
    job = {"model": "qwen3-30b", "hardware": "gb200", "num_gpus": 64}
    run = {**job, "seq_length": 4096, "global_batch_size": 512, "parallelism": layout, "features": features}
    return {"id": "a", "run": run}


@pytest.mark.parametrize(("options", "features"), TABLES["flags_price_as_lines_do"], ids=str)
def test_flags_price_as_lines_do(options: list[str], features: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """Also where neither says which switches are on: both take the likely values, but for the loss of Transformer
    Engine, which published runs have and today's Megatron refuses. Features say all, an option what it names."""
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(line(**features, cross_entropy_fusion="native")))
    assert main(["evaluate", "--runs", str(path), "--json"]) == 0
    of_line = json.loads(capsys.readouterr().out)
    of_flags = evaluated([*MIXTURE, *LAYOUT, *options], capsys)
    low_s, high_s = of_line["step"].pop("step_s_interval")
    of_one = of_flags["best"]["step"].pop("step_s_interval")
    assert of_flags["best"]["step"] == of_line["step"]
    assert of_one[0] <= low_s < high_s <= of_one[1]


def test_switches_change_the_price_and_default_takes_the_trainers_own(capsys: pytest.CaptureFixture[str]) -> None:
    likely = evaluated([*MIXTURE, *LAYOUT], capsys)
    own = evaluated([*MIXTURE, *LAYOUT, "--switch", "default"], capsys)
    overlapped = evaluated([*MIXTURE, *LAYOUT, "--switch", "ep_overlap=true,cuda_graph=none"], capsys)
    assert likely["runtime_spec"]["graphed_modules"]
    assert not own["runtime_spec"]["graphed_modules"]
    assert overlapped["runtime_spec"]["ep_overlap_fraction"] > 0
    assert len({told["best"]["step"]["step_s"] for told in (likely, own, overlapped)}) == 3


def test_pins_and_consent_reach_the_search() -> None:
    options = {"model": "8b", "gpus": 8}
    asked = SearchOptions(**options, switch="p2p_overlap=false", allow="bf16-gradients,fp8", assume="nan_checks=true")
    limits = read_limits(asked, read_job(asked))
    assert limits.switches == {"p2p_overlap": False, "nan_checks": True}
    assert limits.allow == ("bf16_gradients", "fp8")
    job = read_job(SearchOptions(**options))
    assert read_limits(SearchOptions(**options, switch="default"), job).switches == "default"
    assert read_limits(SearchOptions(**options), job).switches is None
    with pytest.raises(SpecError, match="--allow: unknown 'bf17_gradients'"):
        read_limits(SearchOptions(**options, allow="bf17_gradients"), job)


def test_a_plans_layout_with_its_recipe_has_the_plans_step(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "qwen3-30b", "--gpus", "16"]
    assert main([*job, "--pp", "2", "--tp", "2", "--ep", "8", "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    layout, recipe = best["parallelism"], best["recipe"]
    sizes = [f"--{axis.replace('_', '-')}={layout[axis]}" for axis in _SIZES]
    ways = ["--recompute", layout["recompute"]]
    if num_layers := best["stages"][0]["recompute"].get("full"):
        ways += ["--recompute-num-layers", str(num_layers)]
    chunks = [stage["chunks"][chunk] for chunk in range(layout["vpp"]) for stage in best["stages"]]
    ways += ["--layers-per-stage", ",".join(str(last - first) for first, last in chunks)]
    if layout["recompute_modules"]:
        ways += ["--recompute-modules", ",".join(layout["recompute_modules"])]
    switches = ",".join(f"{name}={written(value)}" for name, value in recipe.items())
    again = evaluated([*job, *sizes, *ways, "--switch", switches], capsys)["best"]
    # nobody said how its data is routed
    assert again["step"].pop("step_s_interval")[1] > best["step"].pop("step_s_interval")[1]
    assert again["step"] == best["step"]
    assert again["recipe"] == recipe
    assert evaluated([*job, *sizes, *ways, "--switch", "default"], capsys)["best"]["step"] != best["step"]


def test_what_consent_would_buy_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "8b", "--gpus", "8", "--pp", "1", "--tp", "1", "--top", "1"]
    assert main([*job, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    offers = [offer for offer in best["offers"] if offer["switch"] == "bf16_gradients"]
    for offer in offers:
        assert main([*job, "--allow", ",".join(offer["allow"]), "--json"]) == 0
        allowed = json.loads(capsys.readouterr().out)["best"]
        assert allowed["recipe"]["bf16_gradients"] is True
        assert allowed["step"]["step_s"] <= offer["step_s"] * 1.005
    assert offers


def test_an_assumed_field_stands_beside_switches() -> None:
    asked = LayoutOptions(model="8b", gpus=8, assume="tp_overlap_fraction=0.25,p2p_overlap=false")
    runtime = read_described(asked, read_job(asked)).runtime_spec
    assert (runtime.tp_overlap_fraction, runtime.interleaved_p2p_overlap) == (0.25, False)


PRICED = ["evaluate", "--model", "8b", "--gpus", "16", "--tp", "8"]


def job_of_operations(**options: Any) -> Job:
    return read_job(JobOptions(model="8b", gpus=16, tokens="1T", **options))


def test_they_reach_the_training() -> None:
    operations = job_of_operations(storage_gb_per_s=5.0, failures_per_1000_gpu_days=0.3, spares=1, usd_per_gpu_hour=2.5)
    assert operations.training.operations.model_dump() == TABLES["they_reach_the_training"]


def test_without_tokens_they_are_told_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_job(JobOptions(model="8b", gpus=16, spares=1))
    assert "--spares: has no effect without --tokens" in caplog.text


def test_a_price_that_is_given_is_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PRICED, "--tokens", "1T", "--usd-per-gpu-hour", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["run_cost"]["usd"] == pytest.approx(2 * answer["run_cost"]["gpu_hours"])


def _training(**options: object) -> TrainingSpec:
    asked = JobOptions(model="8b", gpus=1, lora=True, no_history=True, **options)  # type: ignore[arg-type]
    return read_job(asked).training


def test_examples_are_tokens_by_their_mean_length() -> None:
    training = _training(examples="10k", epochs=3.0, example_lengths="512")
    assert (training.tokens, training.examples, training.epochs) == (10_000 * 3 * 512, 10_000, 3.0)
    # no batch is longer than its longest example
    assert (training.batching, training.seq_length) == ("padded", 512)


def test_without_lengths_an_example_is_a_sequence() -> None:
    training = _training(examples="10k", seq_length=1024)
    assert (training.tokens, training.batching) == (10_000 * 1024, "packed")


def test_both_sequences_of_a_pair_are_counted() -> None:
    assert _training(examples="10k", seq_length=1024, objective="dpo").tokens == 2 * 10_000 * 1024


def test_a_mean_and_a_most_are_a_lognormal_that_ends_there() -> None:
    lengths = example_lengths(_training(example_lengths="400:2048"))
    assert mean_length(lengths) == pytest.approx(400, rel=0.01)
    assert lengths[-1][0] == 2048
    assert sum(share for length, share in lengths if length < 2048) > 0.99


def test_lengths_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.yaml"
    path.write_text("lengths:\n  - {length: 100, share: 3}\n  - {length: 200, share: 1}\n")
    training = _training(example_lengths=str(path), batching="packed", examples="400")
    assert training.tokens == pytest.approx(400 * 125)
    assert (training.batching, training.seq_length) == ("packed", 2048)


def test_lengths_may_be_listed_one_a_line_or_with_counts(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n200 3\n\n100\n")
    assert example_lengths(_training(example_lengths=str(path))) == ((100, 0.4), (200, 0.6))
    assert example_lengths(_training(example_lengths="100:2,200:3")) == ((100, 0.4), (200, 0.6))
    path.write_text("".join(f"{length}\n" for length in range(1, 40_000)))
    lengths = example_lengths(_training(example_lengths=str(path), seq_length=65536))
    assert len(lengths) < 400
    assert mean_length(lengths) == pytest.approx(20_000, rel=1e-3)


def test_an_optimizer_is_the_switch_of_that_name() -> None:
    asked = SearchOptions(model="8b", gpus=1, lora=True, optimizer="paged-adamw-8bit", no_history=True)
    assert read_limits(asked, read_job(asked)).switches == {"optimizer": "paged-adamw-8bit"}
    assert "--optimizer paged-adamw-8bit" in command_line(asked)


def test_the_answer_says_examples_steps_and_padding() -> None:
    asked = JobOptions(
        model="1b", gpus=1, lora=True, no_history=True, examples="2k", epochs=2.0, example_lengths="300:1024",
        usd_per_gpu_hour=2.0, global_batch_size=8,
    )  # fmt: skip
    job = read_job(asked)
    plan = evaluate(job.model, job.cluster, job.training, Parallelism(micro_batch_size=4), runtime=job.runtime_spec)
    texts = {figure.name: figure.text for figure in cost_figures(plan)}
    assert texts["examples"] == "2,000 examples × 2 epochs"
    assert texts["steps"] == "500 steps"
    assert "padding" in texts["padding"]
    assert texts["time"].endswith(("min", "h", ")"))
    assert plan.run_cost.usd == pytest.approx(2 * 24 * plan.run_cost.days)
