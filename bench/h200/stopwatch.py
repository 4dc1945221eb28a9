"""Device time between two points of a stream, by CUDA events."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver


def check(answer: tuple[Any, ...]) -> Any:
    """What a driver call returned behind its status. Raises RuntimeError naming the error."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


class Stopwatch:
    """start(), work on the stream, stop(): milliseconds. Needs a current context."""

    def __init__(self, stream: int) -> None:
        self._stream = driver.CUstream(stream)
        self._begin, self._end = (check(driver.cuEventCreate(0)) for _ in range(2))

    def start(self) -> None:
        check(driver.cuEventRecord(self._begin, self._stream))

    def stop(self) -> float:
        """Waits for the stream."""
        check(driver.cuEventRecord(self._end, self._stream))
        check(driver.cuEventSynchronize(self._end))
        return float(check(driver.cuEventElapsedTime(self._begin, self._end)))
