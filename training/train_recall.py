"""Train the small Llama checkpoint that ships in ``tl_devicefix/demo/recall_checkpoint``.

What it learns is in-context recall (see ``tl_devicefix/demo/demo.py``): after
``Alice likes green . Bob likes red . Alice likes`` comes ``green``, who likes what being drawn
anew for every sequence. It is trained for next-token prediction on sequences made as it goes:

* one in two states some facts and then repeats them in random order, so that most sentences ask
  a question and answer it;
* the others repeat a block of random words, which teaches plain induction (and which lets the
  usual induction-head scores on repeated random tokens mean something on this model).

The sequences get longer and state more facts as the training goes on (`CURRICULUM`). At first the
model has only two of its layers, one early and one late. Recall takes two steps (an object learns
whose it is; the question finds it), and left alone both settle in layers 0 and 1: this way they
settle far apart, and in a model split over several devices one device carries the first step's
result to another.

The shipped checkpoint was made, from the root of the repository, with::

    PYTHONPATH=. python training/train_recall.py --out tl_devicefix/demo/recall_checkpoint

which took a quarter of an hour on one core of a busy machine, and needs no other option. The same
seed and the same versions of torch and transformers, on the same kind of processor, give the same
weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tl_devicefix.demo.demo import (
    NAMES,
    OBJECTS,
    RecallPrompt,
    sample_prompt,
)

VERBS = tuple(OBJECTS)
FULL_STOP = "."
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
VOCABULARY = (
    *(PAD, BOS, EOS, UNK, FULL_STOP),
    *NAMES,
    *VERBS,
    *(word for objects in OBJECTS.values() for word in objects),
)
"""Every token of the checkpoint's tokenizer, in the order of their ids."""
WORDS_PER_FACT = 4
MIN_FACTS, MAX_FACTS = 4, 12
"""How many facts a prompt of the evaluation states."""

TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}
CONTENT_WORDS = [token for token in VOCABULARY if token not in (PAD, BOS, EOS, UNK)]

N_CTX = 128
N_LAYERS = 8
TWO_LAYERS = (0, 5)
ALL_LAYERS = tuple(range(N_LAYERS))

N_EVALUATION_PROMPTS = 2000
EVALUATION_SEED = 1_000_003
"""Not a seed of any training stream, and a prompt has too many variants to come up twice."""

