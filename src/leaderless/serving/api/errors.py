"""Errors of requests that cannot be answered."""

from __future__ import annotations

from leaderless.base.values import Json

STOPPING = "the server is stopping: ask again when it is back"


class ApiError(Exception):
    """A request that cannot be answered.

    `param` is the field that is wrong, if one is; `code` is for programs, where the HTTP status does not say it all.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Json]:
        """Return the error in the format of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
