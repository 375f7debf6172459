"""PipeMoE's own model of a pass (Shi et al., INFOCOM 2023): a closed form for its order of operations, as a check of
ours.

Its order: all dispatches, then all combines as their chunks are computed. Nothing but the exchange and the experts
costs anything.
"""

from __future__ import annotations

import math

from parallel.costs.models import Line


def closed_form_seconds(exchange: Line, compute: Line, size: float, work: float, degree: int) -> float:
    """PipeMoE's time of a forward pass in its order: all dispatches, then all combines as their chunks are computed.

    `size` bytes are exchanged each way and `work` is computed, in `degree` equal chunks. It has four cases: one chunk;
    communication takes longer throughout (dispatch never waits for computation); computation does; or the chunks'
    computation is longer, but over before all that must be sent first is sent.
    """
    send, experts = exchange.alpha + exchange.beta * size / degree, compute.alpha + compute.beta * work / degree
    if degree == 1:
        return 2 * send + experts
    if send >= experts or degree * experts < 2 * (degree - 1) * send:
        return 2 * degree * send
    return 2 * send + degree * experts


def closed_form_degree(exchange: Line, compute: Line, size: float, work: float, max_degree: int) -> int:
    """The degree from 1 to `max_degree` with the least `closed_form_seconds`, the lowest of equals, without trying them
    all.

    Where communication takes longer, time grows with the degree, so the lowest degree of each such range is its best;
    where computation does, time falls until sqrt(2 * exchange time / startup of computation) and grows beyond. So the
    best stands at that number or where the cases meet. (The authors' program rounds their roots, which can lead out of
    the case's range, and divides by the difference of startups whatever its sign.)
    """
    a, b = exchange.alpha, exchange.beta * size
    e, f = compute.alpha, compute.beta * work
    roots: list[float] = []
    if e > 0:
        roots.append(math.sqrt(2 * b / e))
    if a != e:  # a + b / r = e + f / r
        roots.append((f - b) / (a - e))
    # r (e + f / r) = 2 (r - 1) (a + b / r)
    square, linear, constant = 2 * a - e, 2 * b - 2 * a - f, -2 * b
    if square == 0:
        if linear != 0:
            roots.append(-constant / linear)
    elif (inside := linear * linear - 4 * square * constant) >= 0:
        roots.extend((-linear + sign * math.sqrt(inside)) / (2 * square) for sign in (1.0, -1.0))
    around = [math.floor(min(max(root, 0.0), max_degree)) + step for root in roots for step in (-1, 0, 1, 2)]
    candidates = {degree for degree in (1, 2, max_degree, *around) if 1 <= degree <= max_degree}
    return min(candidates, key=lambda degree: (closed_form_seconds(exchange, compute, size, work, degree), degree))