OTHER_TOKENS_WEIGHT = 0.1
"""Weight of the loss on the tokens that the context does not tell, next to those it does."""
P_INDUCTION = 0.5
P_MIX_VERBS = 0.3
WARM_UP_STEPS = 50
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum: the shape of its batches, and how hard they are."""

    until: float
    """The fraction of the training at which the stage ends."""
    batch_size: int
    length: int
    max_facts: int
    layers: tuple[int, ...]
    """The layers that the model has in this stage; the others wait as they are."""


CURRICULUM = (
    Stage(until=0.3, batch_size=64, length=32, max_facts=3, layers=TWO_LAYERS),
    Stage(until=0.7, batch_size=48, length=64, max_facts=8, layers=ALL_LAYERS),
    Stage(until=1.0, batch_size=32, length=N_CTX, max_facts=14, layers=ALL_LAYERS),
)


# --------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Fact:
    """One sentence, such as ``Alice likes green .``"""

    name: str
    verb: str
    object: str

    def words(self) -> tuple[str, str, str, str]:
        """The four tokens of the sentence."""
        return (self.name, self.verb, self.object, FULL_STOP)


def sample_facts(rng: random.Random, n_facts: int, *, mix_verbs: bool) -> list[Fact]:
    """Draw facts about `n_facts` different names, no two with the same object.

    All the facts share one verb, unless `mix_verbs` has each draw its own.
    """
    names = rng.sample(NAMES, n_facts)
    if not mix_verbs:
        verb = rng.choice(VERBS)
        objects = rng.sample(OBJECTS[verb], n_facts)
        return [Fact(name, verb, object_) for name, object_ in zip(names, objects, strict=True)]
    verbs = [rng.choice(VERBS) for _ in names]
    shuffled = {verb: rng.sample(OBJECTS[verb], n_facts) for verb in VERBS}
    return [Fact(name, verb, shuffled[verb].pop()) for name, verb in zip(names, verbs, strict=True)]


@dataclass(frozen=True)
class TrainingSequence:
    """Words, and for each whether the words before it tell what it is."""

    words: list[str]
    is_recalled: list[bool]


def recall_sequence(rng: random.Random, length: int, max_facts: int) -> TrainingSequence:
    """State some facts, then repeat them in random order until `length` words are full.

    In half of the sequences each fact is stated the first time that the random order comes to it,
    not before the first question: so the distances to the answers vary more.
    """
    n_facts = rng.randint(2, max_facts)
    facts = sample_facts(rng, n_facts, mix_verbs=rng.random() < P_MIX_VERBS)
    n_sentences = math.ceil(length / WORDS_PER_FACT)
    stated_first = facts if rng.random() < 0.5 else []
    sentences = [*stated_first, *rng.choices(facts, k=n_sentences - len(stated_first))]
    words = [BOS]
    is_recalled = [False]
    stated = set()
    for fact in sentences:
        words += fact.words()
        is_recalled += [False, False, fact in stated, False]
        stated.add(fact)
    return TrainingSequence(words[:length], is_recalled[:length])


def induction_sequence(rng: random.Random, length: int) -> TrainingSequence:
    """Repeat a block of random words, all different, until `length` words are full."""
    block_length = rng.randint(4, min(length // 2, len(CONTENT_WORDS)))
    block = rng.sample(CONTENT_WORDS, block_length)
    repeats = math.ceil(length / block_length)
    first_told = 1 + block_length + 1  # the second block's first word is not told by the context
    return TrainingSequence(
        words=[BOS, *(block * repeats)][:length],
        is_recalled=[position >= first_told for position in range(length)],
    )


def training_batch(rng: random.Random, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch: its token ids, and the mask of the tokens that the context tells."""
    sequences = [
        induction_sequence(rng, stage.length)
        if rng.random() < P_INDUCTION
        else recall_sequence(rng, stage.length, stage.max_facts)
        for _ in range(stage.batch_size)
    ]
    tokens = torch.tensor([[TOKEN_IDS[word] for word in s.words] for s in sequences])
    is_recalled = torch.tensor([s.is_recalled for s in sequences])
    return tokens, is_recalled


