"""Daemon memory: resident set against weights + KV, and its growth over 10,000 requests."""

from __future__ import annotations

from pathlib import Path

import ull
from report import Check, arguments, finish
from serving import serve, tiny_bundle

REQUESTS = 10_000
WARM_UP_REQUESTS = 500
TITLE = "memory"


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"requests to send, default {REQUESTS}")
    options = parser.parse_args()
    with serve(tiny_bundle()) as daemon, ull.Client(daemon.url) as client:
        limits = client.info()
        floor = limits.executor["weight_bytes"] + limits.executor["kv_bytes"]
        for i in range(WARM_UP_REQUESTS):
            client.generate(f"x{i} = ", max_tokens=4, seed=i, temperature=1.0).result()
        before = resident_bytes(daemon.pid)
        for i in range(options.requests):
            client.generate(f"def function_{i}(", max_tokens=4, seed=i, temperature=1.0).result()
        after = resident_bytes(daemon.pid)
    samples = {
        "weights_and_kv_bytes": floor,
        "resident_before_bytes": before,
        "resident_after_bytes": after,
        "requests": options.requests,
    }
    checks = [
        Check("resident set beyond weights + KV", (after - floor) / 1e6, "MB", must=120.0),
        Check(f"growth over {options.requests:,} requests", (after - before) / 1e6, "MB", must=1.0),
    ]
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
