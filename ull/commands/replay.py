"""`ull replay`: runs the requests of a journal again, and names every token that differs."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from ull.client import Client
from ull.client.options import GenerateOptions
from ull.commands.connection import client_of
from ull.commands.outcome import EXIT_FAILED, complain
from ull.errors import ConfigError, JournalError, RequestError, RequestFailed
from ull.journal import Broken, ChainReader, Dropped, Grammar, Parameters, Place, Request, journal_files, open_journal
from ull.wire import InfoReply

_WHOLE = ("stop", "length")  # ends that the tokens decide; others cut an answer short
_MOST_SHOWN = 20  # differences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull replay`."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="of a journal, in order; a directory: all")
    parser.add_argument("--limit", type=int, metavar="N", help="most requests to run (default: all)")
    parser.add_argument("--drafter", metavar="DRAFTER", help="run all with this one: the tokens must be the same")
    parser.add_argument("--force", action="store_true", help="also where another bundle answers than the one recorded")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Runs `ull replay`; exit status 0 only if every token is the one that was recorded."""
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {options.limit}", "limit")
    files = journal_files(options.files)
    sizes = [_size_of(path) for path in files]  # the daemon may record here what it is asked for again
    with client_of(options) as client:
        info = client.info()
        drafters = info.limits["drafters"]
        if options.drafter is not None and options.drafter not in drafters:
            raise ConfigError(
                f"--drafter: {options.drafter!r} is not in this engine; it offers {', '.join(drafters)}", "drafter"
            )
        replay = Replay(client, info, options.drafter, force=options.force)
        try:
            replay.run(list(zip(files, sizes, strict=True)), options.limit)
        except Broken as stop:
            replay.broken = f"{stop.found.place}: {stop.found.what}: {stop.found.message}"
    report = replay.report()
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    if replay.broken is not None:
        complain(f"the chain is broken, and nothing behind that was run: {replay.broken}")
    return 0 if report["equal"] else EXIT_FAILED


class Replay:
    """Runs records again, one after the other, and keeps count. `drafter`: for all, instead of the recorded one."""

    def __init__(self, client: Client, info: InfoReply, drafter: str | None, *, force: bool) -> None:
        self.broken: str | None = None  # where the chain is
        self._client = client
        self._info = info
        self._drafter = drafter
        self._force = force
        self._counts: Counter[str] = Counter()
        self._differences: list[dict[str, Any]] = []
        self._executors: set[str] = set()  # of the records

    def run(self, files: Sequence[tuple[Path, int]], limit: int | None) -> None:
        """Runs the requests of files of so many bytes. Raises Broken; JournalError: another bundle has answered."""
        reader = ChainReader()
        for place, record in _requests(reader, files, self._counts):
            if self._counts["requests"] == limit:
                return
            if record.prompt is None or record.parameters is None:
                self._counts["never_ran"] += 1
                continue
            self._check_bundle(place, record)
            if reader.header is not None:
                self._executors.add(reader.header.executor)
            self._counts["requests"] += 1
            form: GenerateOptions = {}
            if record.grammar is not None:
                if (grammar := reader.grammars.get(record.grammar)) is None:
                    self._differs(place, record, error=f"its grammar {record.grammar} does not stand before it")
                    continue
                form = _form(grammar)
            self._compare(place, record, record.prompt, record.parameters, form)

    def report(self) -> dict[str, Any]:
        """What has become of all."""
        counts = self._counts
        return {
            "equal": not self._differences and self.broken is None,
            "requests": counts["requests"],
            "tokens": counts["tokens"],
            "prefixes": counts["prefixes"],
            "never_ran": counts["never_ran"],
            "dropped": counts["dropped"],
            "different": len(self._differences),
            "differences": self._differences[:_MOST_SHOWN],
            "broken": self.broken,
            "bundle": self._info.engine["digest"],
            "drafter": self._drafter,
            "executor": self._info.executor["name"],
            "recorded_executors": sorted(self._executors),
        }

    def _check_bundle(self, place: Place, record: Request) -> None:
        present = self._info.engine["digest"]
        if record.bundle != present and not self._force:
            raise JournalError(
                f"{place}: the bundle {record.bundle} has answered, this daemon serves {present}: "
                "replay on the same, or say --force",
                place.file,
            )

    def _compare(
        self, place: Place, record: Request, prompt: list[int], parameters: Parameters, form: GenerateOptions
    ) -> None:
        """Runs a record, and notes the first place where it differs."""
        expected, whole = record.completion, record.finish_reason in _WHOLE
        self._counts["prefixes"] += not whole
        if not whole and not expected:
            return  # it was cut before its first token
        most = parameters.max_tokens if whole else len(expected)
        try:
            options = self._options(parameters, most) | form
            if record.choices is not None:
                options |= {"choices": [label.text for label in record.choices], "max_tokens": None}
            result = self._client.generate(prompt, **options).result()
        except (RequestError, RequestFailed) as error:
            self._differs(place, record, error=f"{error.code}: {error.message}")
            return
        got = result.token_ids if whole else result.token_ids[: len(expected)]
        self._counts["tokens"] += len(expected)
        index = next((i for i, pair in enumerate(zip_longest(expected, got)) if pair[0] != pair[1]), None)
        if index is not None:
            one, other = _at(expected, index), _at(got, index)
            self._differs(
                place,
                record,
                index=index,
                expected=one,
                got=other,
                expected_text=self._text(one),
                got_text=self._text(other),
            )
        elif whole and result.finish_reason != record.finish_reason:
            self._differs(place, record, error=f"it ended with {result.finish_reason}, not {record.finish_reason}")
        elif whole and record.choice is not None:
            again = None if result.choice is None else result.choice.logprobs
            if again != record.choice.logprobs:
                self._differs(place, record, error=f"log-probabilities {record.choice.logprobs} are now {again}")

    def _options(self, parameters: Parameters, max_tokens: int) -> GenerateOptions:
        """All that decides the tokens, as it was; no limit of time, and nothing is held."""
        return {
            "max_tokens": max_tokens,
            "temperature": parameters.temperature,
            "top_k": parameters.top_k,
            "top_p": parameters.top_p,
            "min_p": parameters.min_p,
            "presence_penalty": parameters.presence_penalty,
            "frequency_penalty": parameters.frequency_penalty,
            "repetition_penalty": parameters.repetition_penalty,
            "seed": parameters.seed,
            "stop": parameters.stop,
            "stop_ids": parameters.stop_ids,
            "ignore_eos": parameters.ignore_eos,
            "logit_bias": parameters.logit_bias,
            "logprobs": parameters.logprobs,
            "priority": parameters.priority,
            "speculate": self._drafter or parameters.speculate,
            "max_tree": parameters.max_tree or None,
        }

    def _differs(self, place: Place, record: Request, **what: Any) -> None:
        self._differences.append({**place._asdict(), "client": record.client, "id": record.id, **what})

    def _text(self, token: int | None) -> str | None:
        if token is None:
            return None
        try:
            return self._client.detokenize([token], skip_special_tokens=False)
        except RequestError:  # of another vocabulary
            return None


