"""What `bench` measures on, and how a file of prompts is read."""

from __future__ import annotations

SEPARATOR = "---"  # a line of its own between two prompts of a file

BUILT_IN = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    'import json\n\n\ndef load_config(path):\n    """Read settings from a JSON file."""\n    with open(path) as f:',
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):",
    "@dataclass\nclass Point:\n    x: float\n    y: float\n\n    def distance(self, other):",
    "def main():\n    parser = argparse.ArgumentParser(description=__doc__)\n    parser.add_argument(",
)


def split_prompts(text: str) -> list[str]:
    """The prompts of a file, separated by lines of three dashes; blank ones are left out."""
    prompts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.rstrip() == SEPARATOR:
            prompts.append([])
        else:
            prompts[-1].append(line)
    return [text for text in ("\n".join(lines) for lines in prompts) if text.strip()]
