"""Device names: `/job:worker/replica:0/task:1/device:GPU:0` in full; short forms are completed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FULL = re.compile(
    r"^(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?:(?P<kind>[A-Za-z]+)(?::(?P<index>\d+))?)?$"
)
_JOBS = ("worker", "chief", "localhost")
_KINDS = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU"}


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """A device of a worker. Orders by task, then kind, then index, as numbers."""

    task: int
    kind: str
    index: int

    @classmethod
    def parse(cls, text: str, task: int = 0) -> DeviceName:
        """The device that `text` names; a name without a task is one of worker `task`.

        `CPU:3`, `/gpu:0`, `cuda:1`, `/task:2/device:GPU:0` and full names are understood; a missing index is 0.
        TensorFlow's `/job:localhost/…` names a device without its task, `/job:chief/…` one of worker 0.

        Raises:
            ValueError: not a device name.
        """
        match = _FULL.match(text)
        kind = _KINDS.get((match["kind"] or "").lower()) if match else None
        job = (match["job"] or "worker") if match else ""
        if not match or not kind or job not in _JOBS or int(match["replica"] or 0):
            raise ValueError(
                f"{text!r} is not a device name: expected such as 'CPU:0', 'GPU:1' or "
                "'/job:worker/replica:0/task:0/device:GPU:0'"
            )
        named = int(match["task"] or 0)
        if job != "worker" and named:
            raise ValueError(f"{text!r} is not a device name: /job:{job} has task 0 alone")
        number = {"localhost": task, "chief": 0}.get(job, int(match["task"] or task))
        return cls(number, kind, int(match["index"] or 0))

    @property
    def short(self) -> str:
        return f"{self.kind}:{self.index}"

    def __str__(self) -> str:
        return f"/job:worker/replica:0/task:{self.task}/device:{self.kind}:{self.index}"
