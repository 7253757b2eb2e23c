"""The web page that the coordinator of a job serves, and how people are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collectived_proto.viewing import viewing_token


@dataclass(frozen=True, slots=True)
class Page:
    """The coordinator's web page; `token` is to be shown by whoever looks."""

    url: str
    token: str = ""

    @classmethod
    def of(cls, told: Mapping[str, Any], secret: str) -> Page:
        """The page of which the coordinator of a job with this secret told when it was ready."""
        return cls(told["url"], viewing_token(secret) if told["needs_token"] else "")

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    @property
    def link(self) -> str:
        """What a browser opens. What follows the # never leaves it, so no server logs it."""
        return f"{self.url}#token={self.token}" if self.token else self.url

    def line(self, job_file: str, terminal: bool, place: str = "") -> str:
        """What is said of it. A token is shown to people only: what is no terminal may be a log that others read.

        Args:
            place: the host of the coordinator, where it has to be said.
        """
        page = f"page on {place}" if place else "page"
        if self.token and not terminal:
            return f"{page}: {self.url} (the link with its token is in {job_file})"
        return f"{page}: {self.link}"
