"""What a client is told when its request cannot be answered."""

from __future__ import annotations

from leaderless.config import Json

STOPPING = "the server is stopping: ask again when it is back"


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: Of the HTTP response.
        message: The value, the rule and the remedy.
        param: The field that is wrong; None where none is.
        code: A word for programs; None where the status says all.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Json]:
        """The error as OpenAI's API writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
