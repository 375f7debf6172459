"""Numbers in `metrics.jsonl`: peak rates and memory, experts' loads, and flat names for loggers."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

from configs.schema import Config

if TYPE_CHECKING:  # programs that read metrics need not import it
    import torch

# Dense bf16/fp16 tensor-core peak of one device in TFLOP/s, from the vendors' data sheets.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "A40": 149.7,
    "V100": 125.0,
}


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the peak FLOP/s of one device in the run's precision; None if it is unknown (CPUs, fp32, unlisted
    GPUs)."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cuda" or config.training.precision == "fp32":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    matches = [known for known in PEAK_TFLOPS if known in name]
    return PEAK_TFLOPS[max(matches, key=len)] * 1e12 if matches else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on the device so far; on a CPU, the peak memory of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def expert_load(tokens_per_expert: torch.Tensor) -> dict[str, Any]:
    """Return statistics of a table of token counts [num_layers, num_experts]: mean, min and max over the experts of all
    MoE layers, and each MoE layer's max/mean and counts."""
    moe_layers = tokens_per_expert[tokens_per_expert.sum(dim=1) > 0]
    if moe_layers.numel() == 0:
        return {"mean": 0.0, "min": 0, "max": 0, "max_over_mean": [], "counts": []}
    ratios = moe_layers.max(dim=1).values / moe_layers.mean(dim=1)
    return {
        "mean": float(moe_layers.mean()),
        "min": int(moe_layers.min()),
        "max": int(moe_layers.max()),
        "max_over_mean": ratios.tolist(),
        "counts": moe_layers.long().tolist(),
    }


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics object by flat name. Nested names are joined with slashes. The name of a list's
    element ends with its layer if the object has a list `layer`, else with its index. Texts and lists of lists are left
    out."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            if name != "step":
                result[name] = value
        elif isinstance(value, dict):
            if layers := value.get("layer"):
                value = {key: dict(zip(map(str, layers), entry)) for key, entry in value.items() if key != "layer"}
            result.update({f"{name}/{key}": number for key, number in scalars(value).items()})
        elif isinstance(value, list):
            result.update({f"{name}/{i}": number for i, number in enumerate(value) if isinstance(number, (int, float))})
    return result


def texts(metrics: dict[str, Any]) -> dict[str, str]:
    """Return the memory strategy and the all-to-all in each MoE layer's plan, by the metric's flat name."""
    table = metrics.get("moe_layers", {})
    names = [name for name in ("memory_strategy", "all_to_all") if name in table]
    return {f"moe_layers/{name}/{layer}": text for name in names for layer, text in zip(table["layer"], table[name])}


def expert_counts(metrics: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tokens per expert of each MoE layer, by the metric's flat name, for loggers that draw histograms."""
    if "tokens_per_expert" not in metrics:
        return {}
    counts = metrics["tokens_per_expert"]["counts"]
    layers = metrics.get("moe_layers", {}).get("layer", range(len(counts)))
    return {f"tokens_per_expert/layer_{layer}": row for layer, row in zip(layers, counts)}
