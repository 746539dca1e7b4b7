"""Errors of the compiled part."""


class nixlNotFoundError(Exception):  # noqa: N801 - its name
    pass


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - its name
    pass


class nixlNotAllowedError(Exception):  # noqa: N801 - its name
    pass


class nixlMismatchError(Exception):  # noqa: N801 - its name
    pass
