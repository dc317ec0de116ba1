"""Scripts of Megatron-DeepSpeed, as BLOOM's are written, and scripts that train no GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import BASE, TEXTS, layout_of

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration
from planner.export.imported_run import ImportedRun
from planner.layout.runs import parse_run

BLOOM = TEXTS["megatron-deepspeed bloom"]


def test_blooms_script() -> None:
    imported = read_configuration(BLOOM)
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["runtime"], run["num_gpus"]) == ("megatron-deepspeed", "megatron-deepspeed", 384)
    assert (layout["tp"], layout["pp"], layout["micro_batch_size"], run["global_batch_size"]) == (4, 12, 2, 2048)
    assert (layout["recompute"], run["dtype"]) == ("full", "bf16")
    assert layout["layers_per_stage"] == [5, *[6] * 10, 5], "embedding and head count as a layer each"
    assert layout["zero_stage"] == 1
    assert "DeepSpeed's optimizer of bf16 shards its states all the same" in " ".join(imported.notes)
    model = run["model"]
    assert (model["position_embedding"], model["embedding_norm"], model["vocab_size"]) == ("alibi", True, 250880)
    assert imported.unknown == {}
    assert parse_run({"run": imported.complete(hardware="a100")}).parallelism.pp == 12


def read_options(options: str) -> ImportedRun:
    return read_configuration(f"deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py {BASE} --deepspeed {options}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--fp16 --zero-stage 3", {"zero_stage": 3, "recompute": None}),
        ("--fp16 --checkpoint-activations --checkpoint-num-layers 2", {"recompute": "full", "zero_stage": 0}),
        (
            "--fp16 --activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            {"recompute_num_layers": 3},
        ),
        ("--fp16 --ds-sequence-parallel-size 4", {"cp": 4}),
        ("--fp16 --num-experts 8 --moe-expert-parallel-size 4", {"ep": 4, "etp": 1}),
    ],
)
def test_its_own_words_for_the_layout(options: str, expected: dict[str, Any]) -> None:
    imported = read_options(options)
    assert imported.run["num_gpus"] == 16
    assert {name: layout_of(imported).get(name) for name in expected} == expected


def test_its_own_words_for_the_model() -> None:
    model = read_options("--glu-activation swiglu --normalization rmsnorm --num-key-value-heads 8").run["model"]
    assert (model["gated_mlp"], model["norm"], model["num_key_value_heads"]) == (True, "rmsnorm", 8)
    moe = read_options("--num-experts 64 --moe-expert-parallel-size 8").run["model"]["moe"]
    assert (moe["num_experts_per_tok"], moe["moe_layer_freq"]) == (1, 2), "every second layer, one expert a token"
    assert read_options("--num-experts 1").run["model"].get("moe") is None
    with pytest.raises(SpecError, match="residual or growing experts"):
        read_options("--num-experts 64 128 --mlp-type residual")


def test_a_configuration_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    (tmp_path / "run.sh").write_text(
        f"deepspeed pretrain_gpt.py {BASE} --fp16 --deepspeed --deepspeed_config $DIR/ds.json"
    )
    imported = read(tmp_path / "run.sh")
    assert layout_of(imported)["zero_stage"] == 2
    assert imported.run["features"]["optimizer_offload"] == 1.0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"torchrun pretrain_bert.py {BASE}", "this is BERT"),
        (f"torchrun pretrain_t5.py {BASE}", "this is T5"),
        (f"torchrun pretrain_gpt.py {BASE} --retro-add-retriever", "this is Retro"),
        (f"torchrun pretrain_vlm.py {BASE}", "this is a vision-language model"),
        (f"torchrun pretrain_gpt.py {BASE} --is-hybrid-model --hybrid-mlp-ratio 0.5", "this is Mamba"),
        ("python tools/preprocess_data.py --workers 4 --num-layers 2", "this is a preparation of data"),
        ("MODEL_ARGS:\n  --num-layers: 24\n  --vocab-file: /x/vocab.txt\n", "this is BERT"),
        ("MODEL_ARGS:\n  --encoder-num-layers: 12\n  --hidden-size: 768\n", "this is T5"),
    ],
)
def test_what_is_no_gpt_is_named(text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        read_configuration(text)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B", 151936),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3", 129280),
        ("--tokenizer-type TikTokenizer --tokenizer-model ${X}/multiMixV8.gpt4o_nc_sd.500000.128k.vocab.json", 131072),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ${X}/nemotron_2_256k.model", 256000),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ${X}/own.model", None),
        ("", 50257),
    ],
)
def test_vocabularies_of_published_tokenizers(options: str, size: int | None) -> None:
    base = BASE.replace("--vocab-size 50304 ", "")
    imported = read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {base} --bf16 {options}")
    assert imported.run["model"]["vocab_size"] == size
    if size is None:
        with pytest.raises(SpecError, match="vocab_size is not in the configuration") as caught:
            imported.complete()
        assert caught.value.hint == "add --vocab-size N"


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ("--optimizer lion --main-grads-dtype bf16", {"--optimizer": "lion"}),
        ("--optimizer adam --main-grads-dtype fp32", {}),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8", {"--exp-avg-dtype": "fp8"}),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", {}),
        (
            "--cpu-offloading --cpu-offloading-num-layers 4",
            {"--cpu-offloading": "", "--cpu-offloading-num-layers": "4"},
        ),
        ("--deterministic-mode", {}),
    ],
)
def test_options_that_are_not_priced_are_listed(options: str, unknown: dict[str, str]) -> None:
    assert read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {BASE} --bf16 {options}").unknown == unknown
