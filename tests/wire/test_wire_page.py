"""docs/wire.md against the source: every field with its default, every limit and every error code."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conftest import ROOT, Daemon
from ull import wire
from ull.client import Client
from ull.daemon import admission, grammars, sessions

PAGE = (ROOT / "docs/wire.md").read_text()

# Where on the page a struct's table stands: the heading, and the words before the table where the section has several.
PLACES: dict[type[msgspec.Struct], tuple[str, str]] = {
    wire.Generate: ("### generate", ""),
    wire.Tokenize: ("### tokenize", ""),
    wire.Detokenize: ("### detokenize", ""),
    wire.OpenSession: ("### open_session", ""),
    wire.Fork: ("### fork", ""),
    wire.Rollback: ("### rollback", ""),
    wire.Truncate: ("### truncate", ""),
    wire.CloseSession: ("### close_session", ""),
    wire.Commit: ("### commit", ""),
    wire.Cancel: ("### cancel", ""),
    wire.Health: ("### health", ""),
    wire.Info: ("### info", ""),
    wire.Stats: ("### stats", ""),
    wire.SetLog: ("### set_log", ""),
    wire.Trace: ("### trace", ""),
    wire.Upgrade: ("### upgrade", ""),
    wire.Message: ("## Chat and special tokens", ""),
    wire.Token: ("### token", ""),
    wire.PromptLogprobs: ("### prompt_logprobs", ""),
    wire.TokenLogprob: ("### token", "An entry of `logprobs`"),
    wire.Done: ("### done", ""),
    wire.Failure: ("### done", "\n`error`:"),
    wire.ToolCall: ("### done", "An entry of `tool_calls`"),
    wire.Usage: ("### done", "\n`usage`:"),
    wire.Choice: ("### done", "\n`choice`:"),
    wire.GrammarUse: ("### done", "\n`grammar`:"),
    wire.Timeline: ("### done", "\n`timeline`:"),
    wire.Speculation: ("### done", "\n`speculation`:"),
    wire.TokenizeReply: ("### tokenize answer", ""),
    wire.DetokenizeReply: ("### detokenize answer", ""),
    wire.SessionReply: ("### session", ""),
    wire.Error: ("### error", ""),
    wire.Ack: ("### ack", ""),
    wire.HealthReply: ("### health answer", ""),
    wire.InfoReply: ("### info answer", ""),
    wire.StatsReply: ("### stats answer", ""),
    wire.TraceReply: ("### trace answer", ""),
    wire.UpgradeReply: ("### upgrade answer", ""),
    wire.TracedRequest: ("### trace answer", "An entry of `requests`:"),
    wire.Histogram: ("### stats answer", "A histogram of `histograms`:"),
    admission.Limits: ("### info answer", "\n`limits`:"),
}
NOT_SENT = {wire.Prompted, wire.Ended, wire._Envelope}  # a base, and what stays inside the daemon


def section(heading: str) -> str:
    """The page from a heading to the next one of any level."""
    _, found, rest = PAGE.partition(f"\n{heading}\n")
    assert found, f"docs/wire.md has no heading {heading!r}"
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str) -> list[list[str]]:
    """The cells of the first table in `text`, without its head."""
    block = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert block, f"no table in {text[:80]!r}"
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in block[0].splitlines()[2:]]


def rows(struct: type[msgspec.Struct]) -> dict[str, list[str]]:
    """A struct's table, by field."""
    heading, words = PLACES[struct]
    text = section(heading)
    assert words in text, words
    return {row[0].strip("`"): row for row in table(text[text.index(words) :])}


