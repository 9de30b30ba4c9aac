"""How a check says what it is at, for the case that it does not end."""

import json


def doing(what: str) -> None:
    """Says what comes next."""
    print(json.dumps({"doing": what}), flush=True)
