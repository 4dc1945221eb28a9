"""Speculation through the daemon: whoever drafts, the same tokens; what is asked in vain is refused at admission."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ull
from conftest import ROOT, Daemon, Spawn
from processes import ull as ull_command
from processes import ulld
from ull.client.protocol import Result
from ull.client.sync import Client
from ull.wire import DRAFTERS, Speculation

HELD_OUT = (ROOT / "engines/tiny/heldout.txt").read_text()
PROMPT = HELD_OUT[: HELD_OUT.index("class TopologicalSorter")].rstrip()
REPEATING = "\n".join(["        self.lineno = 1"] * 8)
CHAIN = [name for name in DRAFTERS if name != "none"]

# Everything that shapes a completion; each must come out the same whoever drafts.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 1},
    "hot": {"temperature": 1.5, "seed": 2},
    "top-k": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.7, "seed": 4},
    "min-p": {"temperature": 1.0, "min_p": 0.1, "seed": 5},
    "all filters": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    "bias": {"temperature": 0.8, "seed": 7, "logit_bias": {5: 2.0, 300: -math.inf, 77: 3.5}},
    "greedy bias": {"logit_bias": {300: -5.0, 77: 4.0}},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "sampled penalties": {"temperature": 0.8, "seed": 10, "repetition_penalty": 1.3, "frequency_penalty": -0.2},
    "logprobs": {"temperature": 0.8, "seed": 8, "logprobs": 5},
    "greedy logprobs": {"logprobs": 20},
    "end of text": {"temperature": 1.3, "seed": 9, "ignore_eos": False},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


def complete(client: Client, prompt: Any, drafter: str | None, **options: Any) -> Result:
    defaults = {"max_tokens": 60, "ignore_eos": True, "seed": 0}
    return client.generate(prompt, speculate=drafter, **(defaults | options)).result()


def check_same(result: Result, plain: Result) -> None:
    """Everything that a client can see of the completion, logprobs to the last bit; only the rounds may differ."""
    for name in ("token_ids", "text", "finish_reason", "seed", "logprobs"):
        assert getattr(result, name) == getattr(plain, name), name
    assert result.usage.completion_tokens == plain.usage.completion_tokens == len(plain.token_ids)


def check_adds_up(result: Result) -> None:
    """The figures of `done.speculation` agree with each other and with the completion."""
    rounds, tokens = result.speculation, result.usage.completion_tokens
    assert sum(rounds.by_drafter.values()) == rounds.rounds
    assert rounds.tokens_per_round == pytest.approx(tokens / rounds.rounds)
    assert 0 <= rounds.accepted_tokens <= rounds.drafted_tokens
    assert sum(rounds.accepted_by_depth) == rounds.accepted_tokens
    assert rounds.accepted_by_depth == sorted(rounds.accepted_by_depth, reverse=True)
    drafted_rounds = rounds.rounds - rounds.by_drafter.get("none", 0)
    assert not rounds.accepted_by_depth or rounds.accepted_by_depth[0] <= drafted_rounds
    # A round emits what it accepted and one token more; the last may be cut by max_tokens or a stop.
    assert rounds.accepted_tokens + rounds.rounds >= tokens


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with Client(shared_daemon.url) as client:
        yield client


def test_the_tiny_engine_has_every_drafter(client: Client) -> None:
    info = client.info()
    assert list(info.limits["drafters"]) == list(DRAFTERS)
    assert info.limits["default_drafter"] == "auto"
    assert info.limits["max_tree"] == 64
    sizes = ["1", "2", "4", "8", "16", "32", "64"]
    assert list(info.executor["verify_ns"]) == sizes
    assert all(cost > 0 for cost in info.executor["verify_ns"].values())
    assert {"medusa", "eagle", "dflash", "draft"} <= info.executor["draft_ns"].keys()
    for what in ("weight_bytes", "kv_bytes"):
        assert info.executor[what] > info.executor[f"drafter_{what}"] > 0


@pytest.mark.parametrize("drafter", CHAIN)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_same_completion(client: Client, name: str, drafter: str) -> None:
    for prompt in (PROMPT, REPEATING):
        plain = complete(client, prompt, "none", **REQUESTS[name])
        result = complete(client, prompt, drafter, **REQUESTS[name])
        check_same(result, plain)
        check_adds_up(result)
        assert plain.speculation.by_drafter == {"none": len(plain.token_ids)}
        assert set(result.speculation.by_drafter) <= (
            {*DRAFTERS} - {"auto"} if drafter == "auto" else {drafter, "none"}
        )


@pytest.mark.parametrize("drafter", CHAIN)
def test_every_tree_size_gives_the_same_completion(client: Client, drafter: str) -> None:
    for temperature in (0.0, 0.9):
        plain = complete(client, PROMPT, "none", temperature=temperature, seed=5)
        for max_tree in (1, 2, 3, 5, 8, 17, 63, 64):
            result = complete(client, PROMPT, drafter, temperature=temperature, seed=5, max_tree=max_tree)
            check_same(result, plain)
            rounds = result.speculation
            assert rounds.drafted_tokens <= rounds.rounds * (max_tree - 1)
            assert len(rounds.accepted_by_depth) <= max_tree - 1


@pytest.mark.parametrize("drafter", CHAIN)
def test_stop_texts_and_ids_cut_at_the_same_place(client: Client, drafter: str) -> None:
    plain = complete(client, PROMPT, "none", temperature=0.8, seed=11)
    for start in (3, len(plain.text) // 2, len(plain.text) - 6):
        stop = plain.text[start : start + 5]
        expected = complete(client, PROMPT, "none", temperature=0.8, seed=11, stop=stop)
        assert expected.finish_reason == "stop"
        check_same(complete(client, PROMPT, drafter, temperature=0.8, seed=11, stop=stop), expected)
    for place in (0, 1, 20):
        stop_ids = [plain.token_ids[place]]
        expected = complete(client, PROMPT, "none", temperature=0.8, seed=11, stop_ids=stop_ids)
        check_same(complete(client, PROMPT, drafter, temperature=0.8, seed=11, stop_ids=stop_ids), expected)


@pytest.mark.parametrize("drafter", CHAIN)
def test_the_context_s_end(client: Client, drafter: str) -> None:
    ids = [200 + index % 7 for index in range(1000)]  # repeats itself: every drafter is confident up to the last token
    plain = complete(client, ids, "none", max_tokens=200)
    result = complete(client, ids, drafter, max_tokens=200)
    assert (plain.finish_reason, len(plain.token_ids)) == ("length", 24)
    check_same(result, plain)


@pytest.mark.parametrize("drafter", CHAIN)
def test_every_prompt_length_around_a_page(client: Client, drafter: str) -> None:
    for count in (1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129):
        ids = [300 + 7 * index % 50 for index in range(count)]
        plain = complete(client, ids, "none", max_tokens=20, temperature=0.7, seed=count)
        check_same(complete(client, ids, drafter, max_tokens=20, temperature=0.7, seed=count), plain)


@pytest.mark.parametrize("drafter", CHAIN)
def test_the_next_turn_reuses_what_was_accepted(spawn: Spawn, drafter: str) -> None:
    """Rejected drafts leave no trace in the cache that the next turn continues from; nor does a drafter in between."""
    cold = spawn("--set", "engine.prefix_cache=false")
    warm = spawn()
    with Client(cold.url) as fresh, Client(warm.url) as client:
        conversation: list[int] = [200 + index % 50 for index in range(150)]
        for turn, name in enumerate((drafter, "none", drafter, "draft", drafter)):
            result = complete(client, conversation, name, max_tokens=40, temperature=0.8, seed=turn)
            check_same(result, complete(fresh, conversation, "none", max_tokens=40, temperature=0.8, seed=turn))
            if turn:
                assert result.usage.cached_tokens >= len(conversation) - 70
            conversation += [*result.token_ids, 17, 18, 19]


def test_queued_and_mixed_requests(client: Client, shared_daemon: Daemon) -> None:
    cases = [(prompt, seed) for prompt in (PROMPT, REPEATING) for seed in range(3)]
    plain = {
        case: complete(client, case[0], "none", temperature=0.8, seed=case[1], max_tokens=40).token_ids
        for case in cases
    }
    with Client(shared_daemon.url) as other:
        streams = []
        for index, drafter in enumerate([*DRAFTERS, None] * 3):
            prompt, seed = case = cases[index % len(cases)]
            sender = client if index % 2 else other
            options = {"temperature": 0.8, "seed": seed, "max_tokens": 40, "ignore_eos": True}
            streams.append((case, sender.generate(prompt, speculate=drafter, **options)))
        for case, stream in streams:
            assert stream.result().token_ids == plain[case]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_comes_between_changes_nothing(client: Client, shared_daemon: Daemon, drafter: str) -> None:
    """A request that is suspended again and again: by other drafters, other parameters, and its own text."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    others = [(REPEATING, name, index) for index, name in enumerate(DRAFTERS)] + [(PROMPT, "none", 7)]
    suspended = client.stats().engine["suspensions"]
    for option in options:
        plain = complete(client, PROMPT, "none", max_tokens=400, **option).token_ids
        expected = [complete(client, text, "none", temperature=0.8, seed=seed).token_ids for text, _, seed in others]
        with Client(shared_daemon.url) as urgent:
            stream = client.generate(
                PROMPT, max_tokens=400, ignore_eos=True, speculate=drafter, priority="batch", **option
            )
            for (text, name, seed), tokens in zip(others, expected, strict=True):
                next(stream, None)
                between = complete(urgent, text, name, temperature=0.8, seed=seed, priority="realtime")
                assert between.token_ids == tokens
            assert stream.result().token_ids == plain
    assert client.stats().engine["suspensions"] > suspended


