"""The names of the models and the hardware that ship with the planner, from a listing: no file is parsed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

DEFAULT_HARDWARE = "h100-sxm-80gb"
"""The GPU where nobody names one."""
Kind = Literal["model", "hardware"]
_FOLDERS: dict[Kind, str] = {"model": "model_specs", "hardware": "hardware_profiles"}
_ALIASES = re.compile(r"(?:^|, )aliases: *\[(.*?)\]", re.MULTILINE)
_LINES = Path(__file__).parent / "architectures" / "models.yaml"
_LINE = re.compile(r"^([a-z][\w.-]*): (\{.*\})$", re.MULTILINE)


@cache
def lines() -> dict[str, str]:
    """The line of each model that ships as keys of its config.json, by name."""
    return dict(_LINE.findall(_LINES.read_text(encoding="utf-8")))


def model_names() -> dict[str, tuple[str, ...]]:
    """Every model that ships as a file of its own, with its aliases."""
    return {name: aliases for name, aliases in names("model").items() if name not in lines()}


def hardware_names() -> dict[str, tuple[str, ...]]:
    """Every hardware profile that ships with the planner, with its aliases."""
    return dict(names("hardware"))


def folder(kind: Kind) -> Path:
    """Package data of the wheel, else the folder at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data" / _FOLDERS[kind]
    return packaged if packaged.is_dir() else package.parent / _FOLDERS[kind]


@cache
def names(kind: Kind) -> dict[str, tuple[str, ...]]:
    """Canonical names and aliases, by a scan of first lines: parsing forty files would take as long as a plan."""
    texts = {name: path.read_text(encoding="utf-8")[:1000] for name, path in _paths(kind).items()}
    if kind == "model":
        texts |= lines()
    matches = {name: _ALIASES.search(text) for name, text in texts.items()}
    return {
        name: tuple(alias.strip(" '\"") for alias in one[1].split(",")) if one else () for name, one in matches.items()
    }


def find(kind: Kind, name: str) -> Path | None:
    """The shipped file of a canonical name or an alias in any case or, of a model, of a repository of the hub.

    That of a model that ships as a line lies inside of the file of lines.
    """
    lower, known = name.lower(), names(kind)
    own = lower if lower in known else next((own for own, aliases in known.items() if lower in aliases), None)
    own = own or (model_called(name) if kind == "model" else None) or ""
    return _LINES / own if kind == "model" and own in lines() else _paths(kind).get(own)


