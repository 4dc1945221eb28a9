"""`ulld` on the driver double, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ull.client.sync import Client
from ull.spawn import DaemonProcess

TOKENS = 10


@contextlib.contextmanager
def daemons() -> Iterator[Callable[..., DaemonProcess]]:
    """serve(bundle, environment, *arguments, command=None): starts ulld, which ends with the block at the latest."""
    started: list[DaemonProcess] = []
    with pytest.MonkeyPatch.context() as patch:

        def serve(
            bundle: Path, environment: Mapping[str, str], *arguments: str, command: Sequence[str] | None = None
        ) -> DaemonProcess:
            for name, value in environment.items():
                if os.environ.get(name) != value:
                    patch.setenv(name, value)
            started.append(DaemonProcess(bundle, arguments=arguments, command=command, ready_timeout=600.0))
            return started[-1]

        try:
            yield serve
        finally:
            for daemon in started:
                daemon.kill()


def complete(client: Client, prompt: str, **options: Any) -> list[int]:
    """The tokens of a request that ends by its length."""
    result = client.generate(prompt, **{"max_tokens": TOKENS, "seed": 7, "ignore_eos": True} | options).result()
    assert result.finish_reason == "length", result.error
    return list(result.token_ids)
