"""Process groups, collectives and Megatron-core's patches. Imported before Megatron-core, so that its notes can be
silenced."""

import warnings

# Said once per process by Megatron-core and torch, about things that are as they should be here; nobody can act on
# them.
NOTES = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    # of training.recompute=selective, with TransformerEngine as without
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    # of latent attention with model.fusions, which a training may have
    "apply_rope_fusion for multi-latent attention only supports training",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.distributed.*` is deprecated",
    "Setting the SM carveout for matmuls is a temporary experimental",
)


def leave_out_notes() -> None:
    """Have Python's warnings leave them out, and nothing else."""
    for note in NOTES:
        warnings.filterwarnings("ignore", message=note)


leave_out_notes()
