"""The in-context recall task: the words of the shipped checkpoint, and its prompts.

A prompt states some facts, one sentence each, and then asks for one of them again::

    Alice likes green . Bob likes red . Carol likes blue . Bob likes

The next word is ``red``. Each prompt pairs names and objects at random, so the answer is only in
its context: a model has to look it up with its attention heads.

``training/train_recall.py`` makes the training sentences of the checkpoint from the same words.
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
"""The words that can follow each verb."""


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt whose next word can be known only from its context."""

    text: str  # with one space between any two tokens; it ends with the verb of the question
    answer: str  # the word that should come next: the object of the fact asked for
    answer_position: int  # the answer's position in the context; 0 is <bos>, not in `text`


def recall_prompts(n: int, seed: int, n_facts: int) -> list[RecallPrompt]:
    """Draw `n` prompts of `n_facts` facts each; equal arguments give equal prompts."""
    rng = random.Random(seed)
    return [sample_prompt(rng, n_facts) for _ in range(n)]


def sample_prompt(rng: random.Random, n_facts: int) -> RecallPrompt:
    """State facts about different names with one verb, and ask for one of them."""
    names = rng.sample(NAMES, n_facts)
    verb = rng.choice([*OBJECTS])
    objects = rng.sample(OBJECTS[verb], n_facts)
    asked = rng.randrange(n_facts)
    facts = [f"{name} {verb} {what} ." for name, what in zip(names, objects)]
    text = " ".join([*facts, names[asked], verb])
    # <bos> and then four tokens per fact: name, verb, object, full stop.
    return RecallPrompt(text, answer=objects[asked], answer_position=4 * asked + 3)
