"""What experts off the device take of each tier, by what it is for."""

from __future__ import annotations

from optim.arrangement.off_device import ExpertRecords


def expert_parts(records: ExpertRecords) -> dict[str, dict[str, int]]:
    """Bytes of experts off the device by tier and by what they are for; those of their optimizer state are among the
    arrangement's."""
    kept = {"weights": records.weights_kept, "gradients": records.grads_kept}
    slots = {"weights": records.weights_on_device, "gradients": records.grads_on_device}
    on_host = kept if records.tier == "host" else dict.fromkeys(kept, 0)
    return {
        "device": slots,
        "host": {**on_host, "staging": records.staging},
        "disk": kept if records.tier == "disk" else dict.fromkeys(kept, 0),
    }