_SAYS_NO_SIZE = re.compile(
    r"config|provider|model(?!opt)|instruct|base|chat|thinking|\bhf\b|meta(?=-?llama)|bf16|fp8|-\d{4}(?=$|-)|v0\.\d|-(it|pt)\b"
    r"|preview|pretrain|(?<!deepseek-)coder(?!-480)|math|hermes-?\d*|openr1|unsloth|bnb|[48]bit|int[48]|awq|gptq|gguf|\bsft\b|\bdpo\b"
    r"|\brl\b|mcore|torch_dist|tulu-?\d*|distill|nvidia-|reranker|embedding|safeguard|captioner|-1m\b"
    r"|mixture|fp16|nf4|linearized|sparse|2of4|dequantized|reward|skywork|cogito-v\d"
    r"|speciale|prover(-v2)?|guard-gen|\d+bits|(?<!video-7b)-\d+k(?=$|-)|fp32|longwriter|aqlm|reflection|reasoning"
    r"|-mix|-ft-docci|-(224|448|896)\b"
    r"|rope-\d+k|(?<!deepseek)-v[12](\.0)?(?=$|-)|_iter_\d+|dynamic|nvfp4"
)
"""Parts of names that do not change a model's sizes."""
_IN_A_CACHE = re.compile(r"models--[\w.-]+?--([\w.-]+)")
"""A folder of the hub's cache, `models--Qwen--Qwen3-8B/snapshots/…`."""
_AFTER_ITS_SIZE = re.compile(r"(.*\d[bm])((?!-(?:vl|vision|omni|audio|vla)\b)[-_]([a-z]+|v\d+(\.\d+)?))+")
"""A name that goes on with words after its size, as a fine-tuned or converted one does."""
_OTHERS = {
    "gpt175b": "gpt3-175b", "gpt3175b": "gpt3-175b", "llama38b": "llama-3.1-8b", "llama370b": "llama-3.1-70b",
    "deepseekr1": "deepseek-v3", "deepseekv31": "deepseek-v3", "mistralai8x7b": "mixtral-8x7b", "bloom": "bloom-176b",
    "gptneox": "gpt-neox-20b", "open35": "openchat-3.5",
    "llama417b16e": "llama-4-scout", "llama417b128e": "llama-4-maverick",
    "llama417bx16e": "llama-4-scout", "llama417bx128e": "llama-4-maverick", "llama4scout17b16e": "llama-4-scout",
    "llama4maverick17b128e": "llama-4-maverick", "llama4e16": "llama-4-scout", "llama4e128": "llama-4-maverick",
    "llama4experts16": "llama-4-scout", "llama4experts128": "llama-4-maverick", "kimik2": "kimi-k2",
    "moonlight16ba3b": "moonlight-16b", "deepseekv2236b": "deepseek-v2", "deepseekv3671b": "deepseek-v3",
    "deepseekv316b": "deepseek-v2-lite", "llama33370b": "llama-3.1-70b", "llama3370b": "llama-3.1-70b",
    "deepseekr1qwen15b": "qwen2.5-1.5b", "deepseekr1qwen7b": "qwen2.5-7b", "deepseekr1qwen14b": "qwen2.5-14b",
    "deepseekr1qwen32b": "qwen2.5-32b", "deepseekr1llama8b": "llama-3.1-8b", "deepseekr1llama70b": "llama-3.1-70b",
    "deepseekr10528qwen38b": "qwen3-8b", "tinyllamav11": "tinyllama-1.1b", "minimaxm21": "minimax-m2",
    "minimaxm25": "minimax-m2", "minimaxm27": "minimax-m2", "llama7b": "llama-2-7b", "deepseekr1qwen38b": "qwen3-8b",
    "llama31nemotronnano8b": "llama-3.1-8b", "deepseekr1zero": "deepseek-v3", "qwq32b": "qwen2.5-32b",
    "vicuna7bv15": "llama-2-7b", "vicuna13bv15": "llama-2-13b", "zephyr7bbeta": "mistral-7b",
    "zephyr7balpha": "mistral-7b", "llama13b": "llama-2-13b", "kimidev72b": "qwen2.5-72b",
    "wizardlm28x22b": "mixtral-8x22b", "zephyrorpo141ba35b": "mixtral-8x22b", "deepseek671b": "deepseek-v3",
    "deepseek7b": "deepseek-llm-7b", "deepseekcoder7bv15": "deepseek-llm-7b", "numina7btir": "deepseek-llm-7b",
    "llama31nemotron70b": "llama-3.1-70b", "deepseekv32exp": "deepseek-v3.2", "moonlight": "moonlight-16b",
}  # fmt: skip
"""Names that others give to models, without signs: Llama 3 has the sizes of 3.1."""


def model_called(name: str) -> str | None:
    """The shipped model that a repository of the hub, a class or a flavor names; None where there is none."""
    # ModelScope's folders have underscores for a point
    path = re.sub(r"(?<=\d)_{2,3}(?=\d)", ".", name.replace("\\", "/").rstrip("/").lower())
    cached = _IN_A_CACHE.search(path)
    own = (cached[1] if cached else path).rpartition("/")[2].rpartition("__")[2]
    signless, short = _signless(own), _signless(_SAYS_NO_SIZE.sub("", own))
    known = _signless_names()
    exact = own if own in names("model") else None  # opt-13b is not opt-1.3b
    found = exact or known.get(signless) or _OTHERS.get(short) or known.get(short)
    sized = _AFTER_ITS_SIZE.fullmatch(own)
    return found if found or sized is None else model_called(sized[1])


@cache
def _signless_names() -> dict[str, str]:
    """The model of each name and alias without signs, and of those with a size without the other parts; names first."""
    pairs = [(alias, own) for own, aliases in names("model").items() for alias in (own, *aliases)]
    found = {_signless(alias): own for alias, own in reversed(pairs)}
    for alias, own in pairs:
        # `qwen3` of qwen3-coder would be a family, and `14b` of hermes-4-14b a size
        if re.search(r"[a-z].*(\d[bm]|e\d)", short := _signless(_SAYS_NO_SIZE.sub("", alias))):
            found.setdefault(short, own)
    return found


def _signless(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


@cache
def _paths(kind: Kind) -> dict[str, Path]:
    """The file of each canonical name."""
    return {path.stem: path for path in sorted(folder(kind).glob("*.yaml"))}