def default_of(field: Any) -> str:
    """A field's default as the page writes it."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.UNSET:
        return "left out"
    if value is None:
        return "nil"
    return "{}" if isinstance(value, msgspec.Struct) else json.dumps(value)


def test_every_struct_of_the_wire_is_on_the_page() -> None:
    structs = {
        value for value in vars(wire).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)
    } - {msgspec.Struct}
    assert structs - NOT_SENT == set(PLACES) - {admission.Limits}


@pytest.mark.parametrize("struct", PLACES, ids=lambda struct: struct.__name__)
def test_fields_and_defaults(struct: type[msgspec.Struct]) -> None:
    expected = {field.encode_name: default_of(field) for field in msgspec.structs.fields(struct)}
    assert {name: row[2] for name, row in rows(struct).items()} == expected
    assert all(len(row) in (3, 4) for row in rows(struct).values())


def test_types() -> None:
    names = {int: "integer", float: "number", bool: "boolean", str: "text"}
    for struct in PLACES:
        for field in msgspec.structs.fields(struct):
            if field.type in names and field.name not in ("id", "token"):
                assert rows(struct)[field.encode_name][1] == names[field.type], (struct, field.name)


def test_ranges_and_limits() -> None:
    """Numbers that admission enforces stand in their field's row."""
    generate = rows(wire.Generate)
    for field, numbers in {
        "temperature": (admission.MIN_TEMPERATURE, admission.MAX_TEMPERATURE),
        "presence_penalty": (-admission.MAX_PENALTY, admission.MAX_PENALTY),
        "frequency_penalty": (-admission.MAX_PENALTY, admission.MAX_PENALTY),
        "repetition_penalty": (admission.MIN_REPETITION_PENALTY, admission.MAX_REPETITION_PENALTY),
        "stop": (admission.MAX_STOPS, admission.MAX_STOP_BYTES),
        "stop_ids": (admission.MAX_STOP_IDS,),
        "logit_bias": (admission.MAX_LOGIT_BIAS, -admission.MAX_BIAS, admission.MAX_BIAS),
        "logprobs": (admission.MAX_LOGPROBS,),
        "prompt_top_logprobs": (admission.MAX_PROMPT_TOP_LOGPROBS,),
        "timeout_ms": (admission.MAX_TIMEOUT_MS,),
        "deadline_ms": (admission.MAX_TIMEOUT_MS,),
        "max_tree": (admission.MAX_TREE,),
        "choices": (admission.MAX_CHOICES, admission.MAX_CHOICE_TOKENS),
    }.items():
        said = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", generate[field][3])
        assert not {f"{number:f}".rstrip("0").rstrip(".") for number in numbers} - set(said), field
    assert all(f"`{drafter}`" in generate["speculate"][3] for drafter in wire.DRAFTERS)
    assert all(f"`{priority}`" in generate["priority"][3] for priority in wire.PRIORITIES)
    waiting = f"most {sessions.MAX_WAITING} messages wait"
    assert waiting in " ".join(section("## Sessions").split())
    exact = " ".join(section("## Exact answers").split())
    assert all(
        f"`{field}`" in exact for field in (*admission._NOT_WITH_CHOICES, *grammars.FORMS) if "penalty" not in field
    )
    assert json.dumps(grammars.JSON_STYLE) in exact
    warnings = rows(wire.Done)["warnings"][3]
    assert f"first {wire.MAX_WARNINGS}," in warnings and f"{wire.MAX_WARNING_BYTES} bytes" in warnings
    assert f"{admission.MAX_ANSWER_BYTES >> 10} KiB: {admission.MAX_ANSWER_BYTES // 5} ids" in PAGE
    most = f"{wire._MAX_PROMPT_IDS:,} token ids, {wire._MAX_MESSAGES:,} messages and 1024 fields"
    assert most in " ".join(PAGE.split())


def codes_in(tree: ast.AST) -> set[str]:
    """The codes of the errors that a module raises for clients."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            place = {"RequestError": 0, "WireError": 0, "_raise": 1}.get(name)
            if place is not None and place < len(node.args):
                found |= texts_of(node.args[place])
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "code" for target in node.targets):
            found |= texts_of(node.value)
    return found


def texts_of(value: ast.expr) -> set[str]:
    """What texts an expression may be."""
    if isinstance(value, ast.IfExp):
        return texts_of(value.body) | texts_of(value.orelse)
    return {value.value} if isinstance(value, ast.Constant) and isinstance(value.value, str) else set()


def fixed_codes() -> set[str]:
    """The codes of RequestError's subclasses."""
    source = (ROOT / "ull/errors.py").read_text()
    return {
        code
        for code in re.findall(r'super\(\).__init__\("([a-z_]+)"', source)
        if re.search(rf'class \w+\(RequestError\):(?:(?!\nclass ).)*"{code}"', source, re.DOTALL)
    }


