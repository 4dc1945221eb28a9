"""The tiny engine on the chip, from ulld to a client, against the cpu executor and against itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ull.client.sync import Client
from ull.spawn import DaemonProcess

ROOT = Path(__file__).parent.parent.parent
PROMPTS = (
    "def main() -> None:\n    ",
    "The quick brown fox",
    "import numpy as np\n\n\ndef softmax(",
    "class Stack:\n    def push(self, item):\n        ",
    "one two three one two three one two",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    ",
)
LONG = "\n".join(PROMPTS) * 4  # of 320 tokens: before another prompt it is read in a chunk, by heads too
TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHOICES = ["os", "sys", "re", "json", "os.path", "logging"]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    directory = tmp_path_factory.mktemp("engines")
    daemons, found = [], {}
    for target in ("cpu", "sm_90a"):
        bundle = directory / f"tiny-{target}.ull"
        tiny = ROOT / "engines/tiny"
        heads = ["--eagle", str(tiny / "eagle"), "--dflash", str(tiny / "dflash")]
        command = [sys.executable, "-m", "ull_build", f"{tiny}-medusa.toml", *heads, "--target", target]
        subprocess.run([*command, "--output", str(bundle), "--quiet", "--no-eval"], check=True)
        drafts_always = ("--set", "speculation.adaptive=false")
        daemons.append(DaemonProcess(bundle, ready_timeout=180.0, arguments=drafts_always))
        found[target] = Client(daemons[-1].url)
    yield found
    for client in found.values():
        client.close()
    for daemon in daemons:
        daemon.stop()


def complete(client: Client, prompt: str, **options: object) -> list[int]:
    return list(client.generate(prompt, max_tokens=TOKENS, seed=11, ignore_eos=True, **options).result().token_ids)  # type: ignore[arg-type]


SAMPLINGS = ({}, {"temperature": 0.8}, {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3})


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_chip_says_what_the_cpu_says(clients: dict[str, Client], sampling: dict[str, float]) -> None:
    """16-bit activations and another order of sums: a near tie may fall the other way, but rarely."""
    same = [
        complete(clients["cpu"], prompt, **sampling) == complete(clients["sm_90a"], prompt, **sampling)
        for prompt in PROMPTS
    ]
    assert sum(same) >= len(PROMPTS) - 1


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_speculation_changes_nothing(clients: dict[str, Client], sampling: dict[str, float]) -> None:
    client = clients["sm_90a"]
    for prompt in PROMPTS:
        plain = complete(client, prompt, speculate="none", **sampling)
        for drafter in ("suffix", "medusa", "eagle", "dflash", "auto"):
            assert complete(client, prompt, speculate=drafter, **sampling) == plain
            assert complete(client, prompt, speculate=drafter, max_tree=64, **sampling) == plain


@pytest.mark.parametrize("before", ["", LONG], ids=["", "behind a chunk"])
@pytest.mark.parametrize("drafter", ["medusa", "eagle", "dflash"])
def test_drafters_know_as_much_as_on_the_cpu(clients: dict[str, Client], drafter: str, before: str) -> None:
    """Tokens per round, of trees in every round: one that reads what is not its own is right about nothing."""
    found: dict[str, float] = {}
    for target, client in clients.items():
        tokens = rounds = 0
        for prompt in PROMPTS:
            options = {"max_tokens": TOKENS, "seed": 11, "ignore_eos": True, "speculate": drafter, "max_tree": 16}
            speculation = client.generate(before + prompt, **options).result().speculation  # type: ignore[arg-type]
            assert speculation is not None
            tokens, rounds = tokens + TOKENS, rounds + speculation.rounds
        found[target] = tokens / rounds
    assert found["cpu"] > 1.5 and found["sm_90a"] > 0.8 * found["cpu"]


def test_repeated_requests_are_bit_identical(clients: dict[str, Client]) -> None:
    client = clients["sm_90a"]
    first = complete(client, PROMPTS[0], temperature=0.8)
    assert all(complete(client, PROMPTS[0], temperature=0.8) == first for _ in range(5))


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_answers_have_the_form_whatever_drafts_them(clients: dict[str, Client], sampling: dict[str, float]) -> None:
    for prompt in PROMPTS:
        found = set()
        for drafter in ("none", "suffix", "medusa", "eagle", "dflash", "auto"):
            result = (
                clients["sm_90a"]
                .generate(prompt, json_schema=SCHEMA, max_tokens=64, seed=5, speculate=drafter, **sampling)
                .result()
            )
            answer = json.loads(result.text)
            assert list(answer) == ["name", "size"] and len(answer["name"]) <= 20 and 0 <= answer["size"] <= 99
            found.add(tuple(result.token_ids))
        assert len(found) == 1


def test_labels_are_as_likely_as_the_cpu_says(clients: dict[str, Client]) -> None:
    for prompt in PROMPTS:
        cpu, chip = (clients[target].generate(prompt, choices=CHOICES).result().choice for target in ("cpu", "sm_90a"))
        again = clients["sm_90a"].generate(prompt, choices=CHOICES).result().choice
        assert cpu is not None and chip is not None and again is not None
        assert again.logprobs == chip.logprobs
        assert chip.logprobs == pytest.approx(cpu.logprobs, rel=2e-3, abs=0.05)