# --------------------------------------------------------------------------------------------
# Tokenizer and model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer, which prepends ``<bos>`` as the tokenizer of Llama does."""
    backend = Tokenizer(models.WordLevel(vocab=TOKEN_IDS, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, TOKEN_IDS[BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="right",
        model_max_length=N_CTX,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """Build the model with random weights, drawn from torch's global generator.

    The weights of the RMSNorms are drawn around 1, not set to 1: so the trained ones differ from
    channel to channel, as those of large models do, and folding them matters.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=N_CTX,
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
        pad_token_id=TOKEN_IDS[PAD],
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


# --------------------------------------------------------------------------------------------
# Training


def learning_rate(step: int, n_steps: int, peak: float) -> float:
    """Warm up linearly to `peak`, then fall to a fiftieth of it along a cosine."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, n_steps - WARM_UP_STEPS)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays the matrices, and leaves the weights of the RMSNorms alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, and how well it predicted the tokens that the context tells."""

    total: torch.Tensor
    recalled: torch.Tensor
    accuracy: torch.Tensor


def batch_loss(
    model: LlamaForCausalLM, tokens: torch.Tensor, is_recalled: torch.Tensor
) -> BatchLoss:
    """Mean loss on the recalled tokens, plus a little of the mean loss on the others."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    targets, told = tokens[:, 1:], is_recalled[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    recalled, others = losses[told].mean(), losses[~told].mean()
    accuracy = (logits.detach().argmax(-1) == targets)[told].float().mean()
    return BatchLoss(recalled + OTHER_TOKENS_WEIGHT * others, recalled.detach(), accuracy)


def train(
    model: LlamaForCausalLM, n_steps: int, seed: int, peak_learning_rate: float, device: str
) -> float:
    """Train `model` in place; return the mean loss on recalled tokens over the last 50 steps."""
    rng = random.Random(seed)
    optimizer = build_optimizer(model)
    every_layer = model.model.layers
    model.train()
    recent: list[float] = []
    for step in range(n_steps):
        stage = next(stage for stage in CURRICULUM if step < stage.until * n_steps)
        model.model.layers = torch.nn.ModuleList(every_layer[i] for i in stage.layers)
        tokens, is_recalled = training_batch(rng, stage)
        loss = batch_loss(model, tokens.to(device), is_recalled.to(device))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, n_steps, peak_learning_rate)
        optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        recent = [*recent[-49:], loss.recalled.item()]
        if step % 50 == 0 or step == n_steps - 1:
            print(
                f"step {step:5d}  length {stage.length:3d}  "
                f"recalled tokens: loss {loss.recalled:.4f}, accuracy {loss.accuracy:.3f}",
                flush=True,
            )
    return sum(recent) / len(recent)


# --------------------------------------------------------------------------------------------
# Evaluation and saving


@torch.no_grad()
def recall_is_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[RecallPrompt]
) -> list[bool]:
    """Whether, after each prompt, the likeliest token of the whole vocabulary is the answer."""
    model.eval()
    is_right: list[bool] = []
    for start in range(0, len(prompts), 100):
        batch = prompts[start : start + 100]
        inputs = tokenizer([p.text for p in batch], padding=True, return_tensors="pt")
        logits = model(**inputs.to(model.device)).logits
        last = inputs["attention_mask"].sum(dim=1) - 1  # the verb of the question
        predicted = logits[torch.arange(len(batch), device=model.device), last].argmax(-1)
        is_right += [
            token == TOKEN_IDS[p.answer] for token, p in zip(predicted.tolist(), batch, strict=True)
        ]
    return is_right


def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Accuracy on held-out demo prompts, in all and by the number of facts stated."""
    rng, sizes, prompts = random.Random(EVALUATION_SEED), [], []
    for _ in range(N_EVALUATION_PROMPTS):
        sizes.append(rng.randint(MIN_FACTS, MAX_FACTS))
        prompts.append(sample_prompt(rng, sizes[-1]))
    is_right = recall_is_right(model, tokenizer, prompts)
    by_facts: dict[str, float] = {}
    for n_facts in range(MIN_FACTS, MAX_FACTS + 1):
        of_size = [right for right, size in zip(is_right, sizes, strict=True) if size == n_facts]
        by_facts[str(n_facts)] = round(sum(of_size) / len(of_size), 4)
    return {
        "held_out_prompts": len(prompts),
        "held_out_seed": EVALUATION_SEED,
        "accuracy": round(sum(is_right) / len(is_right), 4),
        "accuracy_by_number_of_facts": by_facts,
    }


def rewrite_json(path: Path, changes: dict[str, object], drop: Sequence[str] = ()) -> None:
    """Set and drop top-level keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {key: value for key, value in content.items() if key not in drop} | changes
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save an ordinary Hugging Face checkpoint that transformers 4 and 5 read alike.

    The two write some names differently, and each reads the older one: so the older one is kept.
    """
    model.cpu().save_pretrained(out)
    tokenizer.save_pretrained(out)
    rewrite_json(
        out / "config.json",
        {"rope_theta": 10000.0, "rope_scaling": None},
        drop=["rope_parameters", "_name_or_path"],
    )
    rewrite_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
        drop=["name_or_path", "backend", "is_local"],
    )
    rewrite_json(
        out / "generation_config.json",
        {},
        drop=["_from_model_config", "output_attentions", "output_hidden_states"],
    )
    for file in out.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Train, evaluate, and save the checkpoint with a record of its training."""
    parser = argparse.ArgumentParser(description="Train the shipped in-context recall checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=2000, help="number of optimizer steps")
    parser.add_argument("--lr", type=float, default=8e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    parser.add_argument("--device", default="cpu", help="torch device to train on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads that torch may use")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model().to(arguments.device)
    start = time.perf_counter()
    final_loss = train(
        model, arguments.steps, arguments.seed, arguments.lr, device=arguments.device
    )
    wall_time = time.perf_counter() - start
    evaluation = evaluate(model, tokenizer)

    arguments.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, tokenizer, arguments.out)
    record = {
        **evaluation,
        "final_loss_on_recalled_tokens": round(final_loss, 5),
        "parameters": model.num_parameters(),
        "steps": arguments.steps,
        "peak_learning_rate": arguments.lr,
        "seed": arguments.seed,
        "device": arguments.device,
        "threads": arguments.threads,
        "training_seconds": round(wall_time, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    text = json.dumps(record, indent=2)
    (arguments.out / "training.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
