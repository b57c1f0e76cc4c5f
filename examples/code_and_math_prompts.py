# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Writes prompts about code and mathematics as dialogues for `hf-falcon prepare`: functions of Python's standard library
to complete or to explain, and word problems with random numbers. They have no answers: the target writes its own.

    python examples/code_and_math_prompts.py --output prompts.jsonl --code 1000 --math 1000
"""

import argparse
import ast
import json
import random
import sysconfig
from pathlib import Path

# Longer functions and docstrings make prompts that few users write.
LONGEST = 900
TASKS = (
    "Complete the code I provided.\n\n{stub}",
    "Complete the code I provided.\n{stub}",
    "Complete this Python function:\n\n{stub}",
    "{stub}\nWrite the body of this function.",
    "Write a Python function `{name}({arguments})`. {summary}",
    "What does this Python function do? Explain it step by step.\n\n{source}",
    "Write unit tests for this function.\n\n{source}",
)
NAMES = (
    "Amir Beth Carla Dimitri Elena Femi Grace Hiro Ines Jamal Kira Liam Maya Nadia Omar Priya Quinn Rosa Sam Tara "
    "Umar "
    "Vera Wes Ximena Yusuf Zoe"
).split()
THINGS = "apples books cards coins cookies eggs flowers marbles oranges pencils shells stamps stickers tickets".split()
PLACES = "bakery farm library market museum school shop station theatre zoo".split()
PROBLEMS = (
    "{name} has {a} {things}. {other} gives {name} {b} more, and {name} then gives away {c}. How many {things} are "
    "left?",
    "A {place} sells {things} for ${a} each. {name} buys {b} of them and pays with ${money}. How much change is "
    "there?",
    "{name} saves ${a} every week and {other} saves ${b} every week. How much have both saved together after {c} "
    "weeks?",
    "There are {a} boxes with {b} {things} each. {c} of all the {things} are broken. How many are not broken?",
    "{name} is {a} years older than {other}, who is {b}. How old will {name} be in {c} years?",
    "A train travels {a} miles an hour for {b} hours, then {c} miles an hour for {d} hours. How far does it go in "
    "all?",
    "{name} reads {a} pages on Monday, twice as many on Tuesday, and {b} fewer than on Tuesday on Wednesday. How many "
    "pages are that in three days?",
    "The {place} had {a} visitors in the morning and {percent}% more in the afternoon. How many visitors came that "
    "day?",
    "A shirt costs ${money}. In a sale it is {percent}% cheaper. {name} buys {b}. How much does {name} pay?",
    "{name} shares {product} {things} equally among {b} friends. How many does each friend get?",
    "A tank holds {product} litres. It empties at {b} litres a minute. After how many minutes is it empty?",
    "{name} earns ${a} an hour and works {b} hours a day, {d} days a week. What does {name} earn in {c} weeks?",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
    "{name} and {other} have {money} {things} together. {name} has {c} more than {other}. How many has each of them?",
    "The ratio of red to blue {things} is {d} to {e}. There are {product} blue ones. How many {things} are there?",
    "At the {place}, adults pay ${a} and children ${b}. {c} adults and {d} children come. What do they pay in total?",
    "{name} bakes {a} cakes. Each needs {b} eggs, and eggs come in packs of {c}. How many packs does {name} need?",
    "Half of the {product} {things} at the {place} are sold on the first day and {percent}% of the rest on the "
    "second. "
    "How many are left?",
    "What is {a} * {b} + {c}?",
    "Solve for x: {a}x + {b} = {money}.",
    "{name} runs {a} km in {c} minutes. How long does {name} need for {b} km at the same speed?",
    "The average of {d} numbers is {a}. Four of them are {b}, {c}, {e} and {a}. What is the sum of the others?",
    "If {things} cost ${a} a dozen, how much do {product} {things} cost?",
    "{name} spends {percent}% of ${product} on rent and ${b} on food. How much is left?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("--code", type=int, default=1000, help="prompts about code")
    parser.add_argument("--math", type=int, default=1000, help="prompts about mathematics")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    found = functions()
    chance.shuffle(found)
    prompts = [code_prompt(*function, chance) for function in found[: arguments.code]]
    prompts += [math_prompt(chance) for _ in range(arguments.math)]
    chance.shuffle(prompts)
    with arguments.output.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n")
    print(f"{arguments.output}: {len(prompts)} prompts")


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Functions of the standard library that have a docstring, each with its source."""
    found = []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.name.startswith("_"):
                source = ast.unparse(node)
                if 100 < len(source) <= LONGEST:
                    found.append((source, node))
    return found


def code_prompt(source: str, node: ast.FunctionDef, chance: random.Random) -> str:
    documentation = ast.get_docstring(node) or ""
    stub = ast.unparse(ast.FunctionDef(**{**vars(node), "body": node.body[:1], "decorator_list": []}))
    return chance.choice(TASKS).format(
        stub=f"{stub}\n",
        name=node.name,
        arguments=ast.unparse(node.args),
        summary=" ".join(documentation.split()),
        source=source,
    )


def math_prompt(chance: random.Random) -> str:
    name, other = chance.sample(NAMES, 2)
    a, b, c = (chance.randint(3, 60) for _ in range(3))
    d, e = (chance.randint(2, 9) for _ in range(2))
    return chance.choice(PROBLEMS).format(
        name=name,
        other=other,
        things=chance.choice(THINGS),
        place=chance.choice(PLACES),
        a=a,
        b=b,
        c=c,
        d=d,
        e=e,
        product=b * chance.randint(2, 30),
        money=chance.randint(60, 500),
        percent=5 * chance.randint(1, 19),
    )


if __name__ == "__main__":
    main()
