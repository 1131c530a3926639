"""Decoding of small language models on a CPU: one step with a static cache, and `generate`.

    python -m benchmarks.decoding_cpu [--dtype bfloat16] [--threads 2] --out decoding.jsonl

Each backend runs in a process of its own, since models of one class share compiled code. Times are
medians of processor time of one thread, or of wall time with several; `generate` includes the
prompt and all of transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.sweep.packages import use_packages

BACKENDS = {"eager": None, "peer": "inductor", "ours": "perfuse"}
MODELS = ("llama", "gpt2", "gemma")  # the default; FAMILIES has more
CACHE, PROMPT, VOCABULARY = 1024, 16, 4096
ROUNDS, STEPS, NEW_TOKENS = 15, 8, 64


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    part: str  # step, static, dynamic: the cache of `generate`
    model: str
    sequences: int
    backend: str
    dtype: str = "float32"
    threads: int = 1


SHARED = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * CACHE,
}
GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": VOCABULARY}
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
DENSE = {"first_k_dense_replace": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
GEMMA = {"intermediate_size": 1024, "head_dim": 64}
PHI3 = {"intermediate_size": 512, "pad_token_id": 0}
# What models are made of: the names of transformers, and sizes besides SHARED.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"intermediate_size": 512}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_positions": 2 * CACHE}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA | {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"intermediate_size": 512}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"intermediate_size": 512, "head_dim": 64}),
    "phi": ("PhiForCausalLM", "PhiConfig", {"intermediate_size": 1024}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", PHI3),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"intermediate_size": 512}),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | DENSE | {"v_head_dim": 64}),
}
# All other families have two heads of keys for four of queries.
HEADS = {"gpt2": {}, "phi": {}, "gemma": {}, "deepseek": {"num_key_value_heads": 4}}


def model_of(name: str, dtype: str = "float32") -> Any:
    """Four layers of width 256, two or four heads of queries for each of keys in most."""
    use_packages()
    import transformers

    torch.manual_seed(0)
    model, config, own = FAMILIES[name]
    sizes = (own if name == "gpt2" else SHARED | own) | HEADS.get(name, {"num_key_value_heads": 2})
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made.to(getattr(torch, dtype)).eval()


def step_of(case: Case) -> Callable[[], Any]:
    """A plain loop: the model on one token of each sequence, with its cache."""
    model = model_of(case.model, case.dtype)
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
    tokens = torch.randint(0, VOCABULARY, (case.sequences, PROMPT))
    model(tokens, past_key_values=cache, cache_position=torch.arange(PROMPT))

    def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(
            token, past_key_values=cache, cache_position=at, position_ids=at[None]
        ).logits
        return made

    backend = BACKENDS[case.backend]
    run = step if backend is None else torch.compile(step, backend=backend)
    token, at = tokens[:, :1].clone(), torch.tensor([PROMPT])
    return lambda: [run(token, at) for _ in range(STEPS)]


def generate_of(case: Case) -> Callable[[], Any]:
    model, is_static = model_of(case.model, case.dtype), case.part == "static"
    backend = BACKENDS[case.backend]
    if backend is not None:
        dynamic = None if is_static else True
        model.forward = torch.compile(model.forward, backend=backend, dynamic=dynamic)
    tokens = torch.randint(1, VOCABULARY, (case.sequences, PROMPT))
    options = {"cache_implementation": "static"} if is_static else {}
    mask = torch.ones_like(tokens)
    return lambda: model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )


def measure(case: Case) -> dict[str, Any]:
    torch.set_num_threads(case.threads)
    now = time.thread_time if case.threads == 1 else time.perf_counter
    with torch.no_grad():
        is_step = case.part == "step"
        call = step_of(case) if is_step else generate_of(case)
        for _ in range(3):
            call()
        times = []
        for _ in range(ROUNDS):
            start = now()
            call()
            times.append((now() - start) / (STEPS if is_step else 1))
    return {**asdict(case), "us": round(1e6 * statistics.median(times), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="step,static,dynamic")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sequences", default="1,4,16")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="")
    parser.add_argument("--case", default="", help="one case as JSON, in this process")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(Case(**json.loads(given.case)))))
        return
    for part in given.parts.split(","):
        for model in given.models.split(","):
            for sequences in given.sequences.split(","):
                for backend in BACKENDS:
                    case = Case(part, model, int(sequences), backend, given.dtype, given.threads)
                    record(case, given.out)


def record(case: Case, out: str) -> None:
    """Measure a case in a process of its own, and append the row."""
    command = [sys.executable, "-m", "benchmarks.decoding_cpu", "--case", json.dumps(asdict(case))]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in made.stdout.splitlines() if line.startswith("{")]
    row = rows[-1] if rows else json.dumps({**asdict(case), "error": made.stderr[-300:]})
    print(row, flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(row + "\n")


if __name__ == "__main__":
    main()