def test_prefill_chunks_do_not_matter(spawn: Spawn) -> None:
    completions = set()
    for chunk in (7, 64, 256):
        with Client(spawn("--set", f"engine.prefill_chunk={chunk}").url) as client:
            for drafter in DRAFTERS:
                completions.add(tuple(complete(client, PROMPT, drafter, temperature=0.8, seed=3).token_ids))
    assert len(completions) == 1


def test_a_cancelled_request_leaves_the_next_one_alone(client: Client) -> None:
    plain = complete(client, PROMPT, "none")
    for drafter in CHAIN:
        with client.generate(PROMPT, max_tokens=500, ignore_eos=True, speculate=drafter) as stream:
            next(stream)
        check_same(complete(client, PROMPT, drafter), plain)


def test_speculation_saves_rounds(spawn: Spawn) -> None:
    """Less than half as many rounds as tokens where the text repeats itself and drafting always pays."""
    daemon = spawn("--set", "speculation.adaptive=false")
    ids = [500, 600, 700, 800] * 30
    bias = dict.fromkeys((500, 600, 700, 800), 50.0)  # nothing else can come
    with Client(daemon.url) as client:
        result = complete(client, ids, "suffix", max_tokens=200, logit_bias=bias)
        check_same(result, complete(client, ids, "none", max_tokens=200, logit_bias=bias))
    assert result.speculation.by_drafter["suffix"] > 0
    assert result.speculation.rounds < 100


