"""The in-context recall task: the language of the shipped checkpoint, and its prompts.

A prompt states some facts, one sentence each, and then asks for one of them again::

    Alice likes green . Bob likes red . Carol likes blue . Bob likes

The next word is ``red``. Who likes what is drawn anew for every prompt, so that nothing but the
context tells the answer: a model has to look it up, with its attention heads.

``training/train_recall.py`` trains on sentences made here, and the demo asks prompts made here.
The module needs the standard library alone and imports nothing of this package.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES: tuple[str, ...] = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack"),
    *("Kate", "Leo", "Mary", "Nick", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina"),
    *("Umar", "Vera", "Will", "Xena", "Yuri", "Zoe", "Anna", "Ben", "Clara", "Dan"),
    *("Eva", "Felix"),
)

OBJECTS: dict[str, tuple[str, ...]] = {
    "likes": (
        *("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white"),
        *("grey", "gold", "silver", "violet", "crimson", "turquoise", "beige", "cyan", "magenta"),
        *("ivory", "maroon", "indigo", "olive", "amber"),
    ),
    "visits": (
        *("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Prague", "Lisbon", "Oslo"),
        *("Athens", "Dublin", "Warsaw", "Tokyo", "Delhi", "Cairo", "Lima", "Boston", "Chicago"),
        *("Sydney", "Toronto", "Havana", "Nairobi", "Seoul", "Jakarta"),
    ),
    "owns": (
        *("cats", "dogs", "horses", "sheep", "goats", "ducks", "geese", "rabbits", "parrots"),
        *("turtles", "snakes", "frogs", "mice", "hamsters", "ponies", "pigs", "cows", "bees"),
        *("owls", "hawks", "swans", "llamas", "camels", "lizards"),
    ),
    "eats": (
        *("apples", "pears", "plums", "grapes", "cherries", "lemons", "melons", "bananas"),
        *("bread", "cheese", "rice", "pasta", "soup", "honey", "nuts", "beans", "corn", "carrots"),
        *("onions", "peppers", "potatoes", "mushrooms", "olives", "eggs"),
    ),
}
"""What can follow each verb."""

VERBS: tuple[str, ...] = tuple(OBJECTS)

FULL_STOP = "."

BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"

VOCABULARY: tuple[str, ...] = (
    *(PAD, BOS, EOS, UNK, FULL_STOP),
    *NAMES,
    *VERBS,
    *(word for objects in OBJECTS.values() for word in objects),
)
"""Every token of the checkpoint's tokenizer, in the order of their ids."""

WORDS_PER_FACT = 4

MIN_FACTS, MAX_FACTS = 4, 12
"""How many facts a demo prompt states."""


@dataclass(frozen=True)
class Fact:
    """One sentence, such as ``Alice likes green .``"""

    name: str
    verb: str
    object: str

    def words(self) -> tuple[str, str, str, str]:
        """The four tokens of the sentence."""
        return (self.name, self.verb, self.object, FULL_STOP)


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt whose next word only its context tells.

    The positions count tokens of the tokenized prompt, ``<bos>`` (which the tokenizer prepends,
    and which is not in `text`) being position 0.
    """

    text: str
    """The prompt, one space between any two tokens; it ends with the verb of the question."""
    answer: str
    """The word that should come next: the object of the fact asked for."""
    n_facts: int
    """How many facts are stated before the question."""
    answer_position: int
    """Where the context holds the answer."""
    query_position: int
    """The last position: the verb of the question, after which the answer is predicted."""


def sample_facts(rng: random.Random, n_facts: int, *, mix_verbs: bool = False) -> list[Fact]:
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


def sample_prompt(rng: random.Random, n_facts: int) -> RecallPrompt:
    """State `n_facts` facts with one verb in common, and ask for one of them."""
    facts = sample_facts(rng, n_facts)
    asked = rng.randrange(n_facts)
    words = [word for fact in facts for word in fact.words()]
    words += [facts[asked].name, facts[asked].verb]
    return RecallPrompt(
        text=" ".join(words),
        answer=facts[asked].object,
        n_facts=n_facts,
        answer_position=WORDS_PER_FACT * asked + 3,
        query_position=len(words),
    )


def recall_prompts(n: int, seed: int, n_facts: int | None = None) -> list[RecallPrompt]:
    """Draw `n` prompts, the same ones for the same arguments.

    Each states `n_facts` facts, so that all the prompts are equally long; where `n_facts` is None,
    each draws its number of facts from `MIN_FACTS` to `MAX_FACTS`.
    """
    rng = random.Random(seed)
    return [
        sample_prompt(rng, rng.randint(MIN_FACTS, MAX_FACTS) if n_facts is None else n_facts)
        for _ in range(n)
    ]
