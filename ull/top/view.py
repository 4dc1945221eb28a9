"""The frame that `ull top` shows: at least 80 columns and 24 rows."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ull import wire
from ull.top.figures import History, Look, duration

_COLOURS = {"ok": "green", "draining": "yellow", "stalled": "red", "failed": "red", "journal_unavailable": "red"}


def frame(url: str, look: Look | None, history: History, info: wire.InfoReply | None, gpu: Mapping[str, str]) -> Group:
    """All of it. look: None while the daemon does not answer."""
    if look is None or info is None:
        return Group(_head(url, None, info), Text("\nunreachable, trying again", style="bold red"))
    return Group(
        _head(url, look, info),
        _stream(look, history),
        _requests(look),
        _engine(look, history),
        *([_gpu(gpu)] if gpu else []),
        Text("q or Ctrl-C ends", style="dim"),
    )


def _head(url: str, look: Look | None, info: wire.InfoReply | None) -> Text:
    text = Text()
    if info is not None:
        text.append(f"{info.engine.get('name', '?')}  {info.executor.get('name', '?')}  ", style="bold")
    text.append(f"{url}  ")
    if look is not None:
        status = look.health.status
        text.append(status, style=f"bold {_COLOURS.get(status, 'red')}")
        text.append(f"  up {_age(look.health.uptime_ns // 10**9)}")
    return text


def _stream(look: Look, history: History) -> Panel:
    engine, now = look.stats.engine, history.intervals[-1] if history.intervals else None
    table = Table.grid(padding=(0, 2))
    state = "a request is being served" if engine["running"] else "idle"
    table.add_row("in flight", f"{state}, {engine['queue_length']} waiting, {look.stats.requests['sessions']} sessions")
    if now is not None:
        table.add_row("tokens/s", f"{now.tokens_per_s:9.1f}", history.line("tokens_per_s", 40))
        ttft = f"{duration(now.ttft_p50):>9}  p99 {duration(now.ttft_p99)}"
        table.add_row("TTFT p50", ttft, history.line("ttft_p50", 40))
        gap = f"{duration(now.gap_p50):>9}  p99 {duration(now.gap_p99)}"
        table.add_row("gap p50", gap, history.line("gap_p50", 40))
    return Panel(table, title="stream", title_align="left")


def _requests(look: Look) -> Panel:
    requests = look.stats.requests
    table = Table.grid(padding=(0, 2))
    table.add_row("accepted", str(requests["accepted"]), "ended", _counts(requests["finished"]))
    table.add_row("clients", str(look.stats.io["clients"]), "refused", _counts(requests["refused"]))
    return Panel(table, title="requests", title_align="left")


def _engine(look: Look, history: History) -> Panel:
    engine = look.stats.engine
    used, total = engine["pages_used"], engine["page_count"]
    table = Table.grid(padding=(0, 2))
    share = used / total if total else 0.0
    table.add_row("KV pages", f"{_bar(share)} {used}/{total}, {engine['sessions']} conversations")
    for name, rounds in engine["by_drafter"].items():
        if rounds and name != "none":
            drafted, accepted = engine["drafted_by_drafter"][name], engine["accepted_by_drafter"][name]
            rate = f"{accepted / drafted:.0%} of {drafted} drafted" if drafted else "nothing drafted"
            table.add_row(name, f"{1 + accepted / rounds:.2f} tokens per round, {rate}")
    busy = history.intervals[-1].busy if history.intervals else {}
    for name, thread in look.stats.threads.items():
        told = f"{_bar(busy.get(name, 0.0))} longest cycle {duration(thread['longest_ns'])}, {thread['stalls']} stalls"
        table.add_row(f"{name} thread", told)
    return Panel(table, title="engine", title_align="left")


def _gpu(gpu: Mapping[str, str]) -> Panel:
    return Panel("  ".join(f"{name} {value}" for name, value in gpu.items()), title="GPU", title_align="left")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def _bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return f"{'█' * full}{'░' * (width - full)} {share:4.0%}"


def _age(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    return (f"{days} d " if days else "") + f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