def test_not_adaptive_drafts_in_every_round(spawn: Spawn, tmp_path: Path) -> None:
    """Whatever it costs here: the bits of none, and as plain rounds only those that have nothing to draft."""
    file = tmp_path / "always.toml"
    file.write_text("[speculation]\nadaptive = false\n")
    daemon = spawn("--config", str(file))
    tokens = 40
    with Client(daemon.url) as client:
        assert client.info().executor["adaptive"] is False
        assert client.stats().speculation["adaptive"] is False
        for sampling in ({}, {"temperature": 0.8, "seed": 4}, {"logprobs": 3}):
            plain = complete(client, REPEATING, "none", max_tokens=tokens, **sampling)
            for drafter in CHAIN:
                for max_tree in (2, 16, None):
                    result = complete(client, REPEATING, drafter, max_tokens=tokens, max_tree=max_tree, **sampling)
                    check_same(result, plain)
                    check_adds_up(result)
                    rounds = result.speculation
                    drafted = rounds.rounds - rounds.by_drafter.get("none", 0)
                    if drafter == "suffix":  # only where the last tokens have occurred before
                        assert rounds.by_drafter["suffix"] == drafted > 0
                    else:  # the first reads the prompt's end, the last may need one token
                        assert drafted >= rounds.rounds - 2
                    if drafter in ("medusa", "draft") and max_tree == 2:
                        assert rounds.drafted_tokens == drafted
    assert ull_command("inspect", daemon.url).stdout.count("in every round (speculation.adaptive is false)") == 1


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"speculate": "medussa"}, "speculate", "did you mean 'medusa'?"),
        ({"speculate": "hydra"}, "speculate", "'hydra' is no drafter"),
        ({"speculate": ""}, "speculate", "is no drafter"),
        ({"max_tree": 0}, "max_tree", "from 1"),
        ({"max_tree": 65}, "max_tree", "to 64 tokens, not 65"),
        ({"max_tree": -1}, "max_tree", "not -1"),
        ({"max_tree": 2**62}, "max_tree", "to 64 tokens"),
    ],
)
def test_bad_requests_are_refused_at_admission(client: Client, fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ull.RequestError, match=said.replace("?", r"\?")) as caught:
        client.generate(PROMPT, **fields).result()
    assert (caught.value.code, caught.value.field) == ("bad_request", field)
    assert complete(client, PROMPT, "auto", max_tokens=3).finish_reason == "length"