def test_every_code_that_a_daemon_sends() -> None:
    raised = fixed_codes()
    assert raised == {"busy", "draining", "deadline_unreachable", "forbidden", "invalid_grammar", "journal_unavailable"}
    rooms = (
        "daemon/admission",
        "daemon/control",
        "daemon/grammars",
        "daemon/sessions",
        "daemon/tools",
        "daemon/turns",
        "text/cut",
        "text/tokenizer",
    )
    for name in (*rooms, "coercion", "wire"):
        raised |= codes_in(ast.parse((ROOT / f"ull/{name}.py").read_text()))
    head, _, accepted = section("## Error codes").partition("Of `done.error`")
    assert {row[0].strip("`") for row in table(head)} == raised
    native = "".join(
        path.read_text() for room in ("engine", "io") for path in (ROOT / "ull/native" / room).glob("*.[ch]*")
    )
    constants = dict(re.findall(r'constexpr const char\* (k\w+) = "([a-z_]+)"', native))
    ended = {constants[name] for name in re.findall(r"FinishReason::k\w+, (k\w+),", native)}
    ended |= set(re.findall(r'error_code = "([a-z_]+)"', native))
    assert {row[0].strip("`") for row in table(accepted)} == ended


def test_finish_reasons_and_states() -> None:
    header = (ROOT / "ull/native/engine/request.h").read_text()
    reasons = set(re.findall(r'return "([a-z]+)";', header)) - {"none", "unknown", *wire.PRIORITIES} | {"tool_calls"}
    text = section("### done")
    found = table(text[text.index("| `finish_reason` | The") :])
    assert {row[0].strip("`") for row in found} == reasons
    states = set(re.findall(r"`([a-z_]+)`:", rows(wire.HealthReply)["status"][3]))
    assert states == {"ok", "journal_unavailable", "draining", "stalled", "failed"}


def test_every_type_of_message_has_its_section() -> None:
    for kind in wire._request_types:
        assert section(f"### {kind}")
    for struct in (wire.Token, wire.Done, wire.Error, wire.Ack, wire.SessionReply):
        assert section(f"### {struct.__struct_config__.tag}")


def test_every_field_of_info_and_stats(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        client.generate("x", max_tokens=4).result()
        info, stats = client.info(), client.stats()
    assert set(info.limits) == set(rows(admission.Limits))
    answers = {"info": {"engine": info.engine, "executor": info.executor}}
    answers["stats"] = {name: getattr(stats, name) for name in ("requests", "engine", "io")}
    for answer, maps in answers.items():
        text = section(f"### {answer} answer")
        for name, values in maps.items():
            named = re.findall(r"`(\w+)`", " ".join(row[0] for row in table(text[text.index(f"\n`{name}`:") :])))
            assert set(named) == set(values), f"{answer}.{name}"
    text = section("### stats answer")
    for name in {*stats.latency, *stats.latency["queue"], *stats.engine["round_ns"], *stats.io["delivery_ns"]}:
        assert f"`{name}`" in text
    for thread, figures in stats.threads.items():
        assert all(f"`{name}`" in text for name in (thread, *figures))
    assert {"computing", "io", "others", "avoid_cores", "cooperative"} == set(info.executor["placement"])


def test_the_exchange_is_of_the_wires_own_messages() -> None:
    lines = "".join(
        line[4:] for line in section("## A complete exchange").splitlines(keepends=True) if line[:4] == "    "
    )
    messages = [json.loads(part) for part in re.split(r"^(?:->|<-) ", lines, flags=re.MULTILINE) if part.strip()]
    first, *answers = messages
    assert wire.read_request(msgspec.msgpack.encode(first))[1] == []
    for answer in answers:
        reply = wire.decode_reply(msgspec.msgpack.encode(answer))
        assert msgspec.to_builtins(reply) == answer  # no field is missing, none is foreign
    assert [answer["type"] for answer in answers] == ["token"] * 3 + ["done"]


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= headings
    assert "(docs/wire.md)" in (ROOT / "README.md").read_text() and Path(ROOT / "docs/wire.md").is_file()
