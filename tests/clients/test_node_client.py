"""The Node client: what people copy, and what only it can do. test_other_clients.py has the scenarios."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ull
from other_clients import NODE, node_package, run
from ull.endpoints import default_endpoint

SLOW = {"tokens": [65], "round_ns": 5_000_000, "context": 9000}  # of a script: a token takes five milliseconds


@pytest.fixture(scope="module")
def package() -> Path:
    return node_package()


def script(package: Path, name: str, url: str, body: str) -> list[str]:
    """The command of a program that has a client."""
    path = package / f"{name}.mjs"
    names = "Client, DisconnectedError, FailedError, ProtocolError, RefusedError, UllError, UsageError, defaultUrl"
    path.write_text(f'import {{ {names} }} from "ull-client";\nconst url = "{url}";\n{body}', encoding="utf-8")
    return ["node", str(path)]


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_an_abort_ends_the_request_and_rejects_with_its_reason(
    package: Path, spawn: Callable[..., Any], transport: str
) -> None:
    daemon = spawn(script=SLOW)
    body = f"""
const client = new Client(url, {{ transport: "{transport}" }});
const request = {{ prompt: "a", max_tokens: 4000, ignore_eos: true }};
const abort = new AbortController();
try {{
  for await (const tokens of client.generate(request, {{ signal: abort.signal }})) if (tokens.index > 2) abort.abort();
}} catch (error) {{ console.log(error.name); }}
const own = new AbortController();
const whole = client.complete(request, {{ signal: own.signal }});
setTimeout(() => own.abort(new Error("enough")), 50);
await whole.catch((error) => console.log(error.message));
const late = client.generate(request, {{ signal: AbortSignal.abort(new Error("before")) }});
await late.result().catch((error) => console.log(error.message));
const left = client.generate(request);
for await (const _ of left) break;
await left.result().catch((error) => console.log(error.code));
console.log((await client.complete({{ prompt: "c", max_tokens: 3 }})).finish_reason);
client.close();
"""
    found = run(script(package, "abort", daemon.url, body))
    assert found == ["AbortError", "enough", "before", "usage", "length"]
    finished = [event["finish"] for event in daemon.wait_events("request", 4)]
    assert sorted(finished) == ["cancelled", "cancelled", "cancelled", "length"]


def test_a_program_ends_once_nothing_is_waited_for(package: Path, shared_daemon: Any) -> None:
    """Over the local socket without close()."""
    body = """
const client = new Client(url);
console.log((await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
"""
    assert run(script(package, "ends", shared_daemon.url, body)) == ["length"]


def test_a_closed_client_ends_what_waits_and_refuses_the_rest(package: Path, spawn: Callable[..., Any]) -> None:
    daemon = spawn(script=SLOW)
    body = """
const client = new Client(url);
const stream = client.generate({ prompt: "a", max_tokens: 4000, ignore_eos: true });
await stream.next();
setTimeout(() => client.close(), 20);
await stream.result().catch((error) => console.log(error.code, error instanceof DisconnectedError));
try { client.generate({ prompt: "a" }); } catch (error) { console.log(error.code, error instanceof UsageError); }
"""
    assert run(script(package, "closed", daemon.url, body)) == ["disconnected true", "usage true"]


def test_what_cannot_be_sent_or_makes_no_sense_is_a_usage_error(package: Path, shared_daemon: Any) -> None:
    body = """
const client = new Client(url);
const tries = [
  () => client.generate({ prompt: () => 1 }),
  () => new Client(7),
  () => new Client(url, { transport: "pigeon" }),
  () => new Client(url, { silenceTimeout: 0 }),
];
for (const attempt of tries) try { attempt(); console.log("nothing"); } catch (error) { console.log(error.name); }
const session = await client.openSession();
await session.truncate({}).catch((error) => console.log(error.name));
console.log((await client.complete({ prompt: "c", max_tokens: 2, top_k: undefined, seed: null })).finish_reason);
console.log(typeof (await client.complete({ prompt: "c", max_tokens: 1 })).seed);
client.close();
"""
    assert run(script(package, "usage", shared_daemon.url, body)) == [*["UsageError"] * 5, "length", "number"]


def test_a_stream_that_nobody_holds_is_cancelled_and_one_reads_at_a_time(
    package: Path, spawn: Callable[..., Any]
) -> None:
    daemon = spawn(script=SLOW)
    body = """
const client = new Client(url);
await (async () => {
  const stream = client.generate({ prompt: "a", max_tokens: 100000, ignore_eos: true });
  await stream.next();
  const both = await Promise.allSettled([stream.next(), stream.next()]);
  console.log(both.map((each) => each.reason?.code ?? "read").join(" "));
})();
for (let i = 0; i < 100; ++i) {
  globalThis.gc();
  await new Promise((resolve) => setTimeout(resolve, 50));
  const { requests } = await client.stats();
  if (requests.finished.cancelled === 1) break;
}
console.log((await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
client.close();
"""
    node, path = script(package, "left", daemon.url, body)
    assert run([node, "--expose-gc", path]) == ["read usage", "length"]
    finished = [event["finish"] for event in daemon.wait_events("request", 2)]
    assert finished == ["cancelled", "length"]


def test_the_default_url_is_the_daemons(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        assert run(script(package, "url", "", "console.log(defaultUrl());")) == [default_endpoint()]


def test_the_example_is_cancelled_by_ctrl_c(package: Path, spawn: Callable[..., Any]) -> None:
    daemon = spawn()
    with ull.Client(daemon.url) as client:
        expected = client.generate("def add(first, second):\n", max_tokens=32).result().text
    command = ["node", str(package / "examples/complete.js")]
    found = subprocess.run(
        [*command, "def add(first, second):\n", daemon.url], text=True, capture_output=True, timeout=60
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, expected, "\n32 tokens, length\n")
    usage = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert usage.returncode == 2 and "usage: node complete.js PROMPT" in usage.stderr
    nobody = subprocess.run([*command, "x", "ipc:///nobody"], text=True, capture_output=True, timeout=60)
    assert nobody.returncode == 1 and nobody.stderr.startswith("complete: disconnected: ")


def test_the_examples_of_the_readme(package: Path, shared_daemon: Any) -> None:
    page = (NODE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```js\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        path = package / f"readme{number}.mjs"
        path.write_text(block.replace("ipc:///run/ull/ull.sock", shared_daemon.url), encoding="utf-8")
        assert run(["node", str(path)])
