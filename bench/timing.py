"""Clocks. Contenders take turns within a round, so that a clock that falls under load falls for all
of them.
"""

from __future__ import annotations

import statistics
import time

_GPU_SECONDS = 0.012  # a timing lasts about this long, as many calls as that takes
_CPU_SECONDS = 0.5
_MOST_CALLS = 100
_REST = 0.3  # OpenMP's threads spin for a while after their last work, in the next contender's time


def gpu_times(calls, cupy, rounds=5):
    """Median seconds a call of each of ``calls`` (name -> function): K calls back to back between
    two events, so that the host's latency is hidden behind the queue.
    """

    def span(function, count):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(count):
            function()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) / 1e3 / count

    return _in_turns(calls, span, _GPU_SECONDS, rounds)


def cpu_times(calls, rounds=5):
    """The same with the wall clock."""

    def span(function, count):
        time.sleep(_REST)
        begin = time.perf_counter()
        for _ in range(count):
            function()
        return (time.perf_counter() - begin) / count

    return _in_turns(calls, span, _CPU_SECONDS, rounds, warm=0)


def host_times(calls, cupy, rounds=5, count=50):
    """Median seconds of host time a call: the clock stops before the GPU is waited for."""

    def span(function, _):
        cupy.cuda.runtime.deviceSynchronize()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        spent = time.perf_counter() - begin
        cupy.cuda.runtime.deviceSynchronize()
        return spent / count

    return _in_turns(calls, span, 0.0, rounds)


def _in_turns(calls, span, seconds, rounds, warm=2):
    counts = {}
    for name, function in calls.items():
        if warm:  # the first calls build, load and allocate; on a CPU preparing made one already
            span(function, warm)
        counts[name] = max(1, min(_MOST_CALLS, int(seconds / max(span(function, 1), 1e-9))))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, function in calls.items():
            times[name].append(span(function, counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}