def _requests(
    reader: ChainReader, files: Sequence[tuple[Path, int]], counts: Counter[str]
) -> Iterator[tuple[Place, Request]]:
    """The requests of a journal."""
    for path, size in files:
        for place, record in reader.read(path, size):
            if isinstance(record, Dropped):
                counts["dropped"] += record.records
            elif isinstance(record, Request):
                yield place, record


def _form(grammar: Grammar) -> GenerateOptions:
    """A recorded grammar as the option that it was."""
    value: Any = grammar.source
    if grammar.form == "json_schema":
        value = json.loads(grammar.source)
    elif grammar.form == "json_object":
        value = True
    return cast("GenerateOptions", {grammar.form: value})


def _size_of(path: Path) -> int:
    """Bytes of a journal. Raises JournalError for what is none."""
    with open_journal(path) as file:
        return os.fstat(file.fileno()).st_size


def _at(ids: list[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _print(report: dict[str, Any]) -> None:
    for item in report["differences"]:
        where = f"{item['file']}, line {item['line']}, record {item['sequence']} (request {item['id']})"
        if "error" in item:
            print(f"{where}: {item['error']}")
            continue
        one, other = (
            "the end" if item[name] is None else f"{item[name]} {item[f'{name}_text']!r}"
            for name in ("expected", "got")
        )
        print(f"{where}: token {item['index']} of the completion: recorded {one}, now {other}")
    if report["different"] > len(report["differences"]):
        print(f"... and {report['different'] - len(report['differences'])} more")
    said = [f"{report['requests']} requests", f"{report['tokens']} tokens"]
    said += [f"{report[key]} {words}" for key, words in (
        ("prefixes", "cut short and compared as far as they went"),
        ("never_ran", "that never ran left out"),
        ("dropped", "never recorded"),
    ) if report[key]]  # fmt: skip
    verdict = "all tokens are the same" if report["equal"] else f"{report['different']} requests differ"
    print(f"{', '.join(said)}: {verdict}")
    if others := set(report["recorded_executors"]) - {report["executor"]}:
        print(f"recorded on {', '.join(sorted(others))}, run again on {report['executor']}")