def plain_bundle(directory: Path) -> Path:
    """The tiny engine without any learned drafter."""
    from ull_build.build import build
    from ull_build.recipe import load_recipe
    from ull_build.settings import settings_from_recipe

    recipe = directory / "plain.toml"
    recipe.write_text(f'model = "{ROOT / "engines/tiny"}"\nprecision = "fp8"\n')
    output = {"output": str(directory / "plain.ull")}
    return build(settings_from_recipe(load_recipe(recipe, output), evaluate=False)).path


def test_a_bundle_without_learned_drafters(spawn: Spawn, tmp_path: Path) -> None:
    bundle = plain_bundle(tmp_path)
    daemon = spawn(bundle=bundle)
    with Client(daemon.url) as client:
        info = client.info()
        assert list(info.limits["drafters"]) == ["none", "suffix", "auto"]
        assert info.limits["default_drafter"] == "auto"
        for drafter in ("medusa", "draft"):
            with pytest.raises(ull.RequestError, match="it offers none, suffix, auto") as caught:
                client.generate(PROMPT, speculate=drafter).result()
            assert (caught.value.code, caught.value.field) == ("bad_request", "speculate")
        plain = complete(client, REPEATING, "none")
        assert plain.speculation.by_drafter == {"none": len(plain.token_ids)}
        for drafter in ("suffix", "auto"):
            check_same(complete(client, REPEATING, drafter), plain)
    for drafter, said in (
        ("medusa", "it offers none, suffix, auto"),
        ("magic", "must be one of bundle, none, suffix, medusa, eagle, dflash, draft, auto"),
    ):
        outcome = ulld(str(bundle), "--listen", f"ipc://{tmp_path}/sock", "--set", f"speculation.default={drafter}")
        assert (outcome.returncode, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)
        assert "speculation.default" in outcome.stderr and said.lower() in outcome.stderr.lower()


def test_the_configured_drafter_is_the_default(spawn: Spawn) -> None:
    daemon = spawn("--set", "speculation.default=suffix", "--set", "speculation.max_tree=4")
    with Client(daemon.url) as client:
        assert client.info().limits["default_drafter"] == "suffix"
        result = complete(client, REPEATING, None)
        assert set(result.speculation.by_drafter) <= {"suffix", "none"}
        assert result.speculation.drafted_tokens <= 3 * result.speculation.rounds


