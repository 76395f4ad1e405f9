"""What is asked: thirty prompts, and tasks whose answers are known.

All written for this purpose. A change makes older measurements incomparable, so VERSION counts.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Water boils at a lower temperature on a mountain because",
    "A short list of things to check before a long drive:\n1.",
    "def fibonacci(n):\n    ",
    "The main difference between a list and a tuple in Python is",
    "Dear customer,\nthank you for your letter. We are sorry that the",
    "Once upon a time a lighthouse keeper found a letter that",
    "To cook rice for two people, first",
    "The three states of matter that everybody knows are",
    "SELECT name, price FROM products WHERE",
    "In the year 1969 two astronauts",
    "The opposite of generous is",
    "If all cats are animals and Tom is a cat, then Tom is",
    "A good night's sleep helps because",
    "Translate to German: Good morning, my friend.\nGerman:",
    "Translate to French: The train leaves at eight.\nFrench:",
    "The seasons change because the axis of the Earth",
    'JSON with the keys "name" and "age" for Anna, who is 31:\n',
    "Photosynthesis turns light, water and carbon dioxide into",
    "Question: Which is heavier, a kilogram of iron or a kilogram of feathers?\nAnswer:",
    "The committee met on Tuesday to discuss the budget. In summary,",
    "The first ten prime numbers are",
    "A bicycle has two wheels, a tricycle has",
    "Rewrite politely: Give me the report now.\nPolite:",
    "The heart pumps blood through",
    "#include <stdio.h>\n\nint main(void) {\n",
    "My grandmother used to say that patience",
    "Monday, Tuesday, Wednesday,",
    "An email to a colleague who is ill:\nDear Sam,\n",
    "The moon looks bright at night although it",
)


@dataclass(frozen=True)
class Task:
    """A prompt with one right continuation: its first word must be `answer`."""

    prompt: str
    answer: str


def copy_tasks() -> tuple[Task, ...]:
    """Twenty numbers of 6 to 12 digits to be repeated, after two examples."""
    examples = "Number: 40317\nCopy: 40317\nNumber: 982264\nCopy: 982264\n"
    numbers = [_digits(seed, 6 + seed % 7) for seed in range(20)]
    return tuple(Task(f"{examples}Number: {number}\nCopy:", number) for number in numbers)


def arithmetic_tasks() -> tuple[Task, ...]:
    """Twenty sums and differences of small numbers, after three examples."""
    examples = "3 + 4 = 7\n15 - 6 = 9\n12 + 7 = 19\n"
    tasks: list[Task] = []
    for seed in range(20):
        one, two = 5 + seed * 17 % 43, 2 + seed * 11 % 29
        low, high = sorted((one, two))
        text, answer = (
            (f"{one} + {two}", one + two) if seed % 2 else (f"{high} - {low}", high - low)
        )
        tasks.append(Task(f"{examples}{text} =", str(answer)))
    return tuple(tasks)


def _digits(seed: int, count: int) -> str:
    """Digits without a pattern, the first not zero: a linear congruence, the same everywhere."""
    state, digits = seed * 2654435761 + 12345, ""
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        digits += str(state >> 16 & 0x7FFF)[-1]
    return digits if digits[0] != "0" else f"7{digits[1:]}"
