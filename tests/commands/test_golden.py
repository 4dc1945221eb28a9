"""The tiny engine's exact words, through bundle, daemon, wire and client, on every instruction set.

They change when its weights, its tokenizer, the quantiser, the executor's order of operations or the sampling rule
change, and must not change otherwise.
"""

from typing import Any

import pytest

from conftest import Spawn
from ull.client import Client

GOLDEN: list[tuple[dict[str, Any], str, str]] = [
    (
        {"prompt": 'def read_lines(path):\n    """', "max_tokens": 64},
        "stop",
        'Read and return the file-like object."""\n    return _find_lines(path)\n',
    ),
    (
        {"prompt": "class Stack:\n", "max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "seed": 7},
        "length",
        '"""Base class for implementing the processes.\n\nMultipleally works of these functions are producessed by the '
        "back.\n\n* Multiple information (or lists of functions), with functions which are\nexecing all functions.\n\n"
        '"""\n\nfrom tkinter import Text\n\n\n\n# W',
    ),
    (
        {"prompt": [{"role": "user", "content": "Return the size of a file."}], "max_tokens": 48},
        "length",
        'def get_data(self):\n    """Return the size of a file.\n\n    Return the size of the file.\n    """\n'
        "    return self._compression.get(self._compression.compression.compression.compress",
    ),
]


@pytest.mark.parametrize("isa", ["auto", "portable"])
def test_golden_text(spawn: Spawn, isa: str) -> None:
    daemon = spawn("--set", f"engine.isa={isa}")
    with Client(daemon.url) as client:
        for request, reason, text in GOLDEN:
            result = client.generate(**request).result()
            assert (result.text, result.finish_reason) == (text, reason)
