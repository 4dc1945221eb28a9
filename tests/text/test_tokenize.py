"""`tokenize` and `detokenize`: the ids are a request's own, the text is its stream's, and they count as prompts do."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from control_rig import LONG, Harness
from ull import AsyncClient, Client, RequestError, _native, wire
from ull.bundle import open_bundle
from ull.daemon.admission import MAX_ANSWER_BYTES, Admission, Limits
from ull.daemon.control import IoMessage
from ull.text.tokenizer import Tokenizer
from ull.wire import Detokenize, Tokenize

MANY_LINES = "def main():\n" * 100  # tokenized in a worker
TEXTS = ["import os\n", "x", "naïve café 🐍 \u4e2d\u6587", "  leading", "<|endoftext|> in a text", MANY_LINES]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open the file."}]


@pytest.mark.parametrize("prompt", [*TEXTS, CHAT], ids=range(len(TEXTS) + 1))
def test_the_ids_are_those_of_a_generate(shared_daemon: Daemon, prompt: str | list[dict[str, str]]) -> None:
    with Client(shared_daemon.url) as client:
        ids = client.tokenize(prompt)
        given = client.generate(prompt, max_tokens=4, ignore_eos=True).result()
        by_ids = client.generate(ids, max_tokens=4, ignore_eos=True).result()
        assert given.usage.prompt_tokens == len(ids)
        assert by_ids.token_ids == given.token_ids
        reply = client._ask(Tokenize(id=1000, prompt="import os\n", count_only=True))
        assert reply == wire.TokenizeReply(id=1000, token_ids=[], count=len(client.tokenize("import os\n")))


def test_the_text_is_that_of_a_stream(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    with Client(shared_daemon.url) as client:
        limits = client.info().limits
        for seed in range(5):  # hot enough for bytes that are no characters
            result = client.generate("import ", max_tokens=64, temperature=50.0, seed=seed, ignore_eos=True).result()
            assert client.detokenize(result.token_ids) == result.text
        ids = client.tokenize("x")
        assert client.detokenize(ids) == "x"
        assert client.detokenize(ids, skip_special_tokens=False) != "x"
        assert client.detokenize([]) == ""
        assert client.tokenize("x", add_special_tokens=False) == ids[1:]
        rng = random.Random(1)
        ids = [rng.randrange(limits["vocabulary"]) for _ in range(limits["context"])]
        stream = _native.Detokenizer(str(open_bundle(tiny_bundle).vocabulary_path), [])
        assert client.detokenize(ids) == stream.feed(ids) + stream.finish()


def test_the_asynchronous_client(shared_daemon: Daemon) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.url) as client:
            ids = await client.tokenize("import os\n")
            assert await client.detokenize(ids) == "import os\n"
            assert await client.detokenize(await client.tokenize(MANY_LINES)) == MANY_LINES
            assert len(await client.tokenize(CHAT)) > 8
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await client.detokenize([10**9])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.tokenize(""), "prompt"),
        (lambda client: client.tokenize("x " * 100_000), "prompt"),
        (lambda client: client.tokenize([]), "messages"),
        (lambda client: client.tokenize([{"role": "user"}]), "messages"),
        (lambda client: client.tokenize([1, 2]), "prompt"),
        (lambda client: client.detokenize(["x"]), "token_ids"),
        (lambda client: client.detokenize([-1]), "token_ids"),
        (lambda client: client.detokenize([1] * 100_000), "token_ids"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    shared_daemon: Daemon, ask: Callable[[Client], object], field: str
) -> None:
    with Client(shared_daemon.url) as client:
        with pytest.raises(RequestError) as caught:
            ask(client)
        assert caught.value.field == field
        assert client.detokenize([]) == ""


def test_an_answer_has_a_most(tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory)
    limits = Limits(context=1 << 20, vocabulary=tokenizer.vocabulary, default_max_tokens=1, max_tokens=1)
    admission = Admission(tokenizer, limits, [])
    text = "x = 1\n" * 20_000
    count = len(tokenizer.encode(text))
    assert count * 5 > MAX_ANSWER_BYTES
    with pytest.raises(RequestError, match=f"{count} ids; an answer holds {MAX_ANSWER_BYTES // 5}: send count_only"):
        admission.convert(Tokenize(id=1, prompt=text))
    assert admission.convert(Tokenize(id=1, prompt=text, count_only=True)) == wire.TokenizeReply(
        id=1, token_ids=[], count=count
    )
    ids = tokenizer.encode("import " * 1000, add_special_tokens=False) * 100
    with pytest.raises(RequestError, match="700000 bytes; an answer holds 262144: send them in parts"):
        admission.convert(Detokenize(id=1, token_ids=ids))


def test_long_ones_count_into_the_clients_share(tmp_path: Path) -> None:
    harness = Harness(tmp_path)  # a share of one
    gate = threading.Event()
    convert = harness.plane._admission.convert

    def gated(request: Tokenize | Detokenize) -> wire.TokenizeReply | wire.DetokenizeReply:
        assert not (isinstance(request, Tokenize) and request.prompt == LONG) or gate.wait(20)
        return convert(request)

    harness.plane._admission.convert = gated  # type: ignore[method-assign]

    async def body() -> None:
        harness.send(Tokenize(id=1, prompt=LONG))
        harness.send(Tokenize(id=1, prompt=LONG))
        harness.send(Detokenize(id=2, token_ids=[5] * 2000))
        harness.send(wire.Generate(id=3, prompt=LONG))
        harness.send(wire.Health(id=4, request=1))
        harness.send(Tokenize(id=5, prompt="x"))  # a short one is answered at once
        replies: dict[int | None, Any] = {}
        for _ in range(5):
            reply = await harness.reply()
            replies[reply.id] = reply
        codes = [getattr(replies[index], "code", "") for index in range(1, 6)]
        assert codes == ["duplicate_id", "busy", "busy", "", ""]
        assert replies[4].live is True
        assert replies[5].count == 2  # BOS and one more
        gate.set()
        answer = await harness.reply()
        assert isinstance(answer, wire.TokenizeReply)
        assert answer.count == len(answer.token_ids) > 1000
        harness.send(Detokenize(id=1, token_ids=answer.token_ids))  # the share is free again, and so is the id
        assert await harness.reply() == wire.DetokenizeReply(id=1, text=LONG)
        assert harness.plane.live == 0

    harness.run(body)


def test_a_hang_up_and_a_cancel_while_it_is_converted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)

    async def body() -> None:
        harness.send(Tokenize(id=1, prompt=LONG), identity=b"me")
        harness.send(wire.Cancel(id=1))
        harness.send_frames(IoMessage.GONE, b"me")
        assert await harness.reply() == wire.Ack(id=1, known=True)
        assert isinstance(await harness.reply(), wire.TokenizeReply)  # the io thread throws away what is for nobody
        await harness.until(lambda: harness.plane.live == 0)
        harness.plane.draining = True
        harness.send(Tokenize(id=2, prompt="x"))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and reply.code == "draining"

    harness.run(body)


def test_unknown_fields_reach_the_done_frame(shared_daemon: Daemon, tmp_path: Path) -> None:
    with Client(shared_daemon.url) as client:
        assert client.generate("x", max_tokens=1).result().warnings == []
        state = client._protocol.open_stream(wire.Generate(id=77, prompt="x"))
        messages = [{"role": "user", "content": "x", "colour": 1}]
        fields = {"type": "generate", "id": 77, "max_token": 3, "messages": messages, "max_tokens": 2}
        client._send(wire._encoder.encode(fields), state)
        while not state.finished:
            assert client.poll(20)
        assert state.result().warnings == ["max_token", "messages[0].colour"]
        assert len(state.result().token_ids) == 2


def test_a_drawn_seed_is_exact_in_every_language(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        seeds = {client.generate("x", max_tokens=1, temperature=1.0).result().seed for _ in range(20)}
        assert len(seeds) == 20 and max(seeds) < 2**53
        assert max(seeds) > 2**40
        given = client.generate("x", max_tokens=1, seed=2**64 - 1).result()
        assert given.seed == 2**64 - 1
