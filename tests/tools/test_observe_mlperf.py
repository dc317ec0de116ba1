"""tools/observe_mlperf reads a clone of MLPerf's results: logs, the configuration beside them, and their price."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from planner.errors import SpecError

ROOT = Path(__file__).parents[2]
BEGIN_MS = 1_712_372_000_000
COMMON = "export MICRO_BATCH_SIZE=1\n"
CONFIG = """source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MINIBS=64
export TENSOR_MODEL_PARALLEL=2
export PIPELINE_MODEL_PARALLEL=2
export CONTEXT_PARALLEL=1
export INTERLEAVED_PIPELINE=4
export DGXNNODES=1
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("observe_mlperf", str(ROOT / "tools" / "observe_mlperf"))
    spec = importlib.util.spec_from_loader("observe_mlperf", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def log(num_steps: int, step_s: float) -> str:
    """A log in MLPerf's form, written here: 8 GPUs, a batch of 128 sequences."""
    at_s, lines = 0.0, []

    def add(key: str, value: object, **metadata: object) -> None:
        data = {"time_ms": BEGIN_MS + round(1e3 * at_s), "key": key, "value": value, "metadata": metadata}
        lines.append(f":::MLLOG {json.dumps(data)}")

    for _ in range(8):
        add("init_start", None)
    add("global_batch_size", 128)
    add("max_sequence_length", 8192)
    at_s = 100.0
    add("run_start", None)
    for step in range(1, num_steps + 1):
        at_s += step_s
        add("tracked_stats", {"train_step_time": step_s, "reduced_train_loss": 1.0}, step=128.0 * step)
    add("eval_start", None)
    at_s += 30.0
    add("eval_stop", None)
    add("run_stop", None)
    return "\n".join(lines)


def clone(folder: Path, **configurations: str) -> Path:
    results = folder / "Org" / "results" / "system" / "llama31_405b"
    implementation = folder / "Org" / "benchmarks" / "llama31_405b" / "implementations" / "system"
    for path in (results, implementation):
        path.mkdir(parents=True)
    (results / "result_0.txt").write_text(log(20, 9.0))
    (implementation / "config_common.sh").write_text(COMMON)
    for name, text in configurations.items():
        (implementation / f"config_{name}.sh").write_text(text)
    return folder


def test_the_layout_of_the_configuration_is_priced(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--model", "8b", str(clone(tmp_path, DGXH100_1x8x64xtp2pp2=CONFIG))])
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("| Org system 0 ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["8", "20", "9.000"]
    assert float(cells[5]) > 1
    assert cells[8:] == ["85.7%", "14.3%", "0.0%", "0.0%"]
    assert "1 of 1 logs read; 1 add up within 1%" in out
    assert "1 layouts priced" in out


def test_layouts_that_cannot_be_told_apart_are_not_priced(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = CONFIG.replace("TENSOR_MODEL_PARALLEL=2", "TENSOR_MODEL_PARALLEL=1").replace("MINIBS=64", "MINIBS=32")
    wrong = CONFIG.replace("MINIBS=64", "MINIBS=99")
    folder = clone(tmp_path, DGXH100_1x8x64xtp2pp2=CONFIG, DGXH100_1x8x32xtp1pp2=other, DGXH100_1x8x99=wrong)
    script.main(["--model", "8b", str(folder)])
    assert "no layout told apart" in capsys.readouterr().out


def test_a_folder_without_logs_is_an_error(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no logs of llama31_405b"):
        script.main([str(tmp_path)])
    with pytest.raises(SpecError, match="0 folders"):
        script.main([])


LORA = """source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MINIBS=2
export TP=1
export CP=2
export FP8_ACTIVATION=True
export DGXNNODES=1
"""
LORA_COMMON = "export FP8=True\nexport LORA_A2A=1\nexport MBS=1\n"


def lora_log() -> str:
    """A log of llama2_70b_lora, written here: 8 GPUs, a batch of 8, blocks of 48 steps of 3 s after a longer one."""
    at_s, lines = 0.0, []

    def add(key: str, value: object, **metadata: object) -> None:
        data = {"time_ms": BEGIN_MS + round(1e3 * at_s), "key": key, "value": value, "metadata": metadata}
        lines.append(f":::MLLOG {json.dumps(data)}")

    for key, value in (("global_batch_size", 8), ("lora_rank", 16), ("gradient_accumulation_steps", 2)):
        add(key, value)
    add("run_start", None)
    trained = 0
    for steps, step_s in ((192, 3.5), (48, 3.0), (48, 3.0)):
        add("block_start", None, samples_count=trained)
        at_s, trained = at_s + steps * step_s, trained + 8 * steps
        add("block_stop", None, samples_count=trained)
        add("eval_start", None, samples_count=trained)
        at_s += 30.0
        add("eval_stop", None, samples_count=trained)
    add("run_stop", None)
    return "\n".join(lines)


def lora_clone(folder: Path, gpu: str = "NVIDIA H200-SXM5-141GB", **configurations: str) -> Path:
    root = folder / "training_results_v4.1"
    results = root / "Org" / "results" / "system" / "llama2_70b_lora"
    implementation = root / "Org" / "benchmarks" / "llama2_70b_lora" / "implementations" / "nemo"
    for path in (results, implementation / "configs", root / "Org" / "systems"):
        path.mkdir(parents=True)
    system = {"accelerator_model_name": gpu, "accelerators_per_node": 8, "number_of_nodes": "1"}
    (root / "Org" / "systems" / "system.json").write_text(json.dumps(system))
    (results / "result_0.txt").write_text(lora_log())
    (implementation / "configs" / "config_common.sh").write_text(LORA_COMMON)
    for name, text in configurations.items():
        (implementation / f"config_{name}.sh").write_text(text)
    return root


def test_a_run_with_adapters_is_read_with_its_system_and_all_that_its_configuration_sources(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    other = LORA.replace("CP=2", "CP=1").replace("MINIBS=2", "MINIBS=1")
    root = lora_clone(tmp_path, DGXH200_1x8x2xtp1pp1cp2=LORA, DGXH200_1x8x1xtp1pp1cp1=other)
    script.main(["--benchmark", "llama2_70b_lora", "--rows", str(rows), str(root)])
    assert "1 rows in" in capsys.readouterr().out
    row = json.loads(rows.read_text())
    run = row["run"]
    assert (run["hardware"], run["num_gpus"], run["dtype"]) == ("h200-sxm-141gb", 8, "fp8")
    assert (run["parallelism"]["cp"], run["parallelism"]["dp"]) == (2, 4)
    assert run["adapters"] == {"rank": 16, "targets": ["attention"], "dropout": 0.1}
    assert {"lora_a2a", "activation_func_fp8_input_store"} <= set(run["features"])
    assert row["measured"]["step_s"] == 3.0
    script.main(["--benchmark", "llama2_70b_lora", str(root)])
    out = capsys.readouterr().out
    assert "| Org system 0 | 8 | 288 | 3.000 |" in out
    assert "1 layouts priced" in out


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H200-SXM5-141GB", "DGXH100_1x8"), ("NVIDIA H200-NVL-141GB", "DGXH200_1x8"), ("?", "x")]
)
def test_a_configuration_of_another_gpu_is_not_taken(
    script: ModuleType, tmp_path: Path, gpu: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = lora_clone(tmp_path, gpu, **{name: LORA})
    script.main(["--benchmark", "llama2_70b_lora", "--rows", str(tmp_path / "rows.jsonl"), str(root)])
    assert "0 rows in" in capsys.readouterr().out
