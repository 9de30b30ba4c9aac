"""Why programs are not kept."""


class CacheUnavailable(Exception):
    """Programs cannot be kept here, or are not to be.

    Args:
        reason: A phrase that says why.
        is_expected: Whether nobody needs to hear of it unasked.
    """

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected
