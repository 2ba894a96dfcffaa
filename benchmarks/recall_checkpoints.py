"""Checkpoints of the recall task for `precision.py`: the shipped one, and two with value biases.

A Qwen2 (RMSNorm, value biases, grouped queries) and a Pythia (LayerNorm, biases everywhere) are
trained in a minute. Each is stored in float32 and in 16 bits, in a hub cache.
"""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import torch

DTYPES = ("bfloat16", "float16")
SHIPPED = "shipped Llama"
# Names of models whose sizes TransformerLens reads from config.json: one for each stored dtype.
HUB_NAMES = {
    SHIPPED: ("01-ai/Yi-6B", "01-ai/Yi-34B", "01-ai/Yi-6B-Chat"),
    "Qwen2": ("Qwen/Qwen2-0.5B", "Qwen/Qwen2-1.5B", "Qwen/Qwen2-7B"),
    "Pythia": ("EleutherAI/pythia-70m", "EleutherAI/pythia-160m", "EleutherAI/pythia-410m"),
}
HUB_NAME = {
    (checkpoint, stored): name
    for checkpoint, names in HUB_NAMES.items()
    for stored, name in zip(("float32", *DTYPES), names)
}

# Two layers are enough: one writes each owner at its object, the other looks the owner up.
N_LAYERS, N_HEADS, N_STEPS, PEAK_LEARNING_RATE = 2, 4, 700, 6e-3
N_FACTS, SEED = 8, 7


def make_checkpoints(cache: Path) -> dict[str, Any]:
    """Lay out the hub cache, and return figures of the trained checkpoints."""
    import_train_recall()
    import train_recall
    import transformers.utils.logging as hf_logging
    from transformers import AutoModelForCausalLM

    from tl_devicefix.demo.demo import CHECKPOINT

    hf_logging.disable_progress_bar()
    records = {}
    for checkpoint in HUB_NAMES:
        if checkpoint == SHIPPED:
            model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        else:
            model, records[checkpoint] = train(checkpoint)
        for stored in ("float32", *DTYPES):
            repository = cache / f"models--{HUB_NAME[checkpoint, stored].replace('/', '--')}"
            snapshot = repository / "snapshots" / "0"
            (repository / "refs").mkdir(parents=True, exist_ok=True)
            (repository / "refs" / "main").write_text("0")
            converted = copy.deepcopy(model).to(getattr(torch, stored))
            snapshot.mkdir(parents=True, exist_ok=True)
            train_recall.save_checkpoint(converted, train_recall.build_tokenizer(), snapshot)
    return records


def import_train_recall() -> None:
    """Make `train_recall` importable."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))


def train(checkpoint: str) -> tuple[Any, dict[str, Any]]:
    """Train a Qwen2 or a Pythia on the recall task. Return the model, and its figures."""
    import train_recall as recall

    from tl_devicefix.demo.demo import recall_prompts

    torch.manual_seed(SEED)
    model = build_model(checkpoint)
    before = copy.deepcopy(model)
    layers = tuple(range(N_LAYERS))
    short = recall.Stage(until=0.7, batch_size=64, length=32, max_facts=3, layers=layers)
    long = recall.Stage(until=1.0, batch_size=48, length=64, max_facts=10, layers=layers)
    optimizer, rng = recall.build_optimizer(model), random.Random(SEED)
    model.train()
    for step in range(N_STEPS):
        stage = short if step < short.until * N_STEPS else long
        loss = recall.batch_loss(model, *recall.training_batch(rng, stage))
        for group in optimizer.param_groups:
            group["lr"] = recall.learning_rate(step, N_STEPS, PEAK_LEARNING_RATE)
        optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recall.MAX_GRAD_NORM)
        optimizer.step()
    prompts = recall_prompts(500, seed=recall.EVALUATION_SEED, n_facts=N_FACTS)
    is_right = recall.recall_is_right(model, recall.build_tokenizer(), prompts)
    return model, {
        "accuracy": sum(is_right) / len(is_right),
        **size_and_change("b_V", value_biases(model), value_biases(before)),
        **size_and_change("norm weights", norm_weights(model), norm_weights(before)),
    }


def build_model(checkpoint: str) -> Any:
    """Return a random model: norm weights around 1 and biases around 0, so that both matter."""
    import train_recall as recall
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": len(recall.VOCABULARY),
        "hidden_size": 64,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "max_position_embeddings": recall.N_CTX,
        "initializer_range": 0.04,
        "tie_word_embeddings": False,
        "bos_token_id": recall.TOKEN_IDS[recall.BOS],
        "eos_token_id": recall.TOKEN_IDS[recall.EOS],
        "pad_token_id": recall.TOKEN_IDS[recall.PAD],
    }
    model: Any
    if checkpoint == "Qwen2":
        config = Qwen2Config(**sizes, intermediate_size=160, num_key_value_heads=2)
        model = Qwen2ForCausalLM(config)
    else:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=256, rotary_pct=1.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_norm_weight(name):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def is_norm_weight(name: str) -> bool:
    """Return True if a parameter of a Hugging Face model is the weight of a norm."""
    return "norm" in name and name.endswith("weight")


def norm_weights(model: Any) -> torch.Tensor:
    """Return all norm weights of a Hugging Face model in one vector."""
    return torch.cat([p.detach() for n, p in model.named_parameters() if is_norm_weight(n)])


def value_biases(model: Any) -> torch.Tensor:
    """Return the value biases of a Hugging Face Qwen2 or Pythia in one vector."""
    biases = []
    for name, parameter in model.named_parameters():
        if name.endswith("v_proj.bias"):
            biases.append(parameter.detach())
        elif name.endswith("query_key_value.bias"):  # [heads, query or key or value, d_head]
            biases.append(parameter.detach().view(N_HEADS, 3, -1)[:, 2].flatten())
    return torch.cat(biases)


def size_and_change(name: str, now: torch.Tensor, before: torch.Tensor) -> dict[str, float]:
    """Return how large weights are, and how far training moved them."""
    return {
        f"{name} rms": now.square().mean().sqrt().item(),
        f"{name} max": now.abs().max().item(),
        f"{name} moved by rms": (now - before).square().mean().sqrt().item(),
    }