def test_stats_and_the_log_agree_with_the_done_frames(spawn: Spawn) -> None:
    daemon = spawn()
    with Client(daemon.url) as client:
        results = [complete(client, REPEATING, drafter) for drafter in DRAFTERS]
        lines = daemon.wait_events("request", len(results))
        total = client.stats().speculation
    for name in ("rounds", "drafted_tokens", "accepted_tokens"):
        assert total[name] == sum(getattr(result.speculation, name) for result in results)
    assert sum(total["by_drafter"].values()) == total["rounds"]
    assert total["verify_ns"]["1"] > 0
    for line, result in zip(lines, results, strict=True):
        assert line["tokens_per_round"] == pytest.approx(result.speculation.tokens_per_round, rel=1e-3)


def test_a_request_that_never_ran_has_no_rounds(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 5_000_000})
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000)
        next(running)
        assert client.generate([5], max_tokens=5, timeout=0.05).result().speculation == Speculation()
        running.cancel()
        result = running.result()
    rounds = len(result.token_ids)
    assert result.speculation == Speculation(rounds=rounds, tokens_per_round=1.0, by_drafter={"none": rounds})


# ---- the command line ---------------------------------------------------------------------------------------------


def test_generate_takes_a_drafter(shared_daemon: Daemon) -> None:
    command = ["generate", REPEATING, "--connect", shared_daemon.url, "--max-tokens", "40", "--ignore-eos", "--json"]
    plain = json.loads(ull_command(*command, "--speculate", "none").stdout)
    drafted = json.loads(ull_command(*command, "--speculate", "suffix", "--max-tree", "8").stdout)
    assert drafted["token_ids"] == plain["token_ids"]
    assert msgspec.convert(drafted["speculation"], Speculation).rounds <= plain["speculation"]["rounds"] == 40
    assert set(drafted["speculation"]["by_drafter"]) <= {"suffix", "none"}


def test_refusals_on_the_command_line_are_one_line(shared_daemon: Daemon) -> None:
    for command in (["generate", PROMPT], ["bench", "--requests", "1"]):
        for option, said in ((["--speculate", "suffixx"], "did you mean 'suffix'?"), (["--max-tree", "65"], "not 65")):
            outcome = ull_command(*command, "--connect", shared_daemon.url, *option)
            assert (outcome.returncode, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)
            assert said in outcome.stderr


def test_chat_takes_a_drafter(shared_daemon: Daemon) -> None:
    command = ["chat", "--connect", shared_daemon.url, "--max-tokens", "16"]
    answers = [ull_command(*command, "--speculate", name, stdin="write a loop\nagain\n").stdout for name in DRAFTERS]
    assert len(set(answers)) == 1 and answers[0].strip()


def test_bench_reports_speculation(shared_daemon: Daemon) -> None:
    command = ["bench", "--connect", shared_daemon.url, "--requests", "4", "--max-tokens", "32", "--prompt", REPEATING]
    report = json.loads(ull_command(*command, "--speculate", "suffix", "--json").stdout)
    assert (report["load"]["speculate"], report["load"]["max_tree"]) == ("suffix", None)
    speculation = report["summary"]["speculation"]
    assert speculation["tokens_per_round"] == pytest.approx(4 * 32 / speculation["rounds"], rel=1e-3)
    assert sum(speculation["share_by_drafter"].values()) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in speculation["acceptance_by_depth"])
    plain = json.loads(ull_command(*command, "--speculate", "none", "--json").stdout)["summary"]["speculation"]
    assert (plain["tokens_per_round"], plain["share_by_drafter"], plain["acceptance_by_depth"]) == (1, {"none": 1}, [])
    table = ull_command(*command).stdout
    assert "tokens/round; rounds by drafter:" in table
    assert json.loads(ull_command(*command, "--json").stdout)["load"]["speculate"] == "auto"
