"""Process groups, collectives and Megatron-core's patches. Imported before Megatron-core, so that its notes can be
silenced."""

import warnings

# Said once per process by Megatron-core and torch, about things that are as they should be here; nobody can act on
# them.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.distributed.*` is deprecated",
    "Setting the SM carveout for matmuls is a temporary experimental",
):
    warnings.filterwarnings("ignore", message=_message)
