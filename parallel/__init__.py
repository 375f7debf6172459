"""Process groups, collectives and Megatron-core's patches. Import it before Megatron-core, to silence its warnings."""

import warnings

# Starts of warnings that Megatron-core and torch print once per process, about things that are intended here.
NOTES = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    # with training.recompute=selective, with and without TransformerEngine
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    # with latent attention and model.fusions, which do work in training
    "apply_rope_fusion for multi-latent attention only supports training",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "`torch.distributed.*` is deprecated",
    "Setting the SM carveout for matmuls is a temporary experimental",
)


def leave_out_notes() -> None:
    """Make Python ignore the warnings in NOTES, and no others."""
    for note in NOTES:
        warnings.filterwarnings("ignore", message=note)


leave_out_notes()
