"""Results written into a part of a tensor."""

from __future__ import annotations

import torch


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """left * right, written to `out`, a part of a tensor."""
    if torch.compiler.is_compiling():  # refuses such an `out`, and writes there without a pass more
        out.copy_(left * right)
    else:
        torch.mul(left, right, out=out)
