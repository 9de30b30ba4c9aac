"""How much memory a program of XLA needs."""

import re

import numpy as np


def bytes_alive(hlo: str) -> int:
    """Returns the peak of what is alive in the schedule of an XLA program."""
    rows = re.findall(
        r"^ +(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$",
        hlo[hlo.index("\nENTRY") :],
        re.MULTILINE,
    )
    views = ("bitcast", "get-tuple-element", "tuple")
    parts, sizes, last = {}, {}, {}

    def touch(name, now):
        last[name] = now
        for part in parts.get(name, ()):
            touch(part, now)

    for now, (name, shape, kind, rest) in enumerate(rows):
        used = re.findall(r"%([\w.\-]+)", rest)
        is_new = kind not in (*views, "parameter", "constant")
        sizes[name] = is_new and sum(
            4 * np.prod([int(n) for n in dims.split(",") if n] or [1])
            for dims in re.findall(r"f32\[([\d,]*)\]", shape)
        )
        if kind in views:
            parts[name] = used
        for each in used:
            touch(each, now)
    alive = peak = 0
    for now, (name, *_) in enumerate(rows):
        alive += sizes[name]
        peak = max(peak, alive)
        alive -= sum(sizes.get(x, 0) for x, end in last.items() if end == now)
    return peak
